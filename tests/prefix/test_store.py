"""The store returns exactly the written pages, for the same model, salt and tokens."""

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from refusals import refuses
from share import WHOLE
from store_world import BLOCK, LAYOUT, LEAST, SMALL, World, prompt

from pagepool import BlockAllocator, KvCachePool, PrefixCache
from pagepool.prefix.fingerprint import Fingerprint, fingerprint_of
from pagepool.prefix.store import PrefixStore
from pagepool.prefix.store_folder import stores_in


def bytes_of(folder):
    return sum(path.stat().st_blocks * 512 for path in Path(folder).rglob("*") if path.is_file())


@pytest.mark.parametrize("policy", ["lru", "gittins"])
@pytest.mark.parametrize("num_pools", [1, 2])
def test_prompts_are_found_after_a_restart(tmp_path, policy, num_pools):
    world = World(tmp_path, policy=policy, num_pools=num_pools)
    assert world.run(range(20)) == 0 and world.run(range(100, 109), cache_salt="tenant") == 0
    world = world.restart(tmp_path, policy=policy, num_pools=num_pools)
    assert world.cache.num_cached == 0
    assert world.run(range(20)) == 5 and world.run([*range(8), 0, 0, 0, 0]) == 2
    assert world.run(range(100, 109)) == 0 and world.run(range(100, 109), cache_salt="tenant") == 2
    assert world.store.stats()["found"] == 7
    world.cache.check()
    world.allocator.check(others=0)
    world.stop()


def test_every_way_to_look_a_prompt_up_asks_the_store(tmp_path):
    world = World(tmp_path)
    world.run(range(8))
    world = world.restart(tmp_path)
    assert world.cache.cached_tokens(range(8)) == 0
    with world.cache.match_tokens([*range(6), 9, 9]) as match:
        assert match.num_tokens == 4 and len(match.blocks) == 1
    assert world.cache.match_prefix(range(8), extra_keys=iter(())).tolist() == [*match.blocks.tolist(), 1]
    world.stop()


def test_a_block_is_written_when_it_is_evicted_or_found_again(tmp_path):
    world = World(tmp_path)
    world.run(range(8))
    assert world.cache.flush() and world.store.stats()["written"] == 2
    world.run(range(50, 58))
    world.cache.stats()
    assert world.store.stats()["written"] == 2, "a block that was computed once is not written"
    world.run(range(50, 58))
    assert world.cache.flush() and world.store.stats()["written"] == 4
    world.run(range(70, 78))
    world.cache.evict(16)
    assert world.cache.num_cached == 0
    assert world.cache.link.wait(), "the queue of evicted blocks is not written"
    world.stop()
    world = World(tmp_path)
    assert world.run(range(70, 78)) == 2, "evicted blocks are not in the store"
    world.stop()


def test_random_prompts_through_a_small_pool_and_restarts(tmp_path):
    random = np.random.default_rng(3)
    world, found = World(tmp_path), 0
    for step in range(600):
        found += world.run(prompt(random), cache_salt=(None, "a")[random.integers(2)])
        if random.random() < 0.1:
            world.cache.evict(random.integers(16))
        if step % 60 == 59:
            world.cache.check()
            world = world.restart(tmp_path) if random.random() < 0.5 else (world.stop(), World(tmp_path))[1]
    assert found > 600
    world.allocator.check(others=0)
    world.stop()


def test_other_weights_find_nothing_and_the_first_ones_still_do(tmp_path):
    world = World(tmp_path, weights="fine-tune 1")
    world.run(range(20))
    world = world.restart(tmp_path, weights="fine-tune 2")
    assert world.run(range(20)) == 0
    world = world.restart(tmp_path, weights="fine-tune 1")
    assert world.run(range(20)) == 5
    world.stop()


