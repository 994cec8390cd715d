"""HybridSequence (pages, windows and a recurrent state): after any operation all parts match the tokens."""

import numpy as np
import pytest
from refusals import refuses

from pagepool import (
    BlockAllocator,
    HybridSequence,
    InvalidBlock,
    KvCachePool,
    KvGroup,
    KvLayout,
    PoolError,
    PoolExhausted,
    SsmStatePool,
    StaleHandle,
    StateLayout,
)

STATES = StateLayout(layers=[{"h": ((3,), "float64")}])


def state_after(tokens):
    """Return the result of a recurrence over the tokens; zeros without tokens."""
    value = 0
    for token in tokens:
        value = (value * 31 + token + 1) % 100_003
    return [float(value)] * 3


class Written:
    """A sequence, its tokens, and a fake engine that writes keys and states."""

    def __init__(self, engine, sequence, tokens=()):
        self.engine = engine
        self.sequence = sequence
        self.tokens = list(tokens)

    def feed(self, tokens):
        slots = self.sequence.append(len(tokens))
        self.tokens += tokens
        k = np.repeat(np.array(tokens, np.float32), 8).reshape(-1, 1, 8)
        for pool, places in zip(self.engine.pools, slots, strict=True):
            pool.append(0, places, k, k)
        if self.sequence.state is not None:
            self.sequence.state.view(0, "h")[...] = state_after(self.tokens)

    def roll(self, to):
        del self.tokens[self.sequence.rollback(to) :]

    def check(self):
        sequence = self.sequence
        sequence.check()
        assert sequence.len == len(self.tokens)
        for pool, group, kv in zip(self.engine.pools, sequence.groups, sequence.kv, strict=True):
            start = kv.first_block * kv.block_size
            keys = pool.gather(0, np.array(kv.blocks, np.int32), kv.len - start)[0][:, 0, 0].tolist()
            assert keys == self.tokens[start:]
            assert start <= max(0, len(self.tokens) - (group.window or 0))
        if sequence.state is not None:
            assert sequence.state.view(0, "h").tolist() == state_after(self.tokens)


class Engine:
    def __init__(self, blocks=24, slots=8, windows=(None, 5, 0), sizes=(4, 4, 2), shared=True, states=True):
        self.allocators = [BlockAllocator(blocks) for _ in range(len(windows))]
        if shared:
            self.allocators, sizes = self.allocators[:1] * len(windows), sizes[:1] * len(windows)
        self.pools = []
        for allocator, size in zip(self.allocators, sizes, strict=True):
            layout = KvLayout(1, 1, 8, block_size=size, dtype="float32")
            self.pools.append(KvCachePool.from_layout(layout, blocks, allocator))
        self.states = SsmStatePool.from_layout(STATES, slots) if states else None
        self.groups = [KvGroup(*given, 64) for given in zip(self.allocators, sizes, windows, strict=True)]

    def start(self, tokens=(), **options):
        written = Written(self, HybridSequence(self.groups, self.states, **options))
        written.feed(list(tokens))
        return written

    def idle(self):
        return all(a.in_use == 0 for a in self.allocators) and (self.states is None or self.states.used_count == 0)


def test_a_window_moves_on_in_a_pool_that_is_full():
    engine = Engine(blocks=3, windows=(4,), sizes=(4,), states=False)
    written = engine.start(range(10))
    assert engine.allocators[0].free_count == 0
    for token in range(10, 60):
        written.feed([token])
        written.check()
    assert engine.allocators[0].in_use <= 3 and engine.allocators[0].peak_in_use == 3


def test_blocks_freed_by_one_window_serve_another_group():
    engine = Engine(blocks=8, windows=(2, None), sizes=(4, 4), states=False)
    written = engine.start(range(16))
    assert engine.allocators[0].free_count == 0
    written.feed([16])
    written.check()
    assert [len(kv.blocks) for kv in written.sequence.kv] == [2, 5]


def test_an_append_that_fails_has_changed_nothing():
    engine = Engine(blocks=6, windows=(None, 4), sizes=(4, 4), shared=False)
    written = engine.start(range(20))
    written.check()
    before = [(kv.blocks, kv.first_block) for kv in written.sequence.kv]
    with refuses(PoolExhausted, 3, 1, 6):
        written.sequence.append(12)
    assert [(kv.blocks, kv.first_block) for kv in written.sequence.kv] == before and written.sequence.len == 20
    with refuses(ValueError, -1):
        written.sequence.append(-1)
    written.feed([1, 2])
    written.check()


