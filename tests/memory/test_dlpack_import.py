"""K, V and queries from libraries that have bfloat16 and speak DLPack only, in both capsule forms."""

import ctypes

import numpy as np
import pytest

from pagepool import KvCachePool, KvLayout, PagedSeqState, decode

CPU, CUDA, BFLOAT, INT = 1, 2, 4, 0

new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Legacy(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


class Producer:
    """A tensor of another library: the bits of bfloat16, shown by DLPack alone."""

    def __init__(self, bits, versioned, code=BFLOAT, device=CPU, strided=True):
        self.bits = bits
        self.sizes = (ctypes.c_int64 * bits.ndim)(*bits.shape)
        self.steps = (ctypes.c_int64 * bits.ndim)(*(step // 2 for step in bits.strides))
        tensor = Tensor(
            bits.ctypes.data, device, 0, bits.ndim, code, 16, 1, self.sizes, self.steps if strided else None, 0
        )
        self.versioned = versioned
        self.managed = Versioned(1, 0, None, None, 0, tensor) if versioned else Legacy(tensor, None, None)

    def __dlpack__(self, **options):
        if options and not self.versioned:
            raise TypeError("this library is older than DLPack 1.0")
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        return new_capsule(ctypes.addressof(self.managed), name, None)


def bfloat16_bits(rng, *shape):
    return (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def widened(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.fixture
def pool():
    return KvCachePool.from_layout(KvLayout(1, 2, 64, 16, "bfloat16"), 4)


@pytest.mark.parametrize("versioned", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_append_takes_bfloat16_by_dlpack(pool, versioned, strided):
    k, v = bfloat16_bits(np.random.default_rng(0), 2, 5, 2, 64)
    state = PagedSeqState(pool.allocator)
    producers = [Producer(bits, versioned, strided=strided) for bits in (k, v)]
    pool.append(0, state.append(5), *producers)
    got_k, got_v = pool.gather(0, np.array(state.blocks, np.int32), 5)
    np.testing.assert_array_equal(got_k, widened(k))
    np.testing.assert_array_equal(got_v, widened(v))


@pytest.mark.parametrize("versioned", [False, True])
def test_rows_that_are_apart(pool, versioned):
    k = bfloat16_bits(np.random.default_rng(1), 5, 3, 64)[:, ::2]
    state = PagedSeqState(pool.allocator)
    pool.append(0, state.append(5), Producer(k, versioned), Producer(k, versioned))
    np.testing.assert_array_equal(pool.gather(0, np.array(state.blocks, np.int32), 5)[0], widened(k))


@pytest.mark.parametrize("versioned", [False, True])
def test_decode_takes_queries_in_bfloat16_by_dlpack(pool, versioned):
    rng = np.random.default_rng(2)
    state = PagedSeqState(pool.allocator)
    rows = widened(bfloat16_bits(rng, 5, 2, 64))
    pool.append(0, state.append(5), rows, rows)
    q, lens = bfloat16_bits(rng, 1, 4, 64), np.array([5], np.int32)
    table = np.asarray(state.block_table)[None]
    got = decode(Producer(q, versioned), pool, 0, table, lens)
    np.testing.assert_array_equal(got, decode(widened(q), pool, 0, table, lens))


@pytest.mark.parametrize(("options", "error", "match"), [
    ({"code": INT}, TypeError, "float32"),
    ({"device": CUDA}, ValueError, "CPU memory .* not on device 2"),
])  # fmt: skip
def test_what_cannot_be_read_is_refused_and_nothing_is_written(pool, options, error, match):
    bits = bfloat16_bits(np.random.default_rng(3), 1, 2, 64)
    before = bytes(memoryview(pool))
    with pytest.raises(error, match=match):
        pool.append(0, np.zeros(1, np.int64), Producer(bits, True, **options), Producer(bits, True))
    assert bytes(memoryview(pool)) == before
