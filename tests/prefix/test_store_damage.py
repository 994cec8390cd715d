"""Power losses, damaged and foreign files: a store returns correct pages or none, and never ends the process."""

import os
import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pytest
from share import WHOLE
from store_world import BLOCK, LEAST, World, content

TRIALS = 4000 if WHOLE else 150
SECTOR = 512
SMALL = LEAST - (1 << 20) + (64 << 10)  # 14 slots


class Served:
    """Read every prompt that may be in a store, and check each page."""

    def __init__(self, prompts):
        self.prompts, self.right, self.refused = prompts, 0, 0

    def __call__(self, path, weights="a"):
        world = World(path, num_blocks=64, max_bytes=SMALL, weights=weights)
        for tokens in self.prompts:
            blocks = world.cache.match_prefix(tokens).tolist()
            for number, block in enumerate(blocks):
                world.check_page(block, tokens[: (number + 1) * BLOCK], {})
            self.right += len(blocks)
            world.allocator.free(blocks)
            world.cache.evict(64)
        self.refused += world.store.stats()["refused"]
        world.cache.check()
        world.stop()


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """Return folder, prompts, all writes to the page file, and for each batch the number of writes and the database."""
    path = tmp_path_factory.mktemp("history")
    world = World(path, num_blocks=64, max_bytes=SMALL)
    folder, real, writes, databases = world.store.folder, os.pwrite, [], []
    copy = tmp_path_factory.mktemp("copy") / "index.sqlite"

    def recorded(descriptor, data, offset):
        writes.append((offset, bytes(data)))
        return real(descriptor, data, offset)

    random, prompts = np.random.default_rng(5), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pagepool.prefix.store.os.pwrite", recorded)
        for _ in range(30):
            family, length = int(random.integers(4)), int(random.integers(1, 6)) * BLOCK
            prompts.append([1000 * family + place for place in range(length)] + random.integers(0, 2, BLOCK).tolist())
            world.run(prompts[-1])
            assert world.cache.flush()
            world.cache.evict(64)
            with closing(sqlite3.connect(folder / "index.sqlite")) as source, closing(sqlite3.connect(copy)) as target:
                source.backup(target)
            databases.append((len(writes), copy.read_bytes()))
    world.stop()
    assert len(writes) > 60 and world.store._counts["evicted"] > 20
    return path, folder, prompts, writes, databases


def begin_again(history, folder, pages, database):
    """Lay out a store as a crash may leave it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "pages").write_bytes(pages)
    (folder / "index.sqlite").write_bytes(database)


def test_power_losses_leave_no_wrong_page(tmp_path, history):
    """Sectors of the last writes are lost in any order, bits flip, files are truncated, and the index is outdated."""
    _, made, prompts, writes, databases = history
    folder, random, served = tmp_path / made.name, np.random.default_rng(11), Served(prompts)
    for _ in range(TRIALS):
        stop = int(random.integers(1, len(databases)))
        num_writes, late = databases[stop][0], int(random.choice([0, 2, 6, 20, 80]))
        pages = bytearray(14 * 4096)
        for number, (offset, data) in enumerate(writes[:num_writes]):
            for at in range(0, len(data), SECTOR):
                if number < num_writes - late or random.random() < 0.6:
                    piece = data[at : at + SECTOR]
                    pages[offset + at : offset + at + len(piece)] = piece
        if random.random() < 0.3:
            pages[int(random.integers(len(pages)))] ^= 1 << int(random.integers(8))
        if random.random() < 0.2:
            del pages[int(random.integers(len(pages))) :]
        day = stop if random.random() < 0.6 else int(random.integers(len(databases)))
        database = bytearray(databases[day][1])
        if random.random() < 0.2:
            database[int(random.integers(len(database)))] ^= 1 << int(random.integers(8))
        if random.random() < 0.1:
            del database[int(random.integers(len(database))) :]
        begin_again(history, folder, pages, database)
        served(tmp_path)
    assert served.right > TRIALS * 4 and served.refused > TRIALS


def test_every_byte_of_the_index_may_be_wrong(tmp_path, history):
    """The store raises an exception or returns correct pages. `make store-test` damages every byte."""
    _, made, prompts, writes, databases = history
    folder, served = tmp_path / made.name, Served(prompts[-3:])
    pages = bytearray(14 * 4096)
    for offset, data in writes:
        pages[offset : offset + len(data)] = data
    database = databases[-1][1]
    places = range(len(database)) if WHOLE else [*range(0, 100, 3), *range(100, len(database), 101)]
    random = np.random.default_rng(2)
    for place in places:
        damaged = bytearray(database)
        damaged[place] ^= int(random.integers(1, 256))
        begin_again(history, folder, pages, damaged)
        served(tmp_path)
    assert served.right > len(places)


@pytest.mark.parametrize("taken", [["pages"], ["index.sqlite"], ["pages", "index.sqlite"]])
def test_files_of_another_model_are_not_used(tmp_path, taken):
    """Two fine-tuned models with equal layouts have different pages for the same prompts."""
    worlds = {}
    for weights in ("one", "two"):
        world = worlds[weights] = World(tmp_path, weights=weights)
        world.run(range(20), cache_salt=weights)
        world.run(range(20))
        assert world.cache.flush()
        world.stop()
    source, target = worlds["one"].store.folder, worlds["two"].store.folder
    for name in taken:
        shutil.copy(source / name, target / name)
    world = World(tmp_path, weights="two")
    assert world.cache.match_prefix(range(20), cache_salt="one").tolist() == []
    assert len(world.cache.match_prefix(range(20))) in ((0,) if taken != ["pages"] else (0, 5))
    world.stop()


def test_a_sum_depends_on_every_byte_the_name_and_the_fingerprint(tmp_path):
    world = World(tmp_path)
    random, found = np.random.default_rng(1), world.store._sum
    for size in (0, 1, 8, 15, 256, 4096, 4097, 9000):
        page = bytearray(random.bytes(size))
        sums = {found.of(b"a" * 16, page), found.of(b"b" * 16, page), found.of(b"a" * 16, page + b"\0")}
        places = random.integers(0, size, 40) if size else []
        for place in places:
            changed = bytearray(page)
            changed[place] ^= 1 << int(random.integers(8))
            sums.add(found.of(b"a" * 16, changed))
            swapped = bytearray(page)
            swapped[place], swapped[-1] = swapped[-1], swapped[place]
            if swapped != page:
                sums.discard(found.of(b"a" * 16, swapped))
                sums.add(found.of(b"a" * 16, swapped))
        assert found.of(b"a" * 16, page) in sums and len(sums) >= 3 + (size > 300) * 30
    world.stop()


def test_a_page_that_fails_its_sum_is_written_again(tmp_path):
    world = World(tmp_path)
    world.run(range(20))
    assert world.cache.flush()
    pages = world.store.folder / "pages"
    data = bytearray(pages.read_bytes())
    for slot in range(5):
        data[4096 * slot + 17] ^= 1
    pages.write_bytes(data)
    world.cache.evict(16)
    assert world.run(range(20)) == 0 and world.store.stats()["refused"] == 1
    for _ in range(5):  # a look-up finds the first bad page, and the thread deletes its entry
        world.cache.evict(16)
        world.run(range(20))
        assert world.cache.flush()
    world = world.restart(tmp_path)
    assert world.run(range(20)) == 5
    world.stop()


def test_contents_are_told_apart():
    """Check of the test itself: pages of other prompts differ."""
    assert len({content([1], {}), content([2], {}), content([1], {"cache_salt": "a"}), content([1], {}, 1)}) == 4
