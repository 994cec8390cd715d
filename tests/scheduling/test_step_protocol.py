"""One step: a batch is committed or given up before the next one, and only committed blocks are published."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from marked_engine import Engine, HybridEngine
from share import examples

from pagepool import PrefixCache, Scheduler, SchedulerConfig, SeqState, StateCheckpoints, Tenant

BLOCK = 4


class Failure(Exception):
    """Failure of the model."""


def make(num_blocks=32, cached=True, **config):
    engine = Engine(num_blocks)
    cache = PrefixCache(engine.pool.allocator, BLOCK) if cached else None
    return Scheduler(SchedulerConfig(block_size=BLOCK, **config), engine.pool, cache), engine, cache


@pytest.mark.parametrize("cached", [False, True])
def test_schedule_is_refused_while_a_batch_is_outstanding(cached):
    scheduler, engine, _ = make(cached=cached)
    scheduler.add_request(range(9), 20)
    batch = scheduler.schedule()
    if not cached:  # before the first commit schedule() does not require one
        scheduler.append_token(1, 7)
        batch = scheduler.schedule()
        scheduler.commit(batch, [8])
        batch = scheduler.schedule()
    scheduler.submit([1, 2, 3], 5)
    steps, in_use = scheduler.num_steps, engine.pool.allocator.in_use
    with pytest.raises(RuntimeError, match="a batch of 1 sequences is outstanding"):
        scheduler.schedule()
    assert (scheduler.num_steps, engine.pool.allocator.in_use, scheduler.total_count) == (steps, in_use, 1)
    assert scheduler.outstanding is batch
    scheduler.commit(batch, [9])
    assert scheduler.outstanding is None and scheduler.schedule().seq_ids == [1, 2]
    scheduler.check()


@pytest.mark.parametrize("way", ["commit", "give_up"])
def test_a_batch_is_taken_once(way):
    scheduler, _, _ = make()
    scheduler.add_request(range(9), 20)
    batch = scheduler.schedule()
    getattr(scheduler, way)(batch, *[[7]][: way == "commit"])
    for call in (lambda: scheduler.commit(batch, [7]), lambda: scheduler.give_up(batch)):
        with pytest.raises(ValueError, match="batch of 1 sequences is not outstanding"):
            call()
    assert len(scheduler.get_sequence(1).output_tokens) == (way == "commit")


def test_an_empty_batch_may_be_committed_and_given_up():
    scheduler, _, _ = make()
    batch = scheduler.schedule()
    for _ in range(2):
        scheduler.commit(batch, [])
        scheduler.give_up(batch)
    with pytest.raises(ValueError, match="0 entries, one per sequence, not 1"):
        scheduler.commit(batch, [7])
    assert scheduler.schedule().is_empty


@pytest.mark.parametrize("way", ["finish_sequence", "remove_sequence", "append_token", "preempted"])
def test_blocks_of_a_step_that_is_not_committed_are_not_cached(way):
    scheduler, _, cache = make()
    scheduler.add_request(range(17), 18)
    batch = scheduler.schedule()
    if way == "preempted":
        scheduler.give_up(batch)
        scheduler.finish_sequence(1)
    else:
        getattr(scheduler, way)(1, *[7][: way == "append_token"])
        assert cache.num_cached == 0
        scheduler.commit(batch, [7])
    assert cache.num_cached == 0 and scheduler._blocks.allocator.in_use == 0


def test_forks_of_a_step_that_is_given_up_read_the_prompt_again():
    scheduler, engine, cache = make(max_prefill_tokens=8)
    scheduler.add_request(range(20), 30)
    for _ in range(2):
        scheduler.commit(scheduler.schedule(), [None])
    batch = scheduler.schedule()
    (fork,) = scheduler.fork(1)
    scheduler.append_token(fork, 9)
    scheduler.give_up(batch)
    for seq_id in (1, fork):
        seq = scheduler.get_sequence(seq_id)
        assert (seq.state, seq.fed, seq.kv.len) == (SeqState.PREFILLING, 16, 16)
    assert cache.num_cached == 4 == engine.pool.allocator.in_use
    scheduler.check()
    batch = scheduler.schedule()
    assert batch.tokens == [[16, 17, 18, 19]] * 2 and batch.wants_token == [True, False]
    scheduler.commit(batch, [7, None])
    assert scheduler.schedule().tokens == [[7], [9]]


def test_a_tenant_does_not_pay_for_a_step_that_is_given_up():
    scheduler, _, _ = make(cached=False, policy="fair", tenants={"a": Tenant(weight=2)})
    for tenant in ("a", "b"):
        scheduler.add_request(range(9), 20, tenant=tenant)
    scheduler.commit(scheduler.schedule(), [7, 7])
    served = [scheduler._tenants.served(tenant) for tenant in "ab"]
    for _ in range(3):
        batch = scheduler.schedule()
        assert [scheduler._tenants.served(tenant) for tenant in "ab"] == [served[0] + 1, served[1] + 2]
        scheduler.give_up(batch)
        assert [scheduler._tenants.served(tenant) for tenant in "ab"] == served
    scheduler.check()


def test_slots_of_drafts_go_back():
    scheduler, engine, _ = make(lookahead=3)
    scheduler.add_request(range(9), 40)
    scheduler.commit(scheduler.schedule(), [7])
    batch = scheduler.schedule()
    assert batch.lookahead == [3] and batch.states[0].len == 13
    scheduler.give_up(batch)
    assert scheduler.get_sequence(1).kv.len == 9 and engine.pool.allocator.in_use == 3
    scheduler.check()
    assert scheduler.schedule().tokens == [[7]]


def serve(seed, fails, windows=None, slots=None, kept=None):
    """Return the outputs of each request from a model that fails at random.

    The model draws each token from the contents of the pages and of its recurrent state. A failed step leaves garbage
    in all memory that it may write.
    """
    rng = random.Random(seed)
    num_blocks, failures = rng.choice([16, 30, 200]), random.Random(seed)
    engine = Engine(num_blocks) if windows is None else HybridEngine(num_blocks * len(windows), windows, slots)
    memory = {} if windows is None else {"groups": engine.groups, "states": engine.states}
    cache = None
    if slots is None or kept:
        cache = memory["prefix_cache"] = PrefixCache(engine.pool.allocator, BLOCK)
    if kept:
        memory["checkpoints"] = StateCheckpoints(
            engine.layout, engine.states, kept, grid=8, spacing=1, align=BLOCK, prompt_ends=True
        )
    config = SchedulerConfig(
        block_size=BLOCK,
        max_batch_sequences=rng.choice([2, 20]),
        max_batch_tokens=24,
        max_prefill_tokens=rng.choice([3, 8]),
        lookahead=rng.choice([0, 2]),
        policy=rng.choice(["fair", "priority"]),
    )
    scheduler = Scheduler(config, engine.pool, **memory)
    common = [rng.randrange(9) for _ in range(9)]
    for _ in range(12):
        prompt = common[: rng.choice([0, 5, 9])] + [rng.randrange(9) for _ in range(rng.randint(1, 9))]
        scheduler.add_request(prompt, len(prompt) + rng.randint(1, 12), tenant=rng.randrange(2))
    for _ in range(3000):
        batch = scheduler.schedule()
        if not batch.is_empty and failures.random() < fails:
            with pytest.raises(Failure):
                spoil(engine, batch)
            scheduler.give_up(batch)
        else:
            engine.run(scheduler, batch)
            scheduler.commit(batch, [next_token(engine, state) for state in batch.states])
        scheduler.check()
        if not scheduler.has_work:
            break
    outputs = {seq.id: seq.output_tokens for seq in scheduler.drain_finished()}
    if cache is not None:
        cache.check()
        cache.reset_prefix_cache()
    engine.pool.allocator.check()
    assert len(outputs) == 12 and engine.pool.allocator.in_use == 0
    assert engine.states is None or engine.states.used_count == 0
    return outputs


def spoil(engine, batch):
    """Write garbage and fail."""
    tables = [batch.states]
    if engine.states is not None:
        for state in batch.states[: len(batch) // 2 + 1]:
            state.state.view(0, "h")[0] = -5
    if isinstance(engine, HybridEngine):
        tables = [[state.kv[layer] for state in batch.states] for layer in range(len(engine.groups))]
    garbage = np.full((batch.total_tokens, 1, 8), -77, np.float32)
    for layer, states in enumerate(tables):
        engine.tables.fill(states, batch.num_tokens)
        engine.pool.append(layer, engine.tables.slot_mapping, garbage, garbage)
    raise Failure


def next_token(engine, state):
    if engine.states is not None:
        return int(state.state.view(0, "h")[0]) % 50
    table = state if isinstance(engine, Engine) else state.kv[0]
    end = table.len - table.first_block * BLOCK
    marks = engine.pool.gather(0, table.blocks, end)[0][:, 0, 0]
    return int(marks[marks >= 0][-1]) % 50  # drafts have the mark -1


@examples(25)
@given(st.integers(0, 2**32), st.sampled_from([None, [None], [8], [None, 8]]))
def test_a_model_that_fails_now_and_then_generates_the_same(seed, windows):
    assert serve(seed, 0.3, windows) == serve(seed, 0, windows)


@examples(25)
@given(st.integers(0, 2**32), st.sampled_from([[None], [8], [None, 8]]), st.integers(2, 20), st.integers(60, 10**4))
def test_a_hybrid_model_that_fails_now_and_then_generates_the_same(seed, windows, slots, kept):
    """After a failure its sequences resume from a checkpoint, or from their first token."""
    assert serve(seed, 0.3, windows, slots) == serve(seed, 0, windows, slots)
    assert serve(seed, 0.3, windows, slots, kept) == serve(seed, 0, windows, slots)


def test_a_hybrid_sequence_resumes_from_the_state_that_was_kept():
    engine = HybridEngine(64, [None], 4)
    kept = StateCheckpoints(engine.layout, engine.states, 10**6, grid=8, spacing=1, align=BLOCK)
    memory = {"groups": engine.groups, "states": engine.states, "checkpoints": kept}
    config = SchedulerConfig(block_size=BLOCK, max_prefill_tokens=8)
    scheduler = Scheduler(config, engine.pool, PrefixCache(engine.pool.allocator, BLOCK), **memory)
    scheduler.add_request(range(20), 22)
    for _ in range(2):
        batch = scheduler.schedule()
        engine.run(scheduler, batch)
        scheduler.commit(batch, [None])
    batch = scheduler.schedule()
    with pytest.raises(Failure):
        spoil(engine, batch)
    scheduler.give_up(batch)
    seq = scheduler.get_sequence(1)
    assert (seq.state, seq.kv, engine.states.used_count, scheduler.num_preemptions) == (SeqState.PREEMPTED, None, 0, 1)
    batch = scheduler.schedule()
    assert batch.tokens == [[16, 17, 18, 19]] and seq.num_cached == 16
    engine.run(scheduler, batch)
    scheduler.commit(batch, [7])
