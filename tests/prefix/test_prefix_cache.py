"""Guarantees of the prefix cache, one per test."""

import gc
import os
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from share import examples

from pagepool import (
    BlockAllocator,
    InvalidBlock,
    KvCachePool,
    KvLayout,
    PagedSeqState,
    PoolError,
    PrefixCache,
    reference,
)
from pagepool.prefix.following import following

POLICIES = ["lru", "gittins"]


@pytest.fixture
def cache():
    return PrefixCache(BlockAllocator(32), block_size=4)


def serve(cache, tokens, **names):
    """Match a prompt, allocate and cache the missing blocks; return all blocks, which the caller holds."""
    blocks = cache.match_prefix(tokens, **names).tolist()
    missing = -(-len(tokens) // cache.block_size) - len(blocks)
    blocks += cache.allocator.allocate_n(missing).tolist()
    cache.cache_blocks(tokens, blocks, **names)
    return blocks


def test_full_blocks_of_a_common_beginning_are_found(cache):
    first = serve(cache, range(1, 11))
    second = cache.match_prefix([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13])
    assert second.dtype == np.int32 and second.tolist() == first[:2]
    assert cache.match_prefix([1, 2, 3, 4, 5, 6, 7, 9]).tolist() == first[:1]
    assert cache.match_prefix([2, 2, 3, 4, 5, 6, 7, 8]).tolist() == []
    assert [cache.allocator.ref_count(block) for block in first] == [4, 3, 1]
    cache.check()


def test_the_same_tokens_behind_other_tokens_are_another_block(cache):
    serve(cache, [1, 1, 1, 1, 5, 5, 5, 5])
    serve(cache, [2, 2, 2, 2, 5, 5, 5, 5])
    assert cache.num_cached == 4
    assert cache.match_prefix([5, 5, 5, 5]).size == 0


def fold(a, b):
    product = a * b
    return (product ^ product >> 64) & 2**64 - 1


def colliding_cache():
    """Return a cache with a known hash seed, and rows of 8 tokens with equal hashes below the first root.

    The first two tokens make a factor of a product 0, so the next two tokens change no bit of the hash.
    """
    seed, factor = 0, 2**63
    while factor & 0x8000000080000000:  # both tokens must be below 2**31
        seed += 1
        factor = fold(seed, 0x9E3779B97F4A7C15) ^ 0x9E3779B97F4A7C15
    with patch("os.urandom", lambda n: seed.to_bytes(n, "little")):
        cache = PrefixCache(BlockAllocator(64), 8, "lru")
    head = [factor & 0xFFFFFFFF, factor >> 32]
    return cache, [[*head, a, b, 0, 0, 0, 0] for a in range(5) for b in range(5)]


def test_equal_hashes_are_told_apart_by_tokens():
    cache, rows = colliding_cache()
    held = [serve(cache, row) for row in rows[1:]]
    before = cache.stats()["collisions"]
    for row, blocks in zip(rows[1:], held, strict=True):
        assert cache.match_prefix([*row, 9, 9]).tolist() == blocks
    assert cache.match_prefix(rows[0]).size == 0
    assert cache.stats()["collisions"] >= before + 24  # the last look-up compared each of them
    cache.check()


def test_equal_hashes_are_told_apart_by_the_prefix_before():
    with patch("os.urandom", bytes):  # a seed of 0: equal tokens have equal hashes after any prefix
        cache = PrefixCache(BlockAllocator(64), block_size=2)
    held = [serve(cache, [a, a, b, b]) for a in range(5) for b in range(5)]
    for number, blocks in enumerate(held):
        a, b = divmod(number, 5)
        assert cache.match_prefix([a, a, b, b, 9, 9]).tolist() == blocks
    assert cache.match_prefix([5, 5]).size == 0 and cache.match_prefix([0, 0, 5, 5]).size == 1
    assert cache.stats()["collisions"] > 0
    cache.check()


def test_a_block_without_siblings_needs_no_hash():
    """With all hashes equal, only nodes that have or had siblings cause collisions."""
    cache, rows = colliding_cache()
    first, *others, unknown = rows[:5]
    path = serve(cache, [*first, *range(100, 340)])
    assert cache.match_prefix([*first, *range(100, 340)]).tolist() == path and len(path) == 31
    assert cache.match_prefix(unknown).size == 0 and cache.stats()["collisions"] == 0
    for row in others:
        serve(cache, row)
        cache.check()
    assert cache.match_prefix(unknown).size == 0 and cache.stats()["collisions"] > 0
    assert cache.match_prefix(others[1]).size == 1
    cache.allocator.free(path)
    for blocks in (path, cache.match_prefix(others[0]), cache.match_prefix(others[2])):
        cache.discard(blocks)
        cache.check()
    assert cache.match_prefix(others[1]).size == 1 and cache.match_prefix(first).size == 0
    assert cache.stats()["nodes"] == 1 + 1


CONTEXTS = [
    {},
    {"cache_salt": ""},
    {"cache_salt": "tenant"},
    {"cache_salt": b"tenant"},
    {"cache_salt": 1},
    {"cache_salt": True},
    {"extra_keys": ("tenant",)},
    {"extra_keys": (None,)},
    {"extra_keys": ("ab", "c")},
    {"extra_keys": ("a", "bc")},
    {"extra_keys": ("abc",)},
    {"extra_keys": (1,)},
    {"extra_keys": ("1",)},
    {"cache_salt": "a", "extra_keys": ("b",)},
    {"cache_salt": "b", "extra_keys": ("a",)},
]


@pytest.mark.parametrize("urandom", [bytes, os.urandom], ids=["collisions", "seed"])
def test_salts_and_extra_keys_never_share(urandom):
    with patch("os.urandom", urandom):
        cache = PrefixCache(BlockAllocator(32), block_size=4)
    blocks = []
    for context in CONTEXTS:
        assert cache.match_prefix([1, 2, 3, 4], **context).size == 0
        blocks.append(serve(cache, [1, 2, 3, 4], **context))
    for context, mine in zip(CONTEXTS, blocks, strict=True):
        assert cache.match_prefix([1, 2, 3, 4], **context).tolist() == mine
    cache.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_block_in_use_is_never_evicted(policy):
    cache = PrefixCache(BlockAllocator(8), block_size=1, policy=policy)
    held = serve(cache, [1, 2, 3])
    free = serve(cache, [7, 8])
    cache.allocator.free(free)
    assert cache.evictable == 2
    assert cache.evict(5) == 2
    assert cache.evictable == 0 and cache.evict(1) == 0
    assert [cache.allocator.ref_count(block) for block in held] == [2, 2, 2]
    cache.check()
    cache.allocator.free(held)
    assert cache.evictable == 3
    assert cache.evict(1) == 1
    cache.check()
    assert cache.evict(9) == 2 and cache.allocator.in_use == 0


def test_lru_evicts_the_head_of_the_least_recently_used_run():
    cache = PrefixCache(BlockAllocator(32), 4, "lru")
    old, new = serve(cache, [1] * 8), serve(cache, [2] * 8)
    cache.allocator.free(cache.match_prefix([1] * 8))
    cache.allocator.free(old + new)
    assert cache.evict(3) == 3
    assert cache.match_prefix([2] * 8).size == 0
    assert cache.match_prefix([1] * 8).size == 0  # its first block is evicted, the second is unreachable
    assert cache.num_cached == 1


def test_a_child_is_found_again_when_its_parent_comes_back():
    cache = PrefixCache(BlockAllocator(32), 4, "lru")
    blocks = serve(cache, [1] * 8)
    cache.allocator.free(blocks)
    cache.evict(1)
    again = cache.allocator.allocate_n(2).tolist()
    assert cache.cache_blocks([1] * 4, again) == 1
    assert cache.match_prefix([1] * 8).tolist() == [again[0], blocks[1]]
    cache.check()


def test_an_unused_cached_block_is_replaced_by_one_in_use(cache):
    first = serve(cache, [1] * 12)
    cache.allocator.free(first)
    used = cache.match_prefix([1] * 4).tolist()
    again = cache.allocator.allocate_n(3).tolist()
    assert cache.cache_blocks([1] * 12, again) == 2
    assert cache.cached_tokens([1] * 12) == 12 and cache.num_cached == 3
    assert [cache.allocator.ref_count(block) for block in first + again] == [2, 0, 0, 1, 2, 2]
    assert cache.evict(3) == 0 == cache.stats()["evicted"] and cache.stats()["cleared"] == 2
    cache.check()
    cache.allocator.free(used)
    assert cache.evict(3) == 1 and cache.cache_blocks([1] * 12, again) == 1
    assert cache.match_prefix([1] * 12).tolist() == again
    cache.check()


@pytest.mark.parametrize("blocks", [[-1, 0], [99, 0], [7, 0], [0, 0], [1, 0]])
def test_entries_that_are_not_blocks_in_use_are_skipped(cache, blocks):
    """A sequence with a sliding window has no blocks for its first tokens."""
    found = serve(cache, [1] * 8)
    assert found == [0, 1]
    cache.allocator.free(found)
    assert cache.cache_blocks([1] * 8, blocks) == 0
    assert cache.match_prefix([1] * 8).tolist() == found
    cache.check()


def test_a_prompt_longer_than_the_cache_evicts_its_own_beginning():
    cache = PrefixCache(BlockAllocator(3), 1, "lru")
    assert cache.touch([1, 2, 3, 4, 5]) == 0
    assert cache.touch([1, 2, 3, 4, 5]) == 0
    assert cache.num_cached == 3 and cache.stats()["evicted"] == 7
    cache.check()


def test_a_pass_stops_where_others_hold_every_block():
    cache = PrefixCache(BlockAllocator(2), 1)
    mine = cache.allocator.allocate()
    assert cache.touch([1, 2, 3]) == 0
    assert cache.num_cached == 1 and cache.allocator.ref_count(mine) == 1
    cache.check()


def test_reset_keeps_only_blocks_of_sequences(cache):
    held, gone = serve(cache, [1] * 8, cache_salt="a"), serve(cache, [2] * 8)
    cache.allocator.free(gone)
    cache.reset_prefix_cache()
    cache.check()
    stats = cache.stats()
    assert stats["nodes"] == stats["cached"] == 0 and stats["cleared"] == 4
    assert cache.allocator.in_use == 2
    assert cache.match_prefix([1] * 8, cache_salt="a").size == 0
    cache.allocator.free(held)
    serve(cache, [1] * 8)
    cache.check()


@pytest.mark.parametrize(("policy", "prefixes"), [("lru", 4), ("gittins", 4 + 4 * 4)])
def test_nothing_stays_of_evicted_tenants(policy, prefixes):
    cache = PrefixCache(BlockAllocator(4), 1, policy)
    for tenant in range(100):
        cache.touch([1, 2, 3], cache_salt=tenant)
    assert cache.stats()["nodes"] <= 2 * prefixes  # blocks and ghosts, plus a root for each prefix
    cache.check()


def test_a_dropped_cache_frees_all_blocks():
    allocator = BlockAllocator(4)
    cache = PrefixCache(allocator, 1)
    cache.touch([1, 2, 3])
    assert allocator.in_use == 3
    del cache
    gc.collect()
    assert allocator.in_use == 0
    allocator.check()


def test_a_second_block_for_the_same_tokens_stays_with_its_sequence(cache):
    first = serve(cache, [1] * 4)
    mine = cache.allocator.allocate_n(1)
    assert cache.cache_blocks([1] * 4, mine) == 0
    assert cache.cache_blocks([1] * 4, first) == 0
    assert cache.allocator.ref_count(mine[0]) == 1
    assert cache.match_prefix([1] * 4).tolist() == first


@pytest.mark.parametrize(
    ("tokens", "blocks", "error", "words"),
    [
        ([1] * 8, [0], ValueError, (8, 2, 1)),
        ([1] * 8, [0, 31], InvalidBlock, ("block", 31)),
        ([1] * 8, [0, 99], InvalidBlock, ("block", 99, 32)),
        ([1] * 8, [0, -1], InvalidBlock, ("block", -1)),
        ([1] * 8, [0, 0], InvalidBlock, ("block", 0, 1)),
        ([1] * 8, [0, 1], InvalidBlock, ("block", 1)),
        ("12345678", [0, 2], TypeError, ("tokens", "str", "12345678")),
        (b"12345678", [0, 2], TypeError, ("tokens", "bytes", "b'12345678'")),
        (iter([1] * 8), [0, 2], TypeError, ("tokens", "list_iterator")),
        (set(range(8)), [0, 2], TypeError, ("tokens", "set")),
        (8, [0, 2], TypeError, ("tokens", "int", 8)),
        ([1.5] * 8, [0, 2], TypeError, ("tokens", "float64")),
        ([[1] * 8], [0, 2], ValueError, ("tokens", 1, 2)),
        ([2**31] * 8, [0, 2], ValueError, ("token", 2147483648, 32)),
    ],
)
def test_a_refused_call_changes_nothing(cache, tokens, blocks, error, words):
    zero, one, two = cache.allocator.allocate_n(3).tolist()
    assert [zero, one, two] == [0, 1, 2]
    cache.cache_blocks([9] * 4, [one])
    before = cache.stats()
    with refuses(error, *words):
        cache.cache_blocks(tokens, blocks)
    assert cache.stats() == before
    assert [cache.allocator.ref_count(block) for block in range(3)] == [1, 2, 1]
    assert cache.cache_blocks([1] * 8, [zero, two]) == 2
    cache.check()


@pytest.mark.parametrize("make", [list, np.array, lambda row: np.array(row, np.int32)], ids=["list", "int64", "int32"])
@pytest.mark.parametrize("place", [0, 3, 5, 9])
def test_a_negative_token_is_refused_wherever_it_is(cache, make, place):
    plain = reference.PrefixCache(reference.BlockAllocator(32), 4)
    for each in (cache, plain):
        each.cache_blocks(range(1, 9), each.allocator.allocate_n(3))
    row = list(range(1, 11))
    row[place] = -7
    row = make(row)
    before = cache.stats()
    for each in (cache, plain):
        for call in (
            lambda each=each: each.cache_blocks(row, [0, 1]),
            lambda each=each: each.cache_blocks(row, [0, 1], start=min(2, place // 4 + 1)),
            lambda each=each: each.touch(row),
            lambda each=each: each.match_prefix(row),
            lambda each=each: each.match_tokens(row),
            lambda each=each: each.cached_tokens(row),
        ):
            with refuses(ValueError, "tokens", place, -7):
                call()
    assert cache.stats() == before
    cache.check()


@pytest.mark.parametrize("make", [list, lambda row: np.array(row, np.int32)], ids=["list", "int32"])
def test_look_ups_stop_at_the_first_block_that_is_not_cached(cache, make):
    plain = reference.PrefixCache(reference.BlockAllocator(32), 4)
    for each in (cache, plain):
        each.cache_blocks(range(1, 9), each.allocator.allocate_n(3))
        for call in (each.match_prefix, each.match_tokens, each.cached_tokens):
            for row, salt in ([*range(1, 13), -7], None), ([*range(1, 5), -7], "new"):
                call(make(row), cache_salt=salt)
            for row, place in ([*range(1, 9), -7], 8), ([9, -7], 1):
                with refuses(ValueError, "tokens", place, -7):
                    call(make(row))
    cache.check()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"cache_salt": 1.5}, ("cache_salt", "float", 1.5)),
        ({"cache_salt": np.int64(1)}, ("cache_salt", "int64")),
        ({"extra_keys": "lora"}, ("extra_keys", "str")),
        ({"extra_keys": ([],)}, ("extra_keys", "list")),
    ],
)
def test_keys_of_other_types_are_refused(cache, names, words):
    for call in (cache.match_prefix, cache.touch, lambda tokens, **names: cache.cache_blocks(tokens, [0], **names)):
        with refuses(TypeError, *words):
            call([1, 2, 3, 4], **names)
    assert cache.stats()["nodes"] == 0


