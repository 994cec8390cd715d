"""End of requests: at limits, at a stop token or by a call, with the matching finish reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from share import examples

from pagepool import BlockAllocator, PrefixCache, Scheduler, SchedulerConfig, SeqState


def step(scheduler, *tokens):
    batch = scheduler.schedule()
    scheduler.commit(batch, list(tokens))
    return batch


def ended(scheduler):
    return [(seq.id, seq.finish_reason, seq.output_tokens) for seq in scheduler.drain_finished()]


@pytest.mark.parametrize(
    ("limits", "outputs"),
    [
        ({"max_tokens": 5}, 3),
        ({"max_new_tokens": 3}, 3),
        ({"max_tokens": 9, "max_new_tokens": 3}, 3),
        ({"max_tokens": 4, "max_new_tokens": 3}, 2),
        ({"max_tokens": 2}, 0),
        ({"max_new_tokens": 0}, 0),
    ],
)
def test_the_limit_that_is_reached_first_ends_it(limits, outputs):
    scheduler = Scheduler()
    scheduler.add_request([1, 2], **limits)
    while scheduler.has_work:
        assert scheduler.get_sequence(1).finish_reason is None
        step(scheduler, 7)
    assert ended(scheduler) == [(1, "length", [7] * outputs)]


def test_a_stop_token_ends_it_and_frees_its_blocks():
    allocator = BlockAllocator(8)
    scheduler = Scheduler(SchedulerConfig(), allocator)
    scheduler.add_request([1, 2], 50, stop_token_ids=[5, 6])
    scheduler.add_request([1, 2], 50)
    step(scheduler, 7, 6)
    step(scheduler, 6, 6)
    assert scheduler.get_sequence(1).state is SeqState.FINISHED and allocator.in_use == 1
    assert ended(scheduler) == [(1, "stop", [7, 6])]
    scheduler.check()


def test_a_stop_token_in_the_prompt_ends_nothing():
    scheduler = Scheduler()
    scheduler.add_request([5, 5], 4, stop_token_ids={5})
    step(scheduler, 1)
    assert scheduler.has_work


def test_a_stop_token_at_the_limit_is_a_stop():
    scheduler = Scheduler()
    scheduler.add_request([1], 2, stop_token_ids=[5])
    step(scheduler, 5)
    assert ended(scheduler) == [(1, "stop", [5])]


def test_a_stop_token_by_append_token():
    scheduler = Scheduler()
    scheduler.add_request([1], 9, stop_token_ids=[5])
    scheduler.schedule()
    scheduler.append_token(1, 5)
    assert ended(scheduler) == [(1, "stop", [5])]


def test_drafts_behind_a_stop_token_are_dropped():
    allocator = BlockAllocator(8)
    cache = PrefixCache(allocator, 2)
    scheduler = Scheduler(SchedulerConfig(block_size=2, lookahead=3), allocator, cache)
    scheduler.add_request([1], 9, stop_token_ids=[5])
    step(scheduler, 2)
    batch = scheduler.schedule()
    assert batch.lookahead == [3]
    scheduler.commit(batch, [[3, 5, 6, 8]])
    scheduler.check()
    assert ended(scheduler) == [(1, "stop", [2, 3, 5])]
    assert cache.cached_tokens([1, 2, 3, 5, 9]) == 2  # the stop token itself was perhaps not fed
    cache.reset_prefix_cache()
    assert allocator.in_use == 0


@pytest.mark.parametrize(("way", "reason"), [("finish_sequence", "stop"), ("remove_sequence", "abort")])
def test_a_call_ends_it(way, reason):
    scheduler = Scheduler()
    scheduler.add_request([1], 9)
    step(scheduler, 7)
    seq = scheduler.get_sequence(1)
    getattr(scheduler, way)(1)
    assert (seq.finish_reason, seq.stopped) == (reason, True)


def test_later_calls_do_not_change_the_finish_reason():
    scheduler = Scheduler()
    scheduler.add_request([1], 2)
    scheduler.add_request([1], 3, stop_token_ids=[7])
    step(scheduler, 7, 7)
    for seq_id in (1, 2):
        scheduler.finish_sequence(seq_id)
    assert ended(scheduler) == [(1, "length", [7]), (2, "stop", [7])]


def test_the_caller_s_id_labels_the_request_and_its_blocks():
    allocator = BlockAllocator(8)
    scheduler = Scheduler(SchedulerConfig(), allocator)
    for request_id in ("chat-7", 99, "chat-7", None):
        scheduler.add_request([1], 9, request_id=request_id)
    step(scheduler, 7, 7, 7, 7)
    assert [scheduler.get_sequence(number).request_id for number in (1, 2, 3, 4)] == ["chat-7", 99, "chat-7", None]
    assert {owner.label for owners in allocator.owners().values() for owner in owners} == {"chat-7", 99, 4}


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, TypeError, ("max_tokens", "max_new_tokens")),
        ({"max_new_tokens": -1}, ValueError, ("max_new_tokens", 0, -1)),
        ({"max_new_tokens": 1.5}, TypeError, ("max_new_tokens", "float", "1.5")),
        ({"max_new_tokens": 200}, ValueError, (202, 13, 16, 8)),
        ({"max_tokens": 9, "stop_token_ids": 5}, TypeError, ("stop_token_ids", "int")),
        ({"max_tokens": 9, "stop_token_ids": [1.5]}, TypeError, ("float",)),
        ({"max_tokens": 9, "stop_token_ids": [-1]}, ValueError, (0, -1)),
        ({"max_tokens": 9, "request_id": 1.5}, TypeError, ("request_id", "int", "str", "None", "float", "1.5")),
    ],
)
def test_a_wrong_argument_is_named_and_changes_nothing(arguments, error, words):
    scheduler = Scheduler(SchedulerConfig(), BlockAllocator(8))
    with refuses(error, *words):
        scheduler.add_request([1, 2], **arguments)
    assert scheduler.total_count == 0 and scheduler.add_request([1], 2) == 1


@examples(50)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.sets(st.integers(0, 5)), st.integers(1, 12))
def test_the_output_ends_at_the_first_stop_token_or_the_limit(said, stops, most):
    scheduler = Scheduler(SchedulerConfig(lookahead=0))
    scheduler.add_request([1], max_new_tokens=most, stop_token_ids=stops)
    for token in said:
        if scheduler.has_work:
            step(scheduler, token)
    cut = next((place + 1 for place, token in enumerate(said) if token in stops), len(said))
    outputs = said[: min(cut, most)]
    seq = scheduler.get_sequence(1)
    assert seq.output_tokens == outputs
    expected = "stop" if outputs[-1] in stops else "length" if len(outputs) == most else None
    assert seq.finish_reason == expected
