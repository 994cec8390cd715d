"""A scheduler that is cut short in the middle of a call, wherever: it refuses every call until `recover`, which loses
no block and no token; and one that is called in the middle of a call, by another thread or a handler."""

import gc
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from zlib import crc32

import pytest
from marked_engine import Engine, HybridEngine

import pagepool.scheduling
from pagepool import (
    BlockAllocator,
    PrefixCache,
    Scheduler,
    SchedulerConfig,
    SeqState,
    Sequence,
    StateCheckpoints,
    Tenant,
)

OURS = str(Path(pagepool.scheduling.__file__).parent)
BLOCK = 4
ACTIVE = (SeqState.PREFILLING, SeqState.DECODING)
TENANTS = {"a": Tenant(max_blocks=14), "b": Tenant(max_blocks=12, weight=2.0)}


class Interrupted(BaseException):
    """As a KeyboardInterrupt, but only here."""


class Interrupter:
    """Calls a scheduler. The n-th instruction in its modules is not executed: `Interrupted` is raised instead, as by a
    signal; then the scheduler recovers, and with `again` that instruction of `recover` is not executed either."""

    def __init__(self, modules=""):
        self.modules = modules  # how the names of their files end
        self.left = self.again = self.fired = 0

    def call(self, scheduler, name, *arguments, **names):
        try:
            return self.run(getattr(scheduler, name), *arguments, **names)
        except Interrupted:
            self.left, self.again = self.again, 0
            refuses_until_recovered(scheduler)
            try:
                self.run(scheduler.recover)
            except Interrupted:
                refuses_until_recovered(scheduler)
                scheduler.recover()
            self.left = 0
            raise

    def run(self, method, *arguments, **names):
        before = sys.gettrace()
        if self.left:
            sys.settrace(self.trace)
        try:
            return method(*arguments, **names)
        finally:
            sys.settrace(before)

    def trace(self, frame, event, argument):
        name = frame.f_code.co_filename
        if not (name.startswith(OURS) and name.endswith(self.modules)):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and self.left:
            self.left -= 1
            if self.left == 0:
                self.fired += 1
                raise Interrupted
        return self.trace


def refuses_until_recovered(scheduler):
    """Unless the exception came when all was done."""
    if not scheduler._guard._inside:
        return
    for call in (
        scheduler.schedule,
        scheduler.drain_finished,
        scheduler.check,
        lambda: scheduler.add_request([1], 2),
        lambda: scheduler.remove_sequence(1),
    ):
        with pytest.raises(RuntimeError, match="cut"):
            call()


def token_of(seq_id, place):
    """What the model says, whenever it is asked."""
    return crc32(b"%d %d" % (seq_id, place)) % 50