def test_wrong_construction_and_numbers_are_refused(cache):
    with refuses(ValueError, "block_size", 1, 1024, 0):
        PrefixCache(cache.allocator, 0)
    with refuses(ValueError, "policy", "lru", "gittins", "fifo"):
        PrefixCache(cache.allocator, 4, "fifo")
    with refuses(ValueError, -1):
        cache.evict(-1)


def test_a_block_freed_behind_its_back_is_found(cache):
    [block] = serve(cache, [1] * 4)
    cache.allocator.free([block, block])
    with refuses(PoolError, "cached", 0):
        cache.check()
    with pytest.raises(PoolError, match="freed by someone else"):
        cache.match_prefix([1] * 4)


def test_arrays_of_any_integer_type_and_stride_are_tokens(cache):
    blocks = serve(cache, np.arange(8, dtype=np.int32))
    for row in (np.arange(8), np.arange(16, dtype=np.uint8)[:8], np.arange(0, 16, 1, dtype=np.int64)[:8], range(8)):
        assert cache.match_prefix(row).tolist() == blocks
    assert cache.match_prefix(np.repeat(np.arange(8, dtype=np.int32), 2)[::2]).tolist() == blocks
    frozen = np.arange(8, dtype=np.int32)
    frozen.flags.writeable = False
    assert cache.match_prefix(frozen).tolist() == blocks
    assert cache.match_prefix([]).size == 0


