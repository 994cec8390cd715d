"""The scheduler with hybrid sequences: windows, several groups and recurrent states from one pool of blocks."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from marked_engine import HybridEngine
from refusals import refuses
from share import examples

from pagepool import (
    AttentionSequenceState,
    BlockAllocator,
    HybridSequence,
    KvCachePool,
    KvGroup,
    KvLayout,
    PoolExhausted,
    PrefixCache,
    Scheduler,
    SchedulerConfig,
    SeqState,
    SsmStatePool,
    StateCheckpoints,
    StateLayout,
    Tenant,
)
from pagepool.scheduling.policies import POLICIES

BLOCK = 4
STATE = StateLayout(layers=[{"h": ((1,), "float64")}])


def states_of(slots):
    return SsmStatePool(slots, lambda i: AttentionSequenceState(10**6))


def kept_of(states, budget=10**6, prompt_ends=False, grid=16):
    return StateCheckpoints(STATE, states, budget, grid=grid, spacing=1, align=BLOCK, prompt_ends=prompt_ends)


def make_cached(num_blocks=400, slots=32, grid=16, **config):
    allocator, states = BlockAllocator(num_blocks), SsmStatePool.from_layout(STATE, slots)
    cache, kept = PrefixCache(allocator, BLOCK), kept_of(states, grid=grid)
    config = SchedulerConfig(block_size=BLOCK, **config)
    return Scheduler(config, allocator, cache, states=states, checkpoints=kept), cache, kept


def step(scheduler):
    batch = scheduler.schedule()
    scheduler.commit(batch, [7] * len(batch))
    scheduler.check()
    return batch


def run(scheduler):
    total = 0
    while scheduler.has_work:
        total += step(scheduler).total_tokens
    return total


def test_a_window_frees_its_blocks_during_prefill():
    """A prompt of 100,000 tokens with a window of 4,096 needs blocks for the window and one chunk."""
    allocator = BlockAllocator(273)
    scheduler = Scheduler(SchedulerConfig(), allocator, groups=[KvGroup(allocator, 16, window=4096)])
    scheduler.add_request(range(100_000), max_new_tokens=3)
    while scheduler.has_work:
        scheduler.commit(scheduler.schedule(), [7])
    assert allocator.peak_in_use == (4096 + 256) // 16 and allocator.in_use == 0
    assert scheduler.drain_finished()[0].output_tokens == [7, 7, 7]


def test_appended_tokens_are_fed_in_chunks():
    """A window has blocks for one chunk, so that any number of appended tokens is fed chunk by chunk."""
    allocator = BlockAllocator(5)
    config = SchedulerConfig(max_prefill_tokens=8)
    scheduler = Scheduler(config, allocator, groups=[KvGroup(allocator, BLOCK, window=8)])
    scheduler.add_request([1] * 20, 100)
    while scheduler.get_sequence(1).state is not SeqState.DECODING:
        step(scheduler)
    for token in range(30):
        scheduler.append_token(1, token)
    fed = []
    while scheduler.has_work and len(fed) < 5:
        batch = scheduler.schedule()
        fed.append((batch.num_tokens, batch.wants_token))
        scheduler.commit(batch, [7])
        scheduler.check()
    assert fed == [([8], [False])] * 3 + [([7], [True]), ([1], [True])]


def test_windows_and_full_attention_are_one_account():
    allocator = BlockAllocator(64)
    groups = [KvGroup(allocator, BLOCK), KvGroup(allocator, BLOCK, window=8)]
    config = SchedulerConfig(max_prefill_tokens=8)
    scheduler = Scheduler(config, allocator, groups=groups)
    with refuses(ValueError, 300, 80, 2, 64):
        scheduler.add_request([1], 300)
    scheduler.add_request([1] * 40, 44)
    scheduler.add_request([1] * 40, 44)
    step(scheduler)
    assert scheduler.stats()["promised"] == 2 * (10 + 5 - 2 - 2)
    kv = scheduler.get_sequence(1).kv
    assert isinstance(kv, HybridSequence) and [table.len for table in kv.kv] == [8, 8] and kv.state is None
    run(scheduler)
    assert allocator.peak_in_use <= 2 * (11 + 5) and allocator.in_use == 0


def test_a_slot_is_taken_with_a_request_and_returned_with_it():
    states = states_of(2)
    scheduler = Scheduler(SchedulerConfig(), states=states)
    for _ in range(3):
        scheduler.add_request([1, 2], 5)
    assert step(scheduler).seq_ids == [1, 2] and states.used_count == 2
    assert [seq.state for seq in map(scheduler.get_sequence, (1, 2, 3))][2] is SeqState.WAITING
    scheduler.remove_sequence(1)
    assert states.used_count == 1
    assert sorted(step(scheduler).seq_ids) == [2, 3] and states.used_count == 2
    run(scheduler)
    assert states.used_count == 0


def test_a_slot_that_others_free_is_found():
    states = states_of(1)
    slot = states.alloc(99)
    scheduler = Scheduler(SchedulerConfig(), states=states)
    scheduler.add_request([1, 2], 5)
    assert step(scheduler).is_empty and scheduler.has_work
    states.release(slot)
    assert step(scheduler).seq_ids == [1]


def test_states_alone_with_a_pool_have_one_group_over_it():
    pool = KvCachePool.from_layout(KvLayout(1, 1, 8, block_size=2), 8)
    scheduler = Scheduler(SchedulerConfig(), pool, states=states_of(1))
    scheduler.add_request([1] * 5, 8)
    (state,) = step(scheduler).states
    assert [table.block_size for table in state.kv] == [2] and pool.allocator.in_use == 3 and state.state is not None


def test_a_decode_without_a_new_token_is_not_scheduled_with_recurrent_states():
    scheduler = Scheduler(SchedulerConfig(), states=states_of(2))
    for _ in range(2):
        scheduler.add_request([1, 2], 9)
    batch = scheduler.schedule()
    scheduler.commit(batch, [7, None])
    assert step(scheduler).seq_ids == [1]
    scheduler.append_token(2, 8)
    assert sorted(step(scheduler).seq_ids) == [1, 2]


def test_drafts_get_the_states_that_no_sequence_uses():
    states = SsmStatePool.from_layout(STATE, 6)
    scheduler = Scheduler(SchedulerConfig(lookahead=3), states=states)
    for number in range(2):
        scheduler.add_request([number, 2], 40)
    step(scheduler)
    batch = scheduler.schedule()
    assert (batch.lookahead, states.free_count) == ([3, 1], 0)
    scheduler.commit(batch, [[7, 7], 7])
    assert states.used_count == 2
    for _ in range(3):  # requests come before drafts
        scheduler.add_request([5, 2], 40)
    batch = scheduler.schedule()
    assert (batch.lookahead, states.free_count) == ([1, 0, 0, 0, 0], 0)
    scheduler.give_up(batch)
    assert states.used_count == 0
    run(scheduler)
    assert states.used_count == 0


def test_states_that_others_take_during_schedule_leave_a_step_without_drafts(monkeypatch):
    pool = KvCachePool.from_layout(KvLayout(1, 1, 8, block_size=BLOCK), 8)
    states = SsmStatePool.from_layout(STATE, 4)
    scheduler = Scheduler(SchedulerConfig(lookahead=3), pool, states=states)
    scheduler.add_request([1, 2], 20)
    step(scheduler)
    taken, hold = [], HybridSequence.hold_drafts

    def hold_late(sequence, n):
        taken.extend(states.alloc(99) for _ in range(n and states.free_count - 1))
        hold(sequence, n)

    monkeypatch.setattr(HybridSequence, "hold_drafts", hold_late)
    batch = scheduler.schedule()
    assert (batch.lookahead, batch.tokens, states.used_count, pool.allocator.in_use) == ([0], [[7]], 3, 1)
    scheduler.commit(batch, [7])
    for slot in taken:
        states.release(slot)
    monkeypatch.undo()
    assert scheduler.schedule().lookahead == [3]


def test_fork_takes_a_slot_or_changes_nothing():
    states, allocator = states_of(2), BlockAllocator(16)
    scheduler = Scheduler(SchedulerConfig(), allocator, states=states)
    scheduler.add_request([1, 2], 9, request_id="chat-7")
    step(scheduler)
    with refuses(ValueError, 2, 1):
        scheduler.fork(1, 2)
    (fork,) = scheduler.fork(1)
    assert states.used_count == 2 and scheduler.get_sequence(fork).kv.label == "chat-7"
    scheduler.remove_sequence(1)
    assert states.used_count == 1
    run(scheduler)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"groups": 5}, TypeError, ("groups", "KvGroup", "int", 5)),
        ({"groups": [5]}, TypeError, ("groups[0]", "KvGroup", "int", 5)),
        ({"states": 5}, TypeError, ("states", "SsmStatePool", "None", "int", 5)),
        ({"groups": [KvGroup(BlockAllocator(4))]}, ValueError, ("groups[0]",)),
    ],
)
def test_an_object_without_memory_is_named(arguments, error, words):
    with refuses(error, *words):
        Scheduler(SchedulerConfig(), BlockAllocator(4), **arguments)


def test_options_that_hybrid_sequences_do_not_support_are_refused():
    pool = KvCachePool.from_layout(KvLayout(1, 1, 8, block_size=BLOCK), 8)
    cache = PrefixCache(pool.allocator, BLOCK)
    states, others = (SsmStatePool.from_layout(STATE, 2) for _ in range(2))
    for arguments, error, words in (
        ({"prefix_cache": cache, "states": states}, ValueError, ("prefix", "needs", "checkpoints")),
        ({"prefix_cache": cache, "groups": []}, ValueError, ("prefix", "needs")),
        ({"checkpoints": 5}, TypeError, ("checkpoints", "StateCheckpoints", "None", "int", 5)),
        ({"checkpoints": kept_of(others), "states": states}, ValueError, ("scheduler",)),
        ({"checkpoints": kept_of(states), "states": states}, ValueError, ("checkpoints",)),
        (
            {"checkpoints": StateCheckpoints(STATE, states, 999, align=1), "states": states, "prefix_cache": cache},
            ValueError,
            (1, 4),
        ),
    ):
        with refuses(error, *words):
            Scheduler(SchedulerConfig(), pool, **arguments)
    scheduler = Scheduler(SchedulerConfig(), pool, groups=[KvGroup(pool.allocator, max_blocks_per_seq=3)])
    with refuses(ValueError, 13, 4, "groups[0]", 3):
        scheduler.add_request([1], 13)
    with refuses(ValueError, 0):
        Scheduler(SchedulerConfig(), states=states_of(0)).add_request([1], 2)


def test_a_repeated_prompt_resumes_from_its_checkpoint():
    scheduler, _, kept = make_cached(max_prefill_tokens=100)
    for prompt in ([*range(40)], [*range(40)], [*range(20), 50], [*range(38), 51], [*range(38), 52]):
        scheduler.add_request(prompt, max_new_tokens=1)
        computed = run(scheduler)
        begin = scheduler.drain_finished()[0].num_cached
        assert computed == len(prompt) - begin
        last = begin
    assert kept.stats()["saved"]["grid"] >= 2 and last == 36
    kept.check()


def test_the_second_request_with_a_prompt_goes_on_from_its_end():
    for length in (1, 3, 4, 5, 8, 40, 43):
        allocator, states = BlockAllocator(400), SsmStatePool.from_layout(STATE, 4)
        kept = kept_of(states, prompt_ends=True, grid=0)
        config = SchedulerConfig(block_size=BLOCK)
        scheduler = Scheduler(config, allocator, PrefixCache(allocator, BLOCK), states=states, checkpoints=kept)
        for prompt in (range(length), range(length), range(length + 20)):
            scheduler.add_request(prompt, max_new_tokens=1)
            run(scheduler)
        end = (length - 1) // BLOCK * BLOCK
        longer = length // BLOCK * BLOCK  # the longer prompt diverges here
        assert [seq.num_cached for seq in scheduler.drain_finished()] == [0, end, longer]
        assert states.used_count == 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_burst_keeps_the_state_where_its_prompts_part(policy):
    scheduler, cache, kept = make_cached(policy=policy, grid=0)
    for number in range(8):
        scheduler.add_request([*range(1024), *range(2000 + 20 * number, 2016 + 20 * number)], 1056, tenant=number % 3)
    assert run(scheduler) == 1024 + 8 * 31
    assert kept.stats()["used"]["branch"] == 7
    cache.reset_prefix_cache()
    assert cache.allocator.in_use == 0


def test_no_state_of_before_a_reset_is_kept_at_any_moment(monkeypatch):
    """Another thread resets, and another scheduler hears of it, right before the state is saved."""
    scheduler, cache, kept = make_cached(grid=0)
    save = kept.save

    def interrupted(*arguments, **options):
        cache.reset_prefix_cache()
        kept.follow(cache)
        return save(*arguments, **options)

    monkeypatch.setattr(kept, "save", interrupted)
    scheduler.add_request(range(64), max_new_tokens=1)
    run(scheduler)
    assert kept.index.num_states == 0 == cache.num_cached
    monkeypatch.undo()
    scheduler.add_request(range(80), max_new_tokens=1)
    assert run(scheduler) == 80 and kept.index.num_states > 0
    kept.check()


def test_states_are_dropped_with_a_reset_or_a_new_cache():
    scheduler, cache, kept = make_cached(grid=0)

    def ask(length):
        scheduler.add_request(range(length), max_new_tokens=1)
        return run(scheduler)

    assert (ask(64), ask(80)) == (64, 16)
    cache.reset_prefix_cache()  # as after new weights
    assert ask(80) == 80 and kept.stats()["saved"]["end"] == 1  # not skipped as a duplicate
    assert ask(96) == 16
    kept.follow(PrefixCache(cache.allocator, BLOCK))
    assert kept.index.num_states == 0


def test_a_full_group_alone_shares_prefixes_without_states():
    allocator = BlockAllocator(64)
    cache = PrefixCache(allocator, BLOCK)
    scheduler = Scheduler(SchedulerConfig(), allocator, cache, groups=[KvGroup(allocator, BLOCK)])
    for _ in range(2):
        scheduler.add_request(range(40), max_new_tokens=1)
    assert run(scheduler) == 40 + 4


@pytest.mark.parametrize("windows", [[8], [None, 8], [0, 5, None]])
def test_a_repeated_prompt_resumes_in_every_group(windows):
    allocator = BlockAllocator(400)
    cache = PrefixCache(allocator, BLOCK)
    groups = [KvGroup(allocator, BLOCK, window) for window in windows]
    scheduler = Scheduler(SchedulerConfig(max_prefill_tokens=8), allocator, cache, groups=groups)
    tables = []
    for prompt, cached in (([*range(40)], 0), ([*range(40)], 36), ([*range(60)], 40), ([*range(30), 99], 28)):
        seq_id = scheduler.add_request(prompt, max_new_tokens=2, extra_keys=[0])
        kv = (step(scheduler), scheduler.get_sequence(seq_id).kv)[1]
        tables.append([table.first_block for table in kv.kv])
        run(scheduler)
        assert scheduler.drain_finished()[0].num_cached == cached
    # The sequence holds no blocks of the prefix before its window.
    assert tables[2] == [0 if window is None else (40 - window) // BLOCK for window in windows]
    assert scheduler.add_request([*range(40)], max_new_tokens=1) and run(scheduler) == 40  # other keys
    assert allocator.in_use == cache.num_cached == cache.evictable
    cache.check()


def test_tokens_without_a_recurrent_state_have_a_reason_of_their_own():
    scheduler, _, _ = make_cached(explain_misses=True, grid=0)
    for prompt in (range(40), [*range(30), *[99] * 10]):
        scheduler.add_request(prompt, max_new_tokens=1)
        run(scheduler)
    first, second = scheduler.drain_finished()
    assert first.miss.counts() == {"never_seen": 36, "short": 4}
    assert (second.num_cached, second.miss.found) == (0, 0)
    assert second.miss.counts() == {"no_state": 28, "diverges": 8, "short": 4}
    assert (second.miss.divergence.position, second.miss.divergence.cached_token) == (30, 30)


@pytest.mark.parametrize("windows", [[8], [None, 8]])
def test_of_several_groups_the_one_that_found_least_says_why(windows):
    allocator = BlockAllocator(400)
    cache = PrefixCache(allocator, BLOCK)
    groups = [KvGroup(allocator, BLOCK, window) for window in windows]
    config = SchedulerConfig(max_prefill_tokens=8, explain_misses=True)
    scheduler = Scheduler(config, allocator, cache, groups=groups)
    for prompt in (range(40), range(60)):
        scheduler.add_request(prompt, max_new_tokens=2)
        run(scheduler)
    _, second = scheduler.drain_finished()
    assert (second.miss.found, second.miss.counts()) == (40, {"never_seen": 16, "short": 4})


def test_blocks_before_a_window_stay_cached_until_other_requests_need_blocks():
    """Later requests find fewer cached tokens, but never wrong ones."""
    allocator = BlockAllocator(24)
    cache = PrefixCache(allocator, BLOCK, "lru")
    config = SchedulerConfig(max_prefill_tokens=8)
    scheduler = Scheduler(config, allocator, cache, groups=[KvGroup(allocator, BLOCK, window=8)])
    for prompt in (range(80), range(1000, 1400), range(80), range(80)):
        scheduler.add_request(prompt, max_new_tokens=3)
        run(scheduler)
        cache.check()
    assert [seq.num_cached for seq in scheduler.drain_finished()] == [0, 0, 0, 76]
    assert allocator.peak_in_use == 24 and scheduler.num_preemptions == 0


@examples(60)
@given(st.integers(0, 2**32))
def test_keys_values_and_states_are_right_in_a_pool_that_is_too_small(seed):
    """Preemption, recomputation, forks, stops and cancels, with one or several groups, and with too few slots."""
    rng = random.Random(seed)
    windows = rng.choice([[None], [None], [8], [None, 8], [0, 5, None]])
    slots = rng.choice([None, 2, 5, 20])
    is_cached = rng.random() < 0.7
    engine = HybridEngine(rng.choice([8, 12, 30]) * len(windows), windows, slots)
    memory = {"groups": engine.groups, "states": engine.states}
    if is_cached:
        memory["prefix_cache"] = cache = PrefixCache(engine.pool.allocator, BLOCK)
        if slots is not None:
            memory["checkpoints"] = kept_of(engine.states, rng.choice([60, 300, 10**4]), rng.choice([True, False]))
    config = SchedulerConfig(
        block_size=BLOCK,
        max_batch_sequences=rng.choice([1, 2, 20]),
        max_batch_tokens=rng.choice([6, 24]),
        max_prefill_tokens=rng.choice([3, 8]),
        policy=rng.choice(sorted(POLICIES)),
        lookahead=rng.choice([0, 2]),
        tenants=rng.choice([{}, {1: Tenant(max_blocks=16)}]),
        explain_misses=rng.choice([True, False]),
    )
    scheduler = Scheduler(config, engine.pool, **memory)
    for number in range(3000):
        if number < 60 and rng.random() < 0.3:
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 14))]
            try:
                scheduler.submit(prompt, 22, rng.randrange(2), tenant=rng.randrange(2), stop_token_ids=[49])
            except ValueError as error:
                assert "blocks" in str(error)
        batch = scheduler.schedule()
        for seq in map(scheduler.get_sequence, batch.seq_ids):
            if seq.miss is not None:
                assert seq.miss.found + sum(seq.miss.counts().values()) == len(seq.prompt_tokens)
        engine.run(scheduler, batch)
        decoding = [seq_id for seq_id in batch.seq_ids if scheduler.get_sequence(seq_id).state is SeqState.DECODING]
        forks = []
        if decoding and number < 100 and rng.random() < 0.1:
            try:
                forks = scheduler.fork(rng.choice(decoding), rng.randint(1, 2))
            except ValueError as error:
                assert "fork" in str(error) or "quota" in str(error)
        results = []
        for slots_, wants in zip(batch.lookahead, batch.wants_token, strict=True):
            token = rng.randrange(50)
            results.append([token] if slots_ and wants and rng.random() < 0.5 else token)
        scheduler.commit(batch, results)
        for fork in forks:
            scheduler.append_token(fork, rng.randrange(50))
        if is_cached and rng.random() < 0.03:
            cache.discard([rng.randrange(8)])
        if rng.random() < 0.05 and scheduler.total_count:
            scheduler.cancel(rng.choice(sorted(scheduler._sequences)))
        scheduler.check()
        if number >= 100 and not scheduler.has_work:
            break
    assert not scheduler.has_work
    if is_cached:
        if slots is not None:
            memory["checkpoints"].check()
        cache.reset_prefix_cache()
    assert engine.pool.allocator.in_use == 0 and (engine.states is None or engine.states.used_count == 0)


@pytest.mark.parametrize("windows", [(8,), (None, 8), (None, 8, 8), (4, 12)], ids=str)
def test_a_single_request_ends_in_every_pool_that_accepts_it(windows):
    """Cached blocks before a window are evicted for the window's next blocks."""
    refused = 0
    for num_blocks in range(3, 60):
        for step in (4, 8, 16):
            allocator = BlockAllocator(num_blocks)
            groups = [KvGroup(allocator, 4, window) for window in windows]
            config = SchedulerConfig(block_size=4, max_prefill_tokens=step)
            scheduler = Scheduler(config, allocator, PrefixCache(allocator, 4), groups=groups)
            try:
                scheduler.add_request([*range(63)], max_new_tokens=3)
            except (ValueError, PoolExhausted):
                refused += 1
                continue
            for _ in range(100):
                batch = scheduler.schedule()
                scheduler.commit(batch, [7 if wants else None for wants in batch.wants_token])
            assert not scheduler.has_work, f"{num_blocks} blocks, steps of {step}"
            scheduler.check()
    assert 0 < refused < 3 * 57
