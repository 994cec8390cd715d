"""SsmStatePool, its slots and the states in them."""

import gc

import numpy as np
import pytest
from refusals import refuses

from pagepool import (
    AttentionSequenceState,
    InvalidSlot,
    Mamba2SequenceState,
    PoolExhausted,
    SequenceSlot,
    SequenceState,
    SsmStatePool,
    StateLayout,
)

LAYOUT = StateLayout(
    layers=[
        {"conv_states": ((3, 4), "float16"), "recurrent_states": ((2, 5), "float32")},
        {},
        {"conv_states": ((7,), "float32")},
    ]
)


def mamba(i):
    return Mamba2SequenceState(n_layers=2, d_state=3, d_inner=4, max_context=8)


@pytest.mark.parametrize("state", [AttentionSequenceState(3), mamba(0)])
def test_states_follow_the_protocol(state):
    assert isinstance(state, SequenceState)
    assert (state.step_position, state.capacity) in [(0, 3), (0, 8)]
    state.advance()
    assert state.step_position == 1
    state.reset()
    assert state.step_position == 0


def test_a_state_has_no_step_past_its_capacity():
    state = AttentionSequenceState(1)
    state.advance()
    with refuses(PoolExhausted, 2, 1):
        state.advance()
    assert state.step_position == 1
    with pytest.raises(PoolExhausted):
        AttentionSequenceState(0).advance()


def test_mamba2_state_is_zeroed_in_place():
    state = mamba(0)
    h = state.h
    assert (h.shape, h.dtype) == ((2, 4, 3), np.float32) and not h.any()
    h[...] = 1
    state.advance()
    state.reset()
    assert state.h is h and not h.any()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda it: AttentionSequenceState(-1), ValueError, ("max_context", 0, -1)),
        (lambda it: AttentionSequenceState(1.0), TypeError, ("max_context", "float", "1.0")),
        (lambda it: Mamba2SequenceState(-1, 1, 1, 1), ValueError, ("n_layers", 0, -1)),
        (lambda it: Mamba2SequenceState(1, -1, 1, 1), ValueError, ("d_state", 0, -1)),
        (lambda it: Mamba2SequenceState(1, 1, -1, 1), ValueError, ("d_inner", 0, -1)),
        (lambda it: SsmStatePool(-1, mamba), ValueError, ("capacity", 0, 2147483647, -1)),
        (lambda it: SsmStatePool(2**31, mamba), ValueError, ("capacity", 0, 2147483647, 2147483648)),
        (lambda it: SsmStatePool(1.0, mamba), TypeError, ("capacity", "float", "1.0")),
        (lambda it: SsmStatePool(1, None), TypeError, ("make_state", "NoneType")),
        (lambda it: SsmStatePool(1, lambda i: i), TypeError, ("make_state(0)", "SequenceState", "int")),
        (lambda it: SsmStatePool.from_layout(LAYOUT, -1), ValueError, ("capacity", 0, 2147483647, -1)),
        (lambda it: SsmStatePool.from_layout(None, 1), TypeError, ("layout", "StateLayout", "NoneType")),
        (lambda it: StateLayout(layers=[{"x": ((2,), "O")}]), ValueError, ("dtype", "x", 0, "O")),
        (lambda it: it.alloc("a"), TypeError, ("request_id", "str", "a")),
        (lambda it: it.view(1, "conv_states"), ValueError, ("layer", 1, "conv_states")),
        (lambda it: it.view(0, "x"), ValueError, ("layer", 0, "x", "conv_states", "recurrent_states")),
        (lambda it: it.view(3, "conv_states"), ValueError, ("layer", 0, 2, 3)),
        (lambda it: it.view(-1, "conv_states"), ValueError, ("layer", 0, 2, -1)),
        (lambda it: SsmStatePool(1, mamba).view(0, "h"), ValueError, ("SsmStatePool.from_layout",)),
    ],
)
def test_a_wrong_argument_is_named_and_changes_nothing(call, error, words):
    pool = SsmStatePool.from_layout(LAYOUT, 1)
    with refuses(error, *words):
        call(pool)
    assert pool.free_count == 1