def test_a_store_never_takes_more_bytes_than_it_may(tmp_path):
    least = SMALL
    world = World(tmp_path, num_blocks=64, max_bytes=least)
    num_slots = world.store.num_slots
    for number in range(0, 360, 60):
        world.run(range(4 * number, 4 * number + 240))
        assert world.cache.flush() and bytes_of(tmp_path) <= least
    figures = world.store.stats()
    assert figures["evicted"] > num_slots and figures["used_slots"] <= num_slots == 14
    world = world.restart(tmp_path, num_blocks=64, max_bytes=least)
    assert world.run(range(4 * number, 4 * number + 240)) == num_slots, "the beginning of the last prompt is kept"
    world = world.restart(tmp_path, num_blocks=64, max_bytes=least - (20 << 10))
    assert world.store.num_slots < num_slots and bytes_of(tmp_path) <= least - (20 << 10)
    world.run(range(8))
    world = world.restart(tmp_path, num_blocks=64, max_bytes=least - (20 << 10))
    assert world.run(range(8)) == 2
    world.stop()


def test_the_prompt_that_was_used_longest_ago_is_dropped_first(tmp_path):
    world = World(tmp_path, num_blocks=8, max_bytes=SMALL)
    least = world.store.num_slots
    for number in range(least):
        world.run([7] * 8)
        world.run(range(100 + 8 * number, 108 + 8 * number))
        world.cache.evict(8)
        assert world.cache.flush()
    assert world.store.stats()["evicted"] > 0
    assert world.run([7] * 8) == 2 and world.run(range(100, 108)) == 0
    world.stop()


def test_a_prompt_that_is_found_in_memory_again_and_again_stays_in_the_store(tmp_path):
    max_bytes = SMALL
    world = World(tmp_path, num_blocks=64, max_bytes=max_bytes)
    world.run(range(20))
    for start in range(1000, 3000, 100):
        world.run(range(20))
        for _ in range(2):
            world.run(range(start, start + 12))
        assert world.cache.flush()
    assert world.run(range(20)) == 5 and world.store.stats()["evicted"] > 20
    world = world.restart(tmp_path, num_blocks=64, max_bytes=max_bytes)
    assert world.run(range(20)) == 5
    world.stop()


def test_one_process_writes_and_others_read(tmp_path):
    world = World(tmp_path)
    reader = World(tmp_path)
    assert world.store.is_writer and not reader.store.is_writer
    world.run(range(20))
    assert world.cache.flush()
    assert reader.run(range(20)) == 5 and reader.run(range(60, 80)) == 0
    assert not reader.cache.flush() and reader.store.stats()["written"] == 0
    world.stop()
    assert reader.run(range(20)) == 5
    reader.stop()


def test_a_reader_waits_for_the_files_of_a_writer_that_starts_at_the_same_time(tmp_path):
    world = World(tmp_path)
    world.run(range(20))
    assert world.cache.flush()
    world.store.flush()
    index = world.store.folder / "index"
    index.rename(tmp_path / "later")
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(World, tmp_path)
        time.sleep(0.2)
        (tmp_path / "later").rename(index)
        reader = opening.result()
    assert reader.run(range(20)) == 5
    reader.stop()
    world.stop()


def test_notes_of_uses_do_not_grow_without_bound(tmp_path):
    world = World(tmp_path, num_blocks=512, max_bytes=12 << 20)
    for start in range(0, 2000, 8):
        world.run(range(start, start + 8))
    assert world.cache.flush()
    reader = World(tmp_path, max_bytes=12 << 20)
    world.cache.evict(512)
    for each in (reader, world):
        for start in range(0, 2000, 8):
            assert each.run(range(start, start + 8)) == 2
    deadline = time.monotonic() + 60
    while len(world.store.pages._used) >= 64 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not reader.store.pages._used and len(world.store.pages._used) < 64
    reader.stop()
    world.stop()


def test_a_child_of_fork_finds_and_writes_nothing(tmp_path):
    world = World(tmp_path)
    world.run(range(20))
    assert world.cache.flush()
    child = os.fork()
    if not child:
        names = world.store.names(np.arange(20, dtype=np.int32), b"")
        os._exit(len(world.store.find(names, [b""] * len(names))))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    world.cache.evict(16)
    assert world.run(range(20)) == 5
    world.stop()


