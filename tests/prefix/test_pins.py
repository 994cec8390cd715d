"""Pins keep prefixes for a time, within a budget, and give everything back."""

import gc

import pytest

from pagepool import BlockAllocator, PoolError, PrefixCache, PrefixPins


@pytest.fixture
def cache():
    cache = PrefixCache(BlockAllocator(16), block_size=1)
    cache.touch([1, 2, 3, 4])
    cache.touch([1, 2, 8, 9])
    return cache


def test_what_is_pinned_is_not_evicted_until_its_time(cache):
    pins = PrefixPins(cache, 10)
    pins.pin([1, 2, 3, 4], ttl=5, now=10)
    pins.pin([1, 2, 8], ttl=7, now=10)
    assert (pins.num_pinned, len(pins), cache.evict(9)) == (5, 2, 1)
    assert pins.expire(14.9) == 0 and cache.evict(9) == 0
    assert pins.expire(15) == 1 and cache.evict(9) == 2
    pins.check()
    assert pins.expire(100) == 1 and cache.evict(9) == 3 and cache.allocator.in_use == 0
    pins.check()


def test_without_a_ttl_a_pin_stays_until_it_is_let_go(cache):
    pins = PrefixPins(cache, 4)
    pin = pins.pin([1, 2, 3, 4])
    assert pins.expire(1e18) == 0
    assert pins.unpin(pin) == 4
    with pytest.raises(KeyError):
        pins.unpin(pin)
    assert cache.evict(9) == 6


def test_a_block_of_two_pins_counts_once_and_goes_with_the_second(cache):
    pins = PrefixPins(cache, 4)
    first, second = pins.pin([1, 2, 3, 4]), pins.pin([1, 2])
    assert pins.num_pinned == 4 and sorted(pins.references()) == [0, 0, 1, 1, 2, 3]
    assert pins.unpin(first) == 2 and pins.num_pinned == 2
    assert pins.unpin(second) == 2 and pins.num_pinned == 0
    pins.check()


def test_past_the_budget_nothing_is_pinned(cache):
    pins = PrefixPins(cache, 3)
    with pytest.raises(PoolError, match="4 blocks would be pinned, the budget is 3"):
        pins.pin([1, 2, 3, 4])
    with pytest.raises(ValueError, match="not -1"):
        pins.pin([1], ttl=-1)
    with pytest.raises(ValueError, match="not -1"):
        PrefixPins(cache, -1)
    assert pins.num_pinned == 0 and cache.evictable == 6
    pins.check()


def test_pins_outlast_a_reset_and_free_their_blocks_when_they_go(cache):
    pins = PrefixPins(cache, 4)
    pins.pin([1, 2, 3, 4])
    cache.reset_prefix_cache()
    assert cache.allocator.in_use == 4
    cache.allocator.check(others=0)
    assert [owner.kind for owner in cache.allocator.owners(0)] == ["pin"]
    del pins
    gc.collect()
    assert cache.allocator.in_use == 0


def test_ends_of_pins_let_go_early_do_not_pile_up(cache):
    pins = PrefixPins(cache, 4)
    for now in range(1000):
        pins.unpin(pins.pin([1, 2], ttl=1e9, now=now))
    assert len(pins._due) < 100 and pins.expire(2e9) == 0
