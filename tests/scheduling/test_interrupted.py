"""A scheduler that is interrupted in the middle of a call, wherever: nothing is torn, lost or counted twice."""

import random
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from marked_engine import Engine

import pagepool.scheduling
from pagepool import (
    BlockAllocator,
    PrefixCache,
    PressureCosts,
    Scheduler,
    SchedulerConfig,
    SeqState,
    SwapFile,
    Tenant,
)
from pagepool.scheduling.mending import Mending

OURS = str(Path(pagepool.scheduling.__file__).parent)
BLOCK = 4
ACTIVE = (SeqState.PREFILLING, SeqState.DECODING)
TENANTS = {"a": Tenant(min_blocks=3, max_blocks=14), "b": Tenant(max_blocks=12, weight=2.0)}


class Interrupted(BaseException):
    """As a KeyboardInterrupt, but only here."""


class Interrupter:
    """Calls a scheduler. The n-th instruction in its modules is not executed: `Interrupted` is raised instead, as by a
    signal; and with `again` that one, too, of those that mend what was left."""

    def __init__(self, monkeypatch, modules=""):
        self.modules = modules  # how the names of their files end
        self.left = self.again = self.fired = 0
        mend = Mending._mend

        def interrupted(scheduler, undo):
            if self.again:
                self.left, self.again = self.again, 0
                sys.settrace(self.trace)  # what raises in a trace has ended it
            mend(scheduler, undo)

        monkeypatch.setattr(Mending, "_mend", interrupted)

    def call(self, method, *arguments, **names):
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


class World:
    def __init__(self, seed, interrupter, **config):
        self.call = interrupter.call
        self.rng = rng = random.Random(seed)
        self.engine = Engine(rng.choice([12, 14, 20]))
        self.pool = self.engine.pool
        self.allocator = self.pool.allocator
        cache_policy = config.pop("cache", rng.choice([None, "lru", "gittins"]))
        self.cache = PrefixCache(self.allocator, BLOCK, cache_policy) if cache_policy else None
        config = {
            "policy": rng.choice(["priority", "fcfs", "lpm", "fair"]),
            "ladder": rng.choice([(), ("partial",), ("swap",), ("partial", "swap")]),
            "costs": rng.choice([PressureCosts(1, 100), PressureCosts(60, 1)]),
            "lookahead": rng.choice([0, 0, 3]),
            "max_batch_sequences": rng.choice([2, 5, 20]),
            "max_wait_steps": rng.choice([None, 12]),
            "cache_outputs": rng.choice(["full", "end"]),
            "tenants": rng.choice([{}, TENANTS]),
            **config,
        }
        self.swap = SwapFile(self.pool, num_blocks=30) if "swap" in config["ladder"] else None
        self.scheduler = Scheduler(
            SchedulerConfig(block_size=BLOCK, watermark=0, max_batch_tokens=24, max_prefill_tokens=12, **config),
            self.pool,
            self.cache,
            self.swap,
        )
        self.accepts = rng.random() < 0.5 and self.scheduler.config.lookahead > 0  # drafts, which the engine has not
        self.wanted = {}  # id: how many tokens it gets
        self.removed = set()

    def add(self):
        rng, scheduler = self.rng, self.scheduler
        prompt = [rng.randrange(2)] * rng.choice([0, 4, 8]) + [rng.randrange(50) for _ in range(rng.randint(1, 12))]
        before, limit = set(scheduler._sequences), rng.randint(28, 36)
        try:
            self.call(scheduler.add_request, prompt, limit, rng.randrange(3), tenant=rng.choice(["a", "b", None]))
        finally:
            # A signal that comes when it has returned finds it there, whatever its caller knows of it.
            scheduler.check()
            self.wanted.update(dict.fromkeys(set(scheduler._sequences) - before, limit))

    def step(self):
        batch = self.scheduler.outstanding or self.call(self.scheduler.schedule)
        if not self.accepts:
            self.engine.run(self.scheduler, batch)
        results = [self.rng.randrange(50) for _ in range(len(batch))]
        if self.scheduler.config.lookahead:
            rows = zip(batch.wants_token, batch.lookahead, strict=True)
            results = [[7] * self.rng.randint(1, 1 + slots * self.accepts) if wants else 7 for wants, slots in rows]
        self.call(self.scheduler.commit, batch, results)

    def end(self, way):
        known = sorted(self.scheduler._sequences)
        if known:
            seq_id = self.rng.choice(known)
            self.removed.add(seq_id)
            self.call(getattr(self.scheduler, way), seq_id)

    def drain(self):
        finished = list(self.scheduler._finished.values())
        try:
            self.call(self.scheduler.drain_finished)
        finally:
            self.scheduler.check()
            gone = [seq for seq in finished if seq.id not in self.scheduler._sequences]
            assert gone in ([], finished)
            for seq in gone:
                limit = self.wanted.pop(seq.id)
                assert seq.state is SeqState.FINISHED and seq.kv is None
                assert len(seq.prompt_tokens) + len(seq.output_tokens) == limit or seq.id in self.removed

    def act(self):
        rng = self.rng
        if self.scheduler.outstanding is not None:
            self.step()
        if self.scheduler.waiting_count < 6 and rng.random() < 0.5:
            self.add()
        way = rng.random()
        if way < 0.04:
            self.end("finish_sequence")
        elif way < 0.08:
            self.end("remove_sequence")
        elif way < 0.2:
            self.drain()
        elif way < 0.25 and self.scheduler._sequences:
            self.call(self.scheduler.append_token, rng.choice(sorted(self.scheduler._sequences)), 3)
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
        held = {block for seq in scheduler._sequences.values() if seq.kv is not None for block in seq.kv.blocks}
        held |= set() if self.cache is None else set(self.cache.references())
        assert self.allocator.in_use == len(held), f"{self.allocator.in_use} blocks in use, {len(held)} held"
        assert {seq_id for seq_id in self.wanted if seq_id not in self.removed} <= set(scheduler._sequences)

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
        if self.swap is not None:
            assert self.swap.free_blocks == self.swap.num_blocks


