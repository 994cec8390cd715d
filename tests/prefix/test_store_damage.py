"""Power losses, damaged and foreign files: a store returns correct pages or none, and never ends the process."""

import os
import shutil

import numpy as np
import pytest
from share import WHOLE
from store_world import BLOCK, SMALL, World, content

from pagepool.prefix.page_index import HEAD_BYTES, RECORD_BYTES

TRIALS = 4000 if WHOLE else 150
SECTOR = 512


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
    """Return the name of the folder, prompts, the first bytes of both files, and all writes and ends of batches."""
    world = World(tmp_path_factory.mktemp("history"), num_blocks=64, max_bytes=SMALL)
    folder, real, writes, stops, store = world.store.folder, os.pwrite, [], [], world.store.pages
    first = {name: (folder / name).read_bytes() for name in ("pages", "index")}

    def recorded(descriptor, data, offset):
        name = dict(zip(store._files, ("index", "pages"), strict=True))[descriptor]
        writes.append((name, offset, bytes(data)))
        return real(descriptor, data, offset)

    random, prompts = np.random.default_rng(5), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", recorded)
        for _ in range(30):
            family, length = int(random.integers(4)), int(random.integers(1, 6)) * BLOCK
            prompts.append([1000 * family + place for place in range(length)] + random.integers(0, 2, BLOCK).tolist())
            world.run(prompts[-1])
            assert world.cache.flush()
            world.cache.evict(64)
            assert world.cache.link.wait()
            stops.append(len(writes))
        world.stop()
    assert len(writes) > 200 and store._counts["evicted"] > 20
    return folder.name, prompts, first, writes, stops


def files_after(history, num_writes, late=0, random=None):
    """Return the bytes of both files after these writes. Four of ten sectors of the `late` last ones are lost."""
    files = {name: bytearray(data) for name, data in history[2].items()}
    files["pages"][:] = bytes(14 * 4096)
    files["index"] += bytes(14 * RECORD_BYTES)
    for number, (name, offset, data) in enumerate(history[3][:num_writes]):
        for at in range(0, len(data), SECTOR):
            if number < num_writes - late or random.random() < 0.6:
                piece = data[at : at + SECTOR]
                files[name][offset + at : offset + at + len(piece)] = piece
    return files


def lay_out(folder, files):
    """Write the files of a store as a crash may leave them."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def test_power_losses_leave_no_wrong_page(tmp_path, history):
    """Sectors of the last writes are lost in any order, bits flip, files are truncated, and one file is outdated."""
    name, prompts, _, _, stops = history
    random, served = np.random.default_rng(11), Served(prompts)
    for _ in range(TRIALS):
        num_writes = int(random.choice(stops[1:]))
        late = int(random.choice([0, 8, 24, 80, 300]))
        files = files_after(history, num_writes, late, random)
        if random.random() < 0.3:
            old = files_after(history, int(random.choice(stops)))
            kind = random.choice(["pages", "index"])
            files[kind] = old[kind]
        for data in files.values():
            if random.random() < 0.3:
                data[int(random.integers(len(data)))] ^= 1 << int(random.integers(8))
            if random.random() < 0.15:
                del data[int(random.integers(len(data))) :]
        lay_out(tmp_path / name, files)
        served(tmp_path)
    assert served.right > TRIALS * 4 and served.refused > TRIALS // 2


def test_every_byte_of_the_index_may_be_wrong(tmp_path, history):
    """The store raises an exception or returns correct pages. `make store-test` damages every byte."""
    name, prompts, _, _, stops = history
    served = Served(prompts[-3:])
    whole = files_after(history, stops[-1])
    size = len(whole["index"])
    places = range(size) if WHOLE else [*range(0, 160, 3), *range(HEAD_BYTES, size, 7)]
    random = np.random.default_rng(2)
    for place in places:
        damaged = bytearray(whole["index"])
        damaged[place] ^= int(random.integers(1, 256))
        lay_out(tmp_path / name, {**whole, "index": damaged})
        served(tmp_path)
    assert served.right > len(places)


@pytest.mark.parametrize("taken", [["pages"], ["index"], ["pages", "index"]])
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
    random, found = np.random.default_rng(1), world.store.pages._pages._sums
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
