"""Transactions over allocator, sequences, prefix cache and recurrent states: all of it stays, or none."""

import gc
import signal
import threading

import numpy as np
import pytest

import pagepool
import pagepool.reference
from pagepool import (
    BlockAllocator,
    InvalidBlock,
    PagedSeqState,
    PoolError,
    PoolExhausted,
    PrefixCache,
    SsmStatePool,
    StaleHandle,
    StateLayout,
    Transaction,
)
from pagepool.prefix.eviction import POLICIES

LAYOUT = StateLayout(layers=[{"h": ((3,), "float32")}])


class World:
    def __init__(self):
        self.allocator = BlockAllocator(16)
        self.cache = PrefixCache(self.allocator, 4)
        self.pool = SsmStatePool.from_layout(LAYOUT, 4)
        self.state = PagedSeqState(self.allocator, 4, label="request 1")
        self.state.append(10)
        self.cache.cache_blocks(list(range(10)), self.state.blocks)
        self.handle = self.pool.handle(self.pool.alloc(1))
        self.handle.view(0, "h")[...] = 5

    def picture(self):
        self.allocator.check(others=0)
        self.cache.check()
        self.pool.check()
        counts = [self.allocator.ref_count(block) for block in range(16)]
        states = self.pool.used_count, self.handle.view(0, "h").tolist(), self.handle.slot.position
        return counts, self.state.blocks, self.state.len, self.cache.num_cached, states

    def change_everything(self, transaction):
        """A request that matches a prefix, takes blocks and a state, drafts a branch and publishes what it computed."""
        transaction.enlist(self.state, self.handle)
        found = transaction.match_prefix(self.cache, list(range(8)))
        sequence = transaction.close_on_abort(PagedSeqState(self.allocator, 4))
        sequence.adopt(found)
        transaction.free(self.allocator, found)
        sequence.append(6)
        transaction.cache_blocks(self.cache, [*range(8), 20, 21, 22, 23], sequence.blocks)
        state = transaction.alloc_state(self.pool, 2)
        state.copy_from(self.handle)
        self.handle.view(0, "h")[...] = 6
        self.handle.slot.step()
        self.state.truncate(6)
        branch = transaction.fork(self.state)
        branch.append(5)
        self.state.append(1)
        taken = transaction.allocate_n(self.allocator, 2)
        transaction.share(self.allocator, taken[:1])
        transaction.free(self.allocator, taken[0])
        transaction.free(self.allocator, taken)
        return sequence, branch, state


def test_an_abort_leaves_nothing_behind():
    world = World()
    before = world.picture()
    transaction = Transaction()
    sequence, branch, state = world.change_everything(transaction)
    transaction.abort()
    assert world.picture() == before
    assert sequence.closed and branch.closed and state.is_stale and not transaction.is_open
    transaction.abort()


def test_a_commit_keeps_everything_and_frees_what_it_was_told_to():
    world = World()
    with Transaction() as transaction:
        sequence, branch, state = world.change_everything(transaction)
        assert world.cache.num_cached == 2
    assert world.cache.num_cached == 3 and world.cache.holds(sequence.blocks[2])
    assert world.state.len == 7 and branch.len == 11 and not state.is_stale
    assert world.handle.view(0, "h").tolist() == [6] * 3 and state.view(0, "h").tolist() == [5] * 3
    assert world.pool.used_count == 2
    world.picture()
    assert world.cache.match_prefix([*range(8), 20, 21, 22, 23]).tolist() == sequence.blocks[:3]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, PoolExhausted])
def test_an_exception_aborts(error):
    world = World()
    before = world.picture()
    with pytest.raises(error), Transaction() as transaction:
        world.change_everything(transaction)
        raise error("an engine fails")
    assert world.picture() == before


def test_one_that_is_dropped_aborts():
    world = World()
    before = world.picture()
    transaction = Transaction(world.state)
    inner = transaction.nested(world.handle)
    world.state.append(9)
    world.handle.view(0, "h")[...] = 7
    del inner, transaction
    gc.collect()
    assert world.picture() == before


def test_a_commit_that_fails_has_changed_nothing_and_can_be_aborted():
    world = World()
    before = world.picture()
    transaction = Transaction()
    sequence, *_ = world.change_everything(transaction)
    with pytest.raises(InvalidBlock, match="block 15: it is free"):
        transaction.cache_blocks(world.cache, [30, 31, 32, 33], [15])
    with pytest.raises(ValueError, match="8 tokens fill 2 blocks, got 1"):
        transaction.cache_blocks(world.cache, list(range(8)), [0])
    transaction.cache_blocks(world.cache, [30, 31, 32, 33], world.state.blocks[:1])
    with pytest.raises(InvalidBlock, match="is cached already, for other tokens"):
        transaction.commit()
    assert transaction.is_open and world.cache.num_cached == 2 and not world.cache.holds(sequence.blocks[2])
    transaction.abort()
    assert world.picture() == before

    transaction = Transaction(world.state)
    blocks = transaction.allocate_n(world.allocator, 1)
    transaction.free(world.allocator, [*blocks.tolist(), *blocks.tolist()])
    with pytest.raises(InvalidBlock, match=f"cannot drop 2 references of block {blocks[0]}: it has 1"):
        transaction.commit()
    transaction.abort()
    assert world.picture() == before

    transaction = Transaction()
    transaction.release_state(world.handle)
    world.pool.release(world.handle.index)
    with pytest.raises(StaleHandle):
        transaction.commit()
    transaction.abort()


