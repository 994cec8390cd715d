"""What our own policy keeps that others lose, and how far from the best it stays: prompts made up for the purpose."""

import numpy as np
import pytest
from refusals import refuses

import pagepool
from pagepool import BlockAllocator, PrefixCache, reference
from pagepool.prefix.policies import belady_pass
from pagepool.reference.gittins import AGES, age_class, first_age
from pagepool.reference.policies import belady_pass as plain_belady_pass

# Hits of ARC in sum over the four capacities below, for seeds 0 and 1.
ARC_HITS = {
    "loop": (0, 0),
    "system_prompts": (230_024, 238_566),
    "scans": (116_825, 122_450),
    "conversations": (379_538, 424_039),
}


def hits(policy, prompts, capacity, memory=pagepool):
    cache = memory.PrefixCache(memory.BlockAllocator(capacity), 1, policy)
    found = sum(cache.touch(prompt) for prompt in prompts)
    cache.check()
    return found


def best(prompts, capacity):
    return belady_pass(np.concatenate(prompts), np.cumsum([len(prompt) for prompt in prompts]), capacity)[0]


class Blocks:
    """Hands out rows of ids that nobody had before."""

    def __init__(self):
        self.next = 0

    def __call__(self, n):
        self.next += n
        return np.arange(self.next - n, self.next, dtype=np.int32)


def loop(random, new):
    """40 documents of 50 blocks by turns, with a question each."""
    documents = [new(50) for _ in range(40)]
    return [np.concatenate([documents[i % 40], new(2)]) for i in range(800)]


def system_prompts(random, new):
    """One of 60 beginnings, some much more popular than others, and then something that never comes again."""
    beginnings = [new(int(random.integers(4, 40))) for _ in range(60)]
    choice = np.minimum(random.zipf(1.3, 2500), 60) - 1
    return [np.concatenate([beginnings[i], new(int(random.integers(2, 25)))]) for i in choice]


def scans(random, new):
    """Popular documents; now and then a crowd of others that come once."""
    documents, prompts = [new(25) for _ in range(60)], []
    while len(prompts) < 2500:
        if random.random() < 0.01:
            prompts += [new(60) for _ in range(25)]
        prompts.append(np.concatenate([documents[int(60 * random.random() ** 2)], new(2)]))
    return prompts


def conversations(random, new):
    """12 users take turns at random; each goes on with a conversation, which ends one time in twelve."""
    contexts, prompts = [new(10) for _ in range(12)], []
    for _ in range(2500):
        user = int(random.integers(12))
        begins = random.random() < 1 / 12
        contexts[user] = new(10) if begins else np.concatenate([contexts[user], new(int(random.integers(1, 12)))])
        prompts.append(contexts[user])
    return prompts


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("make", [loop, system_prompts, scans, conversations], ids=lambda make: make.__name__)
def test_our_own_policy_is_at_least_lru_and_more_than_arc_in_sum(make, seed):
    prompts = make(np.random.default_rng(seed), Blocks())
    capacities = [250, 500, 1000, 1500]
    own = [hits("gittins", prompts, capacity) for capacity in capacities]
    lru = [hits("lru", prompts, capacity) for capacity in capacities]
    assert all(mine >= theirs for mine, theirs in zip(own, lru, strict=True))
    assert sum(own) > ARC_HITS[make.__name__][seed]
    assert all(mine <= best(prompts, capacity) for mine, capacity in zip(own, capacities, strict=True))


def test_arc_of_the_reference_finds_what_the_compiled_one_found():
    prompts = system_prompts(np.random.default_rng(0), Blocks())
    assert hits("arc", prompts, 250, reference) == 52_369
    assert hits("arc", loop(np.random.default_rng(0), Blocks()), 1000, reference) == 0


def test_of_a_loop_longer_than_the_cache_a_part_stays():
    prompts = loop(np.random.default_rng(0), Blocks())
    assert hits("lru", prompts, 1000) == 0
    assert hits("gittins", prompts, 1000) > 0.8 * best(prompts, 1000) > 0


