"""Hits of the gittins policy on synthetic prompts, compared with other policies and with Belady's bound."""

import numpy as np
import pytest

import pagepool
from pagepool import BlockAllocator, PrefixCache
from pagepool.reference.gittins import AGES, age_class, first_age
from pagepool.reference.policies import belady_pass

# Hits of ARC, summed over the four capacities below, for seeds 0 and 1.
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
    return belady_pass(np.concatenate(prompts).tolist(), np.cumsum([len(prompt) for prompt in prompts]), capacity)[0]


class Blocks:
    """Returns rows of new ids."""

    def __init__(self):
        self.next = 0

    def __call__(self, n):
        self.next += n
        return np.arange(self.next - n, self.next, dtype=np.int32)


def loop(random, new):
    """40 documents of 50 blocks in turn, each with a question."""
    documents = [new(50) for _ in range(40)]
    return [np.concatenate([documents[i % 40], new(2)]) for i in range(800)]


def system_prompts(random, new):
    """One of 60 system prompts, some much more popular than others, followed by unique blocks."""
    beginnings = [new(int(random.integers(4, 40))) for _ in range(60)]
    choice = np.minimum(random.zipf(1.3, 2500), 60) - 1
    return [np.concatenate([beginnings[i], new(int(random.integers(2, 25)))]) for i in choice]


def scans(random, new):
    """Popular documents, interrupted by groups of documents that occur only once."""
    documents, prompts = [new(25) for _ in range(60)], []
    while len(prompts) < 2500:
        if random.random() < 0.01:
            prompts += [new(60) for _ in range(25)]
        prompts.append(np.concatenate([documents[int(60 * random.random() ** 2)], new(2)]))
    return prompts


def conversations(random, new):
    """12 users in random order; each continues a conversation, which ends with probability 1/12."""
    contexts, prompts = [new(10) for _ in range(12)], []
    for _ in range(2500):
        user = int(random.integers(12))
        begins = random.random() < 1 / 12
        contexts[user] = new(10) if begins else np.concatenate([contexts[user], new(int(random.integers(1, 12)))])
        prompts.append(contexts[user])
    return prompts


@pytest.mark.one_in(4)
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


def test_of_a_loop_longer_than_the_cache_a_part_stays():
    prompts = loop(np.random.default_rng(0), Blocks())
    assert hits("lru", prompts, 1000) == 0
    assert hits("gittins", prompts, 1000) > 0.8 * best(prompts, 1000) > 0


def test_a_block_is_evicted_only_after_its_cached_children():
    cache = PrefixCache(BlockAllocator(64), 1, "gittins")
    for tail in range(4):
        cache.touch([1, 2, 3, 4, 10 + tail, 5, 6])
    cached = cache.num_cached
    for left in range(cached - 1, 0, -1):
        assert cache.evict(1) == 1
        runs = [cache.match_prefix([1, 2, 3, 4, 10 + tail, 5, 6]) for tail in range(4)]
        assert len({block for run in runs for block in run.tolist()}) == left, "some cached blocks are unreachable"
        for run in runs:
            cache.allocator.free(run)


def test_blocks_whose_cached_children_are_held_are_evicted_all_the_same():
    cache = PrefixCache(BlockAllocator(8), 1, "gittins")
    first = cache.allocator.allocate_n(2)
    cache.cache_blocks([1, 2], first)
    second = cache.allocator.allocate_n(3)
    cache.cache_blocks([1, 2, 3], second)  # the third block alone is new
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


def test_no_policy_passes_the_bound():
    random = np.random.default_rng(3)
    rows = [np.arange(1 + int(9 * random.random()), dtype=np.int32) + 10 * int(random.integers(8)) for _ in range(300)]
    for capacity in (5, 20, 40):
        for policy in ("lru", "gittins"):
            assert hits(policy, rows, capacity) <= best(rows, capacity)
