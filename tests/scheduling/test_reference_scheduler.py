"""The scheduler against the one in `reference/`: each step has the same plan and the same preemption records."""

import dataclasses
import random
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import refuses

import pagepool
from pagepool import (
    KvGroup,
    KvLayout,
    SchedulerConfig,
    StateCheckpoints,
    StateLayout,
    Tenant,
    reference,
)
from pagepool.cli.replay import bundled_trace
from pagepool.prefix.eviction import POLICIES as CACHE_POLICIES
from pagepool.reference.checkpoints import StateCheckpoints as ReferenceCheckpoints
from pagepool.replay.ptrace import read_trace
from pagepool.scheduling.policies import POLICIES
from pagepool.scheduling.preemption import MAX_RECORDS

BLOCK = 4
STATE = StateLayout(layers=[{"h": ((1,), "float64")}])
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=BLOCK, dtype="float32")


class World:
    """A scheduler with its pool and cache, from pagepool or from pagepool.reference."""

    def __init__(self, api, config, num_blocks, cache_policy, windows=None, slots=None, kept=0):
        self.pool = api.KvCachePool.from_layout(LAYOUT, num_blocks)
        self.allocator = self.pool.allocator
        self.cache = api.PrefixCache(self.allocator, BLOCK, cache_policy) if cache_policy else None
        self.states, memory = None, {}
        if slots is not None:
            self.states = memory["states"] = api.SsmStatePool.from_layout(STATE, slots)
        if windows is not None:
            memory["groups"] = [KvGroup(self.allocator, BLOCK, window) for window in windows]
        if kept:
            checkpoints = StateCheckpoints if api is pagepool else ReferenceCheckpoints
            options = {"grid": 8, "spacing": 1, "align": BLOCK, "prompt_ends": kept % 2 == 0}
            memory["checkpoints"] = self.checkpoints = checkpoints(STATE, self.states, kept * 100, **options)
        self.scheduler = api.Scheduler(config, self.pool, self.cache, **memory)
        self.outside = []

    def records(self):
        if hasattr(self.scheduler, "preemptions"):
            return [record[:6] for record in self.scheduler.preemptions]
        return self.scheduler.records[-MAX_RECORDS:]

    def picture(self, batch):
        rows = zip(
            batch.seq_ids,
            batch.tokens,
            batch.num_tokens,
            batch.lookahead,
            batch.is_prefill,
            batch.wants_token,
            strict=True,
        )
        found = {row[0]: (*row[1:], self.scheduler.get_sequence(row[0]).num_cached) for row in rows}
        blocks = (self.allocator.free_count, self.cache and (self.cache.evictable, self.cache.num_cached))
        slots = self.states and self.states.free_count
        return found, blocks, slots, self.scheduler.num_preemptions

    def standing(self, seq_id):
        seq = self.scheduler.get_sequence(seq_id)
        state = seq.state if isinstance(seq.state, str) else seq.state.value
        held = None if seq.kv is None else seq.kv.len
        awaits = seq.awaits if hasattr(seq, "awaits") else seq._awaits
        leader = awaits and (awaits[0].id, awaits[1])
        counts = seq.fed, held, seq.num_cached, seq.num_preemptions
        return state, seq.finish_reason, counts, seq.output_tokens, leader