def test_slot_starts_at_its_states_position():
    state = AttentionSequenceState(8)
    state.advance()
    slot = SequenceSlot(state)
    assert (slot.state, slot.position, slot.request_id) == (state, 1, 0)
    slot.step()
    assert (slot.position, state.step_position) == (2, 2)
    slot.request_id = 5
    slot.reset()
    assert (slot.position, state.step_position, slot.request_id) == (0, 0, 0)


def test_a_step_that_fails_leaves_the_slot():
    slot = SequenceSlot(AttentionSequenceState(0))
    with pytest.raises(PoolExhausted):
        slot.step()
    assert slot.position == 0


def test_make_state_builds_each_slot():
    made = []

    def make_state(i):
        made.append(i)
        return AttentionSequenceState(i)

    pool = SsmStatePool(3, make_state)
    assert made == [0, 1, 2] and [pool.slot(i).state.capacity for i in range(3)] == [0, 1, 2]


def pools(capacity):
    return [SsmStatePool(capacity, mamba), SsmStatePool.from_layout(LAYOUT, capacity)]


def test_slots_of_a_layout_are_made_as_they_are_used():
    pool = SsmStatePool.from_layout(LAYOUT, 100_000)
    last = pool.slot(99_999)
    assert last is pool.slot(99_999) and last.request_id == 0
    slots = [pool.slot(pool.alloc(i + 1)) for i in range(3000)]
    assert [slot.request_id for slot in slots] == list(range(1, 3001)) and slots[2999] is pool.slot(2999)
    assert [leak.label for leak in pool.leaks()] == list(range(1, 3001))


def test_exhaustion():
    for pool in pools(1):
        pool.alloc(1)
        with refuses(PoolExhausted, 1, 0):
            pool.alloc(2)
        assert pool.slot(0).request_id == 1


def test_slot_of_a_lent_and_of_a_free_slot():
    for pool in pools(2):
        assert pool.slot(1).request_id == 0
        i = pool.alloc(42)
        assert (pool.slot(i).request_id, pool.slot(i).position) == (42, 0)
        assert pool.slot(i) is pool.slot(i)


def test_release_resets_the_slot():
    for pool in pools(2):
        i = pool.alloc(42)
        slot = pool.slot(i)
        slot.step()
        slot.step()
        assert slot.state.step_position == slot.position == 2
        pool.release(i)
        assert (slot.request_id, slot.position, slot.state.step_position) == (0, 0, 0)


def test_release_zeroes_the_state():
    pool = SsmStatePool(2, mamba)
    i = pool.alloc(1)
    pool.slot(i).state.h[...] = 3
    pool.release(i)
    assert not pool.slot(i).state.h.any()


def test_release_zeroes_one_row_of_every_state():
    pool = SsmStatePool.from_layout(LAYOUT, 3)
    views = [pool.view(0, "conv_states"), pool.view(0, "recurrent_states"), pool.view(2, "conv_states")]
    for view in views:
        view[...] = 1
    pool.alloc(1), pool.alloc(2)
    pool.release(1)
    for view in views:
        assert not view[1].any() and (view[[0, 2]] == 1).all()


def test_a_slot_that_was_released_without_zeroing_is_zeroed_when_it_is_allocated():
    pool = SsmStatePool.from_layout(LAYOUT, 3)
    views = [pool.view(0, "conv_states"), pool.view(0, "recurrent_states"), pool.view(2, "conv_states")]

    def use(zero):
        i = pool.alloc(7, zero)
        found = [view[i].copy() for view in views]
        pool.slot(i).step()
        for view in views:
            view[i] = 5
        return i, bool(np.any([np.any(one) for one in found]))

    for zeroes, is_stale in ((False, True), (True, False)):
        i, _ = use(True)
        pool.release(i, zero=False)
        slot = pool.slot(i)
        assert (slot.request_id, slot.position, slot.state.step_position) == (0, 0, 0)
        assert use(zeroes) == (i, is_stale)
        pool.release(i)
        assert not any(view[i].any() for view in views) and use(False) == (i, False)
        pool.release(i)
    assert pool.used_count == 0
    with refuses(InvalidSlot, 0, 3):
        pool.release(0, zero=False)
    assert not use(True)[1]