def test_a_rollback_too_far_says_how_far_it_could_go():
    engine = Engine(blocks=40, windows=(None, 6), sizes=(4, 4))
    written = engine.start(range(20), keep=2)
    with refuses(ValueError, 18):
        written.sequence.rollback(2)
    there = written.sequence.checkpoint()
    written.feed(list(range(20, 40)))
    with refuses(ValueError, 15, 20):
        written.sequence.rollback(25)
    with refuses(ValueError, 30, 20):
        written.sequence.truncate(30)
    with refuses(ValueError, 41, 40):
        written.sequence.rollback(41)
    written.roll(5)  # the newest state at or before 35 is at 20
    assert len(written.tokens) == 20
    written.check()
    written.sequence.discard(there)
    with refuses(StaleHandle, 20, 0):
        written.sequence.rollback(there)
    written.roll(20)
    written.check()

    pages = Engine(blocks=40, windows=(6,), sizes=(4,), states=False).start(range(30), keep=2)
    pages.feed([30])
    with refuses(ValueError, "to", 25, 19, 20):
        pages.sequence.rollback(6)
    pages.roll(2)
    pages.check()


def test_a_checkpoint_keeps_the_blocks_of_windows_that_it_needs():
    engine = Engine(blocks=40, windows=(6,), sizes=(4,))
    written = engine.start(range(13))
    there = written.sequence.checkpoint()
    assert written.sequence.checkpoint() is there
    for token in range(13, 43):
        written.feed([token])
    assert written.sequence.kv[0].first_block == 1 and engine.states.used_count == 2
    written.roll(there)
    written.check()
    written.sequence.discard(there)
    written.feed(list(range(30)))
    written.sequence.trim()
    assert written.sequence.kv[0].first_block == 9 and engine.states.used_count == 1


def test_all_parts_or_none_when_a_slot_or_a_block_is_missing():
    engine = Engine(blocks=40, slots=2)
    written = engine.start(range(9))
    written.sequence.checkpoint()
    in_use = engine.allocators[0].in_use
    for refused in (written.sequence.fork, lambda: engine.start()):
        with refuses(PoolExhausted, 1, 0, 2):
            refused()
    assert engine.allocators[0].in_use == in_use
    written.feed([9, 10, 11, 12])
    engine.allocators[0].free(written.sequence.kv[1].blocks[-1])
    for refused in (lambda: written.sequence.rollback(written.sequence.checkpoints[0]), written.sequence.close):
        with pytest.raises(InvalidBlock, match="freed by someone else"):
            refused()
    assert [kv.len for kv in written.sequence.kv] == [13, 13, 13]
    assert written.sequence.state.view(0, "h").tolist() == state_after(range(13)) and engine.states.used_count == 2
    engine.allocators[0].allocate()
    written.sequence.close()
    assert engine.idle()


def test_parts_that_were_moved_one_by_one_are_found():
    written = Engine(blocks=40, shared=False).start(range(9))
    written.sequence.kv[1].append(1)
    with refuses(PoolError, 10, 9):
        written.sequence.check()
    assert written.sequence.stats() == {"len": 9, "blocks": 11, "given_back": 0, "states": 1, "checkpoints": 0}


def test_a_freed_object_leaves_nothing():
    engine = Engine()
    written = engine.start(range(9))
    written.sequence.checkpoint()
    written.feed([1, 2, 3])
    del written
    assert engine.idle()


def test_a_request_starts_with_the_cached_blocks_of_all_its_groups():
    engine = Engine(blocks=40, sizes=(4, 4), windows=(None, 5))
    first = engine.start(range(11))
    second = Written(engine, HybridSequence(engine.groups, engine.states), range(10))
    rows = [kv.blocks for kv in first.sequence.kv]
    with refuses(ValueError, 1, 2, 0):
        second.sequence.adopt(rows[:1], 10)
    with refuses(ValueError, 10, 2, 4):
        second.sequence.adopt([rows[0], rows[1][:2]], 10)
    assert second.sequence.kv[0].blocks == [] and second.sequence.len == 0
    engine.allocators[0].check(others=0)
    second.sequence.adopt(rows, 10)
    second.sequence.state.view(0, "h")[...] = state_after(range(10))
    second.check()
    second.feed([90, 91])  # copies the shared blocks
    first.feed([80])
    for each in (first, second):
        each.check()
    with refuses(ValueError, 2, 12):
        second.sequence.adopt(rows, 10)
    for each in (first, second):
        each.sequence.close()
    assert engine.idle()