def random_config(rng, num_blocks):
    tenants = {1: Tenant(max_blocks=max(2, num_blocks // 2), weight=2.0)}
    return SchedulerConfig(
        max_sequences=rng.choice([3, 5, 20]),
        max_batch_tokens=rng.choice([7, 16, 40]),
        max_batch_sequences=rng.choice([1, 2, 4, 20]),
        max_prefill_tokens=rng.choice([4, 9, 40]),
        block_size=BLOCK,
        watermark=rng.choice([0, 0.1]),
        policy=rng.choice(sorted(POLICIES)),
        max_wait_steps=rng.choice([None, 12, 10_000]),
        admission=rng.choice(["prompt", "prompt", "whole"]),
        lookahead=rng.choice([0, 0, 3]),
        tenants=tenants,
        preemption_actions=rng.choice([(), ("partial",)]),
    )


def run(
    seed,
    steps=150,
    tenants=(0, 1, None),
    forget=0.0,
    others=0.0,
    stop_token_ids=(),
    inbox=False,
    forks=0.0,
    fails=0.0,
    memory=None,
    **fixed,
):
    """Run the same requests in both worlds; return the number of actions of each kind.

    forget   probability per step that the caches discard blocks, or all blocks, in use or not
    others   probability that a prompt is cached outside of the scheduler
    inbox    use submit and cancel
    forks    probability that a decoding sequence is forked, before or after the commit of its step
    fails    probability that a step is given up, perhaps after some of its sequences got a token or were stopped
    memory   windows and slots of hybrid sequences
    """
    rng, forgets = random.Random(seed), random.Random(seed)
    num_blocks = rng.randint(4, 16)
    config = dataclasses.replace(random_config(rng, num_blocks), **fixed)
    cache_policy = rng.choice([None, *CACHE_POLICIES, *CACHE_POLICIES])
    if memory is not None:
        cache_policy = rng.choice(sorted(CACHE_POLICIES)) if memory.get("kept") or not memory.get("slots") else None
        num_blocks *= len(memory["windows"])
    shape = (config, num_blocks, cache_policy)
    ours, theirs = worlds = [World(api, *shape, **(memory or {})) for api in (pagepool, reference)]
    for number in range(20 * steps):
        if number < steps and rng.random() < 0.3:
            add(rng, worlds, tenants, stop_token_ids, inbox)
        if number < steps and rng.random() < 0.05 and ours.allocator.free_count:
            for world in worlds:
                world.outside.append(world.allocator.allocate())
        elif ours.outside and (number >= steps or rng.random() < 0.2):
            for world in worlds:
                world.allocator.free(world.outside.pop())
        known = list(ours.scheduler._sequences)
        if known and rng.random() < 0.04:
            seq_id, way = rng.choice(known), rng.choice(["finish_sequence", "remove_sequence"])
            way = "cancel" if inbox else way
            for world in worlds:
                getattr(world.scheduler, way)(seq_id)
        if cache_policy and forgets.random() < forget:
            make_forget(forgets, worlds)
        if cache_policy and forgets.random() < others:
            token, full = forgets.randrange(3), forgets.randint(1, 3)
            for world in worlds:
                cache_elsewhere(world, [token] * BLOCK * full)
        batches = [world.scheduler.schedule() for world in worlds]
        assert ours.picture(batches[0]) == theirs.picture(batches[1]), f"step {number} of seed {seed}"
        assert ours.records() == theirs.records(), f"step {number} of seed {seed}"
        for when in range(2):
            if forks and number < steps and forgets.random() < forks:
                fork(forgets, worlds)
            if not when and fails and number < steps and forgets.random() < fails:
                fail(forgets, worlds, batches)
            elif not when:
                report(rng, worlds, batches)
        for seq_id in list(ours.scheduler._sequences):
            assert ours.standing(seq_id) == theirs.standing(seq_id), f"step {number} of seed {seed}"
        if rng.random() < 0.5:
            drained = [[(seq.id, seq.finish_reason) for seq in world.scheduler.drain_finished()] for world in worlds]
            assert drained[0] == drained[1]
        if number >= steps and not ours.outside and not ours.scheduler.has_work:
            break
    assert not ours.scheduler.has_work and not theirs.scheduler.has_work
    for world in worlds:
        if world.cache is not None:
            world.cache.check()
            world.cache.reset_prefix_cache()
        world.allocator.check()
        assert world.allocator.in_use == 0 and (world.states is None or not world.states.used_count)
    return Counter(ours.scheduler.stats()["actions"])


def fork(rng, worlds):
    ours, theirs = (world.scheduler for world in worlds)
    seqs = [seq_id for seq_id, seq in ours._sequences.items() if seq.state.value == "decoding"]
    if seqs:
        seq_id, count = rng.choice(seqs), rng.randint(1, 3)
        try:
            found = ours.fork(seq_id, count)
        except ValueError:
            with refuses(ValueError, count, "forks"):
                theirs.fork(seq_id, count)
        else:
            assert found == theirs.fork(seq_id, count)


def make_forget(rng, worlds):
    holders = [seq_id for seq_id, seq in worlds[0].scheduler._sequences.items() if seq.kv is not None]
    seq_id, place = rng.choice(holders or [0]), rng.randrange(4)
    everything = rng.random() < 0.2
    for world in worlds:
        if everything:
            world.cache.reset_prefix_cache()
        elif seq_id:
            kv = world.scheduler.get_sequence(seq_id).kv
            blocks = [block for table in getattr(kv, "kv", [kv]) for block in table.blocks]
            world.cache.discard(blocks[place : place + 2])


def cache_elsewhere(world, prompt):
    """Cache a prompt outside of the scheduler, if enough blocks are free."""
    if world.allocator.free_count >= len(prompt) // BLOCK:
        blocks = world.allocator.allocate_n(len(prompt) // BLOCK)
        world.cache.cache_blocks(prompt, blocks)
        world.allocator.free(blocks)


def add(rng, worlds, tenants=(0, 1, None), stop_token_ids=(), inbox=False):
    tenant = rng.choice(tenants)
    head = [rng.randrange(3)] * rng.choice([0, 4, 8, 9])
    prompt = head + [rng.randrange(3) for _ in range(rng.randint(1, 9))]
    about = {"tenant": tenant, "priority": rng.randrange(3), "cache_salt": rng.choice([None, None, "a"])}
    about["reads_cache"] = rng.random() < 0.8
    about["stop_token_ids"] = stop_token_ids
    limit, way = len(prompt) + rng.randint(0, 16), "submit" if inbox else "add_request"
    try:
        seq_id = getattr(worlds[0].scheduler, way)(prompt, limit, **about)
    except ValueError:
        return  # too large for the pool, the quota or the unreserved blocks
    assert getattr(worlds[1].scheduler, way)(prompt, limit, **about) == seq_id


def report(rng, worlds, batches):
    """Commit the same random results in both worlds; the rows of the two batches may have different orders."""
    way = rng.choice(["commit", "commit", "commit", "commit", "some", "append"])
    results, must_commit = {}, worlds[0].cache is not None or worlds[0].scheduler._has_committed
    for seq_id, wants, slots in zip(batches[0].seq_ids, batches[0].wants_token, batches[0].lookahead, strict=True):
        token = rng.randrange(3)
        drafts = [rng.randrange(3) for _ in range(rng.randint(0, slots))]
        results[seq_id] = [*drafts, token] if slots and wants else token
        if way == "some" and rng.random() < 0.3:
            results[seq_id] = None
    for world, batch in zip(worlds, batches, strict=True):
        if way == "append":
            for seq_id in sorted(seq for seq, wants in zip(batch.seq_ids, batch.wants_token, strict=True) if wants):
                world.scheduler.append_token(seq_id, 1)
            if must_commit:
                world.scheduler.commit(batch, [None] * len(batch))
        else:
            world.scheduler.commit(batch, [results[seq_id] for seq_id in batch.seq_ids])


def fail(rng, worlds, batches):
    ways = [(seq_id, rng.choice(["append_token", "finish_sequence", "", ""])) for seq_id in sorted(batches[0].seq_ids)]
    for world, batch in zip(worlds, batches, strict=True):
        if not batch.is_empty and (world.cache is not None or worlds[0].scheduler._has_committed):
            with refuses(RuntimeError, len(batch)):
                world.scheduler.schedule()
        for seq_id, way in ways:
            if way:
                getattr(world.scheduler, way)(seq_id, *[1][: way == "append_token"])
        world.scheduler.give_up(batch)
        if not batch.is_empty:
            with refuses(ValueError, len(batch)):
                world.scheduler.commit(batch, [1] * len(batch))
    worlds[0].scheduler.check()


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32))
def test_the_same_plan_and_the_same_records_in_every_step(seed):
    run(seed)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_the_same_plan_for_many_tenants(seed):
    run(seed, tenants=range(9))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([(2,), (1, 7)]))
def test_the_same_plan_with_stop_tokens(seed, stop_token_ids):
    run(seed, stop_token_ids=stop_token_ids)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_the_same_plan_with_requests_that_are_submitted_and_cancelled(seed):
    run(seed, inbox=True)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_the_same_plan_with_forks(seed):
    run(seed, forks=0.1)
    run(seed, forks=0.1, forget=0.05, max_sequences=20)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([None, [None], [0], [None, 8]]))
