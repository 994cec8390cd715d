"""The scheduler without a pool: order, states, tokens and limits of requests."""

import numpy as np
import pytest
from refusals import refuses

from pagepool import BlockAllocator, PrefixCache, ScheduledBatch, Scheduler, SchedulerConfig, SeqState


def run_to_end(scheduler, token=7, limit=100_000):
    """Run steps until no work is left; return the finished sequences."""
    for _ in range(limit):
        if not scheduler.has_work:
            return scheduler.drain_finished()
        batch = scheduler.schedule()
        assert not batch.is_empty
        scheduler.commit(batch, [token] * len(batch))
    raise AssertionError(f"requests still run after {limit} steps")


def test_ids_count_from_one():
    scheduler = Scheduler()
    assert [scheduler.add_request([1], 4) for _ in range(3)] == [1, 2, 3]
    scheduler.remove_sequence(3)
    assert scheduler.add_request([1], 4) == 4


def test_prompt_is_fed_in_chunks_then_one_token_a_step():
    scheduler = Scheduler(SchedulerConfig(max_prefill_tokens=4))
    seq_id = scheduler.add_request([1, 2, 3, 4, 5, 6], max_tokens=9)
    seq = scheduler.get_sequence(seq_id)
    assert seq.state is SeqState.WAITING and seq.prompt_pos == 0

    batch = scheduler.schedule()
    assert (batch.seq_ids, batch.tokens, batch.is_prefill) == ([1], [[1, 2, 3, 4]], [True])
    assert (batch.num_tokens, batch.total_tokens, batch.wants_token, batch.states) == ([4], 4, [False], [])
    assert seq.state is SeqState.PREFILLING and seq.prompt_pos == 4

    batch = scheduler.schedule()
    assert (batch.tokens, batch.is_prefill, batch.wants_token) == ([[5, 6]], [True], [True])
    assert seq.state is SeqState.DECODING and seq.prompt_pos == 6

    scheduler.append_token(1, 50)
    batch = scheduler.schedule()
    assert (batch.tokens, batch.is_prefill) == ([[50]], [False])
    scheduler.append_token(1, 51)
    assert scheduler.schedule().tokens == [[51]]
    assert seq.all_tokens == [1, 2, 3, 4, 5, 6, 50, 51]


def test_a_decode_without_a_new_token_feeds_the_last_one_again():
    scheduler = Scheduler()
    scheduler.add_request([1, 2], 10)
    scheduler.schedule()
    assert scheduler.schedule().tokens == [[2]]
    scheduler.append_token(1, 9)
    assert scheduler.schedule().tokens == [[9]]
    again = scheduler.schedule()
    assert (again.tokens, again.wants_token) == ([[9]], [True])
    assert scheduler.get_sequence(1).fed == 3


def test_several_appended_tokens_are_fed_together_within_the_budget():
    scheduler = Scheduler(SchedulerConfig(max_batch_tokens=4))
    scheduler.add_request([1, 2], 20)
    scheduler.schedule()
    for token in (5, 6, 7, 8, 9, 10):
        scheduler.append_token(1, token)
    batch = scheduler.schedule()
    assert (batch.tokens, batch.is_prefill, batch.wants_token) == ([[5, 6, 7, 8]], [False], [False])
    scheduler.commit(batch, [99])  # not the result of the last prompt token: ignored
    batch = scheduler.schedule()
    assert (batch.tokens, batch.wants_token) == ([[9, 10]], [True])
    scheduler.commit(batch, [11])
    assert scheduler.schedule().tokens == [[11]]


def test_at_the_limit_a_sequence_counts_as_finished():
    scheduler = Scheduler()
    scheduler.add_request([1, 2], max_tokens=3)
    scheduler.schedule()
    seq = scheduler.get_sequence(1)
    assert not seq.at_limit
    scheduler.append_token(1, 5)
    assert seq.at_limit and seq.state is SeqState.FINISHED and not seq.stopped
    assert not scheduler.has_work and scheduler.schedule().is_empty
    scheduler.append_token(1, 6)
    assert seq.output_tokens == [5]
    assert scheduler.drain_finished() == [seq]


