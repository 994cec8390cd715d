"""The cache of a shared pool together with a store, events, sessions and transfers.

Two attached pools are two processes: each has its own slot, its own references and its own names. Pages are a function
of all tokens before them, so a wrong page is detected.
"""

import os
import random as python_random
import signal

import numpy as np
import pytest
from store_world import BLOCK, LAYOUT, World, prompt

from pagepool import BlockAllocator, KvCachePool, PrefixCache
from pagepool.cluster.pages import PageMover
from pagepool.memory.generations import BlockGenerations
from pagepool.prefix.events import prefix_names
from pagepool.prefix.fingerprint import fingerprint_of
from pagepool.prefix.keys import root_key, root_name
from pagepool.prefix.session import load_session, save_session
from pagepool.transfer import LocalTransfer

KEYS = ({}, {"cache_salt": "a"}, {"extra_keys": (7,)})


@pytest.fixture
def memory():
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    yield fd
    os.close(fd)


@pytest.fixture
def other_memory():
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    yield fd
    os.close(fd)


def in_child(function):
    child = os.fork()
    if child == 0:
        try:
            function()
        finally:
            os._exit(1)
    return child


class Mirror:
    """A process that follows the events of a cache: {name: (block, parent, tokens)}."""

    def __init__(self, cache):
        self.cache, self.known = cache, {}

    def follow(self):
        for event in self.cache.drain_events():
            if event.kind == "stored":
                assert event.name not in self.known
                self.known[event.name] = event.block, event.parent, event.tokens
            elif event.kind == "removed":
                del self.known[event.name]
            else:
                self.known.clear()

    def check(self):
        self.follow()
        snapshot = self.cache.snapshot()
        assert self.cache.drain_events() == []
        assert self.known == {event.name: (event.block, event.parent, event.tokens) for event in snapshot.stored}
        names = self.cache.name_snapshot()
        assert sorted(self.known) == sorted(names.names[at : at + 16] for at in range(0, len(names.names), 16))

    def find(self, tokens, **keys):
        """Return the blocks of the longest prefix of a prompt, by names alone."""
        key = root_key(keys.get("cache_salt"), keys.get("extra_keys", ()))
        blocks = []
        for name in prefix_names(tokens, BLOCK, root_name(key)):
            if name not in self.known:
                break
            blocks.append(self.known[name][0])
        return blocks


def test_a_shared_cache_survives_the_end_of_its_memory(memory, other_memory, tmp_path):
    world = World(tmp_path, shared=memory)
    world.run(range(22))
    world.run(range(10), cache_salt="a")
    world = world.restart(tmp_path, shared=other_memory)  # as after a reboot
    assert world.cache.num_cached == 0
    assert (world.run(range(22)), world.run(range(10), cache_salt="a")) == (5, 2)
    assert world.run(range(10), cache_salt="b") == 0
    assert world.store.stats()["found"] == 7
    world.stop()


def test_pages_that_any_process_has_computed_are_written_by_the_writer(memory, other_memory, tmp_path):
    writer, reader = World(tmp_path, shared=memory), World(tmp_path, shared=memory)
    assert (writer.store.is_writer, reader.store.is_writer) == (True, False)
    reader.run(range(22))
    assert writer.run(range(14)) == 3  # found again
    assert writer.cache.flush()
    assert writer.store.stats()["written"] == 5
    reader.run([7] * 8)
    assert writer.cache.evict(16) == 7  # evicted
    reader.stop()
    world = writer.restart(tmp_path, shared=other_memory)
    assert (world.run(range(22)), world.run([7] * 8)) == (5, 2)
    world.stop()


def test_evicted_pages_come_back_from_the_store(memory, tmp_path):
    worlds = [World(tmp_path, shared=memory, num_blocks=12) for _ in range(2)]
    random = python_random.Random(1)
    for step in range(300):
        worlds[step % 2].run(prompt(np.random.default_rng(random.randrange(40))))
    stats = worlds[0].store.stats()
    assert stats["found"] > 50 and stats["refused"] == 0 and worlds[0].cache.stats()["evicted"] > 100
    for world in worlds:
        world.cache.check()
        world.allocator.check(others=0)
        world.stop()


