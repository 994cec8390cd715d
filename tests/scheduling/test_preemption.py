"""Preemption: only what is needed, the cheapest action, each one with its reason, nothing lost on the way."""

import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marked_engine import LAYOUT, Engine
from preemption_run import MODES, run

from pagepool import (
    InvalidBlock,
    KvCachePool,
    KvLayout,
    PoolExhausted,
    PreemptionCosts,
    PrefixCache,
    Scheduler,
    SchedulerConfig,
    SeqState,
    SwapError,
    SwapFile,
    Tenant,
    calibrate,
)
from pagepool.prefix.eviction import POLICIES as CACHE_POLICIES
from pagepool.scheduling.policies import POLICIES
from pagepool.scheduling.preemption import cheaper_to_swap

BLOCK = LAYOUT.block_size
CHEAP_SWAP = PreemptionCosts(recompute_us_per_token=60, swap_us_per_block=1)
CHEAP_READING = PreemptionCosts(recompute_us_per_token=1, swap_us_per_block=100)


def make(num_blocks, swap_blocks=0, cache_policy=None, **config):
    engine = Engine(num_blocks)
    swap = SwapFile(engine.pool, num_blocks=swap_blocks) if swap_blocks else None
    cache = PrefixCache(engine.pool.allocator, BLOCK, cache_policy) if cache_policy else None
    config = {"watermark": 0, "max_batch_tokens": 64, **config}
    return Scheduler(SchedulerConfig(**config), engine.pool, cache, swap), engine, swap


def step(scheduler, engine, token=7):
    batch = scheduler.schedule()
    engine.run(scheduler, batch)
    scheduler.commit(batch, [token] * len(batch))
    return batch


def until_preempted(scheduler, engine, limit=100):
    for _ in range(limit):
        step(scheduler, engine)
        if scheduler.num_preemptions:
            return scheduler.preemptions.records[-1]
    raise AssertionError("nobody gave way")


def run_to_end(scheduler, engine, limit=5000):
    for _ in range(limit):
        if not scheduler.has_work:
            return scheduler.drain_finished()
        assert not step(scheduler, engine).is_empty
    raise AssertionError(f"no end after {limit} steps")


def test_partial_preemption_takes_the_last_blocks_and_only_those_are_read_again():
    scheduler, engine, _ = make(6, preemption_actions=("partial",))
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


@pytest.mark.parametrize("actions", [(), ("partial",)])
def test_with_a_prefix_cache_only_the_last_blocks_are_given_whatever_the_actions(actions):
    scheduler, engine, _ = make(9, 0, "lru", preemption_actions=actions)
    for head in (0, 100, 200):
        scheduler.add_request(range(head, head + 10), 30)
    until_preempted(scheduler, engine)
    [record] = [record for record in scheduler.preemptions.records if record.action != "evict"]
    victim = scheduler.get_sequence(record.seq_id)
    assert (record.action, record.reason) == ("partial", "its last blocks are enough")
    assert victim.state is SeqState.PREEMPTED and victim.fed == victim.kv.len > 0
    assert len(run_to_end(scheduler, engine)) == 3


def test_what_is_left_of_a_preempted_one_goes_before_another_is_preempted():
    scheduler, engine, _ = make(9, preemption_actions=("partial",), hysteresis=4)
    for _ in range(3):
        scheduler.add_request(range(10), 36)
    until_preempted(scheduler, engine)
    first = scheduler.get_sequence(3)
    assert first.kv is not None
    while scheduler.num_preemptions < 2:
        step(scheduler, engine)
    assert first.kv is None and first.fed == 0
    gave = [record.seq_id for record in scheduler.preemptions.records]
    assert gave == [3] * (len(gave) - 1) + [2] and len(gave) > 2
    assert len(run_to_end(scheduler, engine)) == 3


