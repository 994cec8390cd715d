"""PageStore: opaque keys, one process that writes, one bound for the directory, files that can only be read."""

import fcntl
import logging
import os
import shutil
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from refusals import refuses

from pagepool import PageStore
from pagepool.prefix import page_file, page_index, store_folder
from pagepool.prefix.fingerprint import Fingerprint
from pagepool.prefix.page_index import RECORD_BYTES
from pagepool.prefix.store_files import RESERVED
from pagepool.prefix.store_report import describe, verify

SIZE = 5000  # two sectors of a slot are not used
SLOT = 8192 + RECORD_BYTES
MODEL = Fingerprint("a model", SIZE)


def room(num_slots):
    return RESERVED + num_slots * SLOT


def page_of(key, size=SIZE):
    return np.random.default_rng(list(key)).bytes(size)


def found(store, key, size=SIZE):
    """Whether the store has a page; a wrong one is an error."""
    into = bytearray(size)
    is_found = store.get(key, into)
    assert not is_found or into == page_of(key, size), f"a wrong page for {key}"
    assert store.contains(key) == is_found, "a page that cannot be read is not there"
    return is_found


def files_of(store):
    return sum(path.stat().st_blocks * 512 for path in store.folder.iterdir())


def old(folder, days=1):
    """Let a store look as if it was used some days ago."""
    then = time.time() - 86_400 * days
    os.utime(folder / "index", (then, then))


def keys(*numbers):
    return [b"key %d" % number for number in numbers]


@pytest.mark.parametrize("size", [0, 1, 4096, SIZE, 30_000])
def test_pages_of_any_size_come_back_after_a_restart(tmp_path, size):
    with PageStore(tmp_path, room(40), MODEL) as store:
        for key in keys(*range(4)):
            assert store.put(key, page_of(key, size)) and found(store, key, size)
        with refuses(ValueError, "into", str(size), str(size + 1)):
            store.get(keys(0)[0], bytearray(size + 1))
    with PageStore(tmp_path, room(40), MODEL) as store:
        assert all(found(store, key, size) for key in keys(*range(4))) and not found(store, b"other", size)
        assert store.put(keys(0)[0], b"other bytes") and found(store, keys(0)[0], size), "a key has one page for ever"
        assert verify(store.folder) == {"right": 4, "wrong": 0}


def test_a_full_store_drops_the_page_that_was_used_longest_ago_and_no_parent_before_its_children(tmp_path):
    with PageStore(tmp_path, room(6), MODEL) as store:
        a, b, c, *others = keys(*range(30))
        assert store.put(a, page_of(a)) and store.put(b, page_of(b), parent=a) and store.put(c, page_of(c), parent=b)
        for key in others:
            store.touch(c)  # marks the whole chain
            assert store.put(key, page_of(key))
        assert [found(store, key) for key in (a, b, c)] == [True] * 3
        assert sum(found(store, key) for key in others) == 3 and store.stats()["evicted"] == 24
    with PageStore(tmp_path, room(6), MODEL) as store:
        order = []
        for key in keys(*range(100, 106)):
            store.put(key, page_of(key))
            order.append([store.contains(each) for each in (a, b, c)])
        assert all(before >= after for row in order for before, after in pairwise(row))
        assert order[-1] == [False] * 3


def test_parents_in_a_circle_are_dropped_too(tmp_path):
    with PageStore(tmp_path, room(4), MODEL) as store:
        ring = keys(0, 1, 2, 3)
        for place, key in enumerate(ring):
            assert store.put(key, page_of(key), parent=ring[place - 1])
        store.put(ring[0], page_of(ring[0]), parent=ring[0])
        for key in keys(*range(10, 20)):
            assert store.put(key, page_of(key), parent=key) and found(store, key)