def test_what_another_process_forgets_is_not_read_from_the_store(memory, tmp_path):
    for forget in (lambda cache: cache.reset_prefix_cache(), lambda cache: cache.discard([0])):
        writer, reader = World(tmp_path, shared=memory), World(tmp_path, shared=memory)
        writer.run(range(22))
        assert writer.cache.flush()
        forget(reader.cache)
        writer.cache.evict(16)
        assert writer.run(range(22)) == 0
        reader.stop()
        writer.cache.reset_prefix_cache()
        assert writer.cache.flush() and writer.store.stats()["used_slots"] == 0
        writer.stop()


def test_a_discarded_block_leaves_the_store_and_others_stay(memory, tmp_path):
    world = World(tmp_path, shared=memory)
    world.run(range(22))
    world.run([7] * 8)
    blocks = world.cache.match_prefix(range(22))
    assert world.cache.flush()
    assert world.cache.discard([blocks[3]]) == 1
    world.allocator.free(blocks)
    assert world.cache.flush()
    world.cache.evict(16)
    assert (world.run(range(22)), world.run([7] * 8)) == (3, 2)
    world.stop()


@pytest.mark.parametrize("seed", range(3))
def test_a_process_that_is_killed_leaves_only_right_pages(memory, other_memory, tmp_path, seed):
    """`World.run` checks each page, also in the next process after a reboot."""
    random = np.random.default_rng(seed)

    def serve_for_ever():
        world = World(tmp_path, shared=memory)
        while True:
            world.run(prompt(random), **KEYS[random.integers(3)])

    children = [in_child(serve_for_ever) for _ in range(2)]
    world = World(tmp_path, shared=memory, events=10_000)
    mirror = Mirror(world.cache)
    for step in range(150):
        world.run(prompt(random), **KEYS[step % 3])
        if step % 50 == 49 and children:
            os.kill(children[-1], signal.SIGKILL)
            os.waitpid(children.pop(), 0)
    mirror.check()
    world.cache.check()
    world.stop()
    world = World(tmp_path, shared=other_memory)
    for step in range(50):
        world.run(prompt(random), **KEYS[step % 3])
    world.cache.check()
    world.stop()


def test_events_of_a_block_that_another_process_caches_again_with_other_tokens(memory):
    """The block behind it is cached still, with the same generation before it, but no look-up finds it."""
    first, second = [KvCachePool.from_layout(LAYOUT, 8, shared=memory) for _ in range(2)]
    cache, other = PrefixCache(first.allocator, max_events=100), PrefixCache(second.allocator)
    mirror, tokens = Mirror(cache), list(range(2 * BLOCK))
    blocks = first.allocator.allocate_n(2)
    cache.cache_blocks(tokens, blocks)
    mirror.check()
    held = other.match_prefix(tokens[:BLOCK])
    cache.discard(blocks[:1])
    changed = [token + 100 for token in tokens[:BLOCK]]
    other.cache_blocks(changed, held)
    mirror.check()
    assert mirror.find(changed) == cache.match_prefix(changed).tolist() == held.tolist()
    assert not mirror.find(tokens) and len(mirror.known) == 1
    cache.check()


def test_events_tell_what_every_process_stores_and_removes(memory):
    """By names alone a follower finds what the cache finds."""
    random = np.random.default_rng(5)
    pools = [KvCachePool.from_layout(LAYOUT, 40, shared=memory) for _ in range(2)]
    caches = [PrefixCache(pool.allocator, max_events=10_000) for pool in pools]
    mirrors = [Mirror(cache) for cache in caches]
    for step in range(400):
        cache, keys = caches[random.integers(2)], KEYS[random.integers(3)]
        tokens = prompt(random)
        blocks = cache.match_prefix(tokens, **keys).tolist()
        missing = len(tokens) // BLOCK - len(blocks)
        cache.evict(max(0, missing - cache.allocator.free_count))
        blocks += cache.allocator.allocate_n(missing).tolist()
        cache.cache_blocks(tokens, blocks, **keys)
        cache.allocator.free(blocks)
        if step % 40 == 39:
            cache.discard(random.integers(0, 40, 2))
        if step % 150 == 149:
            cache.reset_prefix_cache()
        if step % 5 == 0:
            mirrors[step % 2].check()
            found = caches[0].match_prefix(tokens, **keys)
            mirrors[0].follow()
            assert mirrors[0].find(tokens, **keys)[: len(found)] == found.tolist()
            caches[0].allocator.free(found)
    for cache in caches:
        cache.check()


