"""`Scheduler.fork`: samples and beams are separate sequences that share blocks until they diverge."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from marked_engine import Engine
from refusals import refuses
from share import examples

from pagepool import BlockAllocator, PrefixCache, Scheduler, SchedulerConfig, SeqState, Tenant

BLOCK = 4


def make(num_blocks=64, cached=False, **config):
    allocator = BlockAllocator(num_blocks)
    cache = PrefixCache(allocator, BLOCK) if cached else None
    return Scheduler(SchedulerConfig(block_size=BLOCK, **config), allocator, cache), allocator


def step(scheduler, token=7):
    batch = scheduler.schedule()
    scheduler.commit(batch, [token] * len(batch))
    return batch


def begin(scheduler, prompt=10, limit=30, **names):
    seq_id = scheduler.add_request(list(range(prompt)), limit, **names)
    while scheduler.get_sequence(seq_id).state is not SeqState.DECODING:
        step(scheduler)
    return seq_id


def test_a_fork_takes_the_quota_that_a_waiting_request_had_room_in():
    """A request is next but does not fit into the pool. Meanwhile a fork uses up its tenant's quota."""
    scheduler, _ = make(6, tenants={"a": Tenant(max_blocks=4)})
    first = scheduler.add_request(range(5), 8, tenant="a")  # 2 of the quota's 4 blocks
    other = scheduler.add_request(range(12), 16)
    step(scheduler, -1)
    waits = scheduler.add_request(range(7), 8, tenant="a")
    step(scheduler, -1)
    assert scheduler.get_sequence(waits).state is SeqState.WAITING  # needs 2 blocks, 1 is free
    scheduler.fork(first)
    scheduler.finish_sequence(other)
    step(scheduler, -1)
    assert scheduler.get_sequence(waits).state is SeqState.WAITING
    scheduler.finish_sequence(first)
    scheduler.schedule()
    assert scheduler.get_sequence(waits).state is not SeqState.WAITING


@pytest.mark.parametrize("cached", [False, True])
def test_samples_share_the_prompts_blocks_until_they_part(cached):
    scheduler, allocator = make(cached=cached)
    seq_id = scheduler.add_request(range(10), 13)
    batch = scheduler.schedule()
    samples = [seq_id, *scheduler.fork(seq_id, 3)]
    assert samples == [1, 2, 3, 4] and allocator.in_use == 3
    scheduler.commit(batch, [20])
    for sample in samples[1:]:
        scheduler.append_token(sample, 20 + sample)
    scheduler.check()
    batch = step(scheduler)
    assert sorted(batch.tokens) == [[20], [22], [23], [24]] and batch.is_prefill == [False] * 4
    assert allocator.in_use == 2 + 4  # two shared full blocks of the prompt, and one last block each
    while scheduler.has_work:
        step(scheduler)
    assert {tuple(seq.output_tokens) for seq in scheduler.drain_finished()} == {(20 + k, 7, 7) for k in (0, 2, 3, 4)}
    if cached:
        scheduler._prefix.cache.reset_prefix_cache()
    assert allocator.in_use == 0


def test_a_dropped_beam_frees_its_own_blocks_at_once():
    scheduler, allocator = make()
    seq_id = begin(scheduler)
    beams = scheduler.fork(seq_id, 2)
    step(scheduler)
    assert allocator.in_use == 2 + 3
    scheduler.remove_sequence(seq_id)
    assert allocator.in_use == 2 + 2 and scheduler.get_sequence(seq_id) is None
    scheduler.finish_sequence(beams[0])
    assert allocator.in_use == 3
    scheduler.check()
    assert step(scheduler).seq_ids == [beams[1]]


def test_a_fork_has_the_options_of_its_original():
    scheduler, allocator = make()
    seq_id = begin(scheduler, request_id="chat-7", stop_token_ids=[5], priority=3, tenant="t", max_new_tokens=9)
    fork = scheduler.get_sequence(scheduler.fork(seq_id)[0])
    seq = scheduler.get_sequence(seq_id)
    for name in ("request_id", "stop_token_ids", "priority", "tenant", "max_tokens", "all_tokens", "fed", "state"):
        assert getattr(fork, name) == getattr(seq, name), name
    assert fork.output_tokens is not seq.output_tokens and fork.num_cached == fork.fed
    assert [owner.label for owner in allocator.owners()[0]] == ["chat-7", "chat-7"]
    scheduler.append_token(fork.id, 5)
    assert (fork.finish_reason, seq.state) == ("stop", SeqState.DECODING)


