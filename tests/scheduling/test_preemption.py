"""Preemption: only as much as needed, each action with its reason, and no token or block is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from marked_engine import LAYOUT, Engine
from preemption_run import MODES, run
from share import examples

from pagepool import PrefixCache, Scheduler, SchedulerConfig, SeqState, Tenant
from pagepool.prefix.eviction import POLICIES as CACHE_POLICIES
from pagepool.scheduling.policies import POLICIES

BLOCK = LAYOUT.block_size


def make(num_blocks, cache_policy=None, **config):
    engine = Engine(num_blocks)
    cache = PrefixCache(engine.pool.allocator, BLOCK, cache_policy) if cache_policy else None
    config = {"max_batch_tokens": 64, **config}
    return Scheduler(SchedulerConfig(**config), engine.pool, cache), engine


def step(scheduler, engine, token=7):
    batch = scheduler.schedule()
    engine.run(scheduler, batch)
    scheduler.commit(batch, [token] * len(batch))
    return batch


def until_preempted(scheduler, engine, limit=100):
    for _ in range(limit):
        step(scheduler, engine)
        if scheduler.num_preemptions:
            return scheduler.preemptions[-1]
    raise AssertionError("no sequence was preempted")


def run_to_end(scheduler, engine, limit=5000):
    for _ in range(limit):
        if not scheduler.has_work:
            return scheduler.drain_finished()
        assert not step(scheduler, engine).is_empty
    raise AssertionError(f"requests still run after {limit} steps")


def test_partial_preemption_takes_the_last_blocks_and_only_those_are_read_again():
    scheduler, engine = make(6)
    for prompt in (7, 10):
        scheduler.add_request(range(prompt), 20)
    record = until_preempted(scheduler, engine)
    victim = scheduler.get_sequence(2)
    assert (record.action, record.seq_id, record.blocks) == ("partial", 2, 1)
    assert victim.state is SeqState.PREEMPTED and victim.fed == victim.kv.len == 8
    scheduler.finish_sequence(1)
    batch = step(scheduler, engine)
    assert batch.seq_ids == [2] and batch.tokens[0] == victim.all_tokens[8:-1] and victim.num_cached == 8
    assert len(run_to_end(scheduler, engine)) == 2 and engine.pool.allocator.in_use == 0


def test_with_a_prefix_cache_only_the_last_blocks_are_given():
    scheduler, engine = make(9, "lru")
    for head in (0, 100, 200):
        scheduler.add_request(range(head, head + 10), 30)
    until_preempted(scheduler, engine)
    [record] = [record for record in scheduler.preemptions if record.action != "evict"]
    victim = scheduler.get_sequence(record.seq_id)
    assert (record.action, record.reason) == ("partial", "its last blocks are enough")
    assert victim.state is SeqState.PREEMPTED and victim.fed == victim.kv.len > 0
    assert len(run_to_end(scheduler, engine)) == 3


def test_the_rest_of_a_preempted_request_is_freed_before_another_is_preempted():
    scheduler, engine = make(9)
    for _ in range(3):
        scheduler.add_request(range(10), 36)
    until_preempted(scheduler, engine)
    first = scheduler.get_sequence(3)
    assert first.kv is not None
    while scheduler.num_preemptions < 2:
        step(scheduler, engine)
    assert first.kv is None and first.fed == 0
    gave = [record.seq_id for record in scheduler.preemptions]
    assert gave == [3] * (len(gave) - 1) + [2] and len(gave) > 2
    assert len(run_to_end(scheduler, engine)) == 3


def test_records_are_bounded_and_totals_are_not(monkeypatch):
    monkeypatch.setattr("pagepool.scheduling.preemption.MAX_RECORDS", 3)
    scheduler, engine = make(8)
    for _ in range(12):
        scheduler.add_request(range(6), 24)
    run_to_end(scheduler, engine)
    stats = scheduler.stats()
    assert len(scheduler.preemptions) == 3
    assert sum(stats["actions"].values()) >= stats["preemptions"] == scheduler.num_preemptions > 3


@examples(60)
@given(
    st.integers(3, 14),
    st.lists(st.tuples(st.integers(1, 14), st.integers(1, 14), st.integers(0, 2)), min_size=1, max_size=12),
    st.sampled_from([None, *CACHE_POLICIES]),
    st.sampled_from(sorted(POLICIES)),
    st.integers(0, 2),
    st.randoms(use_true_random=False),
)
def test_a_preempted_sequence_sees_its_own_keys_again(num_blocks, requests, cache_policy, policy, lookahead, rng):
    """Random policies, aborts and foreign holders of blocks.

    The fake engine checks every key in each step, and the invariants hold after it.
    """
    scheduler, engine = make(
        num_blocks,
        cache_policy,
        policy=policy,
        lookahead=lookahead,
        max_sequences=4,
        max_batch_tokens=12,
        tenants={1: Tenant(max_blocks=max(2, num_blocks // 2))},
    )
    allocator = engine.pool.allocator
    most = {0: num_blocks, 1: min(num_blocks, max(2, num_blocks // 2)), 2: num_blocks}
    todo = [r for r in requests if -(-(r[0] + r[1]) // BLOCK) <= most[r[2]]]
    outside = []
    for number in range(3000):
        if todo and rng.random() < 0.4:
            prompt, output, tenant = todo.pop()
            tokens = [rng.randrange(2) for _ in range(prompt)]
            scheduler.add_request(tokens, prompt + output, tenant, tenant=tenant)
        if number < 60 and rng.random() < 0.1 and allocator.available:
            outside.append(allocator.allocate())
        elif outside and (number >= 60 or rng.random() < 0.3):
            allocator.free(outside.pop())
        if rng.random() < 0.03 and scheduler.total_count:
            scheduler.finish_sequence(rng.choice(list(scheduler._sequences)))
        batch = scheduler.schedule()
        engine.run(scheduler, batch)
        if rng.random() < 0.03 and len(batch):
            scheduler.remove_sequence(rng.choice(batch.seq_ids))
        scheduler.commit(batch, [rng.randrange(2) for _ in batch.seq_ids])
        check(scheduler, allocator, outside)
        if not todo and not scheduler.has_work and not outside:
            break
    assert not scheduler.has_work and not todo
    scheduler.drain_finished()
    if cache_policy:
        scheduler._prefix.cache.check()
        scheduler._prefix.cache.reset_prefix_cache()
    assert allocator.in_use == 0 and scheduler.num_tokens == 0


def check(scheduler, allocator, outside):
    sequences = list(scheduler._sequences.values())
    active = [seq for seq in sequences if seq.state in (SeqState.PREFILLING, SeqState.DECODING)]
    waiting = [seq for seq in sequences if seq.state in (SeqState.WAITING, SeqState.PREEMPTED)]
    assert (len(active), len(waiting)) == (scheduler.active_count, scheduler.waiting_count)
    holders = [seq for seq in sequences if seq.kv is not None]
    for seq in holders:
        assert seq.kv.len == seq.fed <= seq.total_tokens and (seq in active or seq.state is SeqState.PREEMPTED)
    assert scheduler.num_tokens == sum(seq.kv.len for seq in holders)
    scheduler.check()
    allocator.check(others=len(outside))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", MODES)
def test_a_pool_that_is_always_full_keeps_nine_tenths_of_its_throughput(mode):
    """10,000 steps; `make preemption-test` runs 1,000,000. The time is virtual and the same in every run."""
    eased, full = (run(5_000, 1, mode, share) for share in (0.8, 1.0))
    assert full.throughput >= 0.9 * eased.throughput
    assert full.preemptions > 100 and full.occupancy > 0.95
