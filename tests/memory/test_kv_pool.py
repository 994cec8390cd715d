"""KvCachePool: pages, flat and from a layout. What append takes is in test_append.py."""

import gc

import numpy as np
import pytest

from pagepool import BlockAllocator, InvalidBlock, KvCachePool, KvLayout, PoolExhausted

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
    with pytest.raises(PoolExhausted, match="asked for 1 block, 0 of 1 are free"):
        pool.alloc()


@pytest.mark.parametrize("i", [-1, 2, 2**31, 2**70])
def test_pages_out_of_range(i):
    pool = KvCachePool(8, 2)
    for method in (pool.page, pool.free):
        with pytest.raises(InvalidBlock):
            method(i)
    assert pool.free_pages == 2


def test_double_free_of_a_page():
    pool = KvCachePool(8, 2)
    pool.alloc()
    pool.free(0)
    with pytest.raises(InvalidBlock):
        pool.free(0)
    with pytest.raises(InvalidBlock):
        pool.free(1)
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


def test_numpy_of_bfloat16_goes_through_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="compares with ml_dtypes.bfloat16")
    pool = KvCachePool(4, 2, "bfloat16")
    pages = pool.numpy()
    assert pages.dtype == ml_dtypes.bfloat16 and pages.shape == (2, 4)
    pages[1] = 1
    assert pool.page(1).tolist() == [0x3F80] * 4


def test_numpy_of_bfloat16_without_ml_dtypes(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    assert KvCachePool(4, 2, "bfloat16").numpy().dtype == np.uint16


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
    np.asarray(KvCachePool(4, 2)).fill(1)  # would land in the same place, were it free
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
    with pytest.raises(ValueError, match=r"the allocator has 4 blocks, the pool only 3 pages"):
        KvCachePool.from_layout(LAYOUT, 3, allocator)


@pytest.mark.parametrize(
    "arguments, error",
    [
        ((0, 1), ValueError),
        ((-1, 1), ValueError),
        ((2**41, 1), ValueError),
        ((1, -1), ValueError),
        ((1, 2**31), ValueError),
        ((1, 1, "float64"), ValueError),
        ((1, 1, "int8"), ValueError),
        ((1.0, 1), TypeError),
        ((1, 1.0), TypeError),
        ((1 << 40, 2**31 - 1), MemoryError),
        ((1 << 40, 1 << 20), MemoryError),
    ],
)
def test_bad_sizes_of_a_flat_pool(arguments, error):
    with pytest.raises(error):
        KvCachePool(*arguments)


def test_dtype_may_be_a_numpy_dtype():
    assert KvCachePool(1, 1, np.float16).dtype == KvCachePool(1, 1, np.dtype("f2")).dtype == "float16"


@pytest.mark.parametrize(
    "arguments, error",
    [
        ((None, 1), TypeError),
        ((8, 1), TypeError),
        ((LAYOUT, 1.0), TypeError),
        ((LAYOUT, -1), ValueError),
        ((LAYOUT, 1, 5), TypeError),
    ],
)
def test_bad_arguments_of_from_layout(arguments, error):
    with pytest.raises(error):
        KvCachePool.from_layout(*arguments)


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
        with pytest.raises(ValueError, match="from_layout"):
            call()


def test_close_waits_for_no_view():
    pool = KvCachePool(8, 2)
    page = pool.page(0)
    with pytest.raises(BufferError, match="cannot close memory"):
        pool.close()
    page[:] = 1
    del page
    pool.close()
    pool.close()
    assert pool.total_pages == 0
    for call in (lambda: pool.page(0), pool.numpy, pool.__dlpack__):
        with pytest.raises(ValueError, match="closed"):
            call()
    with pytest.raises(BufferError, match="closed"):
        memoryview(pool)


def test_a_closed_pool_follows_its_allocator_no_more():
    allocator = BlockAllocator(2)
    pool = KvCachePool.from_layout(LAYOUT, 2, allocator)
    pool.close()
    k = np.zeros((1, 1, 8), np.float32)
    with pytest.raises(ValueError, match="closed"):
        pool.append(0, np.zeros(1, np.int64), k, k)
    allocator.allocate()
    allocator.check()


def test_pools_come_and_go_beside_their_allocator():
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
        with pytest.raises(ValueError, match="the pool is closed"):
            call()
    pool.free(page)  # what was taken may still be given back
    pool.allocator.check(others=0)


def test_an_argument_of_the_wrong_type_is_named():
    pool = KvCachePool.from_layout(LAYOUT, 2)
    k = np.zeros((1, 1, 8), np.float32)
    with pytest.raises(TypeError, match="layer must be an integer, not float"):
        pool.append(0.0, np.zeros(1, np.int64), k, k)
    with pytest.raises(TypeError, match="seq_len must be an integer, not str"):
        pool.gather(0, [0], "1")
