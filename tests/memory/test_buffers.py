"""Plain NumPy arrays are read directly, with the same result as through the buffer protocol."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from refusals import refuses

from pagepool import KvCachePool, KvLayout, decode

PLAIN = ["float32", "float16", "uint16", "int32", "int64"]


class Own(np.ndarray):
    """A subclass of ndarray, which is not read directly."""


@pytest.fixture(scope="module")
def foreign(build_foreign):
    return build_foreign(Path(__file__).with_name("foreign_buffers.pyx"))


@pytest.fixture(scope="module")
def describe(foreign):
    return foreign.describe


def formats_alike(shown):
    """int64 has two format characters on platforms with a 64-bit long."""
    return shown | {"format": shown["format"].replace(b"l", b"q")}


@st.composite
def arrays(draw):
    """Draw an array of any dtype with up to 6 axes: permuted, reversed, strided, empty, length 1, or read-only."""
    dtype = draw(st.sampled_from([*PLAIN, "float64", ">f4", ">i4", "uint8", "int16", "bool"]))
    shape = draw(st.lists(st.integers(0, 4), max_size=6))
    array = np.empty(shape, dtype)
    slices = [slice(None), slice(None, None, -1), slice(None, None, 2), slice(1, None), slice(0, 1)]
    array = array[(*(draw(st.sampled_from(slices)) for _ in shape), ...)]  # an array even without axes
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    if 1 in array.shape and draw(st.booleans()):  # an axis of length 1 may have any stride
        axis, step = array.shape.index(1), draw(st.sampled_from([0, 6, -8, 1 << 40]))
        array = as_strided(array, strides=[step if i == axis else s for i, s in enumerate(array.strides)])
    if draw(st.booleans()):
        array.flags.writeable = False
    return array


@given(array=arrays())
def test_plain_arrays_show_what_their_buffer_does(describe, array):
    in_place, shown = describe(array)
    by_protocol, expected = describe(array.view(Own))
    assert not by_protocol
    assert in_place == (array.dtype.isnative and array.dtype.name in PLAIN and array.ndim <= 4)
    # a Fortran-ordered array that is not C-contiguous: its own strides here, regular strides there
    if array.flags.f_contiguous and not array.flags.c_contiguous:
        del shown["strides"], expected["strides"]
    assert formats_alike(shown) == formats_alike(expected)


def test_arrays_that_warn_when_they_are_written_are_read_only(describe):
    array = np.broadcast_arrays(np.zeros(3, np.float32), np.zeros((2, 3)))[0]
    assert describe(array) == (True, describe(array.view(Own))[1]) and describe(array)[1]["readonly"]


def test_dtypes_without_buffer_protocol_use_dlpack(foreign):
    ones = KvCachePool(16, 1, "bfloat16").page(0)
    ones[:] = 0x3F80
    halves = foreign.Halves(ones)
    assert foreign.describe(halves)[1] == {
        "at": ones.ctypes.data, "shape": [16], "strides": [2], "format": b"E", "itemsize": 2, "len": 32,
        "readonly": False,
    }  # fmt: skip
    with refuses(BufferError, "bfloat16"):
        memoryview(halves)
    released = memoryview(ones)
    released.release()
    with pytest.raises(ValueError, match="released memoryview"):
        foreign.describe(released)


def test_nothing_is_held_after_a_call_or_what_it_raised():
    pool = KvCachePool.from_layout(KvLayout(1, 2, 8, 4, "float32"), 2)
    k, v = np.ones((2, 5, 2, 8), np.float32)
    slots, tables, lens = np.arange(5), np.array([[0, 1]], np.int32), np.array([5], np.int32)
    q = np.ones((1, 4, 8), np.float32)
    out = np.empty_like(q)
    starts, per_head = np.array([0, 1], np.int32), np.ones(4, np.float32)
    held = [k, v, slots, tables, lens, q, out, starts, per_head]
    before = [sys.getrefcount(array) for array in held]
    pool.append(0, slots, k, v)
    decode(q, pool, 0, tables, lens, out=out, query_start_loc=starts, sinks=per_head, alibi_slopes=per_head)
    pool.gather(0, tables[0], 5)
    for wrong in ({"q": q[0]}, {"tables": tables[0]}, {"lens": lens[:, None]}, {"lens": lens + 9}, {"out": q}):
        use = {"q": q, "tables": tables, "lens": lens, "out": out} | wrong
        with pytest.raises(ValueError):
            decode(use["q"], pool, 0, use["tables"], use["lens"], out=use["out"], query_start_loc=starts)
    with pytest.raises(ValueError):
        decode(q, pool, 0, tables, lens, out=out, sinks=per_head[:3])
    with pytest.raises(ValueError):
        pool.append(0, slots[:4], k, v)
    with pytest.raises(TypeError):
        pool.append(0, slots, k, k[:, :, :4].astype(np.float64))
    wrong = use = None
    assert [sys.getrefcount(array) for array in held] == before
