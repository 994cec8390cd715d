"""An exception at any place inside a call closes the scheduler: later calls name the cause, and no block is lost.

Calls from another thread or from a handler in the middle of a call are refused.
"""

import gc
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from marked_engine import Engine, HybridEngine

import pagepool.scheduling
from pagepool import BlockAllocator, PrefixCache, Scheduler, SchedulerConfig, SeqState, StateCheckpoints, Tenant

OURS = str(Path(pagepool.scheduling.__file__).parent)
BLOCK = 4


class Failing:
    """Make the n-th function call in the scheduler's modules raise `error`."""

    def __init__(self, n, error):
        self.left, self.error = n, error

    def run(self, method, *arguments):
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            return method(*arguments)
        finally:
            sys.settrace(before)

    def trace(self, frame, event, argument):
        code = frame.f_code
        # Not in the guard, which detects the exception. Not in generators, where the exception could be lost.
        is_ours = code.co_filename.startswith(OURS) and not code.co_filename.endswith("guard.py")
        if event == "call" and is_ours and not code.co_name.startswith("<"):
            self.left -= 1
            if self.left == 0:
                raise self.error


class World:
    """A scheduler with a pool too small for its requests, after some steps."""

    def __init__(self, windows, slots, steps, lookahead=0):
        self.engine = Engine(10) if windows is None else HybridEngine(10 * len(windows), windows, slots)
        self.allocator, self.states = self.engine.pool.allocator, self.engine.states
        self.cache = PrefixCache(self.allocator, BLOCK)
        memory = {} if windows is None else {"groups": self.engine.groups, "states": self.states}
        if slots:
            options = {"grid": 8, "spacing": 1, "align": BLOCK}
            memory["checkpoints"] = StateCheckpoints(self.engine.layout, self.states, 1000, **options)
        config = SchedulerConfig(
            block_size=BLOCK,
            max_prefill_tokens=8,
            policy="fair",
            lookahead=lookahead,
            tenants={"a": Tenant(max_blocks=14), "b": Tenant(weight=2.0)},
        )
        self.scheduler = Scheduler(config, self.engine.pool, self.cache, **memory)
        for number in range(5):
            self.scheduler.add_request([number] * 9, 30, tenant="ab"[number % 2])
        for _ in range(steps):
            self.step()

    def step(self, run=lambda method, *arguments: method(*arguments)):
        batch = run(self.scheduler.schedule)
        self.engine.run(self.scheduler, batch)
        run(self.scheduler.commit, batch, [7] * len(batch))

    def act(self, run):
        """All methods that change the scheduler."""
        scheduler = self.scheduler
        run(scheduler.submit, [3] * 7, 12)
        run(scheduler.add_request, [3] * 9, 12)
        run(scheduler.cancel, 2)
        batch = run(scheduler.schedule)
        self.engine.run(scheduler, batch)
        decoding = [seq_id for seq_id in batch.seq_ids if scheduler.get_sequence(seq_id).state is SeqState.DECODING]
        if decoding and len(batch) < 5:
            with suppress(ValueError):  # all slots are in use
                run(scheduler.append_token, run(scheduler.fork, decoding[0])[0], 5)
        run(scheduler.give_up, batch)
        for _ in range(2):
            self.step(run)
        run(scheduler.finish_sequence, 1)
        run(scheduler.remove_sequence, 3)
        run(scheduler.drain_finished)

    def must_be_closed(self, error):
        scheduler = self.scheduler
        for call in (
            scheduler.schedule,
            scheduler.drain_finished,
            scheduler.check,
            lambda: scheduler.add_request([1], 2),
            lambda: scheduler.submit([1], 2),
            lambda: scheduler.remove_sequence(1),
        ):
            with pytest.raises(RuntimeError, match=f"closed.*{type(error).__name__}: {error}") as raised:
                call()
            assert raised.value.__cause__ is error

    def close(self):
        for _ in range(2):
            self.scheduler.close()
        assert not self.scheduler.has_work and self.scheduler.outstanding is None
        assert all(seq.finish_reason and seq.kv is None for seq in self.scheduler._sequences.values())
        self.cache.check()
        self.allocator.check(others=0)
        assert self.allocator.in_use == self.cache.num_cached
        assert self.states is None or self.states.used_count == 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("windows", "slots", "lookahead"),
    [(None, None, 0), (None, None, 2), ([None, 8], None, 0), ([None], 4, 0), ([None], 8, 2)],
    ids=str,
)
def test_an_exception_in_any_function_closes_the_scheduler_and_close_frees_everything(windows, slots, lookahead):
    closed, errors = 0, [KeyboardInterrupt("by hand"), MemoryError("none left"), OSError("broken")]
    for steps in (0, 8):
        for n in range(1, 5000, 3):
            error = errors[n // 3 % 3]
            world, failing = World(windows, slots, steps, lookahead), Failing(n, error)
            try:
                world.act(failing.run)
                break
            except type(error):
                is_closed = world.scheduler._guard.is_closed
            if is_closed:
                world.must_be_closed(error)
                closed += 1
            else:  # the exception came during the check of arguments
                world.scheduler.check()
            world.close()
            with pytest.raises(RuntimeError, match="closed"):
                world.scheduler.schedule()
        assert world.scheduler.num_preemptions or not steps
    assert closed > 100


def test_close_ends_remaining_requests():
    world = World(None, None, 3)
    scheduler, batch = world.scheduler, world.scheduler.schedule()
    scheduler.submit([1], 5)
    scheduler.finish_sequence(2)
    world.close()
    scheduler.cancel(1)
    assert not scheduler.has_work and scheduler.active_count == scheduler.waiting_count == scheduler.num_tokens == 0
    reasons = [scheduler.get_sequence(seq_id).finish_reason for seq_id in (1, 2)]
    assert reasons == ["abort", "stop"]
    with pytest.raises(RuntimeError, match="the scheduler is closed"):
        scheduler.commit(batch, [7] * len(batch))


@pytest.mark.parametrize("method", ["remove_sequence", "schedule", "check"])
def test_a_call_in_the_middle_of_a_call_is_refused(method):
    """A finalizer or signal handler can make such a call; here the prefix cache does. The outer call raises."""

    class Calling:
        def __init__(self, cache):
            self.cache = cache

        def __getattr__(self, name):
            if name == "match_held" and scheduler is not None and not refused:
                try:
                    getattr(scheduler, method)(*arguments)
                except RuntimeError as error:
                    refused.append(error)
                    raise
            return getattr(self.cache, name)

    scheduler, refused, arguments = None, [], (1,) if method == "remove_sequence" else ()
    allocator = BlockAllocator(20)
    cache = Calling(PrefixCache(allocator, BLOCK))
    scheduler = Scheduler(SchedulerConfig(block_size=BLOCK), allocator, cache)
    scheduler.add_request([1] * 9, 12)
    with pytest.raises(RuntimeError, match="the scheduler is in the middle of a call"):
        scheduler.schedule()
    with pytest.raises(RuntimeError, match="closed: a call was interrupted by RuntimeError: the scheduler is"):
        scheduler.schedule()
    scheduler.close()
    assert allocator.in_use == 0


def test_a_call_of_another_thread_in_the_middle_of_a_call_is_refused():
    """Also `close` is refused. The call in progress continues."""

    class Waiting:
        def __getattr__(self, name):
            if name == "evictable" and threading.current_thread() is stepper:
                inside.set()
                assert refused.wait(120)
            return getattr(cache, name)

    allocator = BlockAllocator(20)
    cache = PrefixCache(allocator, BLOCK)
    inside, refused, batches = threading.Event(), threading.Event(), []
    stepper = threading.Thread(target=lambda: batches.append(scheduler.schedule()))
    scheduler = Scheduler(SchedulerConfig(block_size=BLOCK), allocator, Waiting())
    scheduler.add_request([1] * 9, 12)
    stepper.start()
    assert inside.wait(120)
    for call in (
        lambda: scheduler.add_request([2], 5),
        lambda: scheduler.append_token(1, 5),
        lambda: scheduler.finish_sequence(1),
        scheduler.drain_finished,
        scheduler.schedule,
        scheduler.close,
        scheduler.check,
    ):
        with pytest.raises(RuntimeError, match="another thread is inside a call of the scheduler"):
            call()
    refused.set()
    stepper.join()
    assert [batch.seq_ids for batch in batches] == [[1]] and scheduler.total_count == 1
    scheduler.check()
    scheduler.commit(batches[0], [7])  # another thread may commit a batch between calls


@pytest.mark.parametrize("name", ["finish_sequence", "remove_sequence"])
def test_an_invalid_id_is_refused_before_anything_changes(name):
    scheduler = Scheduler()
    scheduler.add_request([1, 2], 5)
    with pytest.raises(TypeError):
        getattr(scheduler, name)([1])
    assert scheduler.schedule().seq_ids == [1]


def test_two_threads_never_commit_the_same_batch_twice():
    """The checks run inside the guarded call, so another thread cannot commit between check and commit."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(300):
            scheduler = Scheduler(SchedulerConfig(max_sequences=32, max_batch_sequences=32))
            for _ in range(32):
                scheduler.add_request([1], 9)
            batch, taken, ready = scheduler.schedule(), [], threading.Barrier(2)

            def commit(scheduler=scheduler, batch=batch, taken=taken, ready=ready):
                ready.wait()
                try:
                    scheduler.commit(batch, [7] * 32)
                    taken.append(True)
                except (RuntimeError, ValueError):
                    taken.append(False)

            threads = [threading.Thread(target=commit) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(taken) == [False, True]
            assert {len(scheduler.get_sequence(number).output_tokens) for number in range(1, 33)} == {1}
            scheduler.check()
    finally:
        sys.setswitchinterval(before)


def test_a_front_end_on_a_thread_of_its_own_is_refused_and_corrupts_nothing():
    scheduler = Scheduler(SchedulerConfig(), BlockAllocator(512))
    added, refused, stop = [], [], threading.Event()

    def front_end():
        while not stop.is_set():
            try:
                added.append(scheduler.add_request(list(range(20)), max_tokens=40))
            except RuntimeError as error:
                refused.append(error)
            time.sleep(0.0002)

    interval, thread = sys.getswitchinterval(), threading.Thread(target=front_end)
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        finished, begin = [], time.monotonic()
        while time.monotonic() < begin + 1.5 or not (added and refused):  # on a slow machine longer
            if time.monotonic() > begin + 120:
                pytest.fail(f"{len(added)} requests were added and {len(refused)} refused in 120 s")
            with suppress(RuntimeError):  # another thread is inside a call
                batch = scheduler.outstanding or scheduler.schedule()
                scheduler.commit(batch, [7] * len(batch))
                finished += scheduler.drain_finished()
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    scheduler.check()
    while scheduler.has_work:
        batch = scheduler.outstanding or scheduler.schedule()
        scheduler.commit(batch, [7] * len(batch))
    finished += scheduler.drain_finished()
    scheduler.check()
    assert sorted(seq.id for seq in finished) == sorted(added)
    assert {len(seq.output_tokens) for seq in finished} == {20}


def test_control_c_at_any_time_costs_no_block():
    """A timer raises KeyboardInterrupt anywhere in the scheduler. A new scheduler continues with the same pool."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    engine = Engine(40)
    allocator = engine.pool.allocator
    cache = PrefixCache(allocator, BLOCK)
    config = SchedulerConfig(block_size=BLOCK, max_batch_sequences=20)
    closed, before, rng = 0, signal.signal(signal.SIGALRM, interrupt), random.Random(5)
    gc.disable()  # a finalizer during a collection could swallow the exception
    try:
        while closed < 30:
            scheduler = Scheduler(config, engine.pool, cache)
            with suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 10 ** rng.uniform(-3.5, -2))
                while True:
                    scheduler.add_request([scheduler.num_steps % 3] * 9, 40)
                    batch = scheduler.schedule()
                    scheduler.commit(batch, [7] * len(batch))
            closed += scheduler._guard.cause is not None
            scheduler.close()
            cache.check()
            allocator.check(others=0)
            assert allocator.in_use == cache.num_cached
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
