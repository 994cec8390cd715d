"""Threads that share one prefix cache, one allocator and one pool of pages: what each reads is what its tokens say.

These run with a GIL, too. Without one, the threads are inside the cache, the allocator and the pool at the same time.
"""

import random
import sys
import sysconfig
import threading

import numpy as np
import pytest

from pagepool import BlockAllocator, KvCachePool, KvLayout, PagedSeqState, PoolExhausted, PrefixCache

THREADS = 4
ROUNDS = 300
BLOCK = 4
BLOCKS = 96
LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=BLOCK, dtype="float32")


@pytest.fixture(autouse=True)
def no_gil_comes_back():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # with a GIL: threads switch wherever they may
    yield
    sys.setswitchinterval(interval)
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        assert not sys._is_gil_enabled(), "an extension module has turned the GIL on"


def run_together(work, threads=THREADS):
    """Runs `work(number)` in several threads that begin at once; raises what one of them raises."""
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
    """What the page of each token holds: a hash of all tokens up to it, so that a wrong block cannot look right."""
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


@pytest.mark.parametrize("policy", ["gittins", "lru", "lfu", "s3fifo", "arc", "priority"])
def test_every_page_that_a_thread_reads_is_what_its_tokens_say(policy):
    allocator = BlockAllocator(BLOCKS)
    pool = KvCachePool.from_layout(LAYOUT, BLOCKS, allocator)
    cache = PrefixCache(allocator, BLOCK, policy)
    hits, refused = [0] * THREADS, [0] * THREADS

    def serve(rng, number):
        """One request: match, append what is missing, publish, read everything back."""
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 40))]
        state = PagedSeqState(allocator, BLOCK, label=number)
        blocks, matched = cache.match_tokens(prompt)
        state.adopt(blocks, matched)  # the last block may be matched in part: the first append copies it
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
        if rng.randrange(3) == 0:  # a branch writes into a page that it shares: copied first
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
