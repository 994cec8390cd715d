"""The result of `match_tokens`: it frees its blocks automatically, or passes them to the sequence that adopts them."""

import copy
import gc
import pickle

import pytest
from refusals import refuses

from pagepool import BlockAllocator, InvalidBlock, PagedSeqState, PoolError, PrefixCache, PrefixMatch

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.fixture
def cache():
    cache = PrefixCache(BlockAllocator(8), block_size=4)
    blocks = cache.allocator.allocate_n(2)
    cache.cache_blocks(PROMPT, blocks)
    cache.allocator.free(blocks)
    return cache


def counts(cache):
    cache.check()
    return [cache.allocator.ref_count(block) for block in range(3)]


def test_a_match_frees_its_blocks_when_it_is_dropped(cache):
    match = cache.match_tokens([*PROMPT[:6], 9])
    assert (match.blocks.tolist(), match.num_tokens, counts(cache)) == ([0, 1], 6, [2, 2, 0])
    blocks = match.blocks
    del match
    gc.collect()
    assert counts(cache) == [1, 1, 0] and blocks.tolist() == [0, 1]


def test_close_gives_them_back_once_and_so_does_a_with_block(cache):
    with cache.match_tokens(PROMPT) as match:
        assert counts(cache) == [2, 2, 0]
    assert counts(cache) == [1, 1, 0]
    match.close()
    match.close()
    assert counts(cache) == [1, 1, 0]
    with refuses(ValueError, 2):
        list(match)
    with pytest.raises(ZeroDivisionError), cache.match_tokens(PROMPT):
        raise ZeroDivisionError
    assert counts(cache) == [1, 1, 0]


def test_a_sequence_takes_them_over(cache):
    match = cache.match_tokens([*PROMPT[:6], 9])
    state = PagedSeqState(cache.allocator, block_size=4)
    state.adopt(match)
    assert (state.blocks, state.len, counts(cache)) == ([0, 1], 6, [2, 2, 0])
    other = PagedSeqState(cache.allocator, block_size=4)
    with refuses(ValueError, 2):
        other.adopt(match)
    del match
    assert counts(cache) == [2, 2, 0] and other.len == 0
    state.close()
    assert counts(cache) == [1, 1, 0]


def test_a_refused_adoption_leaves_the_match_as_it_was(cache):
    match = cache.match_tokens(PROMPT)
    busy = PagedSeqState(cache.allocator, block_size=4)
    busy.append(1)
    small = PagedSeqState(cache.allocator, block_size=4, max_blocks_per_seq=1)
    foreign = PagedSeqState(BlockAllocator(8), block_size=4)
    unequal = PagedSeqState(cache.allocator, block_size=16)
    closed = PagedSeqState(cache.allocator, block_size=4)
    closed.close()
    for state, words in (
        (busy, "cannot adopt blocks: the sequence has 1 of its own"),
        (small, "8 tokens need 2 blocks, the maximum is 1"),
        (foreign, "different allocators"),
        (unequal, "8 tokens do not match 2 blocks of 16"),
        (closed, "closed"),
    ):
        with pytest.raises((ValueError, PoolError), match=words):
            state.adopt(match)
    with refuses(TypeError, "num_tokens", "None", 8):
        small.adopt(match, 4)
    assert counts(cache)[:2] == [2, 2]
    match.close()
    assert counts(cache)[:2] == [1, 1]


def test_unpacked_it_is_the_callers_to_free(cache):
    blocks, num_tokens = cache.match_tokens(PROMPT)
    assert (blocks.tolist(), num_tokens, counts(cache)) == ([0, 1], 8, [2, 2, 0])
    cache.allocator.free(blocks)
    assert counts(cache) == [1, 1, 0]


def test_nothing_found_is_a_match_too(cache):
    match = cache.match_tokens([9])
    assert (match.blocks.tolist(), match.num_tokens) == ([], 0)
    state = PagedSeqState(cache.allocator, block_size=4)
    state.adopt(match)
    state.append(1)
    assert repr(cache.match_tokens(PROMPT[:3])) == "<PrefixMatch: 3 tokens in 1 block>"


def test_blocks_freed_by_another_owner_are_named_and_the_rest_stays(cache):
    match = cache.match_tokens(PROMPT)
    cache.allocator.free([1, 1])  # the references of the match and of the cache
    with refuses(InvalidBlock, 2):
        match.close()
    assert cache.allocator.ref_count(0) == 2
    blocks, _ = match  # otherwise the match would report the error again when it is freed
    cache.allocator.free(blocks[:1])


def test_a_match_is_made_by_a_cache_alone_and_is_not_copied(cache):
    with refuses(TypeError, "PrefixCache.match_tokens"):
        PrefixMatch()
    match = cache.match_tokens(PROMPT)
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            make(match)
    assert counts(cache) == [2, 2, 0]


def test_a_held_match_pins_its_blocks(cache):
    match = cache.match_tokens([*PROMPT[:4], 9])
    assert (cache.evict(8), cache.num_cached, cache.evictable) == (1, 1, 0)
    cache.reset_prefix_cache()
    assert cache.allocator.in_use == 1  # the match keeps the block after the cache's reset
    match.close()
    assert cache.allocator.in_use == 0
