"""DLPack-only tensors as every argument: both kinds of capsules, and the exchange API."""

import ctypes
import sys

import numpy as np
import pytest
from refusals import refuses

from pagepool import (
    BlockAllocator,
    InvalidBlock,
    InvalidSlot,
    KvCachePool,
    KvLayout,
    PagedSeqState,
    SsmStatePool,
    StateLayout,
    decode,
    prefill,
)

CPU, CUDA = 1, 2
CODES = {"int32": 0, "int64": 0, "uint16": 1, "float32": 2, "float16": 2, "float64": 2, "bfloat16": 4}
READ_ONLY, COPIED = 1, 2

new_capsule = ctypes.pythonapi.PyCapsule_New
pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
pointer_in.restype, pointer_in.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
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
    """Another library's tensor over an array. uint16 is exported as bfloat16, which NumPy lacks."""

    versioned = True

    def __init__(self, array, dtype=None, device=CPU, strided=True, flags=0, lanes=1):
        self.array = array
        self.dtype = dtype or array.dtype.name.replace("uint16", "bfloat16")
        self.flags = flags
        item = array.itemsize
        self.sizes = (ctypes.c_int64 * array.ndim)(*array.shape)
        self.steps = (ctypes.c_int64 * array.ndim)(*(step // item for step in array.strides))
        self.tensor = Tensor(array.ctypes.data, device, 0, array.ndim, CODES[self.dtype], 8 * item, lanes, self.sizes,
                             self.steps if strided else None, 0)  # fmt: skip

    def __dlpack__(self, **options):
        if options and not self.versioned:
            raise TypeError("this library does not support DLPack 1.0")
        self.managed = (
            Versioned(1, 0, None, None, self.flags, self.tensor) if self.versioned else Legacy(self.tensor, None, None)
        )
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        return new_capsule(ctypes.addressof(self.managed), name, None)


class LegacyProducer(Producer):
    versioned = False


class ExchangeApi(ctypes.Structure):
    SHOW = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Tensor))
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older_api", ctypes.c_void_p),
        ("unused", ctypes.c_void_p * 3),
        ("show", SHOW),
        ("stream", ctypes.c_void_p),
    ]


@ExchangeApi.SHOW
def show(producer, tensor):
    tensor[0] = producer.tensor
    return 0


EXCHANGE_API = ExchangeApi(1, 3, None, (None, None, None), show, None)
NEWER_API, LESSER_API = ExchangeApi(2, 0, None, (None, None, None), show), ExchangeApi(1, 3)


class FastProducer(Producer):
    """Has only the table of C functions; its other methods raise."""

    __dlpack_c_exchange_api__ = new_capsule(ctypes.addressof(EXCHANGE_API), b"dlpack_exchange_api", None)

    def __dlpack__(self, **options):
        raise AssertionError("the faster exchange API must be used")


PRODUCERS = pytest.mark.parametrize("producer", [Producer, LegacyProducer, FastProducer])