def test_capacity_zero_is_legal():
    for policy in POLICIES:
        cache = PrefixCache(BlockAllocator(0), 1, policy)
        assert cache.touch([1, 2]) == 0 and cache.evict(1) == 0 and cache.match_prefix([1]).size == 0
        assert cache.stats()["nodes"] == 0
        cache.check()


def test_a_last_block_that_is_the_same_in_part_is_found_and_copied_before_it_is_written():
    layout = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
    pool = KvCachePool.from_layout(layout, 8)
    cache = PrefixCache(pool.allocator, block_size=4)
    k = np.random.default_rng(0).standard_normal((8, 1, 8)).astype(np.float32)
    first = PagedSeqState(pool.allocator, block_size=4)
    slots = first.append(8)
    for layer in range(2):
        pool.append(layer, slots, k, -k)
    cache.cache_blocks([1, 2, 3, 4, 5, 6, 7, 8], first.blocks)
    first.release()

    match = cache.match_tokens([1, 2, 3, 4, 5, 6, 9, 9, 9])
    blocks = match.blocks
    assert (blocks.tolist(), match.num_tokens) == ([0, 1], 6)
    second = PagedSeqState(pool.allocator, block_size=4)
    second.adopt(match)
    new = np.full((3, 1, 8), 7, np.float32)
    slots = second.append(3)
    for layer in range(2):
        pool.append(layer, slots, new, new)
        got_k, got_v = pool.gather(layer, second.blocks, 9)
        assert np.array_equal(got_k, np.concatenate([k[:6], new])) and np.array_equal(got_v[:6], -k[:6])
        assert np.array_equal(pool.gather(layer, blocks, 8)[0], k), "the cached page is as it was"
    second.release()
    cache.check()
    pool.allocator.check(others=0)