def test_a_refused_append_to_groups_grows_no_allocator():
    allocators = [BlockAllocator(2, 8), BlockAllocator(2)]
    sequence = HybridSequence([KvGroup(allocator, 4, None, 8) for allocator in allocators])
    with refuses(PoolExhausted, 3, 2):
        sequence.append(12)
    assert [allocator.capacity for allocator in allocators] == [2, 2]


def test_slots_that_were_not_computed_are_retracted_and_the_state_stays():
    blocks = BlockAllocator(64)
    states = SsmStatePool.from_layout(STATES, 4)
    sequence = HybridSequence([KvGroup(blocks, 4), KvGroup(blocks, 4, window=6)], states)
    sequence.append(21)
    sequence.state.view(0, "h")[...] = 7
    for count in (1, 9, 0):
        sequence.append(count)
        sequence.retract(21)
        sequence.check()
        assert sequence.len == 21 and sequence.state.view(0, "h").tolist() == [7.0] * 3
        assert [table.len for table in sequence.kv] == [21, 21] and len(sequence.kv[0].blocks) == 6
    sequence.append(12)
    sequence.append(1)
    before = sequence.stats()
    for length, *words in ((35, "length", 0, 34, 35), (12, 12, 6, 24)):
        with refuses(ValueError, *words):
            sequence.retract(length)
    sequence.checkpoint()
    with refuses(ValueError, 33, 34):
        sequence.retract(33)
    assert sequence.stats()["blocks"] == before["blocks"] and sequence.len == 34
    sequence.close()
    assert blocks.in_use == 0 and states.used_count == 0
    for use in (
        lambda: sequence.retract(0),
        lambda: sequence.state.view(0, "h"),
        lambda: sequence.state.slot,
        lambda: sequence.state.fork(),
    ):
        with pytest.raises(StaleHandle):
            use()
    assert states.used_count == 0


def test_drafts_hold_all_of_their_states_or_none_until_they_are_retracted():
    blocks = BlockAllocator(64)
    states = SsmStatePool.from_layout(STATES, 5)
    sequence = HybridSequence([KvGroup(blocks, 4), KvGroup(blocks, 4, window=6)], states, label=9)
    sequence.append(21)
    sequence.state.view(0, "h")[...] = 21
    for accepted in (0, 4, 2, 0):
        length = sequence.len
        sequence.append(5)
        with refuses(PoolExhausted, 5, 4, 5):
            sequence.hold_drafts(5)
        assert states.used_count == 1 and sequence.drafts == []
        sequence.hold_drafts(4)
        with refuses(ValueError, 1, 4):
            sequence.hold_drafts(1)
        assert states.free_count == 0 == len({slot.index for slot in (sequence.state, *sequence.drafts)}) - 5
        assert [slot.slot.request_id for slot in sequence.drafts] == [9] * 4 and sequence.stats()["states"] == 5
        for place, slot in enumerate((sequence.state, *sequence.drafts), length + 1):
            slot.view(0, "h")[...] = place
        with refuses(ValueError, sequence.len + 1):
            sequence.retract(sequence.len + 1)
        sequence.retract(length + 1 + accepted)
        sequence.check()
        assert sequence.state.view(0, "h").tolist() == [length + 1 + accepted] * 3
        assert (sequence.len, states.used_count, sequence.drafts) == (length + 1 + accepted, 1, [])
    with refuses(ValueError, "n", sequence.len + 1):
        sequence.hold_drafts(sequence.len + 1)
    sequence.append(3)
    sequence.hold_drafts(2)
    child = sequence.fork()  # it has the state after the token before the drafts
    child.retract(child.len - 2)
    assert child.state.view(0, "h").tolist() == sequence.state.view(0, "h").tolist() and child.drafts == []
    for one in (sequence, child):
        one.close()
    assert states.used_count == 0 == blocks.in_use
    with pytest.raises(StaleHandle):
        sequence.hold_drafts(1)


def test_drafts_without_a_recurrent_state_take_nothing():
    sequence = HybridSequence([KvGroup(BlockAllocator(8), 4)])
    sequence.append(5)
    sequence.hold_drafts(3)
    sequence.retract(4)
    assert (sequence.drafts, sequence.len) == ([], 4)
