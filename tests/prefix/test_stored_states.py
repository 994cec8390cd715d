"""Recurrent states in the store: a restart continues from the right state, and no wrong state is ever used."""

import os
import threading
import zlib

import numpy as np
import pytest
from refusals import refuses
from store_world import BLOCK, LAYOUT, World, content

from pagepool import BlockAllocator, KvCachePool, PrefixCache, SsmStatePool, StateCheckpoints, StateLayout
from pagepool.prefix import stored_states
from pagepool.prefix.fingerprint import fingerprint_of
from pagepool.prefix.session import load_session, save_session
from pagepool.prefix.store import PrefixStore
from pagepool.prefix.store_files import RESERVED

FEW = RESERVED + (1 << 20)  # bytes of a store with room for some states
STATES = StateLayout(layers=[{"conv": ((3, 4), "bfloat16"), "ssm": ((5000,), "float32")}, {}, {"ssm": ((2,), "int32")}])


class Hybrid(World):
    """A model with pages, or without, and states that are a function of all tokens so far."""

    def __init__(
        self, path, *, has_pages=True, num_blocks=64, max_bytes=10 << 20, budget=1 << 20, layout=STATES, shared=None
    ):
        self.pools = [KvCachePool.from_layout(LAYOUT, num_blocks, shared=shared)] if has_pages else []
        self.allocator = self.pools[0].allocator if has_pages else BlockAllocator(num_blocks)
        self.fingerprint = fingerprint_of(self.pools, "a", block_size=BLOCK, states=layout)
        self.store = None if path is None else PrefixStore(path, self.fingerprint, max_bytes)
        self.cache = PrefixCache(self.allocator, BLOCK, "lru", store=self.store)
        self.states = SsmStatePool.from_layout(layout, 2)
        self.views = [self.states.view(layer, name) for layer, row in enumerate(layout.layers) for name in row]
        self.checkpoints = StateCheckpoints(
            layout, self.states, budget, grid=0, spacing=BLOCK, align=BLOCK, prompt_ends=True
        )

    def serve(self, tokens, is_right=True, **keys):
        """Serve a prompt; return the number of tokens that were not computed. Checks pages and state."""
        full = (len(tokens) - 1) // BLOCK * BLOCK
        known = self.run(tokens[:full], **keys) * BLOCK
        slot = self.states.alloc(1)
        self.checkpoints.follow(self.cache)
        begin = self.checkpoints.resume(slot, tokens, known, **keys)
        assert begin <= known and self.states.slot(slot).position == begin
        if begin:
            assert all((view[slot] == state_of(tokens[:begin], keys)).all() for view in self.views)
        for position, reason in self.checkpoints.stops(tokens, known, begin, **keys):
            for view in self.views:
                view[slot] = state_of(tokens[:position], keys) if is_right else 99
            self.checkpoints.save(slot, tokens, position, reason, **keys)
        self.states.release(slot)
        self.checkpoints.check()
        return begin

    def restart(self, path, **options):
        assert self.cache.flush()
        self.stop()
        return Hybrid(path, **options)


def state_of(tokens, keys):
    return zlib.crc32(repr((list(tokens), sorted(keys.items()))).encode()) % 997


def test_engines_of_a_hybrid_model_share_pages_and_find_states_in_the_store(tmp_path):
    memory = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    first = Hybrid(tmp_path, shared=memory)
    assert first.serve(range(33)) == 0 and first.cache.flush()
    second = Hybrid(tmp_path, shared=memory)
    assert not second.store.is_writer
    assert second.serve(range(50)) == 32
    assert second.store.stats()["found"] == 1, "the pages are shared, only the state is read"
    assert first.serve(range(50)) == 32 and first.cache.num_cached == 12, "the state of 48 tokens is private"
    first.store.close()
    assert second.serve([*range(32), 7, 7, 7, 7, 7]) == 32, "a state that was read is kept"
    second.store.close()
    os.close(memory)


@pytest.mark.parametrize("has_pages", [True, False])
def test_a_restart_continues_from_the_longest_stored_state(tmp_path, has_pages):
    world = Hybrid(tmp_path, has_pages=has_pages)
    assert world.serve(range(33)) == 0 and world.serve(range(17), cache_salt="tenant") == 0
    world = world.restart(tmp_path, has_pages=has_pages)
    assert world.serve(range(50)) == 32 and world.serve([*range(32), 7, 7, 7, 7, 7]) == 32
    assert world.serve(range(17)) == 0 and world.serve(range(17), cache_salt="tenant") == 16
    assert world.checkpoints.stats()["states"] >= 3, "a state that was read is kept"
    world.store.close()
    assert world.serve(range(50)) == 48
    world = Hybrid(tmp_path, has_pages=not has_pages)
    assert world.serve(range(50)) == 0
    world.stop()


