"""Random programs on a scheduler with a small pool: after every step the invariants hold, every page has the keys of
its sequence, and every request gets the tokens that it would get alone."""

import random
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from marked_engine import Engine, HybridEngine, marks
from refusals import refuses

from pagepool import PrefixCache, Scheduler, SchedulerConfig, StateCheckpoints, Tenant
from pagepool.cli.replay import bundled_trace
from pagepool.prefix.eviction import POLICIES as CACHE_POLICIES
from pagepool.replay.ptrace import read_trace
from pagepool.scheduling.policies import POLICIES

BLOCK = 4


def text(tokens, count):
    """Return the next `count` tokens of a model that looks at all tokens before."""
    known = list(tokens)
    for _ in range(count):
        known.append(int(marks(known)[-1]) % 3)
    return known[len(tokens) :]


class World:
    """A scheduler with an engine that checks all keys, values and states, and with the requests that it was given."""

    def __init__(self, seed, inbox=False, stop_token_ids=(), tenants=(0, 1, None), memory=None, **fixed):
        self.rng = rng = random.Random(seed)
        self.inbox, self.stop_token_ids, self.tenants = inbox, stop_token_ids, tenants
        num_blocks = rng.randint(4, 16)
        quotas = {1: Tenant(max_blocks=max(2, num_blocks // 2), weight=2.0)}
        options = {
            "max_sequences": rng.choice([3, 5, 20]),
            "max_batch_tokens": rng.choice([7, 16, 40]),
            "max_batch_sequences": rng.choice([1, 2, 4, 20]),
            "max_prefill_tokens": rng.choice([4, 9, 40]),
            "policy": rng.choice(sorted(POLICIES)),
            "lookahead": rng.choice([0, 0, 3]),
        }
        config = SchedulerConfig(**{"block_size": BLOCK, "tenants": quotas, **options, **fixed})
        policy, self.kept, given = rng.choice([None, *CACHE_POLICIES, *CACHE_POLICIES]), None, {}
        if memory is None:
            self.engine = Engine(num_blocks, text)
        else:
            windows, slots, kept = memory["windows"], memory.get("slots"), memory.get("kept", 0)
            self.engine = HybridEngine(num_blocks * len(windows), windows, slots, text)
            given = {"groups": self.engine.groups, "states": self.engine.states}
            policy = rng.choice(sorted(CACHE_POLICIES)) if kept or slots is None else None
            if kept:
                options = {"grid": 8, "spacing": 1, "align": BLOCK, "prompt_ends": kept % 2 == 0}
                self.kept = StateCheckpoints(self.engine.layout, self.engine.states, kept * 100, **options)
                given["checkpoints"] = self.kept
        self.allocator = self.engine.pool.allocator
        self.cache = PrefixCache(self.allocator, BLOCK, policy) if policy else None
        self.scheduler = Scheduler(config, self.engine.pool, self.cache, **given)
        self.outside, self.ended, self.stopped = [], [], set()

    def sequences(self):
        return self.scheduler._sequences

    def add(self):
        rng, way = self.rng, "submit" if self.inbox else "add_request"
        prompt = [rng.randrange(3)] * rng.choice([0, 4, 8, 9]) + [rng.randrange(3) for _ in range(rng.randint(1, 9))]
        about = {"tenant": rng.choice(self.tenants), "priority": rng.randrange(3), "reads_cache": rng.random() < 0.8}
        about |= {"cache_salt": rng.choice([None, None, "a"]), "stop_token_ids": self.stop_token_ids}
        try:
            getattr(self.scheduler, way)(prompt, len(prompt) + rng.randint(0, 16), **about)
        except ValueError as error:  # too large for the pool, the quota or the unreserved blocks
            assert "block" in str(error)

    def fork(self):
        """Fork a decoding sequence; return the forks."""
        seqs = [seq_id for seq_id, seq in self.sequences().items() if seq.state.value == "decoding"]
        if seqs:
            try:
                return self.scheduler.fork(self.rng.choice(seqs), self.rng.randint(1, 3))
            except ValueError as error:
                assert "fork" in str(error) or "quota" in str(error)
        return []

    def forget(self):
        """Discard blocks of a sequence, or the whole cache."""
        if self.rng.random() < 0.2:
            return self.cache.reset_prefix_cache()
        holders = [seq.kv for seq in self.sequences().values() if seq.kv is not None]
        if holders:
            kv, place = self.rng.choice(holders), self.rng.randrange(4)
            blocks = [block for table in getattr(kv, "kv", [kv]) for block in table.blocks]
            self.cache.discard(blocks[place : place + 2])

    def cache_elsewhere(self):
        """Cache a prompt outside of the scheduler, if enough blocks are free."""
        full = self.rng.randint(1, 3)
        prompt = [self.rng.randrange(3)] * BLOCK * full
        if self.allocator.free_count >= full:
            blocks = self.allocator.allocate_n(full)
            values = marks(prompt)[:, None, None].repeat(8, axis=2)
            slots = (blocks[:, None].astype("int64") * BLOCK + range(BLOCK)).reshape(-1)
            self.engine.pool.append(0, slots, values, -values)
            self.cache.cache_blocks(prompt, blocks)
            self.allocator.free(blocks)

    def cancel(self):
        if self.sequences():
            seq_id = self.rng.choice(sorted(self.sequences()))
            way = "cancel" if self.inbox else self.rng.choice(["finish_sequence", "remove_sequence"])
            self.stopped.add(seq_id)
            getattr(self.scheduler, way)(seq_id)

    def give_up(self, batch):
        """Undo the step, perhaps after some of its sequences got a token."""
        if not batch.is_empty and (self.cache is not None or self.scheduler._has_committed):
            with refuses(RuntimeError, len(batch)):
                self.scheduler.schedule()
        for seq_id in batch.seq_ids:
            if self.rng.random() < 0.3:
                self.append(seq_id)
        self.scheduler.give_up(batch)
        if not batch.is_empty:
            with refuses(ValueError, len(batch)):
                self.scheduler.commit(batch, [1] * len(batch))

    def append(self, seq_id):
        seq = self.scheduler.get_sequence(seq_id)
        if seq.state.value == "decoding":
            self.scheduler.append_token(seq_id, text(seq.all_tokens, 1)[0])

    def commit(self, batch):
        appends, results = self.rng.random() < 0.2, []
        for seq_id, wants, slots in zip(batch.seq_ids, batch.wants_token, batch.lookahead, strict=True):
            seq = self.scheduler.get_sequence(seq_id)
            found = text(seq.all_tokens, 1 + self.rng.randint(0, slots))
            results.append(None if appends or not wants else found if slots else found[0])
            if appends and wants:
                self.append(seq_id)
        self.scheduler.commit(batch, results)

    def check(self):
        self.scheduler.check()
        self.allocator.check()
        if self.cache is not None:
            self.cache.check()
        for seq in self.scheduler.drain_finished():
            prompt, got = seq.prompt_tokens, seq.output_tokens
            assert got == text(prompt, len(got)), f"sequence {seq.id} has other tokens than alone"
            is_whole = seq.total_tokens == seq.max_tokens or bool(got and got[-1] in self.stop_token_ids)
            assert is_whole or seq.id in self.stopped or seq.id not in self.sequences()
            self.ended.append(seq.id)


def run(seed, steps=120, forget=0.0, others=0.0, forks=0.0, fails=0.0, **about):
    """Run a random program; return the number of actions of each kind.

    forget   probability per step that the cache discards blocks, or all blocks, in use or not
    others   probability that a prompt is cached outside of the scheduler
    forks    probability that a decoding sequence is forked, before or after the commit of its step
    fails    probability that a step is given up, before or after the model has run
    about    see `World`; other names are options of the scheduler
    """
    world = World(seed, **about)
    rng, scheduler = world.rng, world.scheduler
    for number in range(20 * steps):
        is_busy = number < steps
        if is_busy and rng.random() < 0.3:
            world.add()
        if is_busy and rng.random() < 0.05 and world.allocator.free_count:
            world.outside.append(world.allocator.allocate())
        elif world.outside and (not is_busy or rng.random() < 0.2):
            world.allocator.free(world.outside.pop())
        if rng.random() < 0.04:
            world.cancel()
        if world.cache is not None and rng.random() < forget:
            world.forget()
        if world.cache is not None and rng.random() < others:
            world.cache_elsewhere()
        batch = scheduler.schedule()
        is_failure = is_busy and rng.random() < fails
        if not is_failure or rng.random() < 0.5:
            world.engine.run(scheduler, batch)
        new = world.fork() if is_busy and rng.random() < forks else []
        if is_failure:
            world.give_up(batch)
        else:
            world.commit(batch)
            for seq_id in new:  # the step sampled no token for them
                world.append(seq_id)
        if is_busy and rng.random() < forks:
            world.fork()
        world.check()
        if not is_busy and not world.outside and not scheduler.has_work:
            break
    assert not scheduler.has_work and len(set(world.ended)) == len(world.ended)
    if world.kept is not None:
        world.kept.check()
    if world.cache is not None:
        world.cache.reset_prefix_cache()
    assert world.allocator.in_use == 0 and (world.engine.states is None or not world.engine.states.used_count)
    return Counter(scheduler.stats()["actions"])


seeds = given(st.integers(0, 2**32))


@settings(max_examples=60, deadline=None)
@seeds
def test_any_program(seed):
    run(seed)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([(2,), (1, 7)]))
def test_many_tenants_and_stop_tokens(seed, stop_token_ids):
    run(seed, tenants=range(9), stop_token_ids=stop_token_ids)


@settings(max_examples=25, deadline=None)
@seeds
def test_forks_and_requests_from_other_threads(seed):
    run(seed, forks=0.1, inbox=True)
    run(seed, forks=0.1, forget=0.05, max_sequences=20)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([None, [None], [0], [None, 8]]))
def test_steps_that_are_given_up(seed, windows):
    memory = windows and {"windows": windows}
    run(seed, fails=0.3, forks=0.1, memory=memory)
    run(seed, fails=0.2, forks=0.1, memory={"windows": windows or [3], "slots": 5})
    run(seed, fails=0.2, forks=0.1, memory={"windows": [None], "slots": 5, "kept": 5}, inbox=True)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.sampled_from([None, 0, 3, 8, 13]), min_size=1, max_size=3))
