"""`submit` and `cancel`: other threads may call them during a step; they take effect at the next one."""

import gc
import signal
import sys
import threading
import time
import weakref
from contextlib import suppress

import pytest
from refusals import refuses

from pagepool import BlockAllocator, PrefixCache, Scheduler, SchedulerConfig, SeqState


def step(scheduler):
    batch = scheduler.schedule()
    scheduler.commit(batch, [7] * len(batch))
    return batch


def run(scheduler):
    while scheduler.has_work:
        step(scheduler)
    return {seq.id: seq.finish_reason for seq in scheduler.drain_finished()}


def test_a_submitted_request_is_added_at_the_next_step():
    scheduler = Scheduler()
    assert (scheduler.submit([1, 2], 4), scheduler.add_request([3], 4), scheduler.submit([5], max_new_tokens=0)) == (
        1,
        2,
        3,
    )
    assert scheduler.get_sequence(1) is None and scheduler.has_work and scheduler.total_count == 1
    assert step(scheduler).seq_ids == [1, 2]
    assert run(scheduler) == {3: "length", 1: "length", 2: "length"}


def test_a_submitted_request_alone_is_work():
    scheduler = Scheduler()
    scheduler.submit([1], 3)
    assert scheduler.has_work and run(scheduler) == {1: "length"}


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        ({"prompt_tokens": []}, ValueError, (1, 0)),
        ({"prompt_tokens": [1], "max_tokens": 200}, ValueError, (200, 13, 16, 8)),
        ({"prompt_tokens": [1], "extra_keys": 5}, TypeError, ("extra_keys", "int")),
        ({"prompt_tokens": [1], "colour": 5}, TypeError, ("colour",)),
    ],
)
def test_submit_raises_for_an_invalid_request(request_, error, words):
    scheduler = Scheduler(SchedulerConfig(), BlockAllocator(8))
    with refuses(error, *words):
        scheduler.submit(**{"max_tokens": 5, **request_})
    assert not scheduler.has_work and scheduler.submit([1], 5) == 1


def test_a_cancelled_request_ends_at_the_next_step_in_every_state():
    """Cancel works on submitted, active, waiting, finished and unknown requests, and frees their blocks."""
    allocator = BlockAllocator(8)
    scheduler = Scheduler(SchedulerConfig(max_sequences=2), allocator)
    for limit in (2, 9, 9, 9):
        scheduler.add_request([1], limit)
    step(scheduler)
    step(scheduler)
    assert scheduler.get_sequence(1).state is SeqState.FINISHED
    late = scheduler.submit([1], 9)
    for seq_id in (1, 2, 4, late, late, 77):
        scheduler.cancel(seq_id)
    assert scheduler.get_sequence(2).state is SeqState.DECODING
    assert step(scheduler).seq_ids == [3] and allocator.in_use == 1
    scheduler.check()
    assert run(scheduler) == {1: "length", 2: "abort", 4: "abort", late: "abort", 3: "length"}
    assert allocator.in_use == 0


def test_to_cancel_all_leaves_no_work_after_one_step():
    scheduler = Scheduler()
    scheduler.cancel(scheduler.submit([1], 9))
    assert step(scheduler).is_empty and not scheduler.has_work
    with refuses(TypeError, "seq_id", "str", "chat-7"):
        scheduler.cancel("chat-7")
    assert not scheduler.has_work


def test_a_finalizer_and_a_handler_in_the_middle_of_a_call_may_cancel_and_submit():
    class Iterator:
        pass

    class Collecting:
        """A prefix cache with calls during which a generator is dropped and a signal arrives."""

        def __getattr__(self, name):
            if name == "match_held" and readers:
                readers.clear()
                gc.collect()
                signal.raise_signal(signal.SIGALRM)
            return getattr(cache, name)

    allocator, readers = BlockAllocator(20), []
    cache = PrefixCache(allocator, 16)
    scheduler = Scheduler(SchedulerConfig(), allocator, Collecting())
    readers.append(Iterator())
    weakref.finalize(readers[0], scheduler.cancel, 1)
    before = signal.signal(signal.SIGALRM, lambda number, frame: scheduler.submit([4], 6))
    try:
        scheduler.add_request([1] * 40, 50)
        assert step(scheduler).seq_ids == [1] and not readers
    finally:
        signal.signal(signal.SIGALRM, before)
    assert step(scheduler).seq_ids == [2]
    assert run(scheduler) == {1: "abort", 2: "length"}


def test_front_ends_on_threads_of_their_own_lose_nothing_and_disturb_no_step():
    """Three threads submit and cancel continuously. No call raises, and each request is drained once."""
    allocator = BlockAllocator(256)
    cache = PrefixCache(allocator, 16)
    scheduler = Scheduler(SchedulerConfig(), allocator, cache)
    stop, ids = threading.Event(), [[], [], []]

    def front_end(mine):
        while not stop.is_set():
            mine.append(scheduler.submit(list(range(20)), max_tokens=40))
            if len(mine) % 3 == 0:
                scheduler.cancel(mine[-1])
                scheduler.cancel(mine[len(mine) // 2])
            time.sleep(0.0002)

    interval, finished = sys.getswitchinterval(), []
    threads = [threading.Thread(target=front_end, args=(mine,)) for mine in ids]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        begin = time.monotonic()
        while time.monotonic() < begin + 1.5 or not all(ids):  # on a slow machine longer
            if time.monotonic() > begin + 120:
                pytest.fail(f"{ids} were submitted in 120 s")
            step(scheduler)
            finished += scheduler.drain_finished()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    while scheduler.has_work:
        step(scheduler)
    finished += scheduler.drain_finished()
    scheduler.check()
    assert sorted([*ids[0], *ids[1], *ids[2]]) == list(range(1, len(finished) + 1))
    assert sorted(seq.id for seq in finished) == list(range(1, len(finished) + 1))
    assert {seq.finish_reason for seq in finished} == {"length", "abort"}
    assert {len(seq.output_tokens) for seq in finished if seq.finish_reason == "length"} == {20}
    cache.reset_prefix_cache()
    assert allocator.in_use == 0


def test_requests_are_taken_while_a_call_is_under_way_and_refused_once_one_failed():
    class Waiting:
        def __getattr__(self, name):
            if name == "match_held" and threading.current_thread() is stepper:
                inside.set()
                assert go_on.wait(120)
                raise KeyboardInterrupt
            return getattr(cache, name)

    allocator = BlockAllocator(20)
    cache = PrefixCache(allocator, 16)
    inside, go_on = threading.Event(), threading.Event()

    def interrupted():
        with suppress(KeyboardInterrupt):
            scheduler.schedule()

    stepper = threading.Thread(target=interrupted)
    scheduler = Scheduler(SchedulerConfig(), allocator, Waiting())
    scheduler.add_request([1] * 40, 50)
    stepper.start()
    assert inside.wait(120)
    assert scheduler.submit([2], 5) == 2
    go_on.set()
    stepper.join()
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        scheduler.submit([3], 5)
    scheduler.cancel(1)
    scheduler.close()
    assert not scheduler.has_work and allocator.in_use == cache.num_cached