def bfloat16_bits(rng, *shape):
    return (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def widened(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.fixture
def pool():
    return KvCachePool.from_layout(KvLayout(1, 2, 64, 16, "bfloat16"), 4)


@PRODUCERS
@pytest.mark.parametrize("strided", [False, True])
def test_append_takes_bfloat16_by_dlpack(pool, producer, strided):
    k, v = bfloat16_bits(np.random.default_rng(0), 2, 5, 2, 64)
    state = PagedSeqState(pool.allocator)
    pool.append(0, producer(state.append(5)), *(producer(bits, strided=strided) for bits in (k, v)))
    got_k, got_v = pool.gather(0, producer(np.array(state.blocks)), 5)
    np.testing.assert_array_equal(got_k, widened(k))
    np.testing.assert_array_equal(got_v, widened(v))


@PRODUCERS
def test_a_lazily_negated_tensor_is_refused(pool, producer):
    """A lazily negated torch view: its memory has the opposite sign, and DLPack has no flag for that."""
    negated = type("Negated", (producer,), {"is_neg": lambda self: True})
    k, state = bfloat16_bits(np.random.default_rng(0), 5, 2, 64), PagedSeqState(pool.allocator)
    slots = state.append(5)
    for name, arguments in {"k": (negated(k), k), "v": (k, negated(k))}.items():
        with refuses(ValueError, name, unchanged=lambda: memoryview(pool).tobytes()):
            pool.append(0, slots, *arguments)
    negated.is_neg = lambda self: False
    pool.append(0, slots, negated(k), negated(k))


@PRODUCERS
def test_rows_that_are_apart(pool, producer):
    k = bfloat16_bits(np.random.default_rng(1), 5, 3, 64)[:, ::2]
    state = PagedSeqState(pool.allocator)
    pool.append(0, producer(state.append(5)), producer(k), producer(k))
    np.testing.assert_array_equal(pool.gather(0, np.array(state.blocks, np.int32), 5)[0], widened(k))


@pytest.fixture
def batch(pool):
    """Return arguments of decode for two sequences, as NumPy arrays; the queries are exact in bfloat16."""
    rng = np.random.default_rng(2)
    states = [PagedSeqState(pool.allocator), PagedSeqState(pool.allocator)]
    for state, length in zip(states, (5, 20), strict=True):
        pool.append(0, state.append(length), *widened(bfloat16_bits(rng, 2, length, 2, 64)))
    tables = np.array([state.blocks + [0] * (3 - len(state.blocks)) for state in states], np.int32)
    return bfloat16_bits(rng, 3, 4, 64), tables, np.array([5, 20], np.int32), np.array([0, 1, 3], np.int32)


@PRODUCERS
@pytest.mark.parametrize("ints", [np.int32, np.int64])
@pytest.mark.parametrize("out", ["float32", "float16", "bfloat16"])
def test_attention_takes_every_argument_by_dlpack(pool, batch, producer, ints, out):
    q, tables, lens, starts = batch
    per_head = np.linspace(-1, 1, 4, dtype=np.float32)
    options = {"sinks": per_head, "alibi_slopes": per_head}
    expected = prefill(widened(q), pool, 0, tables, lens, starts, **options)
    result = np.zeros_like(expected, np.uint16 if out == "bfloat16" else out)
    shown = producer(result)
    arguments = [producer(array.astype(ints)) for array in (tables, lens, starts)]
    options = {name: producer(array) for name, array in options.items()}
    assert prefill(producer(q), pool, 0, *arguments, out=shown, **options) is shown
    if out == "bfloat16":
        bits = expected.view(np.uint32)
        np.testing.assert_array_equal(result, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
    else:
        np.testing.assert_array_equal(result, expected.astype(out))


@pytest.mark.parametrize("flags", [READ_ONLY, COPIED])
def test_a_read_only_out_is_refused(pool, batch, flags):
    q, tables, lens, starts = batch
    out = np.full(q.shape, 5, np.float32)
    with refuses(ValueError, "out"):
        prefill(q, pool, 0, tables, lens, starts, out=Producer(out, flags=flags))
    assert (out == 5).all()
    prefill(Producer(q, flags=flags), pool, 0, tables, lens, starts)  # read-only


@PRODUCERS
def test_a_result_that_overlaps_an_input_is_refused(pool, batch, producer):
    q, tables, lens, starts = batch
    memory = np.zeros((3, 4, 64), np.float32)
    for name, argument in (("block_tables", tables), ("seq_lens", lens), ("query_start_loc", starts)):
        arguments = {"block_tables": tables, "seq_lens": lens, "query_start_loc": starts}
        inside = memory.view(np.int64).reshape(-1)[-argument.size :].reshape(argument.shape)
        inside[:] = argument
        arguments[name] = producer(inside)
        with refuses(ValueError, "out", name):
            prefill(q, pool, 0, *arguments.values(), out=producer(memory))
        np.testing.assert_array_equal(inside, argument)


def test_int64_beyond_32_bits(pool, batch):
    q, tables, lens, starts = batch
    wide = tables.astype(np.int64)
    wide[0, 1:] = 2**40, -(2**40)  # after the end of the sequence, any value is allowed
    expected = prefill(q, pool, 0, tables, lens, starts)
    np.testing.assert_array_equal(prefill(q, pool, 0, wide, lens, starts), expected)
    for block, limit in ((2**40, 2147483647), (-(2**40), -2147483648)):
        wide[1, 1] = block
        with refuses(InvalidBlock, "block_tables[1, 1]", limit, 4):
            prefill(q, pool, 0, wide, lens, starts)
    for wrong, *words in (
        ((lens + np.int64(2**32), starts), "seq_lens[0]", -2147483648, 2147483647, 4294967301),
        ((lens, starts - np.int64(2**32)), "query_start_loc[0]", -4294967296),
    ):
        with refuses(ValueError, *words):
            prefill(q, pool, 0, tables, *wrong)


def test_int64_arrays_keep_their_layout(pool, batch):
    q, tables, lens, starts = batch
    expected = prefill(q, pool, 0, tables, lens, starts)
    apart = np.ascontiguousarray(np.repeat(tables, 2, axis=0)[:, ::-1]).astype(np.int64)[::2]
    apart[:] = tables
    np.testing.assert_array_equal(prefill(q, pool, 0, apart, lens, starts), expected)
    with refuses(ValueError, "block_tables", 8, "bytes", -8):
        prefill(q, pool, 0, apart[:, ::-1], lens, starts)


@PRODUCERS
@pytest.mark.parametrize("ints", [np.int32, np.int64])
def test_slots_and_ids_by_dlpack(pool, producer, ints):
    k = np.ones((3, 2, 64), np.float32)
    pool.append(0, producer(np.array([1, -1, 20], ints)), k, 2 * k)
    assert [pool.gather(0, [0, 1], 32)[1][token, 0, 0] for token in (1, 20, 2)] == [2, 2, 0]
    with refuses(InvalidSlot, "slot", 64, 1):
        pool.append(0, producer(np.array([1, 64, 20], ints)), k, k)
    with refuses(TypeError, "slot_mapping", "int64", "int32", "float32"):
        pool.append(0, producer(np.zeros(3, np.float32)), k, k)
    allocator = BlockAllocator(8)
    ids = producer(allocator.allocate_n(3).astype(ints))
    allocator.share(ids)
    allocator.free(ids)
    allocator.free(ids)
    assert allocator.free_count == 8
    with refuses(TypeError, "block"):
        allocator.free(producer(np.zeros(3, np.float32)))


@pytest.mark.parametrize("api", [NEWER_API, LESSER_API], ids=["of a later version", "without the function"])
@pytest.mark.parametrize("name", [b"dlpack_exchange_api", b"another"])
def test_an_exchange_api_that_cannot_be_used_is_left_alone(batch, pool, api, name):
    class Odd(Producer):
        __dlpack_c_exchange_api__ = new_capsule(ctypes.addressof(api), name, None)

    q, tables, lens, starts = batch
    expected = prefill(q, pool, 0, tables, lens, starts)
    np.testing.assert_array_equal(prefill(Odd(q), pool, 0, tables, lens, starts), expected)


def test_what_the_exchange_api_raises(batch, pool):
    fails = ctypes.cast(ctypes.pythonapi.PyObject_Size, ctypes.c_void_p).value  # -1, with an exception
    api = ExchangeApi(1, 3, None, (None, None, None), ExchangeApi.SHOW(fails))

    class Sparse(Producer):
        __dlpack_c_exchange_api__ = new_capsule(ctypes.addressof(api), b"dlpack_exchange_api", None)
        error = RuntimeError("it is sparse\nframe #0: of C++")

        def __len__(self):
            raise self.error

    q, tables, lens, starts = batch
    with refuses(ValueError, "read"):
        prefill(Sparse(q), pool, 0, tables, lens, starts)
    Sparse.error = MemoryError("no memory to show it")
    with refuses(MemoryError, "memory", "show"):
        prefill(Sparse(q), pool, 0, tables, lens, starts)


@PRODUCERS
def test_nothing_is_held_after_a_call_by_dlpack(batch, pool, producer):
    q, tables, lens, starts = (producer(array) for array in batch)
    out = producer(np.zeros((3, 4, 64), np.float32))
    held = [q, tables, lens, starts, out]
    before = [sys.getrefcount(each) for each in held]
    prefill(q, pool, 0, tables, lens, starts, out=out)
    with refuses(ValueError, 3, 2, 4):
        prefill(q, pool, 0, tables, lens, producer(np.arange(4)), out=out)
    assert [sys.getrefcount(each) for each in held] == before


@PRODUCERS
@pytest.mark.parametrize(("options", "error", "words"), [
    ({"dtype": "float64"}, TypeError, ('k', 'float32', 'float16', 'bfloat16', 'float64')),
    ({"dtype": "bfloat16", "lanes": 2}, TypeError, ('k', 'float32')),
    ({"device": CUDA}, ValueError, (2,)),
])  # fmt: skip
def test_unreadable_arrays_are_refused_and_nothing_is_written(pool, producer, options, error, words):
    bits = bfloat16_bits(np.random.default_rng(3), 1, 2, 64)
    k = bits.astype(np.float64) if options.get("dtype") == "float64" else bits
    before = bytes(memoryview(pool))
    with refuses(error, *words):
        pool.append(0, np.zeros(1, np.int64), producer(k, **options), producer(bits))
    for wrong, *words in ((np.zeros((1, 1, 1, 2, 64), np.float32), 4, 5), (bits[0], (1, 2, 64), (2, 64))):
        with refuses(ValueError, "k", *words):
            pool.append(0, np.zeros(1, np.int64), producer(wrong), producer(bits))
    assert bytes(memoryview(pool)) == before


def test_a_tensor_without_memory(batch, pool):
    q, tables, lens, starts = batch
    shown = FastProducer(q)
    shown.tensor.data = None  # as in torch's meta tensors
    with refuses(ValueError, "FastProducer"):
        prefill(shown, pool, 0, tables, lens, starts)


def test_a_tensor_that_returns_no_capsule(batch, pool):
    class Broken:
        def __dlpack__(self, **options):
            return 5

    _, tables, lens, starts = batch
    with refuses(TypeError, "__dlpack__"):
        prefill(Broken(), pool, 0, tables, lens, starts)


def test_no_window_and_no_cap_may_be_none(batch, pool):
    q, tables, lens, starts = batch
    expected = prefill(q, pool, 0, tables, lens, starts)
    got = prefill(q, pool, 0, tables, lens, starts, window_left=None, logits_soft_cap=None)
    np.testing.assert_array_equal(got, expected)
    got = decode(q, pool, 0, tables, lens, query_start_loc=starts, window_left=None, logits_soft_cap=None)
    np.testing.assert_array_equal(got, expected)


def states_of(dtype):
    states = SsmStatePool.from_layout(StateLayout(layers=[{"s": ((3, 4), dtype)}]), 2)
    for request in (1, 2):
        states.alloc(request)
    return states


def test_views_of_bfloat16_show_it_by_dlpack():
    pool, states = KvCachePool(4, 3, "bfloat16"), states_of("bfloat16")
    for view in (pool.page(1), pool.numpy(), pool.numpy()[1:, ::2], states.view(0, "s"), states.view(0, "s")[1]):
        for options, name, form in (
            ({}, b"dltensor", Legacy),
            ({"max_version": (1, 0)}, b"dltensor_versioned", Versioned),
        ):
            capsule = view.__dlpack__(**options)
            shown = form.from_address(pointer_in(capsule, name)).tensor
            assert (shown.code, shown.bits, shown.data) == (CODES["bfloat16"], 16, view.ctypes.data)
            assert tuple(shown.shape[: view.ndim]) == view.shape
    assert view.__dlpack_device__() == (CPU, 0)
    numbers = (states.view(0, "s").astype(np.uint32) << 16).view(np.float32)
    assert np.from_dlpack(numbers).dtype == np.float32  # floats are not marked as bfloat16
    assert np.from_dlpack(states_of("uint16").view(0, "s")).dtype == np.uint16  # declared as uint16
    assert np.from_dlpack(states_of("float32").view(0, "s")).shape == (2, 3, 4)
