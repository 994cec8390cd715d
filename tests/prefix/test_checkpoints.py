"""Checkpoints of hybrid models: saved at branches, ends and grid positions, found by exact tokens, evicted by value."""

import tracemalloc

import numpy as np
import plain_checkpoints
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from refusals import refuses
from share import examples

from pagepool import BlockAllocator, InvalidSlot, PoolError, PrefixCache, SsmStatePool, StateCheckpoints, StateLayout
from pagepool.prefix.checkpoints import REASONS, CheckpointIndex, Stop

LAYOUT = StateLayout(layers=[{"conv": ((3, 4), "float32"), "ssm": ((5,), "float16")}, {}, {"ssm": ((2,), "int32")}])
STATE_BYTES = 3 * 4 * 4 + 5 * 2 + 2 * 4


class Engine:
    """A minimal hybrid model: each array of its state is a hash of all tokens so far."""

    def __init__(self, block_size=16, budget=1 << 20, layout=LAYOUT, blocks=4096, in_part=False, **places):
        self.in_part = in_part
        self.layout = layout
        self.pool = SsmStatePool.from_layout(layout, 4)
        self.checkpoints = StateCheckpoints(layout, self.pool, budget, **places)
        self.cache = PrefixCache(BlockAllocator(blocks), block_size, "lru")
        self.computed = 0

    def write(self, slot, tokens):
        for layer, states in enumerate(self.layout.layers):
            for name in states:
                self.pool.view(layer, name)[slot] = hash(tuple(tokens)) % 997

    def holds(self, slot, tokens):
        return all(
            (self.pool.view(layer, name)[slot] == hash(tuple(tokens)) % 997).all()
            for layer, states in enumerate(self.layout.layers)
            for name in states
        )

    def serve(self, prompt, output=()):
        """Run one request; return the number of prompt tokens that need no computation."""
        slot = self.pool.alloc(1)
        size = self.cache.block_size
        blocks, kv_tokens = self.cache.match_tokens(prompt)
        if not self.in_part:
            kv_tokens -= kv_tokens % size
        begin = self.checkpoints.resume(slot, prompt, kv_tokens)
        assert begin <= kv_tokens and (begin == 0 or self.holds(slot, prompt[:begin]))
        assert self.pool.slot(slot).position == self.pool.slot(slot).state.step_position == begin
        for position, reason in self.checkpoints.stops(prompt, kv_tokens, begin):
            self.write(slot, prompt[:position])
            self.checkpoints.save(slot, prompt, position, reason)
        everything = [*prompt, *output]
        self.write(slot, everything)
        self.checkpoints.save(slot, everything, self.checkpoints.index.aligned(len(everything)), "end")
        # A block that matches only partially is copied before it is written.
        shared = kv_tokens // size
        missing = -(-len(everything) // size) - shared
        self.cache.allocator.free(blocks[shared:])
        held = [*blocks[:shared].tolist(), *self.cache.allocator.allocate_n(missing).tolist()]
        self.cache.cache_blocks(everything, held)
        self.cache.allocator.free(held)
        self.pool.release(slot)
        self.checkpoints.check()
        return begin


def prompts(shared, count, tail=50):
    random = np.random.default_rng(0)
    prefix = random.integers(0, 50_000, shared)
    return [[*prefix.tolist(), *random.integers(0, 50_000, tail).tolist()] for _ in range(count)]


@pytest.mark.parametrize("state_elements", [1, 1000, 300_000])
@pytest.mark.parametrize("block_size", [1, 16, 32, 96])
def test_a_shared_prefix_is_hit_from_the_third_request_on(state_elements, block_size):
    """For all sizes of states and blocks, at least 95 % of 480 tokens are found."""
    layout = StateLayout(layers=[{"ssm": ((state_elements,), "float32")}])
    engine = Engine(block_size, budget=8 * (4 * state_elements + 4000), layout=layout)
    found = [engine.serve(prompt) for prompt in prompts(480, 6)]
    assert found[:2] == [0, 0] and min(found[2:]) >= 456, found


@pytest.mark.parametrize("state_elements", [1, 300_000])
@pytest.mark.parametrize("block_size", [16, 512, 528, 1000])
def test_the_same_within_a_block_that_is_larger(state_elements, block_size):
    """With partial matches of blocks, a shared prefix is found for any block size."""
    layout = StateLayout(layers=[{"ssm": ((state_elements,), "float32")}])
    engine = Engine(block_size, budget=8 * (4 * state_elements + 9000), layout=layout, in_part=True)
    found = [engine.serve(prompt) for prompt in prompts(480, 6, tail=600)]
    assert found == [0, 0, 480, 480, 480, 480]


def test_the_next_turn_goes_on_from_the_end_of_the_last():
    engine = Engine(block_size=1, align=1)
    prompt = list(range(100))
    assert engine.serve(prompt, output=[7] * 40) == 0
    assert engine.serve([*prompt, *[7] * 40, *range(30)]) == 140
    assert engine.serve(prompt) == 0 and engine.serve(prompt) == 99


def test_the_grid_bounds_the_tokens_that_the_second_prompt_computes():
    engine = Engine(block_size=16, grid=256)
    assert [engine.serve(prompt) for prompt in prompts(1000, 3)] == [0, 768, 992]


def test_positions_are_multiples_of_the_alignment_of_kernels():
    engine = Engine(block_size=16, align=64)
    assert [engine.serve(prompt) for prompt in prompts(480, 3)] == [0, 0, 448]
    with refuses(ValueError, "position", 64, 1, 100, 65):
        engine.checkpoints.index.admit(range(100), 65, "end")


def test_no_state_without_its_keys_and_values():
    """If blocks are evicted but the state is kept, a prompt resumes at the end of the blocks or earlier."""
    engine = Engine(block_size=16, grid=64)
    prompt = list(range(200))
    engine.serve(prompt)
    assert engine.serve(prompt) == 192
    engine.cache.evict(8)
    assert engine.serve(prompt) == 0


def test_salts_and_keys_are_apart():
    index = CheckpointIndex(100)
    names = [{}, {"cache_salt": "a"}, {"cache_salt": b"a"}, {"extra_keys": ("a",)}, {"cache_salt": 1}]
    slots = [index.admit(range(100), 64, "end", **name) for name in names]
    assert slots == [0, 1, 2, 3, 4]
    assert [index.find(range(100), **name) for name in names] == [(64, slot) for slot in slots]
    assert index.find(range(100), cache_salt=True) is None
    index.check()


def test_other_tokens_are_never_taken():
    index = CheckpointIndex(100)
    index.admit(range(100), 64, "end")
    for at in range(64):
        prompt = list(range(100))
        prompt[at] = -1
        assert index.find(prompt) is None
    assert index.find(range(64)) is None and index.find(range(65)) == (64, 0)
    assert index.find(range(100), limit=63) is None and index.find([]) is None


def test_the_state_that_saves_least_is_evicted_first():
    """The budget holds three states: at 100, 200 and 1000 tokens of different prompts. The one at 100 saves least."""
    index = CheckpointIndex(10_000, 3 * 10_000 + 4 * 1600, grid=0, align=1)
    for salt, length in enumerate((100, 200, 1000)):
        assert index.admit(range(length), length, "end", cache_salt=salt) == salt
    assert index.admit(range(50), 50, "end", cache_salt=9) == -1
    assert index.admit(range(300), 300, "end", cache_salt=3) == 0
    assert [index.find(range(2000), cache_salt=salt) for salt in range(4)] == [None, (200, 1), (1000, 2), (300, 0)]
    index.check()
    assert index.stats()["dropped"] == 1 and index.stats()["rejected"] == 1


def test_an_unused_state_is_evicted_eventually():
    """A valuable but unused state is evicted eventually, even if new states save little."""
    index = CheckpointIndex(1000, 2 * 1000 + 4 * 1100, grid=0, align=1)
    index.admit(range(1000), 1000, "end", cache_salt=-1)
    for salt in range(2000):
        index.admit(range(40), 40, "end", cache_salt=salt)
        index.find(range(50), cache_salt=salt)
        if index.find(range(1000), 0, cache_salt=-1) is None and (-1) not in salts(index):
            break
    else:
        pytest.fail("the unused state was not evicted")
    index.check()


def salts(index):
    return {int(key.split(b"i", 1)[1][8:]) for key in index._roots}


def test_a_budget_of_nothing_keeps_nothing():
    engine = Engine(budget=0)
    assert [engine.serve(prompt) for prompt in prompts(100, 4)] == [0, 0, 0, 0]
    assert engine.checkpoints.stats()["states"] == 0


def test_bad_arguments_change_nothing():
    engine = Engine(align=1)
    save = engine.checkpoints.save
    with refuses(InvalidSlot, "slot", 0, 4):
        save(0, range(10), 10, "end")
    slot = engine.pool.alloc(1)
    with refuses(InvalidSlot, "out"):
        engine.checkpoints.resume(99, range(10), 10)
    for position in (0, 11, -1):
        with refuses(ValueError, 1, 10, position):
            save(slot, range(10), position, "end")
    with refuses(ValueError, "reason", "whim"):
        save(slot, range(10), 10, "whim")
    for name in ("state_bytes", "spacing", "align"):
        with refuses(ValueError, name, 1, 0):
            CheckpointIndex(**({"state_bytes": 1} | {name: 0}))
    with refuses(ValueError, "keep"):
        StateCheckpoints(StateLayout(layers=[{}]), SsmStatePool.from_layout(StateLayout(layers=[{}]), 1), 100)
    other = StateLayout(layers=[{"conv": ((4, 3), "float32"), "ssm": ((5,), "float16")}, {}, {"ssm": ((2,), "int32")}])
    with refuses(ValueError, "state", "conv", 0, "float32(4, 3)", "float32(3, 4)"):
        StateCheckpoints(other, engine.pool, 100)
    assert engine.checkpoints.stats()["states"] == 0


def test_stats_and_reset():
    engine = Engine(grid=64)
    for prompt in prompts(200, 3):
        engine.serve(prompt)
    stats = engine.checkpoints.stats()
    assert stats["state_bytes"] == STATE_BYTES and stats["states"] == sum(stats["saved"].values())
    assert stats["used"]["branch"] + stats["used"]["grid"] == 2 and stats["peak_states"] == stats["states"]
    assert stats["used_bytes"] > stats["states"] * STATE_BYTES
    engine.checkpoints.reset()
    assert engine.checkpoints.stats()["used_bytes"] == 0
    assert engine.serve(prompts(200, 1)[0]) == 0


def test_check_finds_corrupted_state():
    index = CheckpointIndex(100)
    index.admit(range(100), 64, "end")
    index.saved["end"] += 1
    with refuses(PoolError, 0, 1):
        index.check()


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=24)
SALTS = st.sampled_from([None, "a"])