def test_a_child_of_fork_waits_for_no_lock_that_a_thread_of_its_parent_held(tmp_path):
    world = World(tmp_path)
    world.run(range(20))
    assert world.cache.flush()
    link, store = world.cache.link, world.store.pages
    with link._lock, link._writer._changed, store._change, store._look_up:
        child = os.fork()
        if not child:
            signal.alarm(20)
            world.run(range(40, 60))
            world.cache.discard(world.cache.references()[:1])
            is_right = not world.cache.flush() and world.run(range(8)) in (0, 1, 2)
            world.store.stats()
            world.store.close()
            link.close()
            os._exit(not is_right)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    world = world.restart(tmp_path)
    assert world.run(range(20)) == 5
    world.stop()


def test_a_new_directory_can_be_changed_by_its_owner_only(tmp_path):
    before = os.umask(0)
    try:
        World(tmp_path / "parent" / "store").stop()
    finally:
        os.umask(before)
    (folder,) = stores_in(tmp_path / "parent" / "store")
    assert [path.stat().st_mode & 0o777 for path in (folder.parent, folder)] == [0o700, 0o700]


def test_a_directory_that_others_can_change_is_refused(tmp_path):
    World(tmp_path).stop()
    (folder,) = stores_in(tmp_path)
    tmp_path.chmod(0o777)
    with refuses(PermissionError, str(tmp_path), "drwxrwxrwx"):
        World(tmp_path)
    tmp_path.chmod(0o700)
    folder.chmod(0o770)
    with refuses(PermissionError, str(folder), "drwxrwx---"):
        World(tmp_path)
    folder.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
        with refuses(PermissionError, "12345", "0"):
            World(tmp_path)
        os.chown(folder, 0, -1)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with refuses(PermissionError, str(folder)):
        World(tmp_path)


@pytest.mark.parametrize("name", ["index", "pages", "FINGERPRINT", "lock"])
@pytest.mark.parametrize("kind", ["garbage", "empty", "directory"])
def test_files_of_another_kind_give_an_exception_or_right_pages(tmp_path, name, kind):
    world = World(tmp_path)
    world.run(range(20))
    assert world.cache.flush()
    world.stop()
    path = world.store.folder / name
    path.unlink()
    if kind == "directory":
        path.mkdir()
    else:
        path.write_bytes(b"pagepool pages 1\n" * 4096 if kind == "garbage" else b"")
    try:
        world = World(tmp_path)
    except OSError:
        assert kind == "directory"
    else:
        world.run(range(20))
        world.run(range(20))
        world.stop()


def test_discarded_blocks_are_not_found_again(tmp_path):
    world = World(tmp_path)
    world.run(range(20))
    assert world.cache.flush()
    blocks = world.cache.match_prefix(range(20)).tolist()
    world.allocator.free(blocks)
    assert world.cache.discard(blocks[2:3]) == 1
    world.cache.evict(16)
    assert world.run(range(12)) == 2
    world = world.restart(tmp_path)
    assert world.run(range(20)) == 5  # the third block was computed again and written
    world.cache.reset_prefix_cache()
    assert world.run(range(8)) == 0
    world.cache.reset_prefix_cache()
    world = world.restart(tmp_path)
    assert world.run(range(20)) == 0
    world.stop()


def test_a_reader_finds_what_it_has_discarded_no_more(tmp_path):
    world = World(tmp_path)
    world.run(range(20))
    world.run(range(50, 58))
    assert world.cache.flush()
    reader = World(tmp_path)
    assert reader.run(range(20)) == 5
    blocks = reader.cache.match_prefix(range(20)).tolist()
    reader.allocator.free(blocks)
    reader.cache.discard(blocks[2:3])
    assert reader.cache.link.wait()
    reader.cache.evict(16)
    assert reader.run(range(12)) == 2 and reader.run(range(50, 58)) == 2
    reader.cache.reset_prefix_cache()
    assert reader.cache.link.wait() and reader.run(range(50, 58)) == 0
    assert world.run(range(20)) == 5
    reader.stop()
    world.stop()


