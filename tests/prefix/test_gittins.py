"""The gittins policy on many synthetic loads, against LRU, ARC and its reference implementation."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

import pagepool
from pagepool import BlockAllocator, PrefixCache, reference
from pagepool.reference import BlockAllocator as PlainAllocator
from pagepool.reference import PrefixCache as PlainCache
from pagepool.reference.policies import belady_pass

BENCH = Path(__file__).parents[2] / "bench"
if not BENCH.is_dir():
    pytest.skip("needs bench/ of a checkout", allow_module_level=True)
sys.path.append(str(BENCH))
traces = importlib.import_module("traces")

CAPACITIES = [1000, 3000, 10_000]
# Hits of ARC, summed over these capacities, by pagepool.reference, in the traces of seed 21.
ARC_HITS = {
    "conversations": 93_736,
    "agents": 262_666,
    "chats": 220_465,
    "documents": 153_497,
    "sweeps": 415_906,
    "loop": 0,
    "phases": 235_741,
    "regimes": 234_540,
    "recency": 222_070,
    "crowds": 156_848,
    "coding": 381_906,
    "branches": 404_739,
    "tenants": 135_141,
}


def hits(policy, rows, capacity):
    cache = PrefixCache(BlockAllocator(capacity), 1, policy)
    found = sum(cache.touch(row) for row in rows)
    cache.check()
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", traces.TRACES)
def test_it_has_at_least_the_hits_of_lru_and_more_than_arc_in_total(name):
    """If LRU is optimal or the load changes abruptly, it may lose hits up to a quarter of the capacity."""
    rows = traces.make_trace(name, 21, 150_000)
    ids, ends = np.concatenate(rows).tolist(), np.cumsum([len(row) for row in rows])
    own = [hits("gittins", rows, capacity) for capacity in CAPACITIES]
    lru = [hits("lru", rows, capacity) for capacity in CAPACITIES]
    for capacity, mine, theirs in zip(CAPACITIES, own, lru, strict=True):
        less = capacity // 4 if name in ("recency", "regimes") else theirs // 1000
        assert theirs - less <= mine <= belady_pass(ids, ends, capacity)[0]
    assert sum(own) >= ARC_HITS[name]


@pytest.mark.parametrize("name", traces.TRACES)
def test_without_statistics_or_evictions_it_has_the_hits_of_lru_to_a_few_blocks(name):
    rows = traces.make_trace(name, 12, 5_000)
    for capacity in (2_500, 4_000):
        assert hits("gittins", rows, capacity) >= hits("lru", rows, capacity) - 3
    assert hits("gittins", rows, 6_000) == hits("lru", rows, 6_000)


def test_the_cost_of_learning_is_bounded_when_the_load_changes():
    """Each attempt loses at most a tenth of the capacity plus the hits until LRU's blocks are cached again.

    Attempts become less frequent.
    """
    looped = [np.arange(40 * i, 40 * (i + 1), dtype=np.int32) for i in range(60)]
    rows, made = looped * 20, 2400
    for _ in range(3000):
        rows.append(np.arange(made, made + 30, dtype=np.int32))
        made += 30
        rows += rows[-1:-40:-9]
    lru, own = hits("lru", rows, 1500), hits("gittins", rows, 1500)
    assert own >= lru > 0
    turned = rows[len(looped) * 20 :]
    assert hits("gittins", turned, 1500) >= hits("lru", turned, 1500) - 300


@pytest.mark.parametrize(("name", "capacity"), [("regimes", 40), ("conversations", 300), ("chats", 100), ("loop", 500)])
def test_a_long_pass_of_learning_agrees_with_the_reference(name, capacity):
    rows = traces.make_trace(name, 5, 15_000)
    ours = PrefixCache(BlockAllocator(capacity), 1, "gittins")
    plain = PlainCache(PlainAllocator(capacity), 1, "gittins")
    assert [ours.touch(row) for row in rows] == [plain.touch(row.tolist()) for row in rows]
    assert ours.stats()["evicted"] == plain.evicted


def served(memory, rows, capacity):
    """Serve prompts like an engine, with look-ups of whole runs; yield the hits and blocks of each prompt.

    The blocks include reused blocks of evicted entries, so they show the order of evictions.
    """
    allocator = memory.BlockAllocator(capacity)
    cache = memory.PrefixCache(allocator, 1, "gittins")
    for row in rows:
        found = cache.match_prefix(row)
        missing = len(row) - len(found)
        cache.evict(max(0, missing - allocator.free_count))
        table = [*map(int, found), *map(int, allocator.allocate_n(missing))]
        cache.cache_blocks(row, table)
        allocator.free(table)
        yield len(found), table
    cache.check()


@pytest.mark.parametrize(("name", "capacity"), [("regimes", 300), ("conversations", 300), ("chats", 500)])
def test_look_ups_of_runs_give_the_same_decisions_as_block_by_block(name, capacity):
    rows = [row.tolist()[: capacity // 2] for row in traces.make_trace(name, 8, 15_000)]
    assert list(served(pagepool, rows, capacity)) == list(served(reference, rows, capacity))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("capacity", [150, 300, 500])
def test_parts_of_a_run_with_different_use_counts_are_distinguished(capacity):
    """Conversations of many turns: earlier blocks were used more often than later blocks of the same request."""
    rng, rows, made, grown = np.random.default_rng(4), [], 0, [[] for _ in range(9)]
    for _ in range(900):
        talk = int(rng.integers(9))
        size = int(rng.integers(1, 9))
        grown[talk] = [*(grown[talk] if len(grown[talk]) < 60 else []), *range(made, made + size)]
        made += size
        rows.append(grown[talk])
    assert list(served(pagepool, rows, capacity)) == list(served(reference, rows, capacity))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("capacity", [150, 400, 1000])
@pytest.mark.parametrize("name", ["conversations", "recency", "documents"])
def test_its_shadow_of_lru_counts_the_hits_of_lru(name, capacity):
    """The reference's `lead` is its own hits minus LRU's hits, for prompts that fit into the cache."""
    rows = [row.tolist()[:capacity] for row in traces.make_trace(name, 6, 12_000)]
    own = PlainCache(PlainAllocator(capacity), 1, "gittins")
    found = sum(own.touch(row) for row in rows)
    assert found - own._order.shadow.lead == hits("lru", rows, capacity)


def test_the_same_seed_makes_the_same_traces_and_equal_ids_have_equal_beginnings():
    for name in traces.TRACES:
        rows = traces.make_trace(name, 3, 4_000)
        again = traces.make_trace(name, 3, 4_000)
        assert len(rows) == len(again) and all(map(np.array_equal, rows, again))
        before = {}
        for row in rows:
            for parent, block in zip([-1, *row[:-1].tolist()], row.tolist(), strict=True):
                assert before.setdefault(block, parent) == parent


@pytest.mark.parametrize("api", [pagepool, reference])
def test_a_group_that_returns_after_an_older_one_is_not_evicted_next(api):
    """Blocks are evicted in runs only if single evictions would choose the same blocks.

    The last block of each of three groups is held, so that all other blocks of the group wait for it. Freed one after
    another, the groups return to the list of the least recently used blocks in the wrong order: [first, second,
    third], although the third was used before the second.
    """
    allocator = api.BlockAllocator(300)
    cache = api.PrefixCache(allocator, 1, "gittins")
    first, third, second, last, others = chains = [allocator.allocate_n(n).tolist() for n in (6, 4, 4, 1, 200)]
    for number, blocks in enumerate(chains):
        cache.cache_blocks(range(1000 * number, 1000 * number + len(blocks)), blocks)
    cache.discard(others)  # cached only to put all other blocks into one age class
    allocator.free(others + last + first[:-1] + second[:-1] + third[:-1])

    def kept(n):
        assert cache.evict(n) == n
        return [len({*blocks} & {*cache.references()}) for blocks in (first, second, third)]

    assert kept(1) == [6, 4, 4] and last[0] not in cache.references()
    allocator.free([first[-1], second[-1]])
    assert kept(1) == [5, 4, 4] and kept(1) == [4, 4, 4]
    allocator.free(third[-1])
    assert kept(1) == [3, 4, 4] and kept(3) == [0, 4, 4]
    assert kept(3) == [0, 3, 2]  # the second group comes after the third
    assert kept(5) == [0, 0, 0]