def test_a_prompt_of_max_tokens_is_finished_at_once():
    scheduler = Scheduler()
    scheduler.add_request([1, 2, 3], max_tokens=3)
    assert not scheduler.has_work
    assert [seq.id for seq in scheduler.drain_finished()] == [1]


def test_finish_stops_and_drain_forgets():
    scheduler = Scheduler()
    for _ in range(3):
        scheduler.add_request([1, 2], 10)
    scheduler.schedule()
    scheduler.finish_sequence(2)
    assert scheduler.get_sequence(2).stopped and scheduler.get_sequence(2).state is SeqState.FINISHED
    assert (scheduler.active_count, scheduler.waiting_count, scheduler.total_count) == (2, 0, 3)
    assert scheduler.schedule().seq_ids == [1, 3]
    assert [seq.id for seq in scheduler.drain_finished()] == [2]
    assert scheduler.get_sequence(2) is None and scheduler.total_count == 2
    assert scheduler.drain_finished() == []


def test_remove_forgets_in_every_state():
    scheduler = Scheduler(SchedulerConfig(max_sequences=2, max_prefill_tokens=1))
    for prompt in ([1], [1, 2, 3], [1], [1]):
        scheduler.add_request(prompt, 10)
    scheduler.schedule()
    scheduler.finish_sequence(4)
    states = [scheduler.get_sequence(seq_id).state for seq_id in (1, 2, 3, 4)]
    assert states == [SeqState.DECODING, SeqState.PREFILLING, SeqState.WAITING, SeqState.FINISHED]
    for seq_id in (1, 2, 3, 4):
        scheduler.remove_sequence(seq_id)
    assert (scheduler.active_count, scheduler.waiting_count, scheduler.total_count) == (0, 0, 0)
    assert not scheduler.has_work and scheduler.drain_finished() == [] and scheduler.schedule().is_empty


def test_unknown_ids_are_ignored():
    scheduler = Scheduler()
    scheduler.finish_sequence(5)
    scheduler.remove_sequence(5)
    scheduler.append_token(5, 1)
    assert scheduler.get_sequence(5) is None and scheduler.total_count == 0


def test_admission_is_first_come_first_served():
    scheduler = Scheduler(SchedulerConfig(max_sequences=2))
    for _ in range(4):
        scheduler.add_request([1], 3)
    assert scheduler.schedule().seq_ids == [1, 2]
    assert scheduler.waiting_count == 2
    scheduler.finish_sequence(1)
    assert scheduler.schedule().seq_ids == [2, 3]


def test_lower_priority_numbers_go_first():
    scheduler = Scheduler(SchedulerConfig(max_sequences=1))
    for priority in (2, None, -1, 0, 2):
        scheduler.add_request([1], 2, priority=priority)
    assert [seq.id for seq in run_to_end(scheduler)] == [3, 2, 4, 1, 5]


def test_removed_requests_leave_the_waiting_line():
    scheduler = Scheduler(SchedulerConfig(max_sequences=1))
    for _ in range(1000):
        scheduler.add_request([1], 2)
    for seq_id in range(1, 1000):
        scheduler.remove_sequence(seq_id)
    assert scheduler.waiting_count == 1
    assert scheduler.schedule().seq_ids == [1000]


@pytest.mark.parametrize(
    ("prompt", "limit", "words"),
    [([], 4, (1, 0)), ([1, 2, 3], 2, (3, "max_tokens", 2)), ([1], -1, (1, "max_tokens", -1))],
)
def test_bad_requests_are_refused_and_change_nothing(prompt, limit, words):
    scheduler = Scheduler()
    with refuses(ValueError, *words):
        scheduler.add_request(prompt, limit)
    assert scheduler.total_count == 0 and scheduler.add_request([1], 2) == 1


def test_wrong_types_are_refused():
    scheduler = Scheduler()
    with pytest.raises(TypeError):
        scheduler.add_request([1], 2.5)
    with pytest.raises(TypeError):
        scheduler.add_request([1], 2, priority="high")
    with refuses(TypeError, "KvCachePool", "SequencePool", "BlockAllocator", "int"):
        Scheduler(pool=3)
    assert scheduler.total_count == 0


