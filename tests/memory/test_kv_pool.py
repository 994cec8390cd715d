"""KvCachePool: pages, flat and from a layout. test_append.py tests append."""

import gc
import sys

import numpy as np
import pytest
from refusals import refuses

from pagepool import BlockAllocator, InvalidBlock, KvCachePool, KvLayout, PoolExhausted, SsmStatePool, StateLayout

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
VIEWS = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def test_flat_pool_hands_out_pages():
    pool = KvCachePool(8, 3)
    assert (pool.total_pages, pool.free_pages, pool.used_pages, pool.page_size) == (3, 3, 0, 8)
    assert [pool.alloc(), pool.alloc()] == [0, 1]
    pool.free(0)
    assert (pool.free_pages, pool.used_pages, pool.alloc()) == (2, 1, 0)


def test_flat_pool_that_is_exhausted():
    pool = KvCachePool(8, 1)
    pool.alloc()
    with refuses(PoolExhausted, 1, 0):
        pool.alloc()


K = np.zeros((1, 1, 8), np.float32)
ONE = np.zeros(1, np.int64)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: KvCachePool(0, 1), ValueError, ("page_size", 1, 1099511627776, 0)),
        (lambda: KvCachePool(-1, 1), ValueError, ("page_size", 1, 1099511627776, -1)),
        (lambda: KvCachePool(2**41, 1), ValueError, ("page_size", 1, 1099511627776, 2199023255552)),
        (lambda: KvCachePool(1, -1), ValueError, (0, 2147483647, -1)),
        (lambda: KvCachePool(1, 2**31), ValueError, (0, 2147483647, 2147483648)),
        (lambda: KvCachePool(1, 1, "float64"), ValueError, ("float32", "float16", "bfloat16", "uint8", "float64")),
        (lambda: KvCachePool(1, 1, "int8"), ValueError, ("float32", "float16", "bfloat16", "uint8", "int8")),
        (lambda: KvCachePool(1.0, 1), TypeError, ("page_size", "float", "1.0")),
        (lambda: KvCachePool(1, 1.0), TypeError, ("initial_pages", "float", "1.0")),
        (lambda: KvCachePool(1 << 40, 2**31 - 1), MemoryError, (2147483647, 4398046511104, "bytes")),
        (lambda: KvCachePool(1 << 40, 1 << 20), MemoryError, (1048576, 4398046511104, "bytes")),
        (lambda: KvCachePool.from_layout(None, 1), TypeError, ("layout", "KvLayout", "NoneType")),
        (lambda: KvCachePool.from_layout(8, 1), TypeError, ("layout", "KvLayout", "int")),
        (lambda: KvCachePool.from_layout(LAYOUT, 1.0), TypeError, ("num_blocks", "float", "1.0")),
        (lambda: KvCachePool.from_layout(LAYOUT, -1), ValueError, ("num_blocks", 0, 2147483647, -1)),
        (lambda: KvCachePool.from_layout(LAYOUT, 1, 5), TypeError, ("allocator", "BlockAllocator", "int")),
        (lambda: KvCachePool.from_layout(LAYOUT, 3, BlockAllocator(4)), ValueError, (4, 3)),
        (lambda: layers().append(0.0, ONE, K, K), TypeError, ("layer", "float")),
        (lambda: layers().gather(0, [0], "1"), TypeError, ("seq_len", "str")),
    ],
)
def test_a_wrong_argument_is_named(call, error, words):
    with refuses(error, *words):
        call()


def layers():
    return KvCachePool.from_layout(LAYOUT, 2)


@pytest.mark.parametrize(
    ("i", "to_page", "to_free"),
    [
        (-1, ("page", -1, 2), ("block", -1, 2)),
        (2, ("page", 2), ("block", 2)),
        (2**31, *[("block", 2147483648, 32)] * 2),
        (2**70, *[("block", 2**70, 32)] * 2),
        (0, None, ("block", 0)),  # freed before
        (1, None, ("block", 1, 0)),
    ],
)
def test_a_wrong_page_is_named_and_changes_nothing(i, to_page, to_free):
    pool = KvCachePool(8, 2)
    pool.free(pool.alloc())
    if to_page is None:
        pool.page(i)  # any page may be viewed
    else:
        with refuses(InvalidBlock, *to_page):
            pool.page(i)
    with refuses(InvalidBlock, *to_free):
        pool.free(i)
    assert pool.free_pages == 2