def test_a_block_goes_only_after_its_cached_children():
    cache = PrefixCache(BlockAllocator(64), 1, "gittins")
    for tail in range(4):
        cache.touch([1, 2, 3, 4, 10 + tail, 5, 6])
    cached = cache.num_cached
    for left in range(cached - 1, 0, -1):
        assert cache.evict(1) == 1
        runs = [cache.match_prefix([1, 2, 3, 4, 10 + tail, 5, 6]) for tail in range(4)]
        assert len({block for run in runs for block in run.tolist()}) == left, "what is cached is found from the head"
        for run in runs:
            cache.allocator.free(run)


def test_blocks_whose_cached_children_are_held_are_evicted_all_the_same():
    cache = PrefixCache(BlockAllocator(8), 1, "gittins")
    first = cache.allocator.allocate_n(2)
    cache.cache_blocks([1, 2], first)
    second = cache.allocator.allocate_n(3)
    cache.cache_blocks([1, 2, 3], second)  # only the third block is new
    cache.allocator.free(first)
    assert cache.evictable == 2 and cache.evict(8) == 2
    cache.check()
    cache.allocator.free(second)
    assert cache.evict(8) == 1 and cache.allocator.in_use == 0
    cache.check()


def test_age_classes_are_without_gaps():
    for age in [*range(1, 5000), 2**31 - 1, 2**31, 3 * 2**30, 2**40]:
        number = age_class(age)
        assert first_age(number) <= age and (age < first_age(number + 1) or number == AGES - 1)


@pytest.mark.parametrize("capacity", [0, 1, 3, 7, 20, 100])
def test_the_bound_agrees_with_the_reference(capacity):
    random = np.random.default_rng(capacity)
    rows = [random.integers(0, 30, random.integers(0, 6)).astype(np.int32) for _ in range(200)]
    ids, ends = np.concatenate(rows), np.cumsum([len(row) for row in rows])
    expected = plain_belady_pass(ids.tolist(), ends.tolist(), capacity)
    assert belady_pass(ids, ends, capacity) == expected
    assert belady_pass(ids * 60_000_000, ends, capacity) == expected, "ids far apart"


def test_no_policy_passes_the_bound():
    random = np.random.default_rng(3)
    rows = [np.arange(1 + int(9 * random.random()), dtype=np.int32) + 10 * int(random.integers(8)) for _ in range(300)]
    for capacity in (5, 20, 40):
        for policy in ("lru", "gittins", "priority"):
            assert hits(policy, rows, capacity) <= best(rows, capacity)
        for policy in ("lfu", "s3fifo", "arc"):
            assert hits(policy, rows, capacity, reference) <= best(rows, capacity)


@pytest.mark.parametrize(
    ("ids", "ends", "capacity", "words"), [([0, 1], [1], 4, (2, 1)), ([0], [1], -1, (-1,)), ([-3], [1], 1, (-3,))]
)
def test_the_bound_refuses_what_is_no_pass(ids, ends, capacity, words):
    with refuses(ValueError, *words):
        belady_pass(np.array(ids, np.int32), np.array(ends), capacity)


def test_the_bound_of_nothing_is_nothing():
    assert belady_pass(np.empty(0, np.int32), np.empty(0, np.int64), 5) == (0, 0)


def test_the_lowest_priority_goes_first_whatever_was_used_last():
    cache = PrefixCache(BlockAllocator(8), 1, "priority")
    for token, priority in ((1, 9), (2, 0), (3, 255), (4, 9)):
        keep(cache, token, priority=priority)
    cache.allocator.free(cache.match_prefix([1]))
    assert cache.evict(1) == 1 and tokens_of(cache) == [1, 3, 4]
    assert cache.evict(1) == 1 and tokens_of(cache) == [3, 4]
    assert cache.evict(1) == 1 and tokens_of(cache) == [3]
    assert cache.evict(1) == 1 and tokens_of(cache) == []
    with refuses(ValueError, 0, 255, 256):
        cache.cache_blocks([1], [0], priority=256)
    with refuses(ValueError, "policy", "priority", 0, 3):
        PrefixCache(BlockAllocator(8), 1).cache_blocks([1], [0], priority=3)


def keep(cache, token, **names):
    block = cache.allocator.allocate()
    cache.cache_blocks([token], [block], **names)
    cache.allocator.free(block)