@pytest.mark.parametrize("way", ["discard", "reset"])
def test_blocks_that_are_discarded_while_the_disk_is_full_are_not_found_again(tmp_path, monkeypatch, caplog, way):
    world = World(tmp_path)
    world.run(range(20))
    assert world.cache.flush()

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("erase", "erase_all"):
        monkeypatch.setattr(f"pagepool.prefix.page_index.PageIndex.{name}", full)
    with caplog.at_level(logging.WARNING, "pagepool"):
        if way == "discard":
            world.cache.discard(world.cache.references())
        else:
            world.cache.reset_prefix_cache()
        assert world.cache.link.wait()
    monkeypatch.undo()
    assert len(caplog.records) == 1 and world.run(range(20)) == 0
    world.stop()
    world = World(tmp_path)
    assert world.run(range(20)) == 0
    world = world.restart(tmp_path)
    assert world.run(range(20)) == 5
    world.stop()


def test_many_threads_find_right_pages(tmp_path):
    world = World(tmp_path, num_blocks=48)

    def work(seed):
        random = np.random.default_rng(seed)
        found = 0
        for _ in range(150):
            tokens = prompt(random)
            with world.cache.match_tokens(tokens) as match:
                full = match.num_tokens // BLOCK
                for number in range(full):
                    world.check_page(match.blocks[number], tokens[: (number + 1) * BLOCK], {})
                found += full
            if random.random() < 0.2:
                world.cache.evict(random.integers(48))
        return found

    for seed in range(40):
        world.run(prompt(np.random.default_rng(seed)))
    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(4))) > 0
    world.cache.check()
    world.stop()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_costs_one_line_and_no_request(tmp_path, monkeypatch, caplog, number):
    world = World(tmp_path)
    world.run(range(20))
    is_broken = True

    def broken(*args):
        if is_broken:
            raise OSError(number, os.strerror(number))
        return real(*args)

    real = os.pwrite
    monkeypatch.setattr("pagepool.prefix.page_index.os.pwrite", broken)
    with caplog.at_level(logging.WARNING, "pagepool"):
        for start in range(0, 200, 40):
            world.run(range(start, start + 40))
            assert world.cache.flush()
    assert len(caplog.records) == 1 and os.strerror(number) in caplog.text
    assert world.store.stats()["written"] == 0 < world.store.stats()["failed"]
    is_broken = False
    world.run(range(500, 520))
    assert world.cache.flush() and world.store.stats()["written"] == 5
    world.cache.evict(16)
    caplog.clear()
    fails = os.open(world.store.folder / "pages", os.O_WRONLY)  # every read fails
    os.dup2(fails, world.store.pages._files[1])
    os.close(fails)
    for _ in range(3):
        assert world.run(range(500, 520)) == 0
        world.cache.evict(16)
    assert len(caplog.records) == 1 and os.strerror(errno.EBADF) in caplog.text
    world.cache.check()
    world.allocator.check(others=0)
    world.stop()


FULL = """
import resource, signal, sys
sys.path.insert(0, {tests!r})
from store_world import World
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
world = World({path!r}, num_blocks=64)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit := {limit}, limit))
for start in range(0, 20_000, 200):
    world.run(range(start, start + 200))
    world.cache.evict(64)
    assert world.cache.flush()
assert world.store.stats()["failed"] > 0, world.store.stats()
world.cache.check()
"""


@pytest.mark.parametrize("limit", [40_000, 200_000])
def test_files_that_cannot_grow_cost_no_request(tmp_path, limit):
    """The first limit stops writes to the page file and to the index's log, the second one only to the log."""
    code = FULL.format(tests=str(Path(__file__).parent), path=str(tmp_path), limit=limit)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    world = World(tmp_path, num_blocks=64)
    for start in range(0, 20_000, 200):
        world.run(range(start, start + 200))
    world.stop()


KILLED = """
import sys
sys.path.insert(0, {tests!r})
import numpy as np
from store_world import World, prompt
random = np.random.default_rng({seed})
world = World({path!r}, max_bytes={max_bytes})
print("ready", flush=True)
while True:
    world.run(prompt(random))
    world.cache.evict(int(random.integers(16)))
"""