def run(seed, twice, monkeypatch, calls=90, **config):
    """How many calls were interrupted, and were then interrupted again."""
    interrupter, interrupts = Interrupter(monkeypatch), random.Random(seed)
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
def test_whatever_is_interrupted_goes_on(seed, twice, monkeypatch):
    assert run(seed, twice, monkeypatch)[0] > 10


@pytest.mark.parametrize("twice", [False, True])
def test_who_gives_way_is_interrupted_and_goes_on(twice, monkeypatch):
    preemptions = 0
    for seed in range(6):
        ladder = ("partial", "swap") if seed % 2 else ("swap",)
        config = {"ladder": ladder, "costs": PressureCosts(60, 1), "cache": None, "tenants": {}, "lookahead": 0}
        with monkeypatch.context() as patch:
            preemptions += run(seed, twice, patch, max_batch_sequences=20, **config)[1]
    assert preemptions > 30


def test_no_ticket_of_the_swap_file_is_lost(monkeypatch):
    """Every instruction of the ladder and the swap file is the one, in a step that swaps."""
    config = {"ladder": ("swap",), "costs": PressureCosts(60, 1), "cache": None, "tenants": {}, "lookahead": 0}
    before = None
    for n in range(0, 5000, 3):
        with monkeypatch.context() as patch:
            interrupter = Interrupter(patch, ("swap.py", "pressure.py"))
            world = World(1, interrupter, max_batch_sequences=20, **config)
            acts = 0
            while acts != before and not world.scheduler.pressure.counts["swap"]:
                world.act()
                acts += 1
            if before is None:
                before = acts - 1
                continue
            interrupter.left = n
            with suppress(Interrupted):
                world.act()
                assert world.scheduler.pressure.counts["swap"] and n > 100
                return
            interrupter.left = 0
            world.check()
            world.run_to_end()
    raise AssertionError("no end of instructions")


def test_a_step_that_was_not_returned_is_not_charged(monkeypatch):
    """Its tokens are fed again, and each counts once for its tenant."""
    taken_back = 0
    for n in range(1, 4000, 7):
        with monkeypatch.context() as patch:
            interrupter = Interrupter(patch)
            world = World(3, interrupter, policy="fair", lookahead=0)
            for _ in range(8):
                world.act()
            if world.scheduler.outstanding is not None:
                world.step()
            served = dict(world.scheduler._tenants._served)
            fed = {seq.id: seq.fed for seq in world.scheduler._sequences.values()}
            interrupter.left = n
            with suppress(Interrupted):
                interrupter.call(world.scheduler.schedule)
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
def test_who_calls_it_in_the_middle_of_a_call_is_refused(method):
    """A finalizer or a handler of signals; here, its prefix cache. The call that was under way has raised."""

    class Calling:
        def __init__(self, cache):
            self.cache = cache

        def __getattr__(self, name):
            if name == "match_held" and scheduler is not None:
                getattr(scheduler, method)(*arguments)
            return getattr(self.cache, name)

    scheduler, arguments = None, (1,) if method == "remove_sequence" else ()
    allocator = BlockAllocator(20)
    cache = Calling(PrefixCache(allocator, BLOCK))
    scheduler = Scheduler(SchedulerConfig(block_size=BLOCK), allocator, cache)
    scheduler.add_request([1] * 9, 12)
    with pytest.raises(RuntimeError, match="the scheduler is in the middle of a call"):
        scheduler.schedule()
    scheduler.check()
    assert (scheduler.waiting_count, allocator.in_use) == (1, 0)
