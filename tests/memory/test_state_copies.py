"""Copies of recurrent states, and the counters of copies."""

import numpy as np
import pytest

from pagepool import (
    AttentionSequenceState,
    InvalidSlot,
    Mamba2SequenceState,
    SsmStatePool,
    StateLayout,
)

LAYOUT = StateLayout(layers=[{"conv": ((3, 2), "float32")}, {}, {"h": ((5,), "float16"), "x": ((1,), "int64")}])


def states(pool, i):
    return [pool.view(layer, name)[i].tolist() for layer, name in ((0, "conv"), (2, "h"), (2, "x"))]


def fill(pool, i, value):
    for layer, name in ((0, "conv"), (2, "h"), (2, "x")):
        pool.view(layer, name)[i] = value


@pytest.mark.parametrize("capacity", [2, 5])
def test_a_copy_has_every_state_and_the_position(capacity):
    pool = SsmStatePool.from_layout(LAYOUT, capacity)
    a, b = pool.alloc(1), pool.alloc(2)
    fill(pool, a, 7)
    pool.slot(a).step()
    pool.copy(b, a)
    pool.copy(b, b)
    assert states(pool, b) == states(pool, a) and pool.slot(b).position == pool.slot(b).state.step_position == 1
    assert pool.slot(b).request_id == 2
    pool.view(0, "conv")[b] = 8
    assert np.all(pool.view(0, "conv")[a] == 7)
    for wrong in (capacity, -1):
        with pytest.raises(InvalidSlot, match=f"slot {wrong} is out of range: the pool has {capacity} slots"):
            pool.copy(a, wrong)
    pool.release(b)
    with pytest.raises(InvalidSlot, match=f"slot 1 is free: 1 of {capacity} slots are used"):
        pool.copy(b, a)


def test_python_states_copy_themselves_or_say_that_they_cannot():
    pool = SsmStatePool(2, lambda i: Mamba2SequenceState(1, 2, 3, 9))
    a, b = pool.alloc(1), pool.alloc(2)
    pool.slot(a).state.h[...] = 4
    pool.slot(a).step()
    pool.copy(b, a)
    assert np.all(pool.slot(b).state.h == 4) and pool.slot(b).position == 1

    class Bare:
        step_position = 0

        def reset(self):
            self.step_position = 0

    bare = SsmStatePool(3, lambda i: Bare())
    with pytest.raises(TypeError, match="a Bare has no copy_from"):
        bare.copy(bare.alloc(1), bare.alloc(2))
    with pytest.raises(ValueError, match="position 3 exceeds the capacity of this state, 2 steps"):
        longer = AttentionSequenceState(4)
        for _ in range(3):
            longer.advance()
        AttentionSequenceState(2).copy_from(longer)
    with pytest.raises(ValueError, match="cannot become a copy of Mamba2SequenceState"):
        Mamba2SequenceState(1, 2, 3, 9).copy_from(Mamba2SequenceState(1, 2, 4, 9))


def test_leaks_and_stats_name_blocks_in_use():
    pool = SsmStatePool.from_layout(LAYOUT, 4)
    pool.alloc(7)
    pool.release(pool.alloc(8))
    pool.alloc(9)
    assert [leak[:3] for leak in pool.leaks()] == [("state", 7, [0]), ("state", 9, [1])]
    row = 24 + 10 + 8
    assert pool.stats() == {
        "capacity": 4, "used": 2, "free": 2, "peak": 2, "bytes": 2 * row, "capacity_bytes": 4 * row,
    }  # fmt: skip
    assert SsmStatePool(3, lambda i: AttentionSequenceState(1)).stats()["capacity_bytes"] == 0