def test_the_prompt_is_copied():
    prompt = [1, 2, 3]
    scheduler = Scheduler()
    scheduler.add_request(prompt, 5)
    scheduler.add_request(np.array(prompt, dtype=np.int64), 5)
    prompt[0] = 9
    batch = scheduler.schedule()
    assert batch.tokens == [[1, 2, 3], [1, 2, 3]]
    assert all(type(token) is int for token in batch.tokens[1])


def test_commit_is_the_bulk_form_of_append_token():
    """commit and append_token give the same batches and sequences for the same requests."""
    config = SchedulerConfig(max_sequences=6, max_batch_tokens=24, max_batch_sequences=5, max_prefill_tokens=7)
    bulk, single = Scheduler(config), Scheduler(config)
    for scheduler in (bulk, single):
        for index in range(20):
            scheduler.add_request(list(range(index % 9 + 1)), index % 9 + 2 + index % 5)
    step = 0
    while bulk.has_work:
        step += 1
        one, two = bulk.schedule(), single.schedule()
        # The order of rows is unspecified if all sequences fit into a step.
        rows = [
            sorted(zip(batch.seq_ids, batch.tokens, batch.wants_token, batch.is_prefill, strict=True))
            for batch in (one, two)
        ]
        assert rows[0] == rows[1]
        bulk.commit(one, [step * 100 + seq_id for seq_id in one.seq_ids])
        for seq_id, wanted in zip(two.seq_ids, two.wants_token, strict=True):
            if wanted:
                single.append_token(seq_id, step * 100 + seq_id)
        fed = [[(seq.id, seq.fed) for seq in scheduler._sequences.values()] for scheduler in (bulk, single)]
        assert fed[0] == fed[1]
    assert not single.has_work
    ended = [sorted((seq.id, seq.all_tokens) for seq in scheduler.drain_finished()) for scheduler in (bulk, single)]
    assert ended[0] == ended[1] and len(ended[0]) == 20


def test_commit_passes_over_rows_without_a_token():
    scheduler = Scheduler(SchedulerConfig(max_prefill_tokens=2))
    for prompt in ([1], [1, 2, 3], [1], [1]):
        scheduler.add_request(prompt, 9)
    batch = scheduler.schedule()
    assert batch.wants_token == [True, False, True, True]
    scheduler.commit(batch, [5, 5, None, -1])
    assert [scheduler.get_sequence(seq_id).output_tokens for seq_id in (1, 2, 3, 4)] == [[5], [], [], []]


def test_commit_takes_an_array():
    scheduler = Scheduler()
    scheduler.add_request([1], 9)
    scheduler.commit(scheduler.schedule(), np.array([4], dtype=np.int32))
    assert scheduler.get_sequence(1).output_tokens == [4]
    assert type(scheduler.get_sequence(1).output_tokens[0]) is int


def test_commit_of_the_wrong_length_changes_nothing():
    scheduler = Scheduler()
    scheduler.add_request([1], 9)
    batch = scheduler.schedule()
    with refuses(ValueError, 2, 1):
        scheduler.commit(batch, [1, 2])
    assert scheduler.get_sequence(1).output_tokens == []


def test_commit_of_something_else_than_numbers_changes_nothing():
    scheduler = Scheduler()
    for _ in range(2):
        scheduler.add_request([1], 9)
    for expected in ([], [5], [5, 5]):
        batch = scheduler.schedule()
        with pytest.raises(TypeError):
            scheduler.commit(batch, [5, "x"])
        assert [scheduler.get_sequence(seq_id).output_tokens for seq_id in (1, 2)] == [expected, expected]
        scheduler.commit(batch, [5, 5])


def test_a_batch_is_committed_once():
    scheduler = Scheduler()
    scheduler.add_request([1], 9)
    for outputs in (1, 2, 3):
        batch = scheduler.schedule()
        scheduler.commit(batch, [5])
        with refuses(ValueError, 1):
            scheduler.commit(batch, [5])
        assert len(scheduler.get_sequence(1).output_tokens) == outputs