def test_the_block_with_the_longest_partial_match_is_found(cache):
    for tail in ([5, 1, 1, 1], [5, 6, 1, 1], [5, 6, 7, 1], [6, 6, 7, 8]):
        cache.allocator.free(serve(cache, [1, 2, 3, 4, *tail]))
    for tokens, found, number in (
        ([1, 2, 3, 4, 5, 6, 7, 8], [0, 3], 7),
        ([1, 2, 3, 4, 5, 6], [0, 2], 6),
        ([1, 2, 3, 4, 9], [0], 4),
        ([1, 2, 3], [0], 3),
        ([9], [], 0),
        ([], [], 0),
    ):
        blocks, num_tokens = cache.match_tokens(tokens)
        assert (blocks.tolist(), num_tokens) == (found, number)
        cache.allocator.free(blocks)
    assert cache.match_tokens([1, 2, 3], cache_salt="other").num_tokens == 0
    cache.check()


def test_blocks_known_to_be_cached_are_passed_over():
    allocator = BlockAllocator(8)
    cache = PrefixCache(allocator, 2)
    blocks = allocator.allocate_n(4)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    assert cache.cache_blocks(prompt[:4], blocks) == 2
    wrong = [9, 9, *prompt[2:]]  # only the last known block is compared
    assert cache.cache_blocks(wrong[:6], blocks, start=2) == 1
    assert cache.cache_blocks(prompt, blocks, start=3) == 1
    assert cache.match_prefix(prompt).tolist() == blocks.tolist()
    cache.check()