def test_the_cost_table_chooses_between_the_file_and_reading_again():
    assert cheaper_to_swap(CHEAP_SWAP, 1, 4) and not cheaper_to_swap(CHEAP_READING, 1, 4)
    assert not cheaper_to_swap(PreemptionCosts(), 1, 10**9)
    for costs, actions, action in (
        (CHEAP_SWAP, ("partial", "swap"), "swap"),
        (CHEAP_READING, ("partial", "swap"), "partial"),
        (CHEAP_READING, ("swap",), "recompute"),
        (CHEAP_SWAP, ("swap",), "swap"),
        (CHEAP_SWAP, (), "recompute"),
    ):
        scheduler, engine, swap = make(6, 8, costs=costs, preemption_actions=actions)
        for prompt in (7, 10):
            scheduler.add_request(range(prompt), 20)
        record = until_preempted(scheduler, engine)
        assert record.action == action and record.reason and record.step == scheduler.num_steps
        assert len(run_to_end(scheduler, engine)) == 2 and swap.free_blocks == 8


def test_a_swapped_sequence_comes_back_without_reading_anything_again():
    scheduler, engine, swap = make(6, 8, costs=CHEAP_SWAP, preemption_actions=("swap",))
    for prompt in (7, 10):
        scheduler.add_request(range(prompt), 20)
    until_preempted(scheduler, engine)
    victim = scheduler.get_sequence(2)
    assert victim.kv is None and swap.free_blocks == 5
    scheduler.finish_sequence(1)
    batch = step(scheduler, engine)  # the engine checks every key
    assert batch.tokens == [[7]] and victim.fed == victim.total_tokens - 1 and swap.free_blocks == 8
    assert scheduler.preemptions.records[-1].action == "restore"


@pytest.mark.parametrize("end", ["finish", "remove"])
def test_one_that_ends_while_it_is_swapped_leaves_nothing_behind(end):
    scheduler, engine, swap = make(6, 8, costs=CHEAP_SWAP, preemption_actions=("partial", "swap"))
    for prompt in (7, 10):
        scheduler.add_request(range(prompt), 20)
    until_preempted(scheduler, engine)
    assert swap.free_blocks == 7 and scheduler.get_sequence(2).kv is not None
    (scheduler.finish_sequence if end == "finish" else scheduler.remove_sequence)(2)
    scheduler.remove_sequence(1)
    assert swap.free_blocks == 8 and engine.pool.allocator.in_use == 0 and scheduler.num_tokens == 0


@pytest.mark.parametrize("harm", ["short", "changed", "closed"])
def test_a_file_that_does_not_hold_what_was_written_costs_time_and_no_tokens(harm):
    scheduler, engine, swap = make(6, 8, costs=CHEAP_SWAP, preemption_actions=("swap",))
    for prompt in (7, 10):
        scheduler.add_request(range(prompt), 20)
    until_preempted(scheduler, engine)
    if harm == "short":
        os.ftruncate(swap._file, 10)
    elif harm == "changed":
        os.pwrite(swap._file, b"\x01", 200)
    else:
        swap.close()
    finished = run_to_end(scheduler, engine)
    assert [len(seq.all_tokens) for seq in finished] == [20, 20]
    [lost] = [record for record in scheduler.preemptions.records if record.action == "lost"]
    words = {"short": "ends before", "changed": "was changed", "closed": "closed"}
    assert words[harm] in lost.reason and "computed again" in lost.reason


def test_a_full_disk_and_a_full_file_lead_to_the_next_action(monkeypatch):
    scheduler, engine, swap = make(6, 8, costs=CHEAP_SWAP, preemption_actions=("swap", "partial"))
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    for prompt in (7, 10):
        scheduler.add_request(range(prompt), 20)
    record = until_preempted(scheduler, engine)
    assert record.action == "partial" and "No space left on device" in record.reason and swap.free_blocks == 8
    assert len(run_to_end(scheduler, engine)) == 2
    scheduler, engine, swap = make(6, 1, costs=CHEAP_SWAP, preemption_actions=("swap",))
    for prompt in (7, 10):
        scheduler.add_request(range(prompt), 20)
    record = until_preempted(scheduler, engine)
    assert record.action == "recompute" and "3 blocks do not fit into the swap file: 1 are free" in record.reason