@pytest.mark.parametrize("dtype", VIEWS)
def test_page_is_a_writable_view(dtype):
    pool = KvCachePool(8, 3, dtype)
    page = pool.page(1)
    assert (page.shape, page.dtype, page.flags.writeable) == ((8,), VIEWS[dtype], True)
    page[:] = 3
    everything = np.asarray(memoryview(pool)).view(VIEWS[dtype])
    assert everything.tolist() == [0] * 8 + [3] * 8 + [0] * 8
    assert pool.dtype == dtype


def test_free_does_not_clear_a_page():
    pool = KvCachePool(4, 1)
    pool.page(pool.alloc())[:] = 5
    pool.free(0)
    assert pool.page(pool.alloc()).tolist() == [5] * 4


@pytest.mark.parametrize("dtype, code", [("float32", "f"), ("float16", "e"), ("bfloat16", "H")])
def test_memoryview_is_the_whole_buffer(dtype, code):
    pool = KvCachePool(6, 5, dtype)
    view = memoryview(pool)
    assert (view.format, view.ndim, view.shape, view.c_contiguous, view.readonly) == (code, 1, (30,), True, False)
    assert view.nbytes == pool.nbytes
    assert memoryview(pool).cast("B").nbytes == pool.nbytes


def test_base_is_aligned_and_never_moves():
    pool = KvCachePool.from_layout(LAYOUT, 4)
    address = np.asarray(pool).ctypes.data
    assert address % (2 << 20) == 0
    assert pool.page(3).ctypes.data == address + 3 * LAYOUT.block_bytes


def test_numpy_shows_blocks_by_elements():
    pool = KvCachePool.from_layout(LAYOUT, 3)
    pages = pool.numpy()
    assert pages.shape == (3, LAYOUT.page_size) and pages.dtype == np.float32
    pages[2, 1] = 7
    assert pool.page(2)[1] == 7


@pytest.mark.parametrize("installed", [False, True])
def test_views_of_bfloat16_are_its_bits_with_or_without_ml_dtypes(monkeypatch, installed):
    if installed:
        pytest.importorskip("ml_dtypes", reason="the test needs ml_dtypes")
    else:
        monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    pool = KvCachePool(4, 2, "bfloat16")
    states = SsmStatePool.from_layout(StateLayout(layers=[{"s": ((4,), "bfloat16")}]), 2)
    for view in (pool.numpy(), pool.page(1), states.view(0, "s"), states.slot(1).state.view(0, "s")):
        assert view.dtype == np.uint16 and view.flags.writeable
    pool.numpy()[1] = 0x3F80
    assert pool.page(1).tolist() == [0x3F80] * 4 and pool.numpy().shape == (2, 4)


@pytest.mark.parametrize(
    "look",
    [
        lambda pool: pool.page(1),
        lambda pool: pool.numpy()[1],
        lambda pool: np.asarray(memoryview(pool))[4:],
        lambda pool: np.from_dlpack(pool)[4:],
    ],
)
def test_views_outlive_the_pool(look):
    pool = KvCachePool(4, 2)
    pool.page(1)[:] = 9
    view = look(pool)
    del pool
    gc.collect()
    np.asarray(KvCachePool(4, 2)).fill(1)  # would reuse the memory if it were free
    assert view.tolist() == [9] * 4
    view[:] = 8


def test_pages_are_committed_by_touch():
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    pool = KvCachePool(1 << 20, 1 << 14)  # 64 GiB
    pool.page(9000)[5] = 1
    assert pool.nbytes == 1 << 36 and resident() - before < 1 << 26
    assert pool.page(9000)[:7].tolist() == [0, 0, 0, 0, 0, 1, 0]


def test_from_layout_has_the_sizes_of_the_layout():
    pool = KvCachePool.from_layout(LAYOUT, 6)
    assert pool.layout is LAYOUT and pool.page_size == LAYOUT.page_size == 2 * 2 * 8 * 4
    assert (pool.num_layers, pool.num_kv_heads, pool.head_dim, pool.block_size) == (2, 1, 8, 4)
    assert (pool.total_pages, pool.num_blocks, pool.allocator.capacity) == (6, 6, 6)
    assert pool.nbytes == 6 * LAYOUT.block_bytes
    assert pool.alloc() == 0 and pool.allocator.in_use == pool.used_pages == 1


def test_pools_may_share_an_allocator():
    allocator = BlockAllocator(4)
    first = KvCachePool.from_layout(LAYOUT, 4, allocator)
    second = KvCachePool.from_layout(LAYOUT, 6, allocator=allocator)
    assert first.allocator is second.allocator is allocator
    assert second.total_pages == 6