def test_random_calls_give_what_a_dict_gives(tmp_path):
    random, model = np.random.default_rng(2), {}
    store = PageStore(tmp_path, room(200), MODEL)
    for step in range(1500):
        key = keys(int(random.integers(60)))[0]
        size = int(random.choice([10, SIZE, 20_000])) if key not in model else model[key]
        match int(random.integers(6)):
            case 0 | 1:
                assert store.put(key, page_of(key, size), parent=keys(int(random.integers(60)))[0])
                model[key] = size
            case 2:
                store.forget([key])
                model.pop(key, None)
            case 3:
                store.touch(key)
            case _:
                assert found(store, key, size) == (key in model)
        if step % 200 == 199:
            store.close()
            store = PageStore(tmp_path, room(200), MODEL)
        index = store._index
        assert sum(len(entry.slots) for entry in index.entries.values()) + len(index.free) == index.num_slots
    store.forget(None)
    assert not any(store.contains(key) for key in model) and files_of(store) < 100_000
    store.close()


@pytest.mark.parametrize("way", ["forget", "forget all"])
def test_the_bytes_of_forgotten_pages_are_not_in_the_files(tmp_path, way):
    with PageStore(tmp_path, room(40), MODEL) as store:
        for key in keys(*range(9)):
            store.put(key, page_of(key))
        store.forget(keys(*range(8)) if way == "forget" else None)
        data = b"".join(path.read_bytes() for path in store.folder.iterdir())
        assert not any(page_of(key)[:4096] in data or store._id(key) in data for key in keys(*range(8)))
        assert found(store, keys(8)[0]) == (way == "forget")


def test_a_touch_writes_a_few_bytes_whatever_the_number_of_pages_before_it(tmp_path, monkeypatch):
    with PageStore(tmp_path, room(600), MODEL) as store:
        chain = keys(*range(500))
        for place, key in enumerate(chain):
            store.put(key, b"x", parent=chain[place - 1] if place else None)
        written, real = [], os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda file, data, at: written.append(len(data)) or real(file, data, at))
        store.touch(chain[-1])
        store.flush()
        assert sum(written) <= 16


def test_opening_and_writing_sync_nothing(tmp_path, monkeypatch):
    def never(*args):
        raise AssertionError("a file is synced")

    with monkeypatch.context() as patch:
        for name in ("fsync", "fdatasync", "sync"):
            patch.setattr(os, name, never)
        for _ in range(2):
            with PageStore(tmp_path, room(40), MODEL) as store:
                for key in keys(*range(50)):
                    store.put(key, page_of(key))


def test_a_reader_follows_the_writer_and_takes_its_place(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "pagepool"):
        writer, reader = PageStore(tmp_path, room(40), MODEL), PageStore(tmp_path, room(40), MODEL)
    assert len(caplog.records) == 1 and "only reads" in caplog.text
    random, present = np.random.default_rng(3), set()
    for step in range(400):
        (key,) = keys(int(random.integers(70)))
        if random.random() < 0.8:
            assert writer.put(key, page_of(key))
            present.add(key)
        else:
            writer.forget([key])
            present.discard(key)
        if step % 7 == 0:
            have = {each for each in present if writer.contains(each)}
            assert {each for each in keys(*range(70)) if found(reader, each)} == have
    assert not reader.put(b"new", page_of(b"new")) and reader.stats()["dropped"] == 1 and not reader.is_writer
    have = {each for each in present if writer.contains(each)}
    writer.close()
    assert reader.put(b"new", page_of(b"new")) and reader.is_writer and found(reader, b"new")
    assert len(have - {each for each in have if found(reader, each)}) <= 1, "one page at most made room for the new one"
    again = PageStore(tmp_path, room(40), MODEL)
    assert found(again, b"new") and not again.is_writer
    again.close()
    reader.close()


def test_a_reader_that_is_far_behind_reads_the_index_again(tmp_path, monkeypatch):
    monkeypatch.setattr(page_index, "RING", 8)
    writer, reader = PageStore(tmp_path, room(40), MODEL), PageStore(tmp_path, room(40), MODEL)
    for first in (0, 20, 40):
        for key in keys(*range(first, first + 20)):
            writer.put(key, page_of(key))
        assert [found(reader, key) for key in keys(*range(first + 60))] == [
            writer.contains(key) for key in keys(*range(first + 60))
        ]
    writer.forget(None)
    assert not any(found(reader, key) for key in keys(*range(60)))
    reader.close()
    writer.close()