def test_pages_go_to_the_file_and_back_to_the_bit():
    layout = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="bfloat16")
    pool = KvCachePool.from_layout(layout, 6)
    other = KvCachePool.from_layout(layout, 6, pool.allocator)
    swap = SwapFile([pool, other], num_blocks=3)
    for page in (*(pool.page(i) for i in range(6)), *(other.page(i) for i in range(6))):
        page[:] = random.Random(page.ctypes.data).choices(range(65536), k=len(page))
    expected = [(pool.page(i).copy(), other.page(i).copy()) for i in range(3)]
    ticket = swap.store([0, 1, 2])
    with pytest.raises(SwapError, match="1 blocks do not fit into the swap file: 0 are free"):
        swap.store([3])
    swap.load(ticket, [5, 4, 3])
    for (a, b), target in zip(expected, (5, 4, 3), strict=True):
        assert (pool.page(target) == a).all() and (other.page(target) == b).all()
    assert swap.free_blocks == 3
    with pytest.raises(SwapError, match="no swap file can be made in /nowhere"):
        SwapFile(pool, "/nowhere", num_blocks=1)
    with pytest.raises(ValueError, match="share one allocator"):
        SwapFile([pool, KvCachePool.from_layout(layout, 6)], num_blocks=1)
    with pytest.raises(TypeError, match="KvCachePool"):
        SwapFile(pool.allocator, num_blocks=1)


def test_a_swap_file_gives_no_place_away_twice_and_loses_none():
    pool = KvCachePool.from_layout(KvLayout(1, 1, 8), 6)
    swap = SwapFile(pool, num_blocks=2)
    for blocks, error in (([0, 6], InvalidBlock), ([0, "1"], TypeError)):
        with pytest.raises(error):
            swap.store(blocks)
        assert swap.free_blocks == 2
    pool.page(0)[:] = 1
    pool.page(1)[:] = 2
    old = swap.store([0])
    swap.drop(old)
    new = swap.store([1])
    for use in (swap.drop, lambda ticket: swap.load(ticket, [3])):
        with pytest.raises(SwapError, match="the ticket of 1 blocks was forgotten: it has no place 0"):
            use(old)
        assert swap.free_blocks == 1
    swap.load(new, [3])
    assert set(pool.page(3)) == {2} and swap.free_blocks == 2


def test_calibrate_measures_once_and_leaves_everything_as_it_was():
    engine = Engine(4)
    swap = SwapFile(engine.pool, num_blocks=4)
    calls = []
    costs = calibrate(swap, calls.append, tokens=8, rounds=3)
    assert costs.swap_us_per_block > 0 and costs.recompute_us_per_token > 0 and calls == [8] * 4
    assert engine.pool.allocator.in_use == 0 and swap.free_blocks == 4
    assert calibrate() == PreemptionCosts()
    engine.pool.allocator.allocate_n(4)
    with pytest.raises(PoolExhausted):
        calibrate(swap)


def test_records_are_bounded_and_totals_are_not():
    scheduler, engine, _ = make(8, max_records=3)
    for _ in range(12):
        scheduler.add_request(range(6), 24)
    run_to_end(scheduler, engine)
    log = scheduler.preemptions
    assert len(log.records) == 3 and log.counts["recompute"] == scheduler.num_preemptions > 3
    assert scheduler.stats()["actions"] == dict(log.counts) and scheduler.stats()["preemptions"] > 3