def test_slots_for_drafts_stay_with_the_original():
    scheduler, allocator = make(lookahead=3)
    seq_id = begin(scheduler)
    batch = scheduler.schedule()
    assert batch.lookahead == [3] and scheduler.get_sequence(seq_id).kv.len == 14
    (fork,) = scheduler.fork(seq_id)
    assert scheduler.get_sequence(fork).kv.len == 11
    scheduler.commit(batch, [[7, 8]])
    scheduler.check()
    assert scheduler.get_sequence(fork).output_tokens == [7]
    scheduler.remove_sequence(fork)
    scheduler.remove_sequence(seq_id)
    assert allocator.in_use == 0


def test_an_ended_fork_publishes_no_uncommitted_blocks():
    scheduler, allocator = make(cached=True)
    seq_id = scheduler.add_request(range(9), 20)
    scheduler.schedule()
    scheduler.remove_sequence(scheduler.fork(seq_id)[0])
    scheduler.remove_sequence(seq_id)
    assert allocator.in_use == 0


@pytest.mark.parametrize(
    ("config", "n", "error", "words"),
    [
        ({}, 0, ValueError, ("n", 1, 0)),
        ({}, 1.5, TypeError, ("n", "float", "1.5")),
        ({"max_sequences": 4}, 4, ValueError, (4, 1, "max_sequences")),
        ({"tenants": {None: Tenant(max_blocks=20)}}, 2, ValueError, (16, 8, "None", 20)),
    ],
)
def test_forks_that_do_not_fit_change_nothing(config, n, error, words):
    scheduler, _ = make(**config)
    seq_id = begin(scheduler)
    with refuses(error, *words):
        scheduler.fork(seq_id, n)
    scheduler.check()
    assert scheduler.total_count == 1 and scheduler.fork(seq_id) == [2]


def test_only_a_decoding_sequence_can_be_forked():
    scheduler, _ = make(max_prefill_tokens=4)
    seq_id = scheduler.add_request(range(10), 20)
    for state in ("waiting", "prefilling"):
        with refuses(ValueError, "sequence", 1, state):
            scheduler.fork(seq_id)
        scheduler.schedule()
    with refuses(ValueError, "sequence", 9):
        scheduler.fork(9)
    assert scheduler.total_count == 1


@examples(40)
@given(st.integers(0, 2**32))
def test_keys_and_values_of_forks_are_right_in_a_pool_that_is_too_small(seed):
    """Partial preemption and recomputation, with and without a prefix cache; each sequence sees its own tokens."""
    rng = random.Random(seed)
    engine = Engine(rng.choice([12, 20, 60]))
    cache = PrefixCache(engine.pool.allocator, BLOCK) if rng.random() < 0.5 else None
    config = SchedulerConfig(
        block_size=BLOCK,
        max_batch_sequences=rng.choice([2, 20]),
        max_prefill_tokens=8,
        lookahead=rng.choice([0, 0, 2]),
    )
    scheduler = Scheduler(config, engine.pool, cache)
    for number in range(2000):
        if number < 60 and rng.random() < 0.15:
            scheduler.add_request([rng.randrange(3) for _ in range(rng.randint(1, 12))], 24, tenant=rng.randrange(2))
        batch = scheduler.schedule()
        engine.run(scheduler, batch)
        decoding = [seq_id for seq_id in batch.seq_ids if scheduler.get_sequence(seq_id).state is SeqState.DECODING]
        forks = []
        if decoding and number < 100 and scheduler.active_count < 20 and rng.random() < 0.2:
            forks = scheduler.fork(rng.choice(decoding), rng.randint(1, 2))
        scheduler.commit(batch, [rng.randrange(50) for _ in batch.seq_ids])
        for fork in forks:
            scheduler.append_token(fork, rng.randrange(50))
        if rng.random() < 0.05 and scheduler.total_count:
            scheduler.remove_sequence(rng.choice(sorted(scheduler._sequences)))
        scheduler.check()
        if number >= 100 and not scheduler.has_work:
            break
    assert not scheduler.has_work
    if cache is not None:
        cache.reset_prefix_cache()
    assert engine.pool.allocator.in_use == 0