def test_a_reader_that_forgot_pages_deletes_them_when_it_takes_over(tmp_path):
    writer, reader = PageStore(tmp_path, room(40), MODEL), PageStore(tmp_path, room(40), MODEL)
    for key in keys(0, 1):
        writer.put(key, page_of(key))
    reader.forget(keys(0))
    assert [found(reader, key) for key in keys(0, 1)] == [False, True] and found(writer, keys(0)[0])
    writer.close()
    reader.flush()
    assert reader.is_writer
    reader.close()
    with PageStore(tmp_path, room(40), MODEL) as store:
        assert [found(store, key) for key in keys(0, 1)] == [False, True]
        second = PageStore(tmp_path, room(40), MODEL)
        second.forget(None)
    second.flush()
    assert second.is_writer and not found(second, keys(1)[0]) and second.put(keys(1)[0], page_of(keys(1)[0]))
    second.close()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_forked_child_does_not_keep_the_lock(tmp_path, is_killed):
    read, write = os.pipe()
    engine = os.fork()
    if not engine:
        store = PageStore(tmp_path, room(40), MODEL)
        store.put(b"a", page_of(b"a"))
        worker = os.fork()
        if worker:
            os.write(write, b"%d" % worker)
            if not is_killed:
                store.close()
        signal.alarm(60)
        signal.pause()
        os._exit(0)
    worker = int(os.read(read, 20))
    if is_killed:
        os.kill(engine, signal.SIGKILL)
        os.waitpid(engine, 0)
    try:
        deadline = time.monotonic() + 30
        store = PageStore(tmp_path, room(40), MODEL)
        while not store.is_writer and time.monotonic() < deadline:  # the first child has written before it closes
            store.flush()
        assert store.is_writer and found(store, b"a")
        store.close()
    finally:
        os.kill(worker, signal.SIGKILL)
        if not is_killed:
            os.kill(engine, signal.SIGKILL)
            os.waitpid(engine, 0)


def test_a_store_that_was_closed_has_no_lock_before_its_child_runs(tmp_path):
    store = PageStore(tmp_path, room(40), MODEL)
    copy = os.dup(store._lock)  # as a child has it that was forked and does not run yet
    store.close()
    with PageStore(tmp_path, room(40), MODEL) as again:
        assert again.is_writer
    os.close(copy)


def test_calls_in_a_forked_child_wait_for_no_lock(tmp_path):
    store = PageStore(tmp_path, room(40), MODEL)
    store.put(b"a", page_of(b"a"))
    with store._change, store._look_up:
        child = os.fork()
        if not child:
            signal.alarm(20)
            is_right = not store.put(b"b", b"") and not store.contains(b"a") and not store.get(b"a", bytearray(SIZE))
            store.touch(b"a")
            store.forget(None)
            store.flush()
            is_right = is_right and store.stats()["written"] == 1 and not store.is_writer
            store.close()
            os._exit(not is_right)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert found(store, b"a") and store.is_writer
    store.close()


def test_figures_wait_for_no_batch(tmp_path):
    store = PageStore(tmp_path, room(40), MODEL)
    with store._change, store._look_up:
        assert store.stats()["written"] == 0 and store.is_writer and not store.has_notes
    store.close()


def test_look_ups_go_on_while_a_page_is_written(tmp_path, monkeypatch):
    store = PageStore(tmp_path, room(40), MODEL)
    store.put(b"a", page_of(b"a"))
    real = os.pwrite

    def slow(*args):
        assert found(store, b"a")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", slow)
    assert store.put(b"b", page_of(b"b"))
    store.forget([b"b"])
    store.close()


# Files that can only be read.