class Machine(RuleBasedStateMachine):
    """The index and a reference without a tree give the same results and keep the same states."""

    def __init__(self):
        super().__init__()
        self.begin(50, 700, 5, 2, 1)

    def begin(self, state_bytes, budget, grid, spacing, align):
        options = {"grid": grid, "spacing": spacing, "align": align}
        self.index = CheckpointIndex(state_bytes, budget, **options)
        self.model = plain_checkpoints.CheckpointIndex(state_bytes, budget, **options)

    @rule(
        state_bytes=st.integers(1, 300),
        budget=st.none() | st.integers(0, 2000),
        grid=st.integers(0, 8),
        spacing=st.integers(1, 4),
        align=st.integers(1, 3),
    )
    def start_again(self, state_bytes, budget, grid, spacing, align):
        self.begin(state_bytes, budget, grid, spacing, align)

    @rule(tokens=TOKENS, limit=st.none() | st.integers(0, 24), salt=SALTS)
    def find(self, tokens, limit, salt):
        found = self.index.find(tokens, limit, cache_salt=salt)
        assert (found and found[0]) == self.model.find(tokens, limit, cache_salt=salt)

    @rule(tokens=TOKENS, kv_tokens=st.integers(0, 24), begin=st.integers(0, 24), salt=SALTS)
    def stops(self, tokens, kv_tokens, begin, salt):
        found = self.index.stops(tokens, kv_tokens, begin, cache_salt=salt)
        assert found == [Stop(*stop) for stop in self.model.stops(tokens, kv_tokens, begin, cache_salt=salt)]
        assert all(stop.position % self.index.align == 0 and begin < stop.position < len(tokens) for stop in found)

    @rule(tokens=TOKENS, reason=st.sampled_from(REASONS), salt=SALTS, data=st.data())
    def admit(self, tokens, reason, salt, data):
        if len(tokens) < self.index.align:
            return
        position = self.index.align * data.draw(st.integers(1, len(tokens) // self.index.align))
        slot = self.index.admit(tokens, position, reason, cache_salt=salt)
        assert (slot >= 0) == self.model.admit(tokens, position, reason, cache_salt=salt)

    @invariant()
    def agree(self):
        self.index.check()
        kept = sorted(kept.position for kept in self.index._kept.values())
        assert kept == sorted(len(row) for _, row in self.model.states)
        assert (self.index.used_bytes, self.index.used) == (self.model.used_bytes, self.model.used)


TestMachine = Machine.TestCase
TestMachine.settings = examples(60, stateful_step_count=40)


def test_a_budget_uses_memory_only_for_stored_states():
    """A budget of 2**31 bytes holds 268 million states of 8 bytes."""
    layout = StateLayout(layers=[{"h": ((2,), "float32")}])
    pool = SsmStatePool.from_layout(layout, 2**28)
    tracemalloc.start()
    try:
        checkpoints = StateCheckpoints(layout, SsmStatePool.from_layout(layout, 2**28), 2**31)
        slot = pool.alloc(7)
        pool.view(0, "h")[slot] = 3
        assert checkpoints.index.budget_bytes == 2**31 and len(pool.leaks()) == 1
        assert sum(trace.count for trace in tracemalloc.take_snapshot().statistics("lineno")) < 10_000
    finally:
        tracemalloc.stop()
    with refuses(ValueError, 2**34 - 1, 2**31 - 1, 8, "bytes", 2**34):
        StateCheckpoints(layout, pool, 2**34)


def test_checkpoint_arguments_are_checked():
    pool = SsmStatePool.from_layout(LAYOUT, 2)
    slot = pool.alloc(7)
    checkpoints = StateCheckpoints(LAYOUT, pool, 1 << 20)
    checkpoints.save(slot, range(16), 16, "end")
    for make, words in (
        (lambda: StateCheckpoints(None, pool, 100), ("layout", "StateLayout", "NoneType")),
        (lambda: StateCheckpoints(LAYOUT, 5, 100), ("pool", "SsmStatePool", "int")),
        (lambda: StateCheckpoints(LAYOUT, pool, None), ("budget_bytes", "None")),
        (lambda: checkpoints.resume(slot, range(9), None), ("kv_tokens", "None")),
        (lambda: checkpoints.stops(range(9), "x"), ("kv_tokens", "str")),
        (lambda: checkpoints.save(slot, range(9), 1.5, "end"), ("position", "float")),
    ):
        with refuses(TypeError, *words):
            make()
    assert checkpoints.stats()["used"]["end"] == 0 and checkpoints.stats()["states"] == 1
