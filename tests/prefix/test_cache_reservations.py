"""Reservations: what a group of cached blocks keeps when others need room, whatever the policy."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import pagepool
from pagepool import BlockAllocator, PrefixCache, reference
from pagepool.prefix.eviction import POLICIES

CAPACITY = 12
GROUPS = 4


def flood(allocator, cache, count, first=1000, group=0):
    """As many blocks of one group, each for a token of its own; others are evicted for them as needed."""
    done = 0
    for token in range(first, first + count):
        if not allocator.free_count and not cache.evict(1, group=group):
            break
        block = allocator.allocate()
        cache.cache_blocks([token], [block], group=group)
        allocator.free([block])
        done += 1
    return done


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_flood_of_one_tenant_never_takes_what_another_has_reserved(policy):
    allocator = BlockAllocator(16)
    cache = PrefixCache(allocator, 1, policy)
    cache.reservations.set(1, 5)
    flood(allocator, cache, 9, group=1)
    for turn in range(20):
        flood(allocator, cache, 30, 2000 + 100 * turn, group=2)
        assert (cache.reservations.cached(1), cache.reservations.cached(2)) == (5, 11)
    assert cache.reservations.evictable() == 11 and cache.reservations.protected(1) == 5
    cache.check()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_tenant_may_take_its_own_reservation(policy):
    allocator = BlockAllocator(8)
    cache = PrefixCache(allocator, 1, policy)
    cache.reservations.set(1, 6)
    cache.reservations.set(2, 2)
    flood(allocator, cache, 6, group=1)
    flood(allocator, cache, 2, 50, group=2)
    assert cache.reservations.evictable() == 0 and cache.evict(8) == 0
    assert cache.reservations.evictable(1) == 6 and flood(allocator, cache, 30, 3000, group=1) == 30
    assert cache.reservations.cached(1) == 6 and cache.cached_tokens([50]) == 1
    cache.check()


def test_the_oldest_go_first_when_the_group_has_more_than_it_reserved():
    """What was spared does not stay for ever: with new blocks in the group, the reservation is for those."""
    allocator = BlockAllocator(8)
    cache = PrefixCache(allocator, 1)
    cache.reservations.set(1, 3)
    for token in range(40):
        flood(allocator, cache, 1, token, group=1)
        flood(allocator, cache, 9, 1000 + 10 * token, group=2)
    assert [cache.cached_tokens([token]) for token in range(35, 40)] == [0, 0, 1, 1, 1]
    cache.reservations.set(1, 1)
    flood(allocator, cache, 9, 2000, group=2)
    assert [cache.cached_tokens([token]) for token in range(37, 40)] == [0, 0, 1]
    cache.check()


def test_a_block_that_takes_the_place_of_another_is_of_its_group():
    """Also one that was spared, or is to go before all others."""
    allocator = BlockAllocator(8)
    cache = PrefixCache(allocator, 1)
    cache.reservations.set(1, 2)
    flood(allocator, cache, 2, 50, group=1)
    assert cache.evict(8) == 0
    used = allocator.allocate_n(3)
    assert cache.cache_blocks([50], used[:1], group=2) == 1
    assert (cache.reservations.cached(1), cache.reservations.cached(2), cache.reservations.protected(1)) == (2, 0, 1)
    cache.check()
    cache.reservations.set(1, 1)
    assert cache.cache_blocks([51], used[1:]) == 1 and cache.evict(8) == 0
    cache.check()
    allocator.free(used)
    assert cache.reservations.cached(1) == 2 and cache.evict(8) == 1 and cache.evict(8, group=1) == 1
    cache.check()


def test_blocks_in_use_count_for_the_reservation():
    allocator = BlockAllocator(8)
    cache = PrefixCache(allocator, 1)
    cache.reservations.set(1, 3)
    flood(allocator, cache, 5, 0, group=1)
    held = [cache.match_prefix([token]) for token in range(2)]
    assert cache.reservations.protected(1) == 1 and cache.reservations.evictable() == 2 and cache.evict(8) == 2
    assert cache.reservations.cached(1) == 3 and cache.reservations.protected(1) == 1
    for blocks in held:
        allocator.free(blocks)
    assert cache.reservations.protected(1) == 3 and cache.evict(8) == 0
    cache.check()


@pytest.mark.parametrize("group", [-1, 255, 10**9])
def test_groups_are_from_0_to_254(group):
    cache = PrefixCache(BlockAllocator(4), 1)
    for call in (
        lambda: cache.reservations.set(group, 1),
        lambda: cache.reservations.get(group),
        lambda: cache.reservations.cached(group),
        lambda: cache.reservations.protected(group),
        lambda: cache.reservations.evictable(group),
        lambda: cache.cache_blocks([], [], group=group),
        lambda: cache.evict(1, group=group),
    ):
        with pytest.raises(ValueError, match=f"a group must be from 0 to 254, not {group}"):
            call()
    with pytest.raises(ValueError, match="a reservation must be 0 blocks or more, not -1"):
        cache.reservations.set(1, -1)
    assert cache.reservations.get(1) == 0


class Reservations(RuleBasedStateMachine):
    """Two caches, ours and the plain one, that do the same; the property is checked at every eviction."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def begin(self, policy):
        self.pairs = []
        for api in (pagepool, reference):
            allocator = api.BlockAllocator(CAPACITY)
            self.pairs.append((allocator, api.PrefixCache(allocator, 1, policy)))
        self.held = []

    def both(self, call):
        ours, theirs = (call(allocator, cache) for allocator, cache in self.pairs)
        assert ours == theirs
        return ours

    @rule(group=st.integers(0, GROUPS - 1), blocks=st.integers(0, CAPACITY))
    def reserve(self, group, blocks):
        self.both(lambda _, cache: cache.reservations.set(group, blocks))

    @rule(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=4), group=st.integers(0, GROUPS - 1))
    def cache(self, tokens, group):
        def run(allocator, cache):
            missing = len(tokens) - allocator.free_count
            if missing > 0:
                cache.evict(missing, group=group)
            if allocator.free_count < len(tokens):
                return None
            blocks = allocator.allocate_n(len(tokens))
            fresh = cache.cache_blocks(tokens, blocks, group=group)
            allocator.free(blocks)
            return fresh

        self.both(run)

    @rule(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=4))
    def match(self, tokens):
        self.held.append(self.both(lambda _, cache: cache.match_prefix(tokens).tolist()))

    @rule(data=st.data())
    def let_go(self, data):
        if self.held:
            blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.both(lambda allocator, _: allocator.free(blocks))

    @rule(n=st.integers(0, CAPACITY), group=st.integers(0, GROUPS - 1))
    def evict(self, n, group):
        def run(_, cache):
            reserved, before = cache.reservations, [cache.reservations.cached(other) for other in range(GROUPS)]
            possible = reserved.evictable(group)
            done = cache.evict(n, group=group)
            assert done == min(n, possible)
            for other in range(GROUPS):
                assert other == group or reserved.cached(other) >= min(before[other], reserved.get(other))
            return done, [reserved.cached(other) for other in range(GROUPS)]

        self.both(run)

    @rule(tokens=st.lists(st.integers(0, 5), min_size=1, max_size=5))
    def touch(self, tokens):
        self.both(lambda _, cache: cache.touch(tokens))

    @rule(block=st.integers(0, CAPACITY - 1))
    def discard(self, block):
        self.both(lambda _, cache: cache.discard([block]))

    @rule()
    def reset(self):
        self.both(lambda _, cache: cache.reset_prefix_cache())

    @invariant()
    def the_same(self):
        if hasattr(self, "pairs"):
            self.both(lambda allocator, cache: (cache.num_cached, cache.evictable, allocator.free_count))
            for group in range(GROUPS):
                self.both(lambda _, cache, g=group: (cache.reservations.protected(g), cache.reservations.evictable(g)))
            for _, cache in self.pairs:
                cache.check()


TestReservations = Reservations.TestCase
TestReservations.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