class World:
    def __init__(self, seed, interrupter, **config):
        self.interrupter = interrupter
        self.rng = rng = random.Random(seed)
        windows = config.pop("windows", None)
        if windows is None:
            self.engine, memory = Engine(rng.choice([12, 14, 20])), {}
        else:
            self.engine = HybridEngine(rng.choice([12, 14, 20]) * len(windows), windows, rng.choice([3, 20]))
            memory = {"groups": self.engine.groups, "states": self.engine.states}
            if config["cache"]:
                options = {"grid": 8, "spacing": 1, "align": BLOCK}
                memory["checkpoints"] = StateCheckpoints(self.engine.layout, self.engine.states, 1000, **options)
        self.pool = self.engine.pool
        self.allocator = self.pool.allocator
        cache_policy = config.pop("cache", rng.choice([None, "lru", "gittins"]))
        self.cache = PrefixCache(self.allocator, BLOCK, cache_policy) if cache_policy else None
        config = {
            "policy": rng.choice(["priority", "fcfs", "lpm", "fair"]),
            "preemption_actions": rng.choice([(), ("partial",)]),
            "lookahead": rng.choice([0, 0, 3]),
            "max_batch_sequences": rng.choice([2, 5, 20]),
            "max_wait_steps": rng.choice([None, 12]),
            "tenants": rng.choice([{}, TENANTS]),
            **config,
        }
        self.scheduler = Scheduler(
            SchedulerConfig(block_size=BLOCK, watermark=0, max_batch_tokens=24, max_prefill_tokens=12, **config),
            self.pool,
            self.cache,
            **memory,
        )
        self.accepts = rng.random() < 0.5 and self.scheduler.config.lookahead > 0  # drafts, which the engine has not
        self.wanted = {}  # id: how many tokens it gets
        self.removed = set()
        self.origin = {}  # of forks: the first sequence

    def call(self, name, *arguments, **names):
        return self.interrupter.call(self.scheduler, name, *arguments, **names)

    def add(self):
        rng, scheduler = self.rng, self.scheduler
        prompt = [rng.randrange(2)] * rng.choice([0, 4, 8]) + [rng.randrange(50) for _ in range(rng.randint(1, 12))]
        before, limit = self.known(), rng.randint(28, 36)
        try:
            names = {"tenant": rng.choice(["a", "b", None]), "stop_token_ids": prompt[-1:]}
            way = "submit" if limit % 2 else "add_request"
            self.call(way, prompt, limit, rng.randrange(3), **names)
        finally:
            # A signal that comes when it has returned finds it there, whatever its caller knows of it.
            scheduler.check()
            self.wanted.update(dict.fromkeys(self.known() - before, limit))

    def fork(self):
        decoding = [seq_id for seq_id, seq in self.scheduler._sequences.items() if seq.state is SeqState.DECODING]
        if decoding:
            seq_id, before = self.rng.choice(decoding), self.known()
            try:
                with suppress(ValueError):  # the quota has no room
                    self.call("fork", seq_id, 2)
            finally:
                self.scheduler.check()
                for fork in self.known() - before:
                    self.wanted[fork] = self.scheduler.get_sequence(fork).max_tokens
                    self.origin[fork] = self.origin.get(seq_id, seq_id)

    def token_of(self, seq_id, place):
        """What the model says to a fork as to its origin, whose tokens it has at first."""
        return token_of(self.origin.get(seq_id, seq_id), place)

    def known(self):
        """The ids of all requests, those in the inbox included."""
        handed_in = {item.id for item in self.scheduler._inbox.items if isinstance(item, Sequence)}
        assert not handed_in & set(self.scheduler._sequences)
        return handed_in | set(self.scheduler._sequences)

    def step(self):
        scheduler = self.scheduler
        batch = scheduler.outstanding or self.call("schedule")
        if not self.accepts:
            self.engine.run(scheduler, batch)
        results = []
        for seq_id, wants, slots in zip(batch.seq_ids, batch.wants_token, batch.lookahead, strict=True):
            seq = scheduler.get_sequence(seq_id)
            count = self.rng.randint(1, 1 + slots * self.accepts) if wants else 1
            tokens = [self.token_of(seq_id, len(seq.output_tokens) + place) for place in range(count)]
            results.append(tokens if wants and scheduler.config.lookahead else tokens[0])
        self.call("commit", batch, results)

    def end(self, way):
        known = sorted(self.scheduler._sequences)
        if known:
            seq_id = self.rng.choice(known)
            self.removed.add(seq_id)
            self.call(way, seq_id)

    def drain(self):
        finished = list(self.scheduler._finished.values())
        try:
            self.call("drain_finished")
        finally:
            self.scheduler.check()
            gone = [seq for seq in finished if seq.id not in self.scheduler._sequences]
            assert gone in ([], finished)
            for seq in gone:
                limit = self.wanted.pop(seq.id)
                assert seq.state is SeqState.FINISHED and seq.kv is None
                if seq.id not in self.removed:
                    is_full = len(seq.prompt_tokens) + len(seq.output_tokens) == limit
                    at_stop = seq.output_tokens[-1] == seq.prompt_tokens[-1]
                    assert seq.finish_reason == ("stop" if at_stop else "length") and (is_full or at_stop)
                assert seq.prompt_tokens[-1] not in seq.output_tokens[:-1]
                told = [self.token_of(seq.id, place) for place in range(len(seq.output_tokens))]
                assert seq.output_tokens == told, f"the tokens of {seq.id}"

    def act(self):
        rng = self.rng
        if self.scheduler.outstanding is not None:
            self.step()
        if self.scheduler.waiting_count < 6 and rng.random() < 0.5:
            self.add()
        way = rng.random()
        if way < 0.02:
            self.end("cancel")
        elif way < 0.03:
            self.fork()
        elif way < 0.04:
            self.end("finish_sequence")
        elif way < 0.08:
            self.end("remove_sequence")
        elif way < 0.2:
            self.drain()
        elif way < 0.25 and self.scheduler._sequences:
            seq_id = rng.choice(sorted(self.scheduler._sequences))
            place = len(self.scheduler.get_sequence(seq_id).output_tokens)
            self.call("append_token", seq_id, self.token_of(seq_id, place))
        elif way < 0.28 and self.cache is not None:
            self.cache.discard([rng.randrange(12)])
        else:
            self.step()

    def check(self):
        scheduler = self.scheduler
        scheduler.check()
        self.allocator.check()
        if self.cache is not None:
            self.cache.check()
        states = [seq.kv for seq in scheduler._sequences.values() if seq.kv is not None]
        held = {block for state in states for block in scheduler._blocks.blocks_of(state)}
        if self.engine.states is not None:
            assert self.engine.states.used_count == len(states)
        held |= set() if self.cache is None else set(self.cache.references())
        assert self.allocator.in_use == len(held), f"{self.allocator.in_use} blocks in use, {len(held)} held"
        assert {seq_id for seq_id in self.wanted if seq_id not in self.removed} <= self.known()

    def run_to_end(self):
        for _ in range(3000):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work
        self.drain()
        assert set(self.wanted) <= self.removed
        self.check()
        if self.cache is not None:
            self.cache.reset_prefix_cache()
        assert self.allocator.in_use == 0 and self.scheduler.total_count == 0