def test_commit_ignores_sequences_that_ended_meanwhile():
    scheduler = Scheduler()
    for _ in range(3):
        scheduler.add_request([1], 9)
    scheduler.commit(scheduler.schedule(), [5, 5, 5])
    batch = scheduler.schedule()
    finished, removed = scheduler.get_sequence(1), scheduler.get_sequence(2)
    scheduler.finish_sequence(1)
    scheduler.remove_sequence(2)
    scheduler.commit(batch, [6, 6, 6])
    assert finished.output_tokens == removed.output_tokens == [5]
    assert scheduler.get_sequence(3).output_tokens == [5, 6]


def test_the_lists_of_a_batch_belong_to_the_caller():
    scheduler = Scheduler()
    for _ in range(2):
        scheduler.add_request([1], 9)
    for _ in range(3):
        batch = scheduler.schedule()
        size = len(batch)
        scheduler.commit(batch, [5] * size)
        assert batch.seq_ids == [1, 2]
        for name in ("seq_ids", "tokens", "num_tokens", "is_prefill", "wants_token", "states"):
            getattr(batch, name).clear()
        assert size == 2


def test_an_empty_batch_says_so():
    batch = ScheduledBatch.empty()
    assert batch.is_empty and len(batch) == 0 and batch.total_tokens == 0
    assert Scheduler().schedule().is_empty


@pytest.mark.parametrize("wrong", [-1, -(2**31), -(10**30)])
def test_a_token_below_0_is_never_stored(wrong):
    scheduler = Scheduler(SchedulerConfig(block_size=2, lookahead=1), BlockAllocator(8))
    for prompt in ([wrong], [1, wrong, 2], (token for token in (1, wrong))):
        with refuses(ValueError, 0, wrong):
            scheduler.add_request(prompt, 4)
    seq = scheduler.get_sequence(scheduler.add_request([0, 2, 3], 9))
    assert seq.id == 1
    scheduler.commit(scheduler.schedule(), [wrong])  # no result
    scheduler.append_token(1, 0)
    batch = scheduler.schedule()
    with refuses(ValueError, 0, wrong):
        scheduler.append_token(1, wrong)
    with refuses(ValueError, "row", 0, wrong):
        scheduler.commit(batch, [[5, wrong]])
    scheduler.commit(batch, [[5, 6]])
    assert seq.output_tokens == [0, 5, 6]


@pytest.mark.parametrize("wrong", [1.5, "7", float("nan"), np.float32(2), [7], object()])
@pytest.mark.parametrize("with_cache", [False, True])
def test_a_token_that_is_not_an_integer_is_refused(wrong, with_cache):
    """The cache would truncate a float and store the block under a wrong token."""
    allocator = BlockAllocator(8)
    cache = PrefixCache(allocator, block_size=2) if with_cache else None
    scheduler = Scheduler(SchedulerConfig(block_size=2), allocator, cache)
    for prompt in ([wrong], [1, wrong], (token for token in (1, wrong))):
        with pytest.raises((TypeError, ValueError), match="integer"):
            scheduler.add_request(prompt, 4)
    numbers = [scheduler.add_request([number, 2, 3], 9) for number in range(2)]
    for _ in range(3):  # steps 2 and 3 decode
        batch = scheduler.schedule()
        for results in ([4, wrong], [wrong, None]):
            with pytest.raises(TypeError, match="a token must be an integer"):
                scheduler.commit(batch, results)
        with pytest.raises(TypeError, match="a token must be an integer"):
            scheduler.append_token(numbers[0], wrong)
        scheduler.commit(batch, np.array([4, 5]))
    outputs = [scheduler.get_sequence(number).output_tokens for number in numbers]
    assert outputs == [[4] * 3, [5] * 3] and {type(token) for row in outputs for token in row} == {int}


def test_an_invalid_config_is_named():
    with refuses(TypeError, "config", "SchedulerConfig", "int"):
        Scheduler(3)
    for name, value, words in (("tenants", [1], ("tenants", "list")),):
        with refuses(TypeError, *words):
            SchedulerConfig(**{name: value})