def test_the_same_plan_when_steps_are_given_up(seed, windows):
    memory = windows and {"windows": windows}
    run(seed, fails=0.2, forks=0.1, memory=memory)
    run(seed, fails=0.5, forks=0.1, memory=memory, policy="fair", max_sequences=20)
    run(seed, fails=0.2, forks=0.1, memory={"windows": windows or [3], "slots": 5}, lookahead=0)
    run(seed, fails=0.2, forks=0.1, memory={"windows": [None], "slots": 5, "kept": 5}, lookahead=0, inbox=True)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.sampled_from([None, 0, 3, 8, 13]), min_size=1, max_size=3))
@example(2812, [0])  # a fork uses up the quota of a waiting request that would have fitted
def test_the_same_plan_with_windows(seed, windows):
    run(seed, memory={"windows": windows})
    run(seed, memory={"windows": windows}, forks=0.1)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([[None], [3], [None, 8]]), st.integers(1, 5))
def test_the_same_plan_with_recurrent_states(seed, windows, slots):
    memory = {"windows": windows, "slots": slots}
    run(seed, memory=memory, lookahead=0)
    run(seed, memory=memory, lookahead=0, forks=0.1, stop_token_ids=(2,))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12), st.sampled_from([2, 5, 20]))
def test_the_same_plan_with_checkpoints_of_recurrent_states(seed, kept, slots):
    memory = {"windows": [None], "slots": slots, "kept": kept}
    run(seed, memory=memory, lookahead=0)
    run(seed, memory=memory, lookahead=0, forks=0.1, inbox=True)
    run(seed, memory=memory, lookahead=0, forget=0.05)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_the_same_plan_with_a_cache_that_discards_blocks(seed):
    run(seed, forget=0.1)
    run(seed, tenants=(0, 0, 1, 2), forget=0.05)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_the_longest_match_is_first_after_any_new_look_up(seed):
    run(seed, policy="lpm", max_sequences=20)
    run(seed, policy="lpm", max_sequences=20, tenants=range(9), forget=0.05, others=0.05)