def run(seed, twice, calls=90, **config):
    """How many calls were interrupted, and how many sequences preempted."""
    interrupter, interrupts = Interrupter(), random.Random(seed)
    world = World(seed, interrupter, **config)
    for number in range(calls):
        interrupter.left = n = int(10 ** interrupts.uniform(0, 3.7))
        interrupter.again = again = interrupts.randint(1, 2000) if twice else 0
        try:
            with suppress(Interrupted):
                world.act()
            interrupter.left = interrupter.again = 0
            world.check()
        except Exception as error:
            raise AssertionError(f"seed {seed}, {twice}: call {number}, instruction {n}, then {again}") from error
    world.run_to_end()
    return interrupter.fired, world.scheduler.num_preemptions


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("seed", range(24))
def test_whatever_is_cut_short_goes_on_after_recover(seed, twice):
    assert run(seed, twice)[0] > 10


@pytest.mark.parametrize("twice", [False, True])
def test_a_preemption_is_cut_short_and_goes_on_after_recover(twice):
    preemptions = 0
    for seed in range(6):
        actions = ("partial",) if seed % 2 else ()
        config = {"preemption_actions": actions, "cache": None, "tenants": {}, "lookahead": 0}
        preemptions += run(seed, twice, max_batch_sequences=20, **config)[1]
    assert preemptions > 30


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize(
    ("windows", "cache"), [([None], None), ([8], None), ([None, 5], None), ([None], "lru")], ids=str
)
def test_hybrid_sequences_that_are_cut_short_go_on_after_recover(windows, cache, twice):
    preemptions = 0
    for seed in range(6):
        config = {"windows": windows, "preemption_actions": (), "cache": cache, "lookahead": 0, "tenants": {}}
        fired, preempted = run(seed, twice, **config)
        assert fired > 10
        preemptions += preempted
    assert preemptions > 0


def test_a_step_that_was_not_returned_is_not_charged():
    """Its tokens are fed again, and each counts once for its tenant."""
    taken_back = 0
    for n in range(1, 4000, 7):
        interrupter = Interrupter()
        world = World(3, interrupter, policy="fair", lookahead=0)
        for _ in range(8):
            world.act()
        if world.scheduler.outstanding is not None:
            world.step()
        served = dict(world.scheduler._tenants._served)
        fed = {seq.id: seq.fed for seq in world.scheduler._sequences.values()}
        interrupter.left = n
        with suppress(Interrupted):
            world.call("schedule")
            assert taken_back > 40
            return
        world.scheduler.check()
        if world.scheduler.outstanding is None:
            taken_back += 1
            assert world.scheduler._tenants._served == served
            again = {seq.id: seq.fed for seq in world.scheduler._sequences.values() if seq.state in ACTIVE}
            assert again.items() >= {number: count for number, count in fed.items() if number in again}.items()
    raise AssertionError(f"no end of instructions, {taken_back} steps were taken back")


@pytest.mark.parametrize("method", ["remove_sequence", "schedule", "check"])
def test_a_call_in_the_middle_of_a_call_is_refused(method):
    """By a finalizer or a handler of signals; here, by its prefix cache. The call that was under way has raised."""

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
    with pytest.raises(RuntimeError, match=r"an exception has cut a call of the scheduler short: call recover\(\)"):
        scheduler.schedule()
    scheduler.recover()
    scheduler.check()
    assert (scheduler.waiting_count, allocator.in_use) == (1, 0)
    assert scheduler.schedule().seq_ids == [1]


