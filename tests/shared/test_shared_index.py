"""The prefix index of a shared pool: hits across processes, salts, eviction, refusals, schedulers."""

import os
import random
import signal
from array import array

import numpy as np
import pools
import pytest
from share import WHOLE

from pagepool import KvLayout, PagedSeqState, PrefixCache, Scheduler, SchedulerConfig
from pagepool.errors import InvalidBlock, PoolError, StaleHandle
from pagepool.memory.shared_pages import read_pool

SIZE = 16
INDEX_LOCK = 4096 + 64  # where the lock of the index is in the file


@pytest.fixture
def memfd():
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    yield fd
    os.close(fd)


def prompt(seed, n):
    return np.random.default_rng(seed).integers(0, 1000, n * SIZE).astype(np.int32)


def view(fd, num_blocks=64):
    pool = pools.attach(fd, num_blocks)
    return pool, PrefixCache(pool.allocator)


def cached(pool, cache, tokens, **keys):
    """Compute, cache and release a prompt; return its blocks."""
    blocks = pool.allocator.allocate_n(len(tokens) // SIZE)
    pool.numpy()[blocks] = tokens.reshape(-1, SIZE)[:, :1]
    assert cache.cache_blocks(tokens, blocks, **keys) == len(blocks)
    pool.allocator.free(blocks)
    return blocks.tolist()


def test_another_process_finds_the_same_blocks_and_copies_nothing(memfd):
    pool, cache = view(memfd)
    tokens = prompt(1, 5)
    blocks = cached(pool, cache, tokens)

    def child():
        own, found = view(memfd)
        match = found.match_tokens(np.append(tokens, 7))
        assert (match.blocks.tolist(), match.num_tokens) == (blocks, 5 * SIZE)
        assert own.numpy()[match.blocks, 3].tolist() == tokens[::SIZE].tolist()
        state = PagedSeqState(own.allocator)
        state.adopt(match)
        assert state.append(3).tolist() == [state.blocks[5] * SIZE + i for i in range(3)]
        assert state.blocks[:5] == blocks
        assert (own.allocator.in_use, found.num_cached, found.evictable) == (6, 5, 0)
        state.release()
        assert found.evictable == 5
        found.check()
        own.allocator.check(others=0)

    assert pools.wait(pools.in_child(child)) == 0
    assert cache.stats()["cached"] == cache.num_cached == 5
    assert cache.policy == "lru"


def test_the_index_outlives_every_process():
    name = pools.new_name()
    tokens = prompt(2, 4)

    def child():
        cached(*view(name), tokens)
        os.kill(os.getpid(), 9)

    assert pools.wait(pools.in_child(child)) == -9
    pool, cache = view(name)
    assert cache.cached_tokens(tokens) == 4 * SIZE
    assert pool.numpy()[cache.match_prefix(tokens), 0].tolist() == tokens[::SIZE].tolist()
    pools.remove(name)


def test_a_refused_discard_keeps_no_hold_on_its_argument(memfd):
    pool, cache = view(memfd)
    pool.close()
    blocks = array("i", [1, 2])
    with pytest.raises(StaleHandle):
        cache.discard(blocks)
    blocks.append(3)  # raises BufferError while anything looks into the array


def test_salts_and_extra_keys_find_only_their_own_blocks(memfd):
    pool, cache = view(memfd)
    other = view(memfd)[1]
    tokens = prompt(3, 3)
    kinds = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": b"a"}, {"extra_keys": ("a",)}]
    blocks = [cached(pool, cache, tokens, **keys) for keys in kinds]
    assert len({block for found in blocks for block in found}) == 15
    assert [other.match_prefix(tokens, **keys).tolist() for keys in kinds] == blocks
    assert other.cached_tokens(tokens, cache_salt="c") == 0


def test_a_block_is_found_only_behind_its_own_parent(memfd):
    pool, cache = view(memfd)
    tokens = prompt(4, 3)
    first = cached(pool, cache, tokens)
    swapped = np.concatenate([tokens[SIZE:], tokens[:SIZE]])
    assert cache.cached_tokens(swapped) == 0
    other = np.concatenate([prompt(5, 1), tokens[SIZE:]])
    assert cache.cached_tokens(other) == 0
    assert not {*cached(pool, cache, other)} & {*first}


def test_blocks_behind_an_evicted_parent_are_not_found_even_if_its_block_has_the_same_tokens_again(memfd):
    pool, cache = view(memfd)
    tokens = prompt(6, 3)
    blocks = cached(pool, cache, tokens)
    assert cache.discard([blocks[0]]) == 1
    assert cache.cached_tokens(tokens) == 0
    again = pool.allocator.allocate()
    assert cache.cache_blocks(tokens[:SIZE], [again]) == 1
    assert cache.cached_tokens(tokens) == SIZE  # the two others have a parent of an older generation
    cache.check()
    assert cache.evict(10) == 2


def test_the_block_of_another_process_stays_when_both_compute_the_same_prompt(memfd):
    (pool, cache), (other, second) = view(memfd), view(memfd)
    tokens = prompt(7, 4)
    ours, theirs = pool.allocator.allocate_n(4), other.allocator.allocate_n(4)
    assert (cache.cache_blocks(tokens, ours), second.cache_blocks(tokens, theirs)) == (4, 0)
    assert second.match_prefix(tokens).tolist() == ours.tolist()
    other.allocator.free(theirs)
    assert other.allocator.in_use == 4


def test_the_least_recently_used_prefix_is_evicted_first_children_before_parents(memfd):
    (pool, cache), (_, second) = view(memfd), view(memfd)
    prompts = [prompt(10 + i, 3) for i in range(4)]
    for tokens in prompts:
        cached(pool, cache, tokens)
    held = second.match_tokens(prompts[0])
    assert second.evict(4) == 4
    assert [cache.cached_tokens(tokens) // SIZE for tokens in prompts] == [3, 0, 2, 3]
    assert cache.evict(100) == 5
    assert [cache.cached_tokens(tokens) // SIZE for tokens in prompts] == [3, 0, 0, 0]
    held.close()
    assert (cache.evict(100), cache.num_cached, pool.allocator.in_use) == (3, 0, 0)
    stats = cache.stats()
    assert (stats["inserted"], stats["evicted"], stats["cleared"]) == (12, 12, 0)


def test_evicted_blocks_can_be_taken_by_any_process(memfd):
    (pool, cache), (other, second) = view(memfd, 8), view(memfd, 8)
    cached(pool, cache, prompt(20, 8))
    assert other.allocator.free_count == 0
    assert second.evict(3) == 3
    assert len(pool.allocator.allocate_n(3)) == 3
    cache.check()


def test_a_lower_limit_evicts_cached_blocks_above_it_and_returns_their_memory(memfd):
    pool, other = [pools.attach(memfd, 64, pools.WHOLE_PAGES) for _ in range(2)]
    cache, second = PrefixCache(pool.allocator), PrefixCache(other.allocator)
    full = pools.allocated(memfd)
    tokens = prompt(25, 64)
    assert cached(pool, cache, tokens) == [*range(64)]
    held = second.match_tokens(tokens[: 50 * SIZE])
    assert pool.shrink(40) == 40
    assert (pools.allocated(memfd), cache.num_cached, pool.allocator.in_use) == (full - 14, 40, 50)
    assert (second.cached_tokens(tokens), second.evictable, second.stats()["evicted"]) == (40 * SIZE, 0, 24)
    held.close()
    assert (pools.allocated(memfd), other.allocator.in_use, second.evictable) == (full - 24, 40, 40)
    cache.check()
    assert second.evict(64) == 40
    other.allocator.check(others=0)


def test_a_block_above_the_limit_is_not_cached(memfd):
    pool, cache = view(memfd)
    tokens = prompt(26, 64)
    blocks = pool.allocator.allocate_n(64)
    pool.shrink(40)
    assert cache.cache_blocks(tokens, blocks) == 40
    pool.allocator.free(blocks)
    assert (cache.num_cached, pool.allocator.in_use, pool.allocator.free_count) == (40, 40, 0)
    cache.check()


def test_wrong_calls_change_nothing(memfd):
    pool, cache = view(memfd)
    tokens = prompt(21, 2)
    blocks = cached(pool, cache, tokens)
    before = cache.stats()
    own = pool.allocator.allocate_n(2)
    for bad, match in (([99, 1], "out of range"), ([own[0], 60], "free in this process"), (blocks, "free in this")):
        with pytest.raises(InvalidBlock, match=match):
            cache.cache_blocks(prompt(22, 2), bad)
    pool.allocator.free(own)
    held = cache.match_prefix(tokens)
    with pytest.raises(InvalidBlock, match="given at 0, is cached already, for other tokens"):
        cache.cache_blocks(prompt(22, 2), held)
    pool.allocator.free(held)
    with pytest.raises(ValueError, match="at least 0"):
        cache.match_prefix([-1] * SIZE)
    assert cache.match_prefix([]).tolist() == [] and cache.match_prefix([1, 2]).tolist() == []
    assert {**cache.stats(), "looked_up": 0, "hits": 0} == {**before, "looked_up": 0, "hits": 0}
    with pytest.raises(ValueError, match="no shared pool"):
        cache.touch(tokens)
    cache.check()
    pool.allocator.check(others=0)


def test_a_cached_block_is_not_moved_to_another_path(memfd):
    """Keys and values of a block depend on all tokens before it, not only on its own."""
    pool, cache = view(memfd)
    head, other, tail = prompt(40, 1), prompt(41, 1), prompt(42, 1)
    a, x, b = pool.allocator.allocate_n(3).tolist()
    assert cache.cache_blocks(np.append(head, tail), [a, x]) == 2
    before = cache.stats()
    for tokens, blocks, keys in (
        (np.append(other, tail), [b, x], {}),
        (np.append(head, tail), [b, x], {"cache_salt": "other"}),
        (tail, [x], {}),
        (np.concatenate([head, tail, tail]), [a, x, x], {}),
    ):
        with pytest.raises(InvalidBlock, match=f"block {x}, given at {len(blocks) - 1}, is cached already"):
            cache.cache_blocks(tokens, blocks, **keys)
        assert cache.stats() == before
    assert cache.cache_blocks(np.append(other, other), [b, b]) == 1  # the second one is of another path
    assert cache.cached_tokens(np.append(other, other)) == SIZE
    cache.discard([a])
    assert cache.cache_blocks(np.append(head, tail), [a, x]) == 1  # the same path, behind a new parent
    assert cache.match_prefix(np.append(head, tail)).tolist() == [a, x]
    cache.check()


def test_reset_forgets_the_blocks_of_every_process(memfd):
    (pool, cache), (_, second) = view(memfd), view(memfd)
    tokens = prompt(23, 3)
    cached(pool, cache, tokens)
    before = second.epoch
    second.reset_prefix_cache()
    assert (cache.cached_tokens(tokens), cache.num_cached) == (0, 0) and cache.epoch > before
    assert (pool.allocator.in_use, cache.stats()["cleared"]) == (0, 3)


def test_a_stopped_writer_of_the_index_stops_no_other_process(memfd):
    pool, cache = view(memfd)
    tokens = prompt(1, 6)
    blocks = cached(pool, cache, tokens[: 4 * SIZE])
    ready, is_attached = os.pipe()

    def child():
        own = view(memfd)
        os.write(is_attached, b"x")
        signal.pause()
        own[0].close()

    stopped = pools.in_child(child)
    os.read(ready, 1)
    slot = [process["pid"] for process in read_pool(memfd)["processes"]].index(stopped)
    os.pwrite(memfd, (1 << slot).to_bytes(8, "little"), INDEX_LOCK)
    held = cache.match_prefix(tokens).tolist()
    assert held == blocks
    more = pool.allocator.allocate_n(2).tolist()
    assert cache.cache_blocks(tokens, held + more) == 0 and cache.evict(1) == 0
    with pytest.raises(PoolError, match=f"process {stopped} has locked the index .* for 2 s"):
        cache.discard(blocks)
    assert cache.match_prefix(tokens).tolist() == blocks
    pool.allocator.free(held)
    pools.kill(stopped)
    assert cache.cache_blocks(tokens, held + more) == 2
    pool.allocator.free(held + more)
    cache.check()
    assert cache.evict(64) == 6 and cache.num_cached == 0


def test_the_oldest_of_more_blocks_than_one_list_holds_are_evicted_in_their_order(memfd):
    n, count = 20_000, 12
    pool = pools.attach(memfd, n, KvLayout(1, 1, 8, block_size=1, dtype="float32"))
    cache = PrefixCache(pool.allocator)
    blocks = pool.allocator.allocate_n(n)
    order = np.random.default_rng(3).permutation(n)
    for i in order.tolist():  # each block is a prompt
        cache.cache_blocks([i], blocks[i : i + 1])
    pool.allocator.free(blocks)
    pool.allocator.free(cache.match_prefix(order[:1]))  # the oldest becomes the youngest
    expected = np.append(order[1:], order[0])
    for part in np.array_split(expected, count):
        assert cache.evict(len(part)) == len(part)
        assert not any(cache.match_prefix([i]).size for i in part.tolist())
    assert cache.num_cached == 0 and pool.allocator.in_use == 0
    cache.check()


def test_a_child_must_attach_again(memfd):
    pool, cache = view(memfd)
    tokens = prompt(24, 2)
    cached(pool, cache, tokens)

    def child():
        for call in (cache.match_prefix, cache.match_tokens, cache.cached_tokens):
            with pytest.raises(StaleHandle):
                call(tokens)
        for call in (lambda: cache.evict(1), cache.check, lambda: cache.discard([0])):
            with pytest.raises(StaleHandle):
                call()

    assert pools.wait(pools.in_child(child)) == 0
    assert cache.num_cached == 2


def test_random_calls_of_three_views_agree_with_a_dictionary(memfd):
    views = [view(memfd, 40) for _ in range(3)]
    choose, known = random.Random(5), {}
    for step in range(1500):
        pool, cache = views[choose.randrange(3)]
        tokens = np.concatenate([prompt(choose.randrange(3), 2), prompt(choose.randrange(6), choose.randrange(4))])
        action = choose.random()
        if action < 0.6:
            match = cache.match_tokens(tokens)
            n = len(match.blocks)
            expected = next(
                (i for i in range(len(tokens) // SIZE) if tokens[: (i + 1) * SIZE].tobytes() not in known), None
            )
            assert n == (len(tokens) // SIZE if expected is None else expected)
            for i, block in enumerate(match.blocks.tolist()):
                assert known[tokens[: (i + 1) * SIZE].tobytes()] == block
                assert pool.page(block)[0] == tokens[i * SIZE]
            more = len(tokens) // SIZE - n
            if more > pool.allocator.free_count:
                cache.evict(more)
                known = {
                    key: block
                    for key, block in known.items()
                    if cache.cached_tokens(np.frombuffer(key, np.int32)) == len(key) // 4
                }
            if more <= pool.allocator.free_count:
                blocks = np.concatenate([match.blocks, pool.allocator.allocate_n(more)]).astype(np.int32)
                pool.numpy()[blocks[n:]] = tokens.reshape(-1, SIZE)[n:, :1]
                assert cache.cache_blocks(tokens, blocks) == more
                known.update({tokens[: (i + 1) * SIZE].tobytes(): int(block) for i, block in enumerate(blocks)})
                pool.allocator.free(blocks[n:])
            match.close()
        elif action < 0.7:
            cache.evict(choose.randrange(4))
            known = {
                key: block
                for key, block in known.items()
                if cache.cached_tokens(np.frombuffer(key, np.int32)) == len(key) // 4
            }
        if step % 100 == 0:
            cache.check()
    assert all(pool.allocator.in_use == cache.num_cached == len(known) for pool, cache in views)


def test_the_scheduler_of_a_second_process_computes_only_the_last_block(memfd):
    def computed(pool, cache, tokens):
        scheduler = Scheduler(SchedulerConfig(max_batch_tokens=4096, max_prefill_tokens=4096), pool, cache)
        scheduler.add_request(tokens.tolist(), max_new_tokens=1)
        total = 0
        while scheduler.has_work:
            batch = scheduler.schedule()
            total += batch.total_tokens
            scheduler.commit(batch, [1] * len(batch.seq_ids))
        scheduler.close()
        return total

    pool, cache = view(memfd, 256)
    tokens = prompt(30, 128)
    assert computed(pool, cache, tokens) == 2048

    def child():
        own, found = view(memfd, 256)
        assert computed(own, found, tokens) == 16
        found.check()

    assert pools.wait(pools.in_child(child)) == 0
    assert cache.num_cached == 128
    cache.check()


def test_processes_that_are_killed_at_random_never_serve_a_wrong_page():
    found = pools.run_script("stress_prefixes.py", "8" if WHOLE else "2", "3")
    assert '"wrong": 0' in found and '"lost": 0' in found