def test_a_full_log_says_that_events_are_missing(memory):
    pool = KvCachePool.from_layout(LAYOUT, 16, shared=memory)
    cache = PrefixCache(pool.allocator, max_events=3)
    blocks = pool.allocator.allocate_n(5)
    cache.cache_blocks(range(20), blocks)
    assert [event.sequence for event in cache.drain_events()] == [3, 4, 5]
    assert (cache.snapshot().next_sequence, cache.snapshot().num_blocks) == (6, 5)


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_store_and_events_work_together_and_the_names_of_the_store_stay_secret(is_shared, memory, tmp_path):
    world = World(tmp_path, shared=memory if is_shared else None, events=100)
    mirror = Mirror(world.cache)
    world.run(range(22))
    world.cache.evict(2)
    world.run(range(22))  # read from the store, or found
    mirror.check()
    assert len(mirror.known) == 5 and mirror.find(range(22)) == world.cache.match_prefix(range(22)).tolist()
    key = root_key(None, ())
    assert prefix_names(range(22), BLOCK, root_name(key)) == [*mirror.known]
    assert not {*world.store.names(range(22), key)} & {*mirror.known}
    world.stop()


def test_a_session_is_saved_from_a_shared_pool_and_loaded_into_another(memory, other_memory, tmp_path):
    world = World(tmp_path / "store", shared=memory)
    world.run(range(22))
    fingerprint = fingerprint_of(world.pools, "a")
    assert save_session(tmp_path / "session", world.cache, fingerprint, range(22)) == 20
    other = World(tmp_path / "other", shared=other_memory)
    assert load_session(tmp_path / "session", other.cache, fingerprint).num_cached == 20
    second = World(tmp_path / "other", shared=other_memory)
    assert second.run(range(22)) == 5, "another process finds the loaded pages"
    for each in (world, other, second):
        each.stop()


def test_pages_of_a_shared_pool_move_to_another_pool_and_back(memory):
    shared = [KvCachePool.from_layout(LAYOUT, 16, shared=memory) for _ in range(2)]
    private = KvCachePool.from_layout(LAYOUT, 16)
    caches = [PrefixCache(pool.allocator, BLOCK) for pool in (*shared, private)]
    blocks = shared[0].allocator.allocate_n(5)
    for number, block in enumerate(blocks):
        shared[0].page(block)[:] = number + 1
    assert caches[0].cache_blocks(range(20), blocks) == 5
    shared[0].allocator.free(blocks)
    movers = [
        PageMover(LocalTransfer(name), pool, cache)
        for name, pool, cache in zip("abc", (*shared, private), caches, strict=True)
    ]
    offer = movers[1].offer("b", range(22))
    assert movers[2].fetch(offer, range(22)).moved_tokens == 20
    found = caches[2].match_prefix(range(22))
    assert [int(private.page(block)[3]) for block in found] == [1, 2, 3, 4, 5]
    movers[1].release_all()
    caches[0].reset_prefix_cache()
    assert shared[0].allocator.in_use == 0
    again = movers[0].fetch(movers[2].offer("c", range(22)), range(22))
    assert (again.moved_tokens, again.error) == (20, "")
    found = caches[1].match_prefix(range(22))
    assert [int(shared[1].page(block)[3]) for block in found] == [1, 2, 3, 4, 5]
    shared[1].allocator.free(found)
    for mover in movers:
        mover.close()
    for cache in caches:
        cache.check()


def test_a_ticket_of_a_block_that_another_process_has_taken_is_out_of_date(memory):
    first, second = [KvCachePool.from_layout(LAYOUT, 4, shared=memory) for _ in range(2)]
    generations = BlockGenerations(first.allocator)
    block = first.allocator.allocate()
    before = generations.of([block])[0]
    first.allocator.free(block)
    assert block in second.allocator.allocate_n(4)
    assert BlockGenerations(second.allocator).of([block])[0] == generations.of([block])[0] == before + 1
    assert generations.words.readonly and len(generations.words) == 4