def as_user(number, function):
    """Return the text of a function's result in a child with another user id."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(number)
            os.setuid(number)
            text = str(function())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return text


@pytest.fixture
def shipped(tmp_path):
    """A store of root with one page, in a directory that every user may read, and how another user finds it."""
    if os.geteuid():
        pytest.skip("only root can be another user")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    root = tmp_path / "stores"
    with PageStore(root, room(40), MODEL) as store:
        store.put(b"a", page_of(b"a"))
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)

    def use():
        with PageStore(root, room(40), MODEL) as store:
            is_kept = store.put(b"b", page_of(b"b"))
            return found(store, b"a"), store.is_writer, is_kept

    yield root, use
    for folder in (root, *root.rglob("*")):
        folder.chmod(0o700)


def test_a_store_of_root_is_read_by_others_and_never_written(shipped):
    root, use = shipped
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    assert as_user(65534, use) == "(True, False, False)"
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_a_store_of_another_user_is_read_only_from_a_read_only_mount(shipped):
    root, use = shipped
    for path in (root, *root.rglob("*")):
        os.chown(path, 12345, 12345)
    text = as_user(65534, use)
    assert text.startswith("PermissionError") and "12345" in text and "65534" in text
    mount = f"mount --bind {root} {root} && mount -o remount,bind,ro {root}"
    if subprocess.run(mount, shell=True, capture_output=True).returncode:
        pytest.skip("this container may not mount")
    try:
        assert as_user(65534, use) == "(True, False, False)" and use() == (True, False, False)
    finally:
        subprocess.run(["umount", root], check=True)


@pytest.mark.parametrize("name", ["index", "pages", "lock", "FINGERPRINT", "."])
def test_files_without_write_permission_are_read_and_kept(shipped, name):
    root, use = shipped
    for path in (root, *root.rglob("*")):
        os.chown(path, 65534, 65534)
    (folder,) = store_folder.stores_in(root)
    (folder / name).chmod(0o500 if name == "." else 0o400)
    can_write = name == "FINGERPRINT"  # it is not written again
    assert as_user(65534, use) == f"(True, {can_write}, {can_write})"
    (folder / name).chmod(0o700)
    assert as_user(65534, use) == "(True, True, True)"


def test_a_directory_without_a_store_of_this_model_that_cannot_be_written_finds_nothing(shipped, caplog):
    root, _ = shipped

    def use():
        with PageStore(root, room(40), Fingerprint("another", SIZE)) as store:
            return found(store, b"a"), store.is_writer

    assert as_user(65534, use) == "(False, False)"


# One bound for the directory.


def total(root):
    return sum(512 * path.stat().st_blocks for path in root.rglob("*"))


def fill(root, name, count, slots=100):
    with PageStore(root, room(slots), Fingerprint(name, SIZE)) as store:
        for key in keys(*range(count)):
            store.put(key, page_of(key))
        assert total(root) <= room(slots)
        return store.folder, store.stats()


def test_stores_of_other_models_make_room_the_oldest_first(tmp_path):
    first, second = (fill(tmp_path, name, 30)[0] for name in ("first", "second"))
    old(first, 2)
    old(second)
    fill(tmp_path, "third", 40)
    assert not first.exists() and second.exists(), "the oldest one is enough"
    folder, stats = fill(tmp_path, "third", 130)
    assert not second.exists() and folder.exists() and stats["used_slots"] == 100


def test_a_store_that_was_used_a_moment_ago_or_is_in_use_is_kept(tmp_path, caplog):
    first, _ = fill(tmp_path, "first", 75)
    with caplog.at_level(logging.WARNING, "pagepool"):
        _, stats = fill(tmp_path, "second", 60)
    assert first.exists() and 0 < stats["used_slots"] < 25 and stats["evicted"] > 20 and not caplog.records
    with PageStore(tmp_path, room(100), Fingerprint("first", SIZE)) as store:
        old(first)
        fill(tmp_path, "second", 60)
        assert found(store, keys(3)[0])
    old(first)
    _, stats = fill(tmp_path, "second", 130)
    assert not first.exists() and stats["used_slots"] == 100


def test_pages_without_room_are_counted_and_logged_once(tmp_path, caplog):
    with PageStore(tmp_path, room(100), Fingerprint("first", SIZE)) as store:
        assert all(store.put(key, b"") for key in keys(*range(100)))
        with caplog.at_level(logging.WARNING, "pagepool"):
            _, stats = fill(tmp_path, "second", 5)
    assert stats["dropped"] == 5 and stats["written"] == 0 and len(caplog.records) == 1 and "room" in caplog.text


def test_a_lower_limit_removes_old_stores_at_the_next_start(tmp_path):
    first, _ = fill(tmp_path, "first", 90)
    old(first)
    fill(tmp_path, "second", 1, slots=40)
    assert not first.exists()


def test_two_stores_that_grow_at_once_stay_within_the_bound(tmp_path):
    children = []
    for name in ("one", "two", "three"):
        child = os.fork()
        if not child:
            os._exit(fill(tmp_path, name, 150)[1]["written"] == 0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    sizes = sum(store_folder.bytes_of(folder) for folder in store_folder.stores_in(tmp_path))
    assert sizes <= room(100) and total(tmp_path) <= room(100)


def test_a_full_directory_has_room_for_new_weights_at_once(tmp_path):
    first, _ = fill(tmp_path, "first", 60)
    second, _ = fill(tmp_path, "second", 40)
    folder, stats = fill(tmp_path, "third", 110)
    assert not first.exists() and second.exists() and 55 < stats["used_slots"] <= 60, "the oldest makes room"
    with PageStore(tmp_path, room(100), Fingerprint("third", SIZE)) as store:
        reader = PageStore(tmp_path, room(100), Fingerprint("third", SIZE))
        store.close()
        fill(tmp_path, "fourth", 5)
        assert folder.exists() and not second.exists() and found(reader, keys(109)[0]), "a process reads it"
        reader.close()


def test_a_store_gets_room_while_another_one_grows(tmp_path, monkeypatch):
    file = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(file, fcntl.LOCK_EX)
    monkeypatch.setattr(store_folder.time, "sleep", lambda seconds: fcntl.flock(file, fcntl.LOCK_UN))
    with PageStore(tmp_path, room(40), MODEL) as store:
        assert store.put(b"a", page_of(b"a"))
    os.close(file)


def test_files_that_are_removed_while_they_are_open_are_begun_again(tmp_path):
    with PageStore(tmp_path, room(40), MODEL) as store:
        store.put(b"a", page_of(b"a"))
        shutil.rmtree(store.folder)
        assert found(store, b"a"), "the files are still open"
        assert store.put(b"b", page_of(b"b")) and store.is_writer
        with PageStore(tmp_path, room(40), MODEL) as reader:
            assert [found(reader, key) for key in (b"a", b"b")] == [False, True]


def test_a_store_that_is_deleted_closes_its_files(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert PageStore(tmp_path, room(40), MODEL).is_writer
    assert len(os.listdir("/proc/self/fd")) == before
    with refuses(TypeError, "max_bytes"):
        PageStore(tmp_path, None, MODEL)


def test_pages_that_were_all_used_make_room_for_the_next_one(tmp_path):
    with PageStore(tmp_path, room(6), MODEL) as store:
        assert all(store.put(key, page_of(key)) for key in keys(*range(6)))
        assert all(found(store, key) for key in keys(3, 1, 0, 2, 4, 5))
        assert store.put(b"new", page_of(b"new")) and store.stats()["evicted"] == 1


def test_a_page_that_is_too_large_takes_no_place_of_others(tmp_path):
    with PageStore(tmp_path, room(6), MODEL) as store:
        assert all(store.put(key, page_of(key)) for key in keys(*range(6)))
        assert not store.put(b"large", bytes(7 * 8192)) and store.stats()["dropped"] == 1
        assert all(found(store, key) for key in keys(*range(6)))
        assert store.put(b"large", bytes(6 * 8192)) and store.stats()["evicted"] == 6


@pytest.mark.parametrize("limit", [1 << 50, 1 << 63, 1 << 70])
def test_a_limit_may_be_larger_than_every_disk(tmp_path, limit):
    with PageStore(tmp_path, limit, Fingerprint("small", 1)) as store:
        assert store.put(b"a", b"a") and store.get(b"a", bytearray(1))
        assert store.num_slots < 1 << 32


def test_no_file_is_written_through_a_link(tmp_path, caplog):
    with PageStore(tmp_path / "store", room(40), MODEL) as store:
        folder = store.folder
    for name in ("index", "pages", "FINGERPRINT", "lock"):
        target, path = tmp_path / name, folder / name
        target.write_text("kept")
        path.unlink()
        path.symlink_to(target)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "pagepool"), PageStore(tmp_path / "store", room(40), MODEL) as store:
            assert not store.put(b"a", page_of(b"a")) and target.read_text() == "kept" and name in caplog.text
        path.unlink()


def test_a_use_of_an_unknown_key_and_a_page_that_is_dropped_during_a_read_take_no_memory(tmp_path, monkeypatch):
    with PageStore(tmp_path, room(4), MODEL) as store, PageStore(tmp_path, room(4), MODEL) as reader:
        for key in keys(*range(20)):
            store.touch(key)
        assert not store._used
        store.put(b"a", page_of(b"a"))
        read = page_file.PageFile.read

        def forget_first(self, entry, page):
            store.forget([b"a"])
            return read(self, entry, page)

        monkeypatch.setattr(page_file.PageFile, "read", forget_first)
        for each in (store, reader):
            assert not each.get(b"a", bytearray(SIZE)) and not each._refused and not each.stats()["refused"]
            store.put(b"a", page_of(b"a"))


def test_a_store_that_is_removed_is_begun_again_by_its_reader(tmp_path):
    writer, reader = PageStore(tmp_path, room(40), MODEL), PageStore(tmp_path, room(40), MODEL)
    writer.put(b"a", page_of(b"a"))
    assert not store_folder.remove(writer.folder), "a process writes to it"
    writer.close()
    assert not store_folder.remove(writer.folder), "a process reads it"
    shutil.rmtree(writer.folder)
    assert found(reader, b"a"), "the files are still open"
    assert reader.put(b"b", page_of(b"b")) and reader.is_writer
    assert [found(reader, key) for key in (b"a", b"b")] == [False, True]
    assert describe(reader.folder)["pages"] == 1 and describe(reader.folder)["in_use"]
    reader.close()


def test_an_index_of_another_seed_is_not_followed(tmp_path):
    writer, reader = PageStore(tmp_path, room(40), MODEL), PageStore(tmp_path, room(40), MODEL)
    writer.put(b"a", page_of(b"a"))
    writer.close()
    (writer.folder / "index").write_bytes(b"damaged")
    assert not found(reader, b"a")
    with PageStore(tmp_path, room(40), MODEL) as store:
        assert not found(store, b"a") and store.put(b"a", page_of(b"a"))
        assert not found(reader, b"a")
    reader.close()


def test_bad_arguments_are_refused(tmp_path):
    with refuses(ValueError, "max_bytes", str(room(4)), "1000"):
        PageStore(tmp_path, 1000, MODEL)
    with refuses(TypeError, "fingerprint"):
        PageStore(tmp_path, room(40), "a model")
    tmp_path.chmod(0o777)
    with refuses(PermissionError, str(tmp_path), "drwxrwxrwx"):
        PageStore(tmp_path, room(40), MODEL)
    tmp_path.chmod(0o700)
    assert [path.name for path in Path(tmp_path).iterdir()] == []
    with PageStore(tmp_path, room(40), MODEL) as store:
        with refuses(TypeError):
            store.put(b"a", "text")
        for call in (
            store.contains,
            store.touch,
            lambda key: store.put(b"a", b"", key),
            lambda key: store.forget([key]),
        ):
            with refuses(TypeError, "key", "str"):
                call("text")
        assert not store.contains(b"a")
