"""Threads that share one object: prefix cache, allocator, pool, states, scheduler. Each object stays consistent.

The tests also run with a GIL. Without it, several threads are inside a method of the same object at the same time.
"""

import random
import sys
import threading
from contextlib import suppress

import numpy as np
import pytest

from pagepool import (
    BlockAllocator,
    BlockTables,
    InvalidBlock,
    KvCachePool,
    KvLayout,
    PagedSeqState,
    PoolExhausted,
    PrefixCache,
    Scheduler,
    SchedulerConfig,
    SsmStatePool,
    StateLayout,
    decode,
)
from pagepool.memory.batch import append_batch, release_batch

THREADS = 4
ROUNDS = 300
BLOCK = 4
BLOCKS = 96
LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=BLOCK, dtype="float32")


@pytest.fixture(autouse=True)
def switching():
    """With a GIL, let threads switch as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def run_together(work, threads=THREADS):
    """Run `work(number)` in several threads that start together; raise the first exception of a thread."""
    start, failures = threading.Barrier(threads), []

    def begin(number):
        try:
            start.wait()
            work(number)
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=begin, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if failures:
        raise failures[0]


def keys_of(prompt, layer):
    """Return the key of each token: a hash of all tokens up to it, so that a wrong block is always detected."""
    values, state = [], layer + 1
    for token in prompt:
        state = (state * 1103515245 + token + 12345) % 1_000_003
        values.append(state)
    return np.repeat(np.array(values, np.float32), 8).reshape(-1, 1, 8)


def check_pages(pool, blocks, prompt):
    for layer in range(2):
        k, v = pool.gather(layer, blocks, len(prompt))
        expected = keys_of(prompt, layer)
        np.testing.assert_array_equal(k, expected)
        np.testing.assert_array_equal(v, -expected)


@pytest.mark.parametrize("policy", ["gittins", "lru"])
def test_every_page_that_a_thread_reads_matches_its_tokens(policy):
    allocator = BlockAllocator(BLOCKS)
    pool = KvCachePool.from_layout(LAYOUT, BLOCKS, allocator)
    cache = PrefixCache(allocator, BLOCK, policy)
    hits, refused = [0] * THREADS, [0] * THREADS

    def serve(rng, number):
        """Do one request: match, append the missing tokens, publish, read all tokens back."""
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 40))]
        state = PagedSeqState(allocator, BLOCK, label=number)
        blocks, matched = cache.match_tokens(prompt)
        state.adopt(blocks, matched)  # the last block may match partially: then the first append copies it
        allocator.free(blocks)
        hits[number] += matched // BLOCK
        check_pages(pool, state.blocks, prompt[:matched])
        try:
            slots = state.append(len(prompt) - matched)
        except PoolExhausted:
            refused[number] += 1
            cache.evict(rng.randrange(1, 12))
            state.release()
            return
        for layer in range(2):
            new = keys_of(prompt, layer)[matched:]
            pool.append(layer, slots, new, -new)
        cache.cache_blocks(prompt, state.blocks)
        check_pages(pool, state.blocks, prompt)
        if rng.randrange(3) == 0:  # a fork writes into a shared page, which is copied first
            branch, more = state.fork(), [rng.randrange(2) for _ in range(3)]
            try:
                slots = branch.append(3)
            except PoolExhausted:
                refused[number] += 1
            else:
                for layer in range(2):
                    new = keys_of(prompt + more, layer)[-3:]
                    pool.append(layer, slots, new, -new)
                check_pages(pool, branch.blocks, prompt + more)
            branch.release()
            check_pages(pool, state.blocks, prompt)
        state.release()

    def work(number):
        rng = random.Random(number)
        for turn in range(ROUNDS):
            serve(rng, number)
            if turn % 20 == number:
                cache.stats()
            if turn % 50 == number:
                cache.evict(BLOCKS)

    run_together(work)
    assert sum(hits) > 0 and sum(refused) > 0
    assert cache.stats()["hits"] == sum(hits)
    cache.check()
    allocator.check(others=0)
    assert allocator.in_use == cache.stats()["cached"] and allocator.free_count + allocator.in_use == BLOCKS
    cache.reset_prefix_cache()
    cache.check()
    allocator.check(others=0)
    assert allocator.in_use == 0 and allocator.free_count == BLOCKS


def test_blocks_of_one_allocator_are_never_two_threads_own():
    """Each thread records its number for the blocks that it holds, while other threads call the allocator."""
    allocator = BlockAllocator(8, max_blocks=120)
    owner = np.full(120, -1)

    def work(number):
        rng, held = random.Random(number), []
        for _ in range(ROUNDS * 4):
            kind = rng.randrange(6)
            try:
                if kind == 0:
                    held.append(allocator.allocate())
                    new = held[-1:]
                elif kind == 1:
                    new = allocator.allocate_n(rng.randrange(12)).tolist()
                    held += new
                else:
                    new = []
            except PoolExhausted:
                continue
            assert (owner[new] == -1).all()
            owner[new] = number
            if kind == 2 and held:
                some = rng.sample(held, rng.randrange(1, len(held) + 1))
                allocator.share(some)
                assert {allocator.ref_count(block) for block in some} == {2}
                allocator.free(some)
            elif kind == 3:
                rng.shuffle(held)
                some, held = held[:6], held[6:]
                assert (owner[some] == number).all()
                owner[some] = -1
                allocator.free(np.array(some, np.int32) if rng.randrange(2) else some)
            elif kind == 4:
                allocator.shrink()
            elif kind == 5:
                stats = allocator.stats()
                assert stats["used"] + stats["free"] == stats["capacity"] <= 120
                assert stats["used"] >= len(held)
        owner[held] = -1
        allocator.free(held)

    run_together(work)
    allocator.check(others=0)
    assert allocator.in_use == 0 and (owner == -1).all()


class Holds:
    """An owner of one block. Its finalizer lets other threads run."""

    kind, label = "other", None

    def __init__(self, allocator):
        self.allocator, self.block = allocator, allocator.allocate()
        allocator.add_owner(self)

    def references(self):
        return [self.block]

    def __del__(self):
        threading.Event().wait(1e-5)
        self.allocator.free(self.block)


def test_no_owner_is_lost_while_others_are_added_and_go():
    allocator = BlockAllocator(100 * THREADS)
    kept = [[] for _ in range(THREADS)]

    def work(number):
        for _ in range(40):
            gone = Holds(allocator)
            kept[number].append(Holds(allocator))
            del gone

    run_together(work)
    allocator.check(others=0)  # every reference has a listed owner
    assert len(allocator.owners()) == 40 * THREADS


def test_owners_may_be_asked_for_while_matches_are_held():
    allocator = BlockAllocator(64)
    cache = PrefixCache(allocator, 1)
    cache.touch(range(16))

    def work(number):
        held = []
        for turn in range(ROUNDS):
            if number % 2:
                for owners in allocator.owners().values():
                    assert {owner.kind for owner in owners} <= {"cache", "other"}
                allocator.leaks()
            else:
                held.append(cache.match_tokens(range(1 + turn % 16)))
                if len(held) > 3:
                    held.pop(0).close()

    run_together(work)
    cache.check()
    allocator.check(others=0)


@pytest.mark.parametrize("policy", ["gittins", "lru"])
def test_concurrent_calls_of_one_cache_are_consistent_with_its_events(policy):
    """Applying the events in order gives the final content of the cache. Groups keep their reserved blocks."""
    allocator = BlockAllocator(BLOCKS)
    cache = PrefixCache(allocator, BLOCK, policy, max_events=100_000)
    known = {}

    def follow():
        for event in cache.drain_events():
            if event.kind == "stored":
                known[event.name] = event.block
            elif event.kind == "removed":
                del known[event.name]
            else:
                known.clear()

    def work(number):
        rng = random.Random(number)
        for turn in range(ROUNDS):
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 40))]
            salt = rng.choice([None, "a", "b"])
            found = cache.match_prefix(prompt, cache_salt=salt)
            missing = len(prompt) // BLOCK - len(found)
            try:
                own = allocator.allocate_n(missing)
            except PoolExhausted:
                cache.evict(missing)
            else:
                blocks = [*found.tolist(), *own.tolist()]
                cache.cache_blocks(prompt, blocks, cache_salt=salt, start=len(found))
                allocator.free(own)
            allocator.free(found)
            kind = rng.randrange(10)
            if kind == 0:
                cache.discard(rng.sample(range(BLOCKS), 3))
            elif kind == 1:
                cache.touch(prompt, cache_salt=salt)
            elif kind == 2:
                assert 0 <= cache.cached_tokens(prompt, cache_salt=salt) <= len(prompt)
            elif kind == 3:
                assert 0 <= cache.evictable <= BLOCKS
            elif kind == 4:
                assert len(set(cache.references())) <= BLOCKS
            elif kind == 5:
                stats = cache.stats()
                assert stats["inserted"] == stats["cached"] + stats["evicted"] + stats["cleared"]
                assert stats["used"] + stats["evictable"] + stats["free"] == BLOCKS
            elif kind == 6 and turn % 7 == 0:
                cache.reset_prefix_cache()
            elif kind == 7:
                cache.check()
            elif kind == 9:
                snapshot = cache.snapshot()
                assert len({event.block for event in snapshot.stored}) == len(snapshot.stored)
            if number == 0:
                follow()

    run_together(work)
    follow()
    assert sorted(known.values()) == sorted(cache.references())
    cache.check()
    allocator.check(others=0)
    cache.reset_prefix_cache()
    assert allocator.in_use == 0


def test_a_pool_is_closed_while_others_use_it():
    """Each call succeeds or raises the error of a closed pool. No freed memory is read."""
    k = np.ones((4, 1, 8), np.float32)
    for _ in range(60):
        pool = KvCachePool.from_layout(LAYOUT, 8)
        closed = []

        def work(number, pool=pool, closed=closed):
            try:
                while not closed:
                    if number == 0:
                        pool.append(0, np.arange(4), k, k)
                        pool.gather(0, [0], 4)
                    elif number == 1:
                        assert np.from_dlpack(pool, copy=True).shape == (pool.page_size * 8,)
                        pool.page(3)[:] = 1
                    elif number == 2:
                        pool.stats(), pool.trim(), repr(pool)
                    else:
                        with suppress(BufferError):  # others are inside
                            pool.close()
                            closed.append(True)
            except (ValueError, BufferError) as error:
                assert "closed" in str(error)

        run_together(work)
        assert closed and pool.max_blocks == 0


def test_threads_append_to_one_pool_and_decode_their_sequences_to_the_same_bits():
    layout = KvLayout(num_layers=1, num_kv_heads=2, head_dim=64, block_size=16)
    pool = KvCachePool.from_layout(layout, 64 * THREADS)
    inputs = []
    for seed in range(THREADS):
        generator = np.random.default_rng(seed)
        shapes = (300, 2, 64), (300, 2, 64), (1, 4, 64)
        inputs.append([generator.standard_normal(shape, np.float32) for shape in shapes])

    def outputs(number):
        k, v, q = inputs[number]
        state = PagedSeqState(pool.allocator)
        tables = BlockTables(1, 64)
        found = []
        for at in range(0, 300, 15):
            pool.append(0, state.append(15), k[at : at + 15], v[at : at + 15])
            tables.fill([state])
            for num_threads in (1, 2):
                found.append(decode(q, pool, 0, tables.block_tables, tables.seq_lens, num_threads=num_threads))
        state.close()
        return np.array(found)

    expected = [outputs(number) for number in range(THREADS)]

    def work(number):
        for _ in range(3):
            np.testing.assert_array_equal(outputs(number).view(np.uint32), expected[number].view(np.uint32))

    run_together(work)
    pool.allocator.check(others=0)
    assert pool.allocator.in_use == 0


def test_concurrent_calls_make_a_slot_object_only_once():
    for _ in range(100):
        pool = SsmStatePool.from_layout(StateLayout(layers=[{"h": ((2,), "float32")}]), 2000)
        seen = [None] * THREADS

        def work(number, pool=pool, seen=seen):
            seen[number] = [pool.slot(i) for i in (0, 1, 1023, 1024, 1999)]
            for turn in range(20):
                slot = pool.alloc(number + 1)
                pool.view(0, "h")[slot] = turn
                assert pool.slot(slot).request_id == number + 1 and pool.view(0, "h")[slot].tolist() == [turn] * 2
                pool.release(slot)

        run_together(work)
        assert all(mine is theirs for others in seen for mine, theirs in zip(seen[0], others, strict=True))
        assert pool.used_count == 0
        pool.check()


def test_a_label_is_set_while_others_read_it():
    states = [PagedSeqState(BlockAllocator(4), 4, label=10**30) for _ in range(2)]
    states[1].close()

    def work(number):
        for turn in range(ROUNDS * 10):
            for state in states:
                if number == 0:
                    state.label = 10**30 + turn
                elif number == 1:
                    assert str(10**29)[:20] in repr(state) and state.label >= 10**30
                elif number == 2 and state.closed:
                    with pytest.raises(Exception, match="1000000000000000000"):
                        state.append()
                elif number == 3 and not state.closed:
                    assert state.fork().label >= 10**30

    run_together(work)


def test_ids_that_another_thread_changes_meanwhile_break_nothing():
    """A call reads the ids once: on failure it drops exactly the references that it added."""
    allocator = BlockAllocator(4)
    allocator.allocate_n(2)
    ids = np.array([0] * 3000 + [-1], np.int32)
    others = np.random.default_rng(0).integers(-(2**31), 2**31 - 1, 3000).astype(np.int32)
    done = []

    def work(number):
        while number == 0 and len(done) < THREADS - 1:
            ids[:3000] = others
            ids[:3000] = 0
        for _ in range(ROUNDS if number else 0):
            for call in (allocator.share, allocator.free):
                with pytest.raises(InvalidBlock):
                    call(ids)
        done.append(number)

    run_together(work)
    allocator.check()
    assert [allocator.ref_count(block) for block in range(4)] == [1, 1, 0, 0]


def test_lists_of_sequences_that_another_thread_changes_meanwhile_break_nothing():
    allocator = BlockAllocator(4000)
    batches = [([PagedSeqState(allocator, 4) for _ in range(50)], [1] * 50) for _ in range(THREADS - 1)]
    done = []

    def work(number):
        while number == 0 and len(done) < THREADS - 1:
            for batch, counts in batches:
                some = batch[1:]
                del batch[1:], counts[1:]
                batch += some
                counts += [1] * 49
        if number:
            tables, (batch, counts) = BlockTables(50, 4000), batches[number - 1]
            for _ in range(ROUNDS * 3):
                for call in (append_batch, tables.fill):
                    with suppress(ValueError):  # lists of different lengths, or a sequence without tokens
                        call(batch, counts)
                release_batch(batch)
        done.append(number)

    run_together(work)
    allocator.check(others=0)


def test_threads_that_share_a_scheduler_are_refused_in_the_middle_of_a_call_and_corrupt_nothing():
    """A refused thread retries. At the end every request has all its tokens, and every block is free."""
    allocator = BlockAllocator(48)
    cache = PrefixCache(allocator, BLOCK)
    scheduler = Scheduler(SchedulerConfig(block_size=BLOCK, max_batch_sequences=6), allocator, cache)
    ids, refused, drained = [[] for _ in range(THREADS)], [0] * THREADS, [[] for _ in range(THREADS)]

    def insist(number, call, *arguments):
        while True:
            try:
                return call(*arguments)
            except RuntimeError as error:
                assert "another thread is inside a call" in str(error) or "in the middle of a call" in str(error)
                refused[number] += 1

    def step(number):
        # Another thread may have scheduled a batch, or may commit this one.
        batch = scheduler.outstanding
        if batch is None:
            try:
                batch = scheduler.schedule()
            except RuntimeError as error:
                assert any(words in str(error) for words in ("outstanding", "another thread", "middle of a call"))
                return
        try:
            insist(number, scheduler.commit, batch, [number] * len(batch))
        except ValueError as error:
            assert "not outstanding" in str(error)

    def work(number):
        rng = random.Random(number)
        for turn in range(ROUNDS):
            kind = rng.randrange(8)
            if kind == 0 and len(ids[number]) < 40:
                prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
                ids[number].append(insist(number, scheduler.add_request, prompt, len(prompt) + 8))
            elif kind == 1 and ids[number]:
                insist(number, scheduler.append_token, rng.choice(ids[number]), 7)
            elif kind == 2:
                drained[number] += insist(number, scheduler.drain_finished)
            elif kind == 3 and ids[number] and turn % 5 == 0:
                insist(number, scheduler.finish_sequence, rng.choice(ids[number]))
            elif kind == 5 and turn % 10 == 0:
                insist(number, scheduler.check)
            elif kind == 6:
                assert 0 <= scheduler.active_count <= 4 * 40 and scheduler.stats()["capacity"] == 48
            else:
                step(number)

    run_together(work)
    scheduler.check()
    while scheduler.has_work:
        step(0)
    drained[0] += scheduler.drain_finished()
    scheduler.check()
    assert sorted(seq.id for seqs in drained for seq in seqs) == sorted(number for some in ids for number in some)
    assert len({number for some in ids for number in some}) == sum(map(len, ids))
    cache.check()
    cache.reset_prefix_cache()
    allocator.check(others=0)
    assert allocator.in_use == 0