@example(2812, [0])  # a fork uses up the quota of a waiting request that would have fitted
def test_windows(seed, windows):
    run(seed, memory={"windows": windows}, forks=0.1)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 12), st.sampled_from([2, 5, 20]))
def test_recurrent_states_and_their_checkpoints(seed, kept, slots):
    memory = {"windows": [None], "slots": slots, "kept": kept}
    run(seed, memory=memory, forks=0.1, inbox=True)
    run(seed, memory=memory, forget=0.05)


@settings(max_examples=25, deadline=None)
@seeds
def test_a_cache_that_discards_blocks_and_has_blocks_of_others(seed):
    run(seed, forget=0.1)
    run(seed, max_sequences=20, tenants=range(9), forget=0.05, others=0.05)


def test_the_random_programs_take_every_action():
    taken = sum((run(seed) for seed in range(30)), start=Counter())
    assert all(taken[action] > 5 for action in ("evict", "recompute")), taken


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_recorded_hour_in_a_pool_that_is_too_small(policy):
    """The first requests of the bundled trace get all their tokens, with every policy."""
    trace = read_trace(bundled_trace(), 60)
    engine = Engine((max(trace.prompt) // 16 + 20) * 4)
    config = SchedulerConfig(max_batch_tokens=256, max_prefill_tokens=128, policy=policy, block_size=BLOCK)
    scheduler = Scheduler(config, engine.pool)
    for prompt, output in zip(trace.prompt, trace.output, strict=True):
        scheduler.add_request([1] * prompt, prompt + min(output, 100))
    ended = []
    while scheduler.has_work:
        batch = scheduler.schedule()
        scheduler.commit(batch, [2] * len(batch))
        scheduler.check()
        ended += scheduler.drain_finished()
    assert len(ended) == 60 and all(
        seq.output_tokens == [2] * (seq.max_tokens - len(seq.prompt_tokens)) for seq in ended
    )
    assert scheduler.num_preemptions > 0 and engine.pool.allocator.in_use == 0