def test_kills_at_random_leave_no_wrong_page(tmp_path):
    random = np.random.default_rng(9)
    found = 0
    max_bytes = SMALL
    for seed in range(12 if WHOLE else 4):
        code = KILLED.format(tests=str(Path(__file__).parent), path=str(tmp_path), seed=seed, max_bytes=max_bytes)
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "ready\n"
        try:
            child.wait(random.random() * 0.4)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        child.stdout.close()
        world = World(tmp_path, max_bytes=max_bytes)
        found += sum(world.run(prompt(random)) for _ in range(100))
        world.stop()
    assert found > 40 * (seed + 1)


def test_bad_arguments_are_refused_with_both_numbers(tmp_path):
    pool = KvCachePool.from_layout(LAYOUT, 4)
    found = fingerprint_of(pool, "a")
    with refuses(ValueError, "max_bytes", "279040", "1000"):
        PrefixStore(tmp_path, found, 1000)
    with refuses(TypeError, "fingerprint"):
        PrefixStore(tmp_path, "a", LEAST)
    with refuses(TypeError, "weights"):
        fingerprint_of(pool, 7)
    with refuses(ValueError, "weights"):
        fingerprint_of(pool, "")
    with refuses(ValueError, "block_size"):
        fingerprint_of([], "a")
    with PrefixStore(tmp_path, found, LEAST) as store:
        second = KvCachePool.from_layout(LAYOUT, 4, pool.allocator)
        with refuses(ValueError, "256", "512"):
            PrefixCache(second.allocator, store=store)
        second.close()
        with refuses(ValueError, "4 tokens", "8"):
            PrefixCache(BlockAllocator(4), block_size=8, store=store)
        with refuses(TypeError, "store"):
            PrefixCache(pool.allocator, store="a folder")
        cache = PrefixCache(pool.allocator, store=store)
        with refuses(ValueError, "touch"):
            cache.touch([1, 2, 3, 4])
        assert cache.store is store
    assert not PrefixCache(BlockAllocator(4)).flush() and PrefixCache(BlockAllocator(4)).store is None


def test_fingerprints_differ_by_everything_that_pages_depend_on():
    pool = KvCachePool.from_layout(LAYOUT, 4)
    found = fingerprint_of(pool, "a", rope_theta=1.0)
    assert found == fingerprint_of([KvCachePool.from_layout(LAYOUT, 9)], "a", rope_theta=1.0)
    others = [
        fingerprint_of(pool, "b", rope_theta=1.0),
        fingerprint_of(pool, "a", rope_theta=2.0),
        fingerprint_of(pool, "a"),
        fingerprint_of([pool, pool], "a", rope_theta=1.0),
        fingerprint_of(KvCachePool(64, 4), "a", rope_theta=1.0, block_size=4),
        Fingerprint(found.text, found.page_bytes, 8),
    ]
    assert len({found.digest, *(other.digest for other in others)}) == 7


def test_a_rolling_restart_keeps_the_pages_of_the_new_server(tmp_path, monkeypatch):
    """The new server opens the store while the old one has it. Pages from before the take-over are offered again."""
    monkeypatch.setattr("pagepool.prefix.store_link.RETRY_SECONDS", 0.05)
    old, new = World(tmp_path), World(tmp_path)
    for _ in range(2):
        new.run(range(20))
    assert not new.cache.flush() and not new.store.is_writer
    assert new.cache.link.wait() and new.store.stats()["dropped"] == 5
    old.stop()
    deadline = time.monotonic() + 60
    while not new.store.is_writer and time.monotonic() < deadline:  # without a request
        time.sleep(0.01)
    world = new.restart(tmp_path)
    assert world.run(range(20)) == 5
    world.stop()


def test_evicted_pages_that_find_no_room_in_the_queue_are_counted_and_logged(tmp_path, caplog):
    world = World(tmp_path, num_blocks=64)
    link = world.cache.link
    world.run(range(256))
    link.close()  # nothing is taken out of the queue any more
    world.cache.evict(64)
    world.run(range(1000, 1256))
    world.cache.evict(64)
    assert link.queue.dropped == 128 - link.queue.room
    with caplog.at_level(logging.WARNING, "pagepool"):
        link._writer._is_stopping = False
        link._writer._write_all()
    assert world.store.stats()["dropped"] == link.queue.dropped and len(caplog.records) == 1 and "queue" in caplog.text
    world.stop()