def test_what_is_cached_is_what_the_blocks_held_when_it_was_said():
    world = World()
    with Transaction(world.state) as transaction:
        fresh = transaction.close_on_abort(PagedSeqState(world.allocator, 4))
        fresh.append(8)
        said = fresh.blocks
        transaction.cache_blocks(world.cache, list(range(50, 58)), said)
        fresh.truncate(2)
        fresh.append(6)  # other tokens, elsewhere
        assert fresh.blocks[0] != said[0]
    found = world.cache.match_prefix(list(range(50, 58)))
    assert found.tolist() == said
    world.allocator.free(found)
    world.allocator.check(others=0)


def test_frees_and_releases_wait_for_the_commit():
    world = World()
    block = world.allocator.allocate()
    transaction = Transaction()
    transaction.free(world.allocator, block)
    transaction.release_state(world.handle)
    assert world.allocator.ref_count(block) == 1 and world.pool.used_count == 1
    with pytest.raises(PoolError, match="this transaction releases slot 0 already"):
        transaction.release_state(world.handle)
    with pytest.raises(InvalidBlock, match="block 9: it is free"):
        transaction.free(world.allocator, 9)
    transaction.commit()
    assert world.allocator.ref_count(block) == 0 and world.pool.used_count == 0


def test_the_next_blocks_are_the_same_after_an_abort():
    allocator = BlockAllocator(8)
    first = allocator.allocate_n(5)
    allocator.free(first[[1, 3]])
    with Transaction() as transaction:
        transaction.allocate_n(allocator, 1)
        transaction.allocate_n(allocator, 3)
        transaction.abort()
    state = PagedSeqState(allocator, 4)
    with Transaction(state) as transaction:
        state.append(13)
        transaction.abort()
    assert allocator.allocate_n(4).tolist() == [3, 1, 5, 6]


def test_an_inner_one_that_commits_is_undone_by_the_outer_one():
    world = World()
    before = world.picture()
    outer = Transaction()
    with outer.nested(world.state) as inner:
        world.change_everything(inner)
        with pytest.raises(PoolError, match="a transaction within this one is open"):
            outer.commit()
        with pytest.raises(PoolError, match="a transaction within this one is open"):
            outer.allocate_n(world.allocator, 1)
    assert world.state.len == 7 and world.cache.num_cached == 2
    outer.abort()
    assert world.picture() == before


def test_an_inner_one_that_aborts_leaves_what_the_outer_one_did():
    world = World()
    with Transaction(world.state) as outer:
        world.state.append(3)
        for accepted in (0, 2):
            with outer.nested(world.state) as branch:  # a draft, of which some tokens are accepted
                world.state.append(4)
                world.state.truncate(13 + accepted)
                if not accepted:
                    branch.abort()
        assert world.state.len == 15
        inner = outer.nested()
        inner.enlist(world.handle)
        world.handle.view(0, "h")[...] = 1
        inner.commit()
    assert world.state.len == 15 and world.handle.view(0, "h").tolist() == [1] * 3
    world.allocator.check(others=0)
    assert world.pool.used_count == 1


def test_what_an_inner_one_made_and_another_changed_is_closed_by_the_outer_one():
    allocator = BlockAllocator(8)
    with Transaction() as outer:
        with outer.nested() as inner:
            made = inner.close_on_abort(PagedSeqState(allocator, 4))
            made.append(5)
            with inner.nested(made):
                made.append(5)
        outer.abort()
    assert made.closed and allocator.in_use == 0


def test_a_sequence_takes_part_in_one_transaction_at_a_time():
    world = World()
    with Transaction(world.state) as first:
        first.enlist(world.state)
        with pytest.raises(PoolError, match="it takes part in 1 transactions, 0 are around this one"):
            Transaction(world.state)
        with first.nested() as inner:
            inner.enlist(world.state)
            world.state.append(20)
            inner.abort()
        assert world.state.len == 10
    assert world.state.open_transactions == 0
    with pytest.raises(PoolError, match="the transaction has ended"):
        first.enlist(world.state)


def test_a_participant_that_cannot_begin_leaves_the_others_as_they_were():
    world = World()
    for _ in range(3):
        world.pool.alloc(9)
    with pytest.raises(PoolExhausted, match="asked for 1 slot, 0 of 4 are free"):
        Transaction(world.state, world.handle)
    assert world.state.open_transactions == world.handle.open_transactions == 0