def test_a_state_of_python_is_reset_in_any_case():
    pool = SsmStatePool(2, mamba)
    i = pool.alloc(1)
    pool.slot(i).state.h[...] = 3
    pool.slot(i).step()
    pool.release(i, zero=False)
    assert not pool.slot(i).state.h.any() and pool.slot(i).state.step_position == 0
    assert pool.alloc(2) == i


@pytest.mark.parametrize("i", [-1, 2, 2**40])
def test_slots_out_of_range(i):
    for pool in pools(2):
        for method in (pool.slot, pool.release):
            with refuses(InvalidSlot, "slot", i, 2):
                method(i)


def test_double_release():
    for pool in pools(2):
        i = pool.alloc(1)
        pool.release(i)
        for slot in (i, 1):
            with refuses(InvalidSlot, "slot", slot):
                pool.release(slot)
        assert pool.free_count == 2


def test_a_reset_that_fails_leaves_the_slot_in_use():
    class Stubborn(AttentionSequenceState):
        def reset(self):
            raise RuntimeError("no")

    pool = SsmStatePool(1, lambda i: Stubborn(1))
    pool.alloc(9)
    with pytest.raises(RuntimeError):
        pool.release(0)
    assert (pool.used_count, pool.slot(0).request_id) == (1, 9)


def test_a_layout_counts_the_elements_of_its_views():
    pool = SsmStatePool.from_layout(LAYOUT, 3)
    views = [pool.view(layer, name) for layer, states in enumerate(LAYOUT.layers) for name in states]
    assert len(views) > 1 and 3 * LAYOUT.num_elements == sum(view.size for view in views)
    assert StateLayout(layers=[{}, {}]).num_elements == 0


def test_views_of_a_layout():
    pool = SsmStatePool.from_layout(LAYOUT, 3)
    conv, recurrent = pool.view(0, "conv_states"), pool.view(0, "recurrent_states")
    assert (conv.shape, conv.dtype) == ((3, 3, 4), np.float16)
    assert (recurrent.shape, recurrent.dtype) == ((3, 2, 5), np.float32)
    assert conv.flags.c_contiguous and conv.ctypes.data % 64 == recurrent.ctypes.data % 64 == 0
    recurrent[1] = 4
    assert not conv.any() and not pool.view(2, "conv_states").any()
    np.testing.assert_array_equal(pool.slot(1).state.view(0, "recurrent_states"), np.full((2, 5), 4))


def test_views_outlive_the_pool():
    pool = SsmStatePool.from_layout(LAYOUT, 2)
    view, row = pool.view(2, "conv_states"), pool.slot(1).state.view(2, "conv_states")
    view[1] = 6
    del pool
    gc.collect()
    assert view[1].tolist() == row.tolist() == [6] * 7


def test_capacity_zero_is_legal():
    for pool in pools(0):
        assert (pool.capacity, pool.free_count, pool.used_count) == (0, 0, 0)
        with pytest.raises(PoolExhausted):
            pool.alloc(1)
        with pytest.raises(InvalidSlot):
            pool.slot(0)
    assert pool.view(0, "conv_states").shape == (0, 3, 4)


def test_a_layout_without_any_state():
    pool = SsmStatePool.from_layout(StateLayout(layers=[{}, {}]), 2)
    pool.release(pool.alloc(1))
    assert pool.free_count == 2


@pytest.mark.parametrize(
    ("layer", "name"),
    [({3: ((2,), "float32")}, 3), ({"h": (2, "float32")}, "h"), ({"h": "x"}, "h"), ({"h": ((2,),)}, "h")],
)
def test_a_layout_names_a_wrong_state(layer, name):
    with refuses(TypeError, name, 1):
        StateLayout(layers=[{}, layer])


def test_equal_layouts_of_states_are_one_key():
    layouts = [StateLayout(layers=[{"a": (shape, "float32"), "b": ([3], "int8")}]) for shape in ((2, 1), [2, 1])]
    assert len({layouts[0]: 1, layouts[1]: 2, StateLayout(layers=[{}]): 3}) == 2