@settings(max_examples=120, deadline=None)
@given(
    st.integers(3, 14),
    st.lists(st.tuples(st.integers(1, 14), st.integers(1, 14), st.integers(0, 2)), min_size=1, max_size=12),
    st.sets(st.sampled_from(["partial", "swap"])),
    st.sampled_from([0, 2, 50]),
    st.sampled_from([None, *CACHE_POLICIES]),
    st.sampled_from(sorted(POLICIES)),
    st.integers(0, 2),
    st.sampled_from(["prompt", "whole"]),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_whoever_gives_way_sees_its_own_keys_again(
    num_blocks, requests, actions, swap_blocks, cache_policy, policy, lookahead, admission, reserved, rng
):
    """Any mix of actions, policies, failing files, aborts and foreign holders: the engine checks every key in each
    step, and the equations hold after it."""
    scheduler, engine, swap = make(
        num_blocks,
        swap_blocks,
        cache_policy,
        preemption_actions=tuple(actions),
        costs=CHEAP_SWAP,
        policy=policy,
        lookahead=lookahead,
        admission=admission,
        max_sequences=4,
        max_batch_tokens=12,
        hysteresis=rng.randrange(3),
        cache_outputs=rng.choice(["full", "end"]),
        tenants={0: Tenant(min_blocks=reserved), 1: Tenant(max_blocks=max(2, num_blocks // 2))},
    )
    allocator = engine.pool.allocator
    most = {0: num_blocks, 1: min(max(2, num_blocks // 2), num_blocks - reserved), 2: num_blocks - reserved}
    todo = [r for r in requests if -(-(r[0] + r[1]) // BLOCK) <= most[r[2]]]
    outside = []
    for number in range(3000):
        if todo and rng.random() < 0.4:
            prompt, output, tenant = todo.pop()
            terms = {"cache_priority": tenant, "cache_ttl": rng.choice([None, 5])} if cache_policy == "priority" else {}
            tokens = [rng.randrange(2) for _ in range(prompt)]
            scheduler.add_request(tokens, prompt + output, tenant, tenant=tenant, **terms)
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
        if swap is not None and rng.random() < 0.02:
            os.ftruncate(swap._file, 64)
        scheduler.commit(batch, [rng.randrange(2) for _ in batch.seq_ids])
        check(scheduler, allocator, swap, outside)
        if not todo and not scheduler.has_work and not outside:
            break
    assert not scheduler.has_work and not todo
    scheduler.drain_finished()
    if cache_policy:
        scheduler._prefix.cache.check()
        scheduler._prefix.cache.reset_prefix_cache()
    assert allocator.in_use == 0 and scheduler.num_tokens == 0
    if swap is not None:
        assert swap.free_blocks == swap.num_blocks


def check(scheduler, allocator, swap, outside):
    sequences = list(scheduler._sequences.values())
    active = [seq for seq in sequences if seq.state in (SeqState.PREFILLING, SeqState.DECODING)]
    waiting = [seq for seq in sequences if seq.state in (SeqState.WAITING, SeqState.PREEMPTED)]
    assert (len(active), len(waiting)) == (scheduler.active_count, scheduler.waiting_count)
    holders = [seq for seq in sequences if seq.kv is not None]
    for seq in holders:
        assert seq.kv.len == seq.fed <= seq.total_tokens and (seq in active or seq.state is SeqState.PREEMPTED)
    assert scheduler.num_tokens == sum(seq.kv.len for seq in holders)
    scheduler.check()
    if swap is not None:
        out = sum(len(seq._swapped.ticket.places) for seq in sequences if seq._swapped)
        assert swap.free_blocks + out == swap.num_blocks
    allocator.check(others=len(outside))


@pytest.mark.parametrize("mode", MODES)
def test_a_pool_that_is_always_full_keeps_nine_tenths_of_its_throughput(mode):
    """10,000 steps; `make preemption-test` takes 1,000,000. The time is virtual, and so the same in every run."""
    eased, full = (run(5_000, 1, mode, share) for share in (0.8, 1.0))
    assert full.throughput >= 0.9 * eased.throughput
    assert full.preemptions > 100 and full.occupancy > 0.95