def test_blocks_before_start_that_are_not_cached_are_looked_up():
    allocator = BlockAllocator(12)
    cache = PrefixCache(allocator, 2)
    first, second, third = (allocator.allocate_n(3) for _ in range(3))
    prompt = [1, 2, 3, 4, 5, 6]
    cache.cache_blocks(prompt[:4], first)
    assert cache.cache_blocks(prompt, second, start=2) == 1  # its first two blocks are not the cached ones
    assert cache.match_prefix(prompt).tolist() == [*first[:2], second[2]]
    assert cache.cache_blocks(prompt, third, cache_salt="other", start=3) == 3
    with refuses(InvalidBlock, "block", 0):
        cache.cache_blocks(prompt, first, start=2, extra_keys=("a",))
    cache.discard([second[2]])
    cache.cache_blocks([5, 5], first[2:])
    with refuses(InvalidBlock, "block", 2):
        cache.cache_blocks(prompt, first, start=2)
    for start in (-1, 4):
        with refuses(ValueError, "start", 0, 3, start):
            cache.cache_blocks(prompt, first, start=start)
    cache.check()


def test_a_start_far_beyond_or_free_blocks_change_nothing():
    allocator = BlockAllocator(4)
    cache = PrefixCache(allocator, 1)
    for wrong in ([0, 1], [-7, 2**31 - 1]):
        with pytest.raises(InvalidBlock, match=r"given at|out of range|is free"):
            cache.cache_blocks([1, 2], wrong, start=2)
    assert cache.num_cached == 0
    cache.check()


