"""`repr` of objects, as a debugger or a log shows it."""

from pagepool import (
    AttentionSequenceState,
    BlockTables,
    KvCachePool,
    KvLayout,
    PagedSeqState,
    PrefixCache,
    Scheduler,
    SsmStatePool,
)


def test_repr_shows_the_contents():
    pool = KvCachePool.from_layout(KvLayout(num_layers=1, num_kv_heads=1, head_dim=8), 4, max_blocks=8)
    state = PagedSeqState(pool.allocator)
    other = PagedSeqState(pool.allocator, label="request 7")
    cache = PrefixCache(pool.allocator)
    states = SsmStatePool(2, lambda i: AttentionSequenceState(3))
    scheduler = Scheduler()
    state.append(40)
    other.append(1)
    cache.cache_blocks(range(20), state.blocks)
    states.alloc(7)
    tables = BlockTables(3, 8).fill([state, other])
    scheduler.add_request([1, 2], 2)
    scheduler.add_request([1], 2)
    shown = [repr(thing) for thing in (pool.allocator, pool, state, other, cache, states, tables, scheduler)]
    state.release()
    other.close()
    pool.close()
    assert [*shown, repr(other), repr(pool)] == [
        "<BlockAllocator: 4 of 8 blocks in use>",
        "<KvCachePool: 4 of 8 pages in use, 512 bytes each>",
        "<PagedSeqState: 40 tokens, 3 blocks of 16>",
        "<PagedSeqState 'request 7': 1 tokens, 1 blocks of 16>",
        "<PrefixCache gittins: 1 of 8 blocks cached>",
        "<SsmStatePool: 1 of 2 slots used>",
        "<BlockTables: 2 of 3 rows filled>",
        "<Scheduler: 0 active, 1 waiting, 1 finished>",
        "<PagedSeqState 'request 7': closed>",
        "<KvCachePool: closed>",
    ]