def test_a_block_that_matches_in_part_is_found_in_every_process(memory):
    """As in a cache of one process, also when another process has cached the block."""
    random = np.random.default_rng(3)
    pools = [KvCachePool.from_layout(LAYOUT, 800, shared=memory) for _ in range(2)]
    caches = [PrefixCache(pool.allocator) for pool in pools]
    plain = PrefixCache(BlockAllocator(800), BLOCK, "lru")
    for step in range(150):
        tokens, keys = random.integers(0, 3, random.integers(1, 30)), KEYS[random.integers(3)]
        with plain.match_tokens(tokens, **keys) as expected, caches[step % 2].match_tokens(tokens, **keys) as match:
            assert match.num_tokens == expected.num_tokens and len(match.blocks) == len(expected.blocks)
        for cache in (plain, caches[random.integers(2)]):
            blocks = cache.allocator.allocate_n(len(tokens) // BLOCK)
            cache.cache_blocks(tokens, blocks, **keys)
            cache.allocator.free(blocks)
    assert plain.num_cached == caches[0].num_cached > 100
    for pool in pools:
        pool.allocator.check(others=0)


def serve(cache, tokens, **keys):
    """Find, evict, allocate and cache, as an engine does; return the number of found blocks."""
    blocks = cache.match_prefix(tokens, **keys).tolist()
    found, full = len(blocks), len(tokens) // cache.block_size
    cache.evict(max(0, full - found - cache.allocator.free_count))
    blocks += cache.allocator.allocate_n(full - found).tolist()
    cache.cache_blocks(tokens, blocks, start=found, **keys)
    cache.allocator.free(blocks)
    return found


def test_gittins_finds_the_same_in_a_shared_pool_as_in_a_pool_of_one_process(memory):
    """Loops that are longer than the cache, conversations and single requests: what LRU does badly."""
    random = np.random.default_rng(2)
    pool = KvCachePool.from_layout(LAYOUT, 200, shared=memory)
    shared = PrefixCache(pool.allocator, policy="gittins")
    private = PrefixCache(BlockAllocator(200), BLOCK, "gittins")
    least = PrefixCache(BlockAllocator(200), BLOCK, "lru")
    hits = [0, 0, 0]
    for step in range(6000):
        kind = random.integers(3)
        if kind == 0:
            tokens = np.arange(step % 45 * 100, step % 45 * 100 + 20)
        elif kind == 1:
            tokens = np.arange(10**6 + random.integers(10) * 1000, 10**6 + 10**4)[: random.integers(8, 60)]
        else:
            tokens = random.integers(0, 2**31 - 1, 24)
        for number, cache in enumerate((shared, private, least)):
            hits[number] += serve(cache, tokens)
        assert hits[0] == hits[1]
    assert hits[0] > hits[2]
    assert shared.stats()["evicted"] == private.stats()["evicted"] > 10_000
    assert (shared.policy, shared.stats()["policy"]) == ("gittins", "gittins")
    shared.check()


@pytest.mark.parametrize("policies", [("gittins", "gittins"), ("gittins", "lru")])
def test_each_process_may_evict_by_its_own_policy(memory, tmp_path, policies):
    """Processes evict each other's blocks, discard and reset; one is killed. `World.run` checks each page."""
    random = np.random.default_rng(7)

    def serve_for_ever():
        world = World(tmp_path, shared=memory, policy="gittins", num_blocks=24)
        while True:
            world.run(prompt(random), **KEYS[random.integers(3)])

    worlds = [World(tmp_path / name, shared=memory, policy=name, num_blocks=24) for name in policies[:1]]
    worlds.append(World(tmp_path / "second", shared=memory, policy=policies[1], num_blocks=24))
    child = in_child(serve_for_ever)
    found = 0
    for step in range(300):
        found += worlds[step % 2].run(prompt(random), **KEYS[random.integers(3)])
        if step == 150:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if step % 60 == 59:
            worlds[step // 60 % 2].cache.discard(random.integers(0, 24, 2))
        if step == 200:
            worlds[0].cache.reset_prefix_cache()
    assert found > 100 and worlds[0].cache.stats()["evicted"] > 100
    for world in worlds:
        world.cache.check()
        world.allocator.check(others=0)
        world.stop()
    evictable = worlds[0].cache.evictable
    assert worlds[0].cache.evict(24) == evictable and worlds[0].cache.num_cached == 0