def test_functions_run_at_the_end_and_a_foreign_failure_stops_nothing():
    world = World()
    before = world.picture()
    calls = []
    with Transaction() as transaction:
        transaction.on_commit(lambda: calls.append("commit"))
        transaction.on_abort(lambda: calls.append("abort"))
    assert calls == ["commit"]

    def fail():
        calls.append("fail")
        raise RuntimeError("foreign")

    transaction = Transaction(world.state)
    world.state.append(3)
    transaction.on_abort(fail)
    transaction.allocate_n(world.allocator, 3)
    with pytest.raises(RuntimeError, match="foreign"):
        transaction.abort()
    assert calls == ["commit", "fail"] and world.picture() == before


class Interrupted(BaseException):
    """As a KeyboardInterrupt, but only here."""


# One that comes within the __del__ of a transaction that has ended is shown by Python and goes no further.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function Transaction.__del__:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timers that send signals")
def test_a_signal_at_any_moment_leaves_nothing_behind():
    def interrupt(number, frame):
        raise Interrupted

    allocator = BlockAllocator(4000)
    cache = PrefixCache(allocator, 4)
    held = allocator.allocate_n(100)
    cache.cache_blocks(list(range(400)), held)
    state = PagedSeqState(allocator, 4)
    state.append(7)
    before = [allocator.ref_count(block) for block in range(200)], allocator.in_use
    previous = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    try:
        for round in range(400):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + round))
                with Transaction(state) as transaction:
                    while True:
                        transaction.allocate_n(allocator, 3)
                        transaction.share(allocator, held)
                        transaction.match_prefix(cache, list(range(400)))
                        transaction.cache_blocks(cache, list(range(40)), held, cache_salt="s")
                        transaction.fork(state)
                        state.append(1)
            except (Interrupted, PoolExhausted) as error:
                interrupted += isinstance(error, Interrupted)
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert ([allocator.ref_count(block) for block in range(200)], allocator.in_use) == before, round
            assert state.open_transactions == 0 and state.len == 7
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    allocator.check()
    assert interrupted > 100


def test_transactions_of_several_threads_do_not_meet():
    allocator = BlockAllocator(4000)
    failures = []

    def work(seed):
        random = np.random.default_rng(seed)
        state = PagedSeqState(allocator, 4)
        state.append(7)
        for _ in range(200):
            keep, length = bool(random.integers(2)), state.len
            with Transaction(state) as transaction:
                transaction.allocate_n(allocator, 3)
                state.append(int(random.integers(1, 9)))
                if keep:
                    state.truncate(7)
                transaction.abort()
            if state.len != length:
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and allocator.in_use == 0
    allocator.check(others=0)


@pytest.mark.parametrize("api", [pagepool, pagepool.reference])
def test_what_is_cached_and_idle_stays_when_a_transaction_caches_the_same_tokens(api):
    """It would be gone if another publication of the same commit were refused."""
    allocator = api.BlockAllocator(6)
    cache = api.PrefixCache(allocator, 1)
    cache.touch([1, 2])
    blocks = allocator.allocate_n(2)
    transaction = Transaction()
    transaction.cache_blocks(cache, [1, 3], blocks)
    transaction.cache_blocks(cache, [4], [0])
    with pytest.raises(InvalidBlock):
        transaction.commit()
    transaction.abort()
    assert cache.references() == [0, 1] and cache.cached_tokens([1, 2]) == 2
    transaction = Transaction()
    transaction.cache_blocks(cache, [1, 3], blocks)
    transaction.commit()
    assert [cache.holds(block) for block in [0, 1, *blocks]] == [True, True, False, True]
    assert cache.cache_blocks([1, 3], blocks) == 1 and not cache.holds(0) and allocator.ref_count(0) == 0
    cache.check()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_discarded_blocks_are_forgotten_wherever_they_are(policy):
    allocator = BlockAllocator(8)
    cache = PrefixCache(allocator, 1, policy)
    blocks = allocator.allocate_n(5)
    cache.cache_blocks([1, 2, 3, 4, 5], blocks)
    allocator.free(blocks[2:])
    assert cache.evict(2) == 2  # looks at those in use and holds them apart
    assert cache.discard([blocks[1], 7, blocks[1]]) == 1 and not cache.holds(blocks[1]) and not cache.holds(99)
    cache.check()
    assert cache.match_prefix([1, 2]).tolist() == [blocks[0]]
    allocator.free(blocks[0])
    assert allocator.ref_count(blocks[1]) == 1
    assert cache.cache_blocks([1, 2], blocks[:2]) == 1
    cache.check()
    stats = cache.stats()
    assert stats["inserted"] == stats["cached"] + stats["evicted"] + stats["cleared"]