def test_the_random_runs_take_every_action():
    taken = sum((run(seed) for seed in range(40)), start=run(40))
    assert all(taken[action] > 5 for action in ("evict", "partial", "recompute")), taken


def test_a_recorded_hour_is_served_alike():
    """The first requests of the bundled trace, with their arrival times, in a pool that is too small for them."""
    trace = read_trace(bundled_trace(), 60)
    config = SchedulerConfig(max_batch_tokens=256, max_prefill_tokens=128, preemption_actions=("partial",))
    num_blocks = max(trace.prompt) // 16 + 20
    worlds = [api.Scheduler(config, api.BlockAllocator(num_blocks)) for api in (pagepool, reference)]
    assert len(trace) == 60
    for prompt, output in zip(trace.prompt, trace.output, strict=True):
        for world in worlds:
            world.add_request([1] * prompt, prompt + min(output, 100))
    while worlds[0].has_work:
        batches = [world.schedule() for world in worlds]
        plans = [dict(zip(batch.seq_ids, batch.num_tokens, strict=True)) for batch in batches]
        assert plans[0] == plans[1]
        for world, batch in zip(worlds, batches, strict=True):
            world.commit(batch, [2] * len(batch))
    assert not worlds[1].has_work and worlds[0].num_steps == worlds[1].num_steps
    assert [record[:6] for record in worlds[0].preemptions] == worlds[1].records != []


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_full_pool_with_every_policy(policy):
    rng = random.Random(policy)
    tenants = {1: Tenant(max_blocks=12)}
    config = SchedulerConfig(max_batch_tokens=24, block_size=BLOCK, policy=policy, tenants=tenants)
    worlds = [World(api, config, 24, "lru") for api in (pagepool, reference)]
    for number in range(300):
        while worlds[0].scheduler.waiting_count < 4 and number < 250:
            add(rng, worlds)
        batches = [world.scheduler.schedule() for world in worlds]
        assert worlds[0].picture(batches[0]) == worlds[1].picture(batches[1])
        assert worlds[0].records() == worlds[1].records()
        for world, batch in zip(worlds, batches, strict=True):
            world.scheduler.commit(batch, [2] * len(batch))
    assert worlds[0].scheduler.num_preemptions > 0
