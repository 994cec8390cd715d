"""Concurrent Python threads: thread-safe objects stay consistent wherever the interpreter switches threads."""

import gc
import random
import sys
import threading
import time

import pytest

from pagepool import (
    BlockAllocator,
    HybridSequence,
    KvCachePool,
    KvGroup,
    KvLayout,
    PagedSeqState,
    PoolExhausted,
    PrefixCache,
    SsmStatePool,
    StateLayout,
)

STATES = StateLayout(layers=[{"h": ((4,), "float32")}])
THREADS = 5
ROUNDS = 20  # minimum rounds of each thread
PATIENCE = 600  # seconds: longer than any machine should need


class Litter:
    """Cyclic garbage with a finalizer that lets other threads run."""

    alive = 0  # about as many

    def __init__(self):
        self.itself = self
        Litter.alive += 1

    def __del__(self):
        Litter.alive -= 1
        time.sleep(0)


@pytest.fixture
def switching():
    """Let threads switch at any bytecode, and at allocations that start the garbage collector."""
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(20, 2, 2)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*threshold)


def together(work, enough=lambda: True, seconds=0.4):
    """Run `work(rng, number)` repeatedly in several threads; raise the first exception of a thread.

    Runs for `seconds`, then until each thread has done `ROUNDS` rounds and `enough()` is true: on a busy machine the
    threads may start late.
    """
    failures, begin = [], time.monotonic()
    rounds, Litter.alive = [0] * THREADS, 0
    start = threading.Barrier(THREADS)

    def is_enough():
        return time.monotonic() > begin + seconds and min(rounds) >= ROUNDS and enough()

    def loop(number):
        rng = random.Random(number)
        try:
            start.wait()
            while not failures and not is_enough():
                if time.monotonic() > begin + PATIENCE:
                    raise TimeoutError(f"enough() is still false after {PATIENCE} s and {rounds} rounds")
                if Litter.alive < 100:  # more garbage would make collections start faster than they end
                    Litter()
                work(rng, number)
                rounds[number] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=loop, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("policy", ["lru", "gittins"])
def test_a_prefix_cache_may_be_used_by_several_threads(switching, policy):
    """Every matched block contains the requested tokens, whatever other threads do to the cache meanwhile."""
    allocator = BlockAllocator(40)
    cache = PrefixCache(allocator, 2, policy, max_events=100)
    written = {}  # for each block in use, the prompt up to the end of the block

    def work(rng, number):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(14))]
        blocks, tokens = cache.match_tokens(prompt)
        blocks = blocks.tolist()
        for place, block in enumerate(blocks[: tokens // 2]):
            assert written[block] == prompt[: 2 * place + 2]
        try:
            full = tokens // 2
            own = allocator.allocate_n(len(prompt) // 2 - full).tolist()
        except PoolExhausted:
            cache.evict(3)
            own = None
        if own is not None:
            row = blocks[:full] + own
            for place, block in enumerate(own, full):
                written[block] = prompt[: 2 * place + 2]
            cache.cache_blocks(prompt, row)
            allocator.free(own)
        allocator.free(blocks)
        if rng.randrange(20) == 0:
            cache.discard([rng.randrange(40)])
        if rng.randrange(200) == 0:
            cache.reset_prefix_cache()
        if rng.randrange(10) == 0:
            cache.drain_events()
            cache.stats()

    together(work, enough=lambda: cache.stats()["hits"] > 0)
    cache.check()
    allocator.check(others=0)
    cache.reset_prefix_cache()
    assert allocator.in_use == 0


def test_owners_are_listed_while_sequences_come_and_go(switching):
    """`owners` returns living sequences, or sequences that are being freed and have no blocks."""
    allocator = BlockAllocator(64)

    class Other:
        kind, label = "other", None

        def references(self):
            return []

    def work(rng, number):
        if number == 0:
            for owners in allocator.owners().values():
                for owner in owners:
                    assert owner.kind in ("sequence", "other") and owner.label in (None, 1, 2, 3, 4)
            allocator.leaks()
            assert allocator.stats()["sequences"] >= 0
        else:
            state = PagedSeqState(allocator, 4, label=number)
            state.append(rng.randrange(16))
            child = state.fork()
            state.label = child.label
            allocator.add_owner(Other())
            del state, child

    together(work)
    assert allocator.stats()["sequences"] == 0 and allocator.owners() == {}
    allocator.check(others=0)


def test_states_of_one_pool_may_be_used_by_several_threads(switching):
    pool = SsmStatePool.from_layout(STATES, 7)

    def work(rng, number):
        try:
            slot = pool.alloc(number + 1)
        except PoolExhausted:
            return
        view = pool.view(0, "h")[slot]
        assert view.tolist() == [0] * 4 and pool.slot(slot).position == 0
        view[...] = number
        pool.slot(slot).step()
        if pool.free_count > 2:
            try:
                other = pool.alloc(number + 1)
            except PoolExhausted:  # others were faster
                other = None
            if other is not None:
                pool.copy(other, slot)
                assert pool.view(0, "h")[other].tolist() == [number] * 4 and pool.slot(other).position == 1
                pool.release(other)
        assert pool.slot(slot).request_id == number + 1 and view.tolist() == [number] * 4
        pool.release(slot)

    together(work)
    pool.check()
    assert pool.used_count == 0


def test_sequences_of_several_threads_share_allocator_cache_and_states(switching):
    allocator = BlockAllocator(200)
    KvCachePool.from_layout(KvLayout(1, 1, 8, block_size=4, dtype="float32"), 200, allocator)
    cache = PrefixCache(allocator, 4, "lru")
    states = SsmStatePool.from_layout(STATES, 30)
    done = [0] * THREADS

    def work(rng, number):
        prompt = [number, *[rng.randrange(2) for _ in range(11)]]
        state = PagedSeqState(allocator, 4, label=number)
        hybrid = HybridSequence([KvGroup(allocator, 4), KvGroup(allocator, 4, window=5)], states, label=number + 1)
        try:
            hybrid.append(rng.randrange(1, 12))
            with cache.match_tokens(prompt) as found:
                state.adopt(found)
            state.append(len(prompt) - state.len)
            hybrid.append(7)
            draft = hybrid.checkpoint()
            hybrid.append(3)
            hybrid.rollback(draft)
            cache.cache_blocks(prompt, state.blocks)
        except PoolExhausted:
            cache.evict(8)
        else:
            assert state.len == 12
            done[number] += 1
        state.close()
        hybrid.close()

    together(work, enough=lambda: sum(done) > 0, seconds=1)
    cache.check()
    states.check()
    allocator.check(others=0)
    cache.reset_prefix_cache()
    assert allocator.in_use == 0 and states.used_count == 0


def test_owners_and_leaks_may_be_asked_for_while_another_thread_shrinks(switching):
    """Blocks that are freed meanwhile have no owner. Blocks that stay keep their owners."""
    allocator = BlockAllocator(1, max_blocks=64)
    state = PagedSeqState(allocator, 4, label="stays")
    state.append(9)

    def work(rng, number):
        if number == 0:
            allocator.free(allocator.allocate_n(60))
            allocator.shrink()
        elif number % 2:
            assert [owner.label for block in state.blocks for owner in allocator.owners()[block]] == ["stays"] * 3
        else:
            assert allocator.leaks()[0].label == "stays"

    together(work)
    assert [leak[:3] for leak in allocator.leaks()] == [("sequence", "stays", [0, 1, 2])]
    allocator.check(others=0)