def test_a_call_of_another_thread_in_the_middle_of_a_call_is_refused():
    """`recover` too: nothing was cut short. The call that is under way goes on."""

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
        scheduler.recover,
        scheduler.check,
    ):
        with pytest.raises(RuntimeError, match="another thread is inside a call of the scheduler"):
            call()
    refused.set()
    stepper.join()
    assert [batch.seq_ids for batch in batches] == [[1]] and scheduler.total_count == 1
    scheduler.check()
    scheduler.commit(batches[0], [7])  # a batch may be handed over to another thread between calls


@pytest.mark.parametrize("name", ["schedule", "recover"])
def test_recover_does_not_break_into_a_call_that_another_thread_has_just_begun(name):
    """At each line of it that thread waits until another has tried to recover, and then to drain."""
    scheduler = Scheduler(SchedulerConfig(block_size=BLOCK), BlockAllocator(20))
    scheduler.add_request([1] * 9, 12)
    recovered, drained = [], []

    def others_try():
        for call, done in ((scheduler.recover, recovered), (scheduler.drain_finished, drained)):
            try:
                call()
            except RuntimeError:
                done.append(False)
            else:
                done.append(True)

    def at_each_line(frame, event, argument):
        if frame.f_globals["__name__"] not in ("pagepool.scheduling.scheduler", "pagepool.scheduling.guard"):
            return None
        if event == "line":
            other = threading.Thread(target=others_try)
            other.start()
            other.join()
        return at_each_line

    sys.settrace(at_each_line)
    try:
        getattr(scheduler, name)()
    finally:
        sys.settrace(None)
    # Before the call has begun and after it has ended both work; in between neither does.
    for done in (recovered, drained):
        assert done[0] and not all(done)
        began, ended = done.index(False), len(done) - done[::-1].index(False)
        assert not any(done[began:ended]) and ended - began > 10
    assert recovered == drained
    scheduler.check()


@pytest.mark.parametrize("name", ["finish_sequence", "remove_sequence"])
def test_what_cannot_be_an_id_is_refused_before_anything_changes(name):
    scheduler = Scheduler()
    scheduler.add_request([1, 2], 5)
    with pytest.raises(TypeError):
        getattr(scheduler, name)([1])
    assert scheduler.schedule().seq_ids == [1]


def test_two_threads_never_commit_the_same_batch_twice():
    """What is checked is checked inside of the call: the other thread may be anywhere in its own."""
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
        while time.monotonic() < begin + 1.5 or not (added and refused):  # however slow the machine
            if time.monotonic() > begin + 120:
                pytest.fail(f"{len(added)} requests were added and {len(refused)} refused in 120 s")
            with suppress(RuntimeError):  # the front end is inside
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


def test_control_c_at_any_time_costs_no_block_and_no_token():
    """A timer raises KeyboardInterrupt, wherever the scheduler is."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    engine = Engine(40)
    cache = PrefixCache(engine.pool.allocator, BLOCK)
    config = SchedulerConfig(block_size=BLOCK, max_batch_sequences=20, preemption_actions=("partial",), watermark=0)
    scheduler = Scheduler(config, engine.pool, cache)
    ids, cut, before = [], 0, signal.signal(signal.SIGALRM, interrupt)
    rng = random.Random(5)
    gc.disable()  # what others do in a collection may swallow the exception
    try:
        while cut < 150 or scheduler.has_work:
            if cut < 150 and scheduler.waiting_count < 5:
                ids.append(scheduler.add_request([len(ids) % 3] * 9, 40))
            try:
                if cut < 150:
                    signal.setitimer(signal.ITIMER_REAL, 10 ** rng.uniform(-5, -3.3))
                batch = scheduler.outstanding or scheduler.schedule()
                tokens = [
                    token_of(seq_id, len(scheduler.get_sequence(seq_id).output_tokens)) for seq_id in batch.seq_ids
                ]
                scheduler.commit(batch, tokens)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                cut += 1
                scheduler.recover()
                scheduler.check()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    finished = scheduler.drain_finished()
    assert sorted(seq.id for seq in finished) == ids
    for seq in finished:
        assert seq.output_tokens == [token_of(seq.id, place) for place in range(31)]
    cache.check()
    cache.reset_prefix_cache()
    engine.pool.allocator.check()
    assert engine.pool.allocator.in_use == 0