def test_a_state_is_written_when_it_is_used_or_dropped(tmp_path):
    world = Hybrid(tmp_path, budget=2 * 25_000)  # room for 2 states
    world.serve(range(9))
    assert len(world.cache.link.states) == 0
    world.serve(range(9))
    for start in (100, 200, 300):
        assert 40 in [world.serve(range(start, start + 41)) for _ in range(8)]
    world.cache.evict(64)
    assert world.checkpoints.stats()["dropped"] >= 2 and world.cache.link.wait()
    world.stop()
    world = Hybrid(tmp_path)
    assert [world.serve(range(start, start + 41)) for start in (100, 200, 300)] == [40, 40, 40]
    assert world.serve(range(9)) == 8
    world.stop()


def test_a_full_queue_drops_states_and_flush_writes_them_all(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_states, "QUEUE_BYTES", 1)
    world = Hybrid(tmp_path, budget=4 << 20)
    for start in range(0, 600, 50):
        world.serve(range(start, start + 9))
    world = world.restart(tmp_path)
    assert [world.serve(range(start, start + 9)) for start in range(0, 600, 50)] == [8] * 12
    world.stop()


def test_a_damaged_state_is_not_used_and_the_one_before_it_is(tmp_path):
    world = Hybrid(tmp_path)
    world.serve(range(9))
    world.serve(range(41))
    assert world.cache.flush()
    world.stop()
    path = world.store.folder / "pages"
    data = path.read_bytes()
    for place in range(100, len(data), 1000):
        damaged = bytearray(data)
        for at in range(place, len(data), 20_480):  # one byte of every state
            damaged[at] ^= 1
        path.write_bytes(damaged)
        world = Hybrid(tmp_path)
        world.store.pages._may_write = False  # only a reader: it must not repair what the next turn damages
        world.store.pages._close_lock()
        assert world.serve(range(41)) in (0, 8, 40)
        world.stop()
    path.write_bytes(data)
    world = Hybrid(tmp_path)
    assert world.serve(range(41)) == 40
    world.stop()


@pytest.mark.parametrize("way", ["discard", "reset"])
def test_states_computed_from_forgotten_blocks_are_forgotten_on_disk(tmp_path, way):
    world = Hybrid(tmp_path)
    world.serve(range(33), is_right=False)
    assert world.cache.flush()
    blocks = world.cache.match_prefix(range(32))
    world.allocator.free(blocks)
    if way == "discard":
        world.cache.discard(blocks[:1])
    else:
        world.cache.reset_prefix_cache()
    assert world.serve(range(33)) == 0
    world = world.restart(tmp_path)
    assert world.serve(range(33)) == 32
    world.stop()


def test_a_block_found_while_it_is_discarded_does_not_stay_in_the_store(tmp_path):
    """The thread must not delete the entry before the block is forgotten: a look-up in between writes it again."""
    world = World(tmp_path)
    world.run(range(8))
    blocks = world.cache.match_prefix(range(8))
    world.allocator.free(blocks)
    link, queue = world.cache.link, world.cache.link.queue
    with link.forgetting(world.store.names(np.arange(8, dtype=np.int32), b"n" + bytes(8))):
        for _ in range(100):
            world.store.write([])  # gives the thread time
        assert not link._writer._is_done(), "the thread waits for the end of the block"
        assert queue.num_added == 2
        assert world.cache.match_prefix(range(8)).tolist() == blocks.tolist()
        world.allocator.free(blocks)
        world.cache.link.queue.mark([])
    world.cache.evict(16)
    world.cache.link.wait()
    world.stop()


def test_a_state_of_a_forgotten_block_is_not_queued(tmp_path):
    queue, state = stored_states.StateQueue(), bytearray(4)
    assert queue.offer(b"a" * 16, b"", state, lambda: False) and len(queue) == 0
    assert queue.offer(b"a" * 16, b"", state, lambda: True)
    peeked = queue.peek()
    queue.clear()
    assert queue.offer(b"b" * 16, b"", state, lambda: True)
    queue.pop(peeked)  # was cleared: the other one stays
    assert [each.name for each in queue.peek()] == [b"b" * 16]


def test_flush_in_another_thread_reads_whole_states(tmp_path):
    world = Hybrid(tmp_path, budget=3 * 25_000, num_blocks=16)
    stop = threading.Event()

    def flush():
        while not stop.is_set():
            world.cache.flush()

    thread = threading.Thread(target=flush)
    thread.start()
    random = np.random.default_rng(3)
    used = 0
    for _ in range(300):
        family, length = int(random.integers(5)), int(random.integers(2, 8)) * BLOCK + 1
        used += world.serve([100 * family + place for place in range(length)])
    stop.set()
    thread.join()
    assert used > 1000
    world = world.restart(tmp_path)
    assert sum(world.serve([100 * family + place for place in range(29)]) for family in range(5)) > 50
    world.stop()