def test_a_priority_ends_when_its_time_has_come_and_is_told():
    cache = PrefixCache(BlockAllocator(8), 1, "priority")
    keep(cache, 1, priority=9, ttl=10, now=100)
    keep(cache, 2, priority=255, ttl=5.5, now=100)
    keep(cache, 3, priority=1)
    keep(cache, 4)
    assert cache.expire(105.25) == 0 and cache.evict(1) == 1 and tokens_of(cache) == [1, 2, 3]
    assert cache.expire(105.5) == 1 and cache.expire(105.5) == cache.expire(0) == 0
    assert cache.evict(1) == 1 and tokens_of(cache) == [1, 3]
    cache.check()
    keep(cache, 2, priority=200, ttl=1, now=100)  # has ended already
    assert cache.evict(1) == 1 and tokens_of(cache) == [1, 3]
    assert cache.evict(1) == 1 and tokens_of(cache) == [1]
    held = cache.match_prefix([1])
    keep(cache, 3, priority=3)
    keep(cache, 4, priority=20)
    assert cache.evict(1) == 1 and tokens_of(cache) == [1, 4]
    assert cache.expire(1e9) == 1  # while it is held
    cache.allocator.free(held)
    assert cache.evict(1) == 1 and tokens_of(cache) == [4]
    cache.check()
    keep(cache, 1, priority=255, ttl=1, now=2e9)
    assert cache.evict(2) == 2  # before its time
    cache.check()
    assert cache.expire(1e10) == 0


def test_priorities_end_in_the_order_of_their_times_whenever_that_is_told():
    random = np.random.default_rng(8)
    times = np.concatenate([random.normal(0, 10.0 ** random.integers(-3, 9), 40) for _ in range(12)])
    times = np.concatenate([times, times[::7], [0.0, -0.0, np.inf, -1e308, 1e308]])
    for steps in (1, 3, 50):
        cache = PrefixCache(BlockAllocator(len(times)), 1, "priority")
        for token in range(len(times)):
            keep(cache, token, priority=int(random.integers(1, 256)), ttl=0, now=times[token])
        for now in [*np.sort(random.choice(times[:400], steps - 1)), np.inf]:
            due = int((times <= now).sum())
            cache.expire(now)
            cache.check()
            assert cache.expire(now) == 0
            left = due - cache.stats()["evicted"]
            assert cache.evict(left) == left
            gone = [token for token in range(len(times)) if not cache.cached_tokens([token])]
            assert gone == sorted(np.argsort(times, kind="stable")[:due])
    cache = PrefixCache(BlockAllocator(len(times)), 1, "priority")
    for token in range(len(times)):
        keep(cache, token, priority=7, ttl=0, now=times[token])
    assert cache.expire(np.inf) == len(times)
    for token in np.argsort(times, kind="stable").tolist():
        assert cache.evict(1) == 1 and cache.cached_tokens([token]) == 0


def test_what_is_no_ttl_is_refused_and_changes_nothing():
    cache = PrefixCache(BlockAllocator(8), 1, "priority")
    block = cache.allocator.allocate()
    for names, error, match in (
        ({"ttl": -1}, ValueError, "ttl must be 0 or more, not -1"),
        ({"ttl": float("nan")}, ValueError, "ttl must be a number, not nan"),
        ({"ttl": 1, "now": float("nan")}, ValueError, "now must be a time, not nan"),
        ({"now": float("nan")}, ValueError, "now must be a time, not nan"),
        ({"ttl": float("inf"), "now": float("-inf")}, ValueError, "must add up to a time, not inf and -inf"),
        ({"ttl": "1"}, TypeError, "ttl must be a number, not str: '1'"),
        ({"ttl": 1, "now": None}, TypeError, "must be real number, not NoneType"),
    ):
        with pytest.raises(error, match=match):
            cache.cache_blocks([1], [block], priority=3, **names)
    with refuses(ValueError, "now", "nan"):
        cache.expire(float("nan"))
    with refuses(ValueError, "policy", "None", 3):
        PrefixCache(BlockAllocator(8), 1).cache_blocks([1], [0], ttl=3)
    assert PrefixCache(BlockAllocator(8), 1).expire(5) == cache.num_cached == 0
    cache.check()


def tokens_of(cache):
    """Which of the prompts of one token, 1 to 4, are cached; each counts as used, lowest first."""
    found = []
    for token in (1, 2, 3, 4):
        blocks = cache.match_prefix([token])
        found += [token] * len(blocks)
        cache.allocator.free(blocks)
    return found
