"""`PageTier`: pages are a function of all tokens before them, so that a wrong page is detected.

Two tiers of one process are two processes: each has its own slot in the memory. Other tests start and kill processes.
"""

import os
import random as python_random
import signal
import time
import zlib
from itertools import pairwise
from threading import Event

import numpy as np
import pytest
from refusals import refuses
from tier_names import files_of, tier_name

from pagepool import PageTier
from pagepool.prefix import page_index
from pagepool.prefix.fingerprint import Fingerprint
from pagepool.prefix.page_file import PageFile
from pagepool.prefix.page_index import PageIndex
from pagepool.prefix.page_store import PageStore

BLOCK = 4
PAGE = 100_001  # bytes; not a multiple of anything
MODEL = Fingerprint("a", page_bytes=PAGE, block_size=BLOCK)
OTHER = Fingerprint("b", page_bytes=PAGE, block_size=BLOCK)
BYTES = 8 << 20  # 40 to 43 pages
STORE = 200 << 20
KEYS = ({}, {"cache_salt": "a"}, {"extra_keys": (7,)})


@pytest.fixture
def name():
    with tier_name() as chosen:
        yield chosen


def page_of(tokens, keys, pieces=1):
    """Return the page of the last tokens, as one buffer or cut into pieces."""
    word = zlib.crc32(np.array(tokens, np.int32).tobytes() + repr(sorted(keys.items())).encode())
    page = np.resize(np.frombuffer(np.uint32(word).tobytes(), np.uint8), PAGE)
    return page if pieces == 1 else [page[at : at + PAGE // pieces + 1] for at in range(0, PAGE, PAGE // pieces + 1)]


class Pages:
    """The pages of a prompt, computed when they are looked at."""

    def __init__(self, tokens, keys, pieces=1):
        self.tokens, self.keys, self.pieces, self.computed = tokens, keys, pieces, 0

    def __len__(self):
        return len(self.tokens) // BLOCK

    def __getitem__(self, place):
        self.computed += 1
        return page_of(self.tokens[: (place + 1) * BLOCK], self.keys, self.pieces)


def find(tier, tokens, pieces=1, **keys):
    """Check every page that the tier finds; return how many there are. For every other length a thread reads them."""
    is_submitted = len(tokens) % 2
    with tier.submit_match(tokens, **keys).result(60) if is_submitted else tier.match(tokens, **keys) as found:
        count = found.num_tokens // BLOCK
        whole = np.zeros((count, PAGE), np.uint8)
        cuts = [0, *sorted(python_random.Random(1).sample(range(PAGE), pieces - 1)), PAGE]
        into = [[row[a:b] for a, b in pairwise(cuts)] for row in whole]
        tier.read(found, into if pieces > 1 else whole)
    for place in range(count):
        assert np.array_equal(whole[place], page_of(tokens[: (place + 1) * BLOCK], keys)), "a wrong page"
    return count


def serve(tier, tokens, **keys):
    """Serve a prompt as an engine does; return how many pages were found, and how many the tier has afterwards."""
    found = find(tier, tokens, **keys)
    return found, tier.put(tokens, Pages(tokens, keys), **keys)


def prompt(random):
    """Return a prompt of up to 7 pages: a prefix of one of 4 long prompts, sometimes with another end."""
    family, length = random.integers(4), random.integers(1, 6) * BLOCK
    return [1000 * int(family) + at for at in range(length)] + random.integers(
        0, 2, random.integers(2 * BLOCK)
    ).tolist()


def in_child(function):
    child = os.fork()
    if child == 0:
        try:
            function()
        finally:
            os._exit(1)
    return child


def kill(child):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_page_is_found_behind_equal_tokens_and_keys_only(name, pieces):
    tier = PageTier(name, BYTES, MODEL)
    tokens = list(range(5 * BLOCK + 2))
    for keys in KEYS:
        assert find(tier, tokens, **keys) == 0
        assert tier.put(tokens, Pages(tokens, keys, pieces), **keys) == 5
    for keys in KEYS:
        assert find(tier, tokens, pieces, **keys) == 5
    for changed in range(len(tokens)):
        other = [*tokens[:changed], 900, *tokens[changed + 1 :]]
        assert find(tier, other) == min(changed // BLOCK, 5)
    tier.check()
    tier.remove()
    assert not files_of(name)


def test_only_missing_pages_are_looked_at(name):
    tier = PageTier(name, BYTES, MODEL)
    tokens = list(range(6 * BLOCK))
    first, second = Pages(tokens[: 2 * BLOCK], {}), Pages(tokens, {})
    assert (tier.put(tokens, first), tier.put(tokens, second), tier.put(tokens, second)) == (2, 6, 6)
    assert (first.computed, second.computed) == (2, 4)
    tier.close()


def test_processes_share_pages_and_a_later_process_finds_them(name):
    first, second = PageTier(name, BYTES, MODEL), PageTier(name, BYTES, MODEL)
    tokens = list(range(4 * BLOCK))
    assert (serve(first, tokens), serve(second, tokens)) == ((0, 4), (4, 4))
    first.close()
    second.close()
    third = PageTier(name, BYTES, MODEL)
    assert find(third, tokens) == 4
    third.clear()
    assert find(third, tokens) == 0
    third.close()


def test_a_full_tier_evicts_what_was_used_longest_ago_and_keeps_what_is_in_use(name, caplog):
    tier = PageTier(name, BYTES, MODEL)
    rows = [[1000 * row + at for at in range(4 * BLOCK)] for row in range(20)]
    for row in rows:
        assert serve(tier, row)[1] == 4
    assert find(tier, rows[0]) == 0 and find(tier, rows[-1]) == 4 and not caplog.records
    held = [tier.match(row) for row in rows]
    free = tier.stats()["capacity"] - sum(len(each.blocks) for each in held)
    assert free < BLOCK
    long = list(range(50_000, 50_000 + 8 * BLOCK))
    assert serve(tier, long) == (0, free) and serve(tier, long) == (free, free)
    assert caplog.text.count(f"the page tier {name}: pages find no room") == len(caplog.records) == 1
    for each in held:
        each.close()
    assert serve(tier, long)[1] == 8 and find(tier, long) == 8
    tier.check()
    tier.close()


def test_a_match_that_is_deleted_releases_its_pages(name):
    tier = PageTier(name, BYTES, MODEL)
    serve(tier, list(range(4 * BLOCK)))
    found = tier.match(range(4 * BLOCK))
    assert tier.stats()["used"] == 4
    found.close()
    found.close()
    found = tier.match(range(4 * BLOCK))
    del found
    assert tier.stats()["used"] == 0
    tier.close()


def test_another_model_of_the_same_name_finds_nothing_and_gets_half_of_the_memory(name):
    tier = PageTier(name, 2 * BYTES, MODEL)
    most = tier.stats()["capacity"]
    tokens = list(range(8 * BLOCK))
    serve(tier, tokens)
    other = PageTier(name, 2 * BYTES, OTHER)
    assert other.stats()["capacity"] >= most // 2 and tier.stats()["capacity"] > most // 4
    assert serve(other, tokens) == (0, 8) and serve(tier, tokens)[1] == find(tier, tokens) == 8
    assert sum(path.stat().st_blocks * 512 for path in files_of(name)) <= 2 * BYTES
    with refuses(ValueError, 3 * BYTES, 2 * BYTES):
        PageTier(name, 3 * BYTES, MODEL)
    for each in (tier, other):
        each.check()
        each.close()


def test_the_memory_of_former_weights_is_freed_when_no_process_has_it(name):
    tier = PageTier(name, BYTES, MODEL)
    most = tier.stats()["capacity"]
    serve(tier, list(range(8 * BLOCK)))
    tier.close()
    other = PageTier(name, BYTES, OTHER)
    assert other.stats()["capacity"] == most and len(files_of(name)) == 2  # the pool and the budget
    other.close()


def test_wrong_arguments_are_refused_and_nothing_is_kept(name):
    with refuses(ValueError, "max_bytes", 4, 3):
        PageTier(name, (4 << 20) + 310_000, MODEL)
    with refuses(ValueError, "block_size of the fingerprint", 1, 0):
        PageTier(name, BYTES, Fingerprint("a", page_bytes=PAGE))
    with refuses(ValueError, "store", "store_bytes"):
        PageTier(name, BYTES, MODEL, store="somewhere")
    with pytest.raises(OSError):
        PageTier(name, BYTES, MODEL, store="/proc/somewhere", store_bytes=STORE)
    assert not files_of(name)
    tier = PageTier(name, BYTES, MODEL)
    stats = tier.stats

    def changed():
        return {key: value for key, value in stats().items() if key not in ("looked_up",)}

    tokens = list(range(3 * BLOCK))
    with refuses(ValueError, 3, 12, 8, unchanged=changed):
        tier.put(tokens[:8], Pages(tokens, {}))
    with refuses(ValueError, PAGE, PAGE - 1, unchanged=changed):
        tier.put(tokens, [bytes(PAGE), bytes(PAGE), bytes(PAGE - 1)])
    with refuses(ValueError, -1, unchanged=changed):
        tier.put([-1] * 4, [bytes(PAGE)])
    with refuses(TypeError, "extra_keys", unchanged=changed):
        tier.put(tokens, Pages(tokens, {}), extra_keys="a")
    assert find(tier, tokens) == 0
    tier.put(tokens, Pages(tokens, {}))
    with tier.match(tokens) as found, refuses(ValueError, 3, 2, 1):
        tier.read(found, [bytearray(PAGE)] * 3, start=1)
    with tier.match(tokens) as found:
        for wrong, error in (
            (bytearray(PAGE - 1), ValueError),
            (bytes(PAGE), BufferError),
            ([bytearray(1), 7], TypeError),
        ):
            into = bytearray(PAGE)
            with pytest.raises(error):
                tier.read(found, [into, wrong])
            assert into == page_of(tokens[:BLOCK], {}).tobytes(), "pages before it were copied"
    into = [bytearray(PAGE)]
    with tier.match(tokens) as found:
        with refuses(ValueError, "start", 0, -1):
            tier.read(found, into, start=-1)
        with refuses(TypeError, "found", "Future"):
            tier.read(tier.submit_match(tokens), into)
        other = PageTier(name, BYTES, OTHER)
        with refuses(ValueError, "found", "this tier"):
            other.read(found, into)
        other.close()
    with refuses(ValueError, "found", "closed"):
        tier.read(found, into)
    tier.check()
    with tier.match(tokens) as found:
        tier.close()
        with refuses(ValueError, "found", "closed"):
            tier.read(found, into)
    assert into == [bytearray(PAGE)]


def test_a_tier_that_is_closed_during_a_call_keeps_nothing(name):
    tier = PageTier(name, BYTES, MODEL)

    class Closing(Pages):
        def __getitem__(self, place):
            tier.close()
            return super().__getitem__(place)

    tokens = list(range(3 * BLOCK))
    with pytest.raises(BufferError):  # the call copies a page
        tier.put(tokens, Closing(tokens, {}))
    assert tier.put(tokens, Pages(tokens, {})) == 0
    tier.close()
    assert find(PageTier(name, BYTES, MODEL), tokens) == 0


def test_random_prompts_in_two_processes_find_only_their_own_pages(name):
    random = np.random.default_rng(3)
    tiers = [PageTier(name, BYTES, MODEL) for _ in range(2)]
    hits = 0
    for step in range(300):
        hits += serve(tiers[step % 2], prompt(random), **KEYS[random.integers(3)])[0]
    assert hits > 300 and tiers[0].stats()["evicted"] > 100
    for tier in tiers:
        tier.check()
        tier.close()


@pytest.mark.parametrize("seed", range(2))
def test_a_process_that_is_killed_while_it_writes_leaves_only_right_pages(name, seed, tmp_path):
    def serve_for_ever(number):
        random = np.random.default_rng(10 * seed + number)
        tier = PageTier(name, BYTES, MODEL, store=tmp_path, store_bytes=STORE)
        while True:
            serve(tier, prompt(random), **KEYS[random.integers(3)])

    random, hits = np.random.default_rng(seed), 0
    for number in range(6):
        child = in_child(lambda number=number: serve_for_ever(number))
        time.sleep(0.05 + 0.03 * number)
        tier = PageTier(name, BYTES, MODEL)
        for _ in range(5):
            hits += serve(tier, prompt(random), **KEYS[random.integers(3)])[0]
        kill(child)
        for _ in range(10):
            hits += serve(tier, prompt(random), **KEYS[random.integers(3)])[0]
        most = tier.stats()["capacity"]
        long = list(range(90_000, 90_000 + most * BLOCK))
        assert tier.put(long, Pages(long, {})) == most, "the pages of a killed process are released"
        tier.check()
        tier.close()
    assert hits > 50


def test_pages_survive_the_end_of_their_memory_in_a_store(name, tmp_path):
    tier = PageTier(name, BYTES, MODEL, store=tmp_path, store_bytes=STORE)
    tokens = list(range(6 * BLOCK))
    serve(tier, tokens, cache_salt="a")
    assert tier.flush(60)
    tier.remove()  # as after a reboot
    tier = PageTier(name, BYTES, MODEL, store=tmp_path, store_bytes=STORE)
    assert (find(tier, tokens, cache_salt="a"), find(tier, tokens)) == (6, 0)
    assert tier.stats()["store"]["found"] == 6
    tier.remove()
    other = PageTier(name, BYTES, OTHER, store=tmp_path, store_bytes=STORE)
    assert find(other, tokens, cache_salt="a") == 0
    other.close()


def test_a_submitted_match_waits_for_no_page_of_the_store(name, tmp_path, monkeypatch):
    tier = PageTier(name, BYTES, MODEL, store=tmp_path, store_bytes=STORE)
    rows = [[1000 * row + at for at in range(4 * BLOCK + 1)] for row in range(4)]
    for row in rows[:3]:
        serve(tier, row)
    assert tier.flush(60)
    tier.remove()
    may_read, load = Event(), PageStore.load
    monkeypatch.setattr(PageStore, "load", lambda *arguments: may_read.wait(60) and load(*arguments))
    tier = PageTier(name, BYTES, MODEL, store=tmp_path, store_bytes=STORE)
    reads, waits, others = [tier.submit_match(row) for row in rows[:3]]
    assert not reads.done() and not waits.done() and waits.cancel()
    assert tier.submit_match(rows[3]).result(0).num_tokens == 0
    tier.put(rows[3], Pages(rows[3], {}))
    assert tier.submit_match(rows[3]).result(0).num_tokens == 4 * BLOCK
    assert tier.submit_match([900]).result(0).num_tokens == 0
    assert tier.stats()["looked_up"] == 8
    with refuses(ValueError, -1):
        tier.submit_match([-1] * BLOCK)
    may_read.set()
    for found in (reads.result(60), others.result(60)):
        assert found.num_tokens == 4 * BLOCK
        found.close()
    assert [find(tier, row) for row in rows] == [4] * 4 and tier.stats()["used"] == 0
    tier.close()
    assert tier.submit_match(rows[0]).result(0).num_tokens == 0


def test_a_submitted_match_does_not_wait_until_the_index_of_the_store_is_read(name, tmp_path, monkeypatch):
    writer = PageTier(name, BYTES, MODEL, store=tmp_path, store_bytes=STORE)
    serve(writer, range(4 * BLOCK))
    tier = PageTier(name + "-reader", BYTES, MODEL, store=tmp_path, store_bytes=STORE)
    assert writer.flush(60) and not tier._cache.store.is_writer
    monkeypatch.setattr(page_index, "RING", 4)
    may_read, load = Event(), PageIndex.load
    monkeypatch.setattr(PageIndex, "load", lambda *each, **more: may_read.wait(60) and load(*each, **more))
    found = [tier.submit_match(range(4 * BLOCK)) for _ in range(2)]
    assert not any(each.done() for each in found)
    may_read.set()
    assert [each.result(60).num_tokens for each in found] == [4 * BLOCK] * 2
    assert tier.submit_match(range(4 * BLOCK + 1)).result(60).num_tokens == 4 * BLOCK
    tier.close()
    writer.close()


def test_evicted_pages_come_back_from_the_store(name, tmp_path):
    tier = PageTier(name, BYTES, MODEL, store=tmp_path, store_bytes=STORE)
    writer = PageTier(name, BYTES, MODEL)  # another process without a store, as a worker of an engine
    rows = [[1000 * row + at for at in range(4 * BLOCK)] for row in range(30)]
    for row in rows:
        tier.make_room(4)
        assert writer.put(row, Pages(row, {})) == 4
        assert tier._cache.link.wait(60)
    for row in rows:
        assert find(tier, row) == 4
        assert tier._cache.link.wait(60)  # the look-up has evicted pages of a later row
    assert tier.stats()["store"]["found"] > 60
    for each in (tier, writer):
        each.check()
        each.close()


def test_pages_are_stored_on_request(name, tmp_path):
    tier = PageTier(name, BYTES, MODEL, store=tmp_path, store_bytes=STORE)
    tokens = list(range(6 * BLOCK))
    tier.put(tokens, Pages(tokens, {}))
    tier.store([*tokens, 1, 2, 3, 4])
    tier.store([9] * 8)
    assert tier._cache.link.wait(60)
    tier.remove()  # without a flush
    tier = PageTier(name, BYTES, MODEL, store=tmp_path, store_bytes=STORE)
    assert find(tier, tokens) == 6 and tier.stats()["store"]["written"] == 0
    tier.close()


def test_damaged_pages_of_the_store_are_not_found(name, tmp_path):
    tier = PageTier(name, BYTES, MODEL, store=tmp_path, store_bytes=STORE)
    tokens = list(range(6 * BLOCK))
    serve(tier, tokens)
    assert tier.flush(60)
    tier.remove()
    [pages] = tmp_path.glob("*/pages")
    data = np.fromfile(pages, np.uint8)
    data[100::4096] ^= 1
    data.tofile(pages)
    tier = PageTier(name, BYTES, MODEL, store=tmp_path, store_bytes=STORE)
    assert serve(tier, tokens) == (0, 6) and tier.stats()["store"]["refused"] > 0 and find(tier, tokens) == 6
    tier.close()


def test_a_disk_that_fails_stops_no_call(name, tmp_path, monkeypatch, caplog):
    def fails(*arguments):
        raise OSError(28, "No space left on device")

    tier = PageTier(name, BYTES, MODEL, store=tmp_path, store_bytes=STORE)
    monkeypatch.setattr(PageFile, "write", fails)
    random, hits = np.random.default_rng(1), 0
    for _ in range(60):
        hits += serve(tier, prompt(random))[0]
    assert hits > 50 and tier._cache.link.wait(60)
    assert tier.stats()["store"]["written"] == 0 and caplog.text.count("pages cannot be written") == 1
    tier.close()


def test_a_child_after_a_fork_finds_and_keeps_nothing(name, caplog, tmp_path):
    tier = PageTier(name, BYTES, MODEL, store=tmp_path, store_bytes=STORE)
    tokens = list(range(4 * BLOCK))
    serve(tier, tokens)

    def use():
        tier.make_room(1000)
        tier.store(tokens)
        assert tier.submit_match([*tokens, 1]).result(0).num_tokens == tier.match(tokens).num_tokens == 0
        assert tier.put(tokens, Pages(tokens, {})) == 0
        assert "nothing is found" in caplog.text and "nothing is kept" in caplog.text
        os._exit(0)

    assert os.waitpid(in_child(use), 0)[1] == 0
    view = memoryview(tier._pages)  # as a thread that copies has it
    assert os.waitpid(in_child(lambda: os._exit(tier.close() is not None)), 0)[1] == 0
    view.release()
    assert find(tier, tokens) == 4
    tier.check()
    tier.close()
