"""Copy-on-write: a fork that appends writes into a copied block, in every pool of the allocator."""

import numpy as np

from pagepool import BlockAllocator, KvCachePool, KvLayout, PagedSeqState
from pagepool.memory.block_tables import append_batch

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float16")


def write(pool, slots, value):
    n = len(slots)
    for layer in range(pool.num_layers):
        k = np.full((n, pool.num_kv_heads, pool.head_dim), value + layer / 8, np.float32)
        pool.append(layer, slots, k, -k)


def read(pool, state, layer=0):
    k, v = pool.gather(layer, state.blocks, state.len)
    np.testing.assert_array_equal(k, -v)
    return (k[:, 0, 0] - layer / 8).tolist()


def test_a_fork_copies_the_page_of_all_layers_before_it_writes():
    pool = KvCachePool.from_layout(LAYOUT, 8)
    parent = PagedSeqState(pool.allocator, block_size=4)
    write(pool, parent.append(6), 1)
    child = parent.fork()
    write(pool, child.append(3), 2)
    write(pool, parent.append(1), 3)
    for layer in range(3):
        assert read(pool, child, layer) == [1] * 6 + [2] * 3
        assert read(pool, parent, layer) == [1] * 6 + [3]


def test_every_attached_pool_is_copied():
    allocator = BlockAllocator(8)
    pools = [
        KvCachePool.from_layout(LAYOUT, 8, allocator),
        KvCachePool.from_layout(KvLayout(1, 1, 16, block_size=4, dtype="float32"), 9, allocator),
    ]
    parent = PagedSeqState(allocator, block_size=4)
    slots = parent.append(6)
    for pool in pools:
        write(pool, slots, 1)
    child = parent.fork()
    slots = child.append(1)
    for pool in pools:
        write(pool, slots, 2)
        assert (read(pool, parent), read(pool, child)) == ([1] * 6, [1] * 6 + [2])


def test_a_freed_pool_is_not_copied():
    allocator = BlockAllocator(8)
    kept = KvCachePool.from_layout(LAYOUT, 8, allocator)
    gone = [KvCachePool.from_layout(LAYOUT, 8, allocator) for _ in range(5)]
    parent = PagedSeqState(allocator, block_size=4)
    write(kept, parent.append(2), 1)
    gone.pop().close()
    gone.clear()
    child = parent.fork()
    write(kept, child.append(1), 2)
    assert (read(kept, parent), read(kept, child)) == ([1] * 2, [1] * 2 + [2])


def test_a_flat_pools_pages_are_copied_too():
    pool = KvCachePool(8, 4)
    state = PagedSeqState(pool.allocator, block_size=4)
    state.append(2)
    pool.page(0)[:] = 7
    child = state.fork()
    child.append()
    assert child.blocks == [1] and pool.page(1).tolist() == [7] * 8


def test_a_batch_of_forks():
    pool = KvCachePool.from_layout(LAYOUT, 8)
    parent = PagedSeqState(pool.allocator, block_size=4)
    write(pool, parent.append(6), 1)
    family = [parent, parent.fork(), parent.fork()]
    append_batch(family, [2, 1, 3])
    for value, (state, n) in enumerate(zip(family, (2, 1, 3), strict=True), start=2):
        slots = np.array([state.blocks[t // 4] * 4 + t % 4 for t in range(6, 6 + n)])
        write(pool, slots, value)
    assert [read(pool, state) for state in family] == [[1] * 6 + [2] * 2, [1] * 6 + [3], [1] * 6 + [4] * 3]