def test_states_count_towards_the_bytes_of_the_store(tmp_path):
    world = Hybrid(tmp_path, max_bytes=FEW, budget=8 << 20)
    for start in range(0, 8000, 40):
        world.serve(range(start, start + 17))
        if start % 400 == 0:
            assert world.cache.flush() and world.store.stats()["bytes"] <= FEW
    assert world.store.stats()["evicted"] > 0 and world.store.stats()["failed"] == 0
    world = world.restart(tmp_path, max_bytes=FEW)
    assert world.serve(range(start, start + 17)) == 16
    world.stop()
    layout = StateLayout(layers=[{"ssm": ((1 << 20,), "float32")}])
    with refuses(ValueError, "max_bytes", "4 pages and states"):
        Hybrid(tmp_path, max_bytes=FEW, layout=layout)


def test_a_state_that_is_used_in_memory_again_and_again_stays_in_the_store(tmp_path):
    world = Hybrid(tmp_path, max_bytes=FEW, budget=8 << 20)
    for start in range(0, 6000, 20):
        assert world.serve(range(9)) == (8 if start else 0)
        world.serve(range(start + 1000, start + 1009))
        if start % 200 == 0:
            assert world.cache.flush()
    assert world.store.stats()["evicted"] > 100
    world = world.restart(tmp_path, max_bytes=FEW)
    assert world.serve(range(9)) == 8
    world.stop()


def test_a_store_of_other_states_is_refused(tmp_path):
    world = Hybrid(tmp_path)
    layout = StateLayout(layers=[{"ssm": ((4,), "float32")}])
    assert fingerprint_of(world.pools, "a", states=layout).digest != fingerprint_of(world.pools, "a").digest
    other = StateCheckpoints(layout, SsmStatePool.from_layout(layout, 1), 1000, align=BLOCK)
    with refuses(ValueError, "16", "20032"):
        other.follow(world.cache)
    world.stop()


def test_a_session_has_the_state_of_its_prefix(tmp_path):
    path = tmp_path / "session"
    world = Hybrid(None)
    world.serve(range(33), cache_salt="a")
    options = {"cache_salt": "a", "checkpoints": world.checkpoints}
    assert save_session(path, world.cache, world.fingerprint, range(35), **options) == 32
    with refuses(ValueError, "20032", "0"):
        save_session(path, world.cache, world.fingerprint, range(35))
    world = Hybrid(None)
    options["checkpoints"] = world.checkpoints
    with refuses(ValueError, "1 groups", "2"):
        load_session(path, world.cache, world.fingerprint, num_groups=2, **options)
    found = load_session(path, world.cache, world.fingerprint, **options)
    assert found.num_cached == 32 and world.serve(range(40), cache_salt="a") == 32
    data = bytearray(path.read_bytes())
    for place in (len(data) - 1, len(data) - 20_032, len(data) - 20_033):
        damaged = data.copy()
        damaged[place] ^= 1
        path.write_bytes(damaged)
        world = Hybrid(None)
        options["checkpoints"] = world.checkpoints
        assert load_session(path, world.cache, world.fingerprint, **options).num_cached == 0
        assert world.serve(range(40), cache_salt="a") == 0


def test_a_session_has_the_blocks_of_every_group(tmp_path):
    path = tmp_path / "session"
    world = World(tmp_path)
    tokens = list(range(10))
    for group in range(2):
        assert world.run(tokens, extra_keys=(group,)) == 0
    fingerprint = world.store.fingerprint
    world.stop()
    assert save_session(path, world.cache, fingerprint, tokens) == 0
    assert save_session(path, world.cache, fingerprint, tokens, num_groups=2) == 8
    world = World(tmp_path / "other")
    assert load_session(path, world.cache, fingerprint, num_groups=2).num_cached == 8
    assert [world.run(tokens, extra_keys=(group,)) for group in range(2)] == [2, 2]
    assert content(tokens, {"extra_keys": (0,)}) != content(tokens, {"extra_keys": (1,)})
    world.stop()


def test_a_session_of_groups_that_are_cached_in_part_is_completed(tmp_path):
    path, tokens = tmp_path / "session", list(range(16))
    world = World(tmp_path)
    for group in range(2):
        world.run(tokens, extra_keys=(group,))
    fingerprint = world.store.fingerprint
    world.stop()
    save_session(path, world.cache, fingerprint, tokens, num_groups=2)
    world = World(tmp_path / "other")
    world.run(tokens[:4], extra_keys=(0,))
    world.run(tokens[:8], extra_keys=(1,))
    assert load_session(path, world.cache, fingerprint, num_groups=2).num_cached == 16
    assert [world.run(tokens, extra_keys=(group,)) for group in range(2)] == [4, 4]
    world.allocator.check(others=0)
    world.stop()