class DtypeOfTorch:
    """A stand-in for torch's dtypes."""

    __module__ = "torch"

    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return f"torch.{self.name}"


def test_dtype_may_be_one_of_numpy_torch_or_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="the test needs ml_dtypes")
    for name, *others in (
        ("float16", np.float16, np.dtype("f2"), DtypeOfTorch("float16")),
        ("bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), DtypeOfTorch("bfloat16")),
    ):
        for other in others:
            assert KvCachePool(1, 1, other).dtype == name
            assert KvLayout(1, 1, 8, dtype=other) == KvLayout(1, 1, 8, dtype=name)
    for wrong in (np.float64, DtypeOfTorch("int16"), "f2"):
        for make in (lambda dtype: KvCachePool(1, 1, dtype), lambda dtype: KvLayout(1, 1, 8, dtype=dtype)):
            with refuses(ValueError, "dtype", "float32"):
                make(wrong)
    for wrong in (None, 5, object()):
        with refuses(TypeError, "dtype"):
            KvLayout(1, 1, 8, dtype=wrong)


def test_states_of_dtypes_of_torch():
    of_torch, named = (
        StateLayout(layers=[{"a": ((2,), of("bfloat16")), "b": ((3,), of("float32"))}]) for of in (DtypeOfTorch, str)
    )
    assert of_torch == named
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="the test needs ml_dtypes")
    for bfloat16 in (ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)):
        layout = StateLayout(layers=[{"a": ((2,), bfloat16), "b": ((3,), "float32")}])
        assert layout == named and SsmStatePool.from_layout(layout, 1).view(0, "a").dtype == np.uint16
    with refuses(ValueError, "dtype", "a", 0, "float4"):
        StateLayout(layers=[{"a": ((2,), DtypeOfTorch("float4"))}])


def test_capacity_zero_is_legal():
    for pool in (KvCachePool(8, 0), KvCachePool.from_layout(LAYOUT, 0)):
        assert (pool.total_pages, pool.free_pages, pool.used_pages, pool.nbytes) == (0, 0, 0, 0)
        assert memoryview(pool).nbytes == 0 and pool.numpy().shape == (0, pool.page_size)
        assert np.from_dlpack(pool).shape == (0,)
        with pytest.raises(PoolExhausted):
            pool.alloc()
        with pytest.raises(InvalidBlock):
            pool.page(0)
    none = np.zeros((0, 1, 8), np.float32)
    pool.append(0, np.zeros(0, np.int64), none, none)
    k, v = pool.gather(1, [], 0)
    assert k.shape == v.shape == (0, 1, 8)


def test_flat_pool_has_no_layers():
    pool = KvCachePool(64, 4)
    k = np.zeros((1, 1, 8), np.float32)
    assert pool.layout is None
    for call in (lambda: pool.append(0, np.zeros(1, np.int64), k, k), lambda: pool.gather(0, [0], 1)):
        with refuses(ValueError, "from_layout"):
            call()


def test_close_waits_for_no_view():
    pool = KvCachePool(8, 2)
    page = pool.page(0)
    with refuses(BufferError, "close", "memory"):
        pool.close()
    page[:] = 1
    del page
    pool.close()
    pool.close()
    assert pool.total_pages == 0
    for call in (lambda: pool.page(0), pool.numpy, pool.__dlpack__):
        with refuses(ValueError, "closed"):
            call()
    with refuses(BufferError, "closed"):
        memoryview(pool)


def test_a_closed_pool_follows_its_allocator_no_more():
    allocator = BlockAllocator(2)
    pool = KvCachePool.from_layout(LAYOUT, 2, allocator)
    pool.close()
    k = np.zeros((1, 1, 8), np.float32)
    with refuses(ValueError, "closed"):
        pool.append(0, np.zeros(1, np.int64), k, k)
    allocator.allocate()
    allocator.check()


def test_pools_of_one_allocator_come_and_go():
    allocator = BlockAllocator(2)
    for _ in range(20):
        pools = [KvCachePool.from_layout(LAYOUT, 2, allocator) for _ in range(9)]
    del pools
    gc.collect()
    assert KvCachePool.from_layout(LAYOUT, 2, allocator).alloc() == 0


def test_a_closed_pool_hands_out_nothing_and_is_not_entered():
    pool = KvCachePool(8, 2)
    page = pool.alloc()
    pool.close()
    for call in (pool.alloc, pool.__enter__):
        with refuses(ValueError, "closed"):
            call()
    pool.free(page)  # pages of a closed pool can still be freed
    pool.allocator.check(others=0)
