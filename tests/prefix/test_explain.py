"""`PrefixCache.explain`: each token that is not found has a reason. Random programs: test_prefix_machine.py."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from share import examples

from pagepool import BlockAllocator, KvCachePool, KvLayout, PrefixCache
from pagepool.prefix.explain import REASONS, Explanation


def cache_of(*prompts, blocks=64, block_size=4, policy="gittins", salt=None):
    cache = PrefixCache(BlockAllocator(blocks), block_size, policy)
    for prompt in prompts:
        cache.touch(prompt, cache_salt=salt)
    return cache


def test_each_reason_has_its_tokens():
    prompt = list(range(20))
    cache = cache_of(prompt)
    assert cache.evict(2) == 2
    assert cache.explain([*prompt, 7]).counts() == {"evicted": 8, "short": 1}
    assert cache.explain([*prompt, 7, 7, 7, 7]).counts() == {"evicted": 8, "never_seen": 4}
    assert cache.explain([0, 1, 2, 3, 4, 5, 9, *prompt]).counts() == {"diverges": 20, "short": 3}
    assert cache.explain([9] * 9).counts() == {"never_seen": 8, "short": 1}
    assert cache.explain([9] * 3).counts() == {"short": 3}
    assert cache.explain(prompt, cache_salt="b").counts() == {"other_key": 20}
    assert cache.explain(prompt, extra_keys=("b",)).counts() == {"other_key": 20}
    assert cache.explain([]).parts == ()
    assert cache.explain(prompt[:12]).parts == ()


def test_a_block_behind_an_evicted_one_is_evicted_too():
    cache = cache_of(list(range(12)), policy="lru")
    assert cache.evict(1) == 1
    explanation = cache.explain(list(range(12)))
    assert (explanation.found, explanation.counts()) == (0, {"evicted": 12})
    assert explanation.evicted_ago >= 0


def test_a_divergence_shows_twelve_tokens_of_both_prompts_and_follows_the_known_one_to_later_blocks():
    cache = cache_of(list(range(100, 132)))
    there = cache.explain([*range(100, 111), 5, 6, 7, 8, 9, 10, 11]).divergence
    assert (there.position, there.token, there.cached_token) == (11, 5, 111)
    assert there.around == (105, 106, 107, 108, 109, 110, 5, 6, 7, 8, 9, 10)
    assert there.cached_around == tuple(range(105, 117))


def test_the_prompt_that_shares_most_is_shown_and_the_youngest_of_equal_ones():
    cache = cache_of(
        [1, 1, 1, 1, 5, 5, 5, 5], [1, 1, 1, 1, 5, 6, 6, 6], [1, 1, 1, 1, 5, 6, 7, 7], [1, 1, 1, 1, 8, 8, 8, 8]
    )
    assert cache.explain([1, 1, 1, 1, 5, 6, 9, 9]).divergence.cached_token == 7
    assert cache.explain([1, 1, 1, 1, 2, 2, 2, 2]).divergence.cached_token == 8


@pytest.mark.parametrize("keys", [{"cache_salt": "b"}, {"extra_keys": (1,)}])
def test_tokens_of_another_salt_or_of_other_keys_are_never_shown(keys):
    cache = cache_of(list(range(1000, 1016)), salt="a")
    cache.touch([1000, 1001, 1002, 1003], **keys)
    explanation = cache.explain([*range(1000, 1010), 1, 2, 3, 4, 5, 6], **keys)
    assert explanation.counts() == {"other_key": 4, "never_seen": 8}
    assert explanation.divergence is None and "101" not in str(explanation) + str(explanation.as_dicts())


def test_what_was_forgotten_is_never_seen_within_the_time_that_is_remembered():
    for policy, forgets in (("gittins", False), ("lru", True)):
        cache = cache_of(list(range(16)), policy=policy)
        assert cache.explain([99] * 4).remembers is None
        cache.evict(4)
        explanation = cache.explain(list(range(16)))
        assert explanation.counts() == ({"never_seen": 16} if forgets else {"evicted": 16})
        assert (explanation.remembers is not None) == forgets
    cache.reset_prefix_cache()
    assert cache.explain(list(range(16))).remembers >= 0


def test_nothing_is_changed_by_a_question():
    cache = cache_of(list(range(16)), [50, 51, 52, 53], blocks=8, policy="lru")
    before = cache.stats()
    for _ in range(3):
        cache.explain(list(range(8)))
    assert cache.stats() == before
    cache.evict(1)  # the least recently used block is still the first of the first prompt
    assert cache.cached_tokens(list(range(16))) == 0


def test_a_shared_pool_names_what_it_cannot_tell():
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
    file = os.memfd_create("pages", os.MFD_ALLOW_SEALING)
    pool = KvCachePool.from_layout(layout, 16, shared=file)
    cache = PrefixCache(pool.allocator, 4)
    blocks = pool.allocator.allocate_n(2)
    cache.cache_blocks(range(8), blocks)
    explanation = cache.explain([*range(8), 1, 2, 3, 4, 5])
    assert (explanation.found, explanation.counts()) == (8, {"shared_pool": 4, "short": 1})
    pool.allocator.free(blocks)
    cache.reset_prefix_cache()
    pool.close()
    os.close(file)


def test_wrong_arguments_are_refused():
    cache = cache_of([1, 2, 3, 4])
    with pytest.raises(ValueError, match=r"tokens\[5\] is -1"):
        cache.explain([1, 2, 3, 4, 5, -1])
    with pytest.raises(TypeError, match="tokens"):
        cache.explain("text")
    with pytest.raises(TypeError, match="cache_salt"):
        cache.explain([1], cache_salt=1.5)


@examples(200)
@given(
    data=st.data(),
    length=st.integers(1, 60),
    size=st.integers(1, 5),
)
def test_parts_sum_to_the_prompt_for_any_number_of_usable_tokens(data, length, size):
    """A caller that can use only a part of the found tokens, for want of a recurrent state, and computes the last."""
    looked_up = length - 1
    full = looked_up // size
    found, evicted = sorted(data.draw(st.tuples(st.integers(0, full), st.integers(0, full))))
    bounds = (("evicted", evicted * size), ("never_seen", full * size))
    usable = data.draw(st.integers(0, found * size))
    row = np.arange(length, dtype=np.int32)
    explanation = Explanation.of(row, (found * size, bounds, -1, (), -1, -1), usable, length)
    assert usable + sum(explanation.counts().values()) == length
    assert [part["reason"] for part in explanation.as_dicts()] == sorted(explanation.counts(), key=REASONS.index)
    assert explanation.counts().get("no_state", 0) == found * size - usable