@pytest.fixture(params=["private", "shared"])
def either_cache(request):
    """A cache of a private pool, and one of a shared pool."""
    if request.param == "private":
        yield PrefixCache(BlockAllocator(32), block_size=4)
        return
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
    with os.fdopen(os.memfd_create("test", os.MFD_ALLOW_SEALING), "rb") as file:
        pool = KvCachePool.from_layout(layout, 32, shared=file.fileno())
        yield PrefixCache(pool.allocator)
        pool.close()


def test_nothing_is_cached_of_an_epoch_that_a_reset_or_a_discard_has_ended(either_cache):
    """Also if no block was cached at that moment: a sequence can have read one that was evicted since."""
    cache, tokens = either_cache, range(8)
    blocks = cache.allocator.allocate_n(2).tolist()
    for end in (cache.reset_prefix_cache, lambda: cache.discard([5]), lambda: cache.discard(blocks[:1])):
        epoch = cache.epoch
        end()
        assert cache.epoch > epoch
        assert cache.cache_blocks(tokens, blocks, epoch=epoch) == 0 == cache.cached_tokens(tokens)
        epoch = cache.epoch
        assert cache.cache_blocks(tokens, blocks, epoch=epoch) == 2
        assert (cache.discard([]), cache.evict(1), cache.epoch) == (0, 0, epoch)
        cache.reset_prefix_cache()
    assert cache.cache_blocks(tokens, blocks) == 2  # without an epoch: the caller knows that the blocks are right
    cache.check()


@examples(60)
@given(st.data())
def test_following_tokens_are_those_of_a_cached_text_of_the_same_salt(data):
    size = data.draw(st.integers(1, 4))
    cache = PrefixCache(BlockAllocator(200), size)
    texts = data.draw(st.lists(st.lists(st.integers(0, 1), max_size=14), max_size=6))
    known = []
    for number, text in enumerate(texts):
        blocks = cache.allocator.allocate_n(len(text) // size)
        cache.cache_blocks(text, blocks, cache_salt=number % 2)
        cache.allocator.free(blocks)
        known.append((number % 2, text[: len(text) // size * size]))
    for salt in (0, 1):
        for begin in [[], *data.draw(st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=4)), *texts]:
            most = data.draw(st.integers(0, 9))
            found = following(cache, begin, most, cache_salt=salt).tolist()
            rests = [text[len(begin) :] for own, text in known if own == salt and text[: len(begin)] == begin]
            assert len(found) <= most and (not found or any(rest[: len(found)] == found for rest in rests))
            assert found or not most or not begin or not any(rests)
    cache.check()
