"""Objects that own memory or ids cannot be copied: a copy would free the original's resources."""

import copy
import pickle

import pytest
from refusals import refuses

from pagepool import (
    BlockAllocator,
    BlockTables,
    HybridSequence,
    KvCachePool,
    KvGroup,
    KvLayout,
    PagedSeqState,
    PrefixCache,
    Scheduler,
    SequencePool,
    SsmStatePool,
    StateCheckpoints,
    StateLayout,
)

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8)
STATES = StateLayout(layers=[{"h": ((2,), "float32")}])


def owners():
    allocator = BlockAllocator(8)
    pool = KvCachePool.from_layout(LAYOUT, 8)
    state = PagedSeqState(allocator, block_size=4)
    state.append(9)
    cache = PrefixCache(allocator, block_size=4)
    states = SsmStatePool.from_layout(STATES, 2)
    return allocator, [
        allocator,
        pool,
        state,
        BlockTables(2, 2),
        cache,
        states,
        HybridSequence([KvGroup(allocator, 4)]),
        HybridSequence([], states).state,
        SequencePool(pool, states),
        StateCheckpoints(STATES, states, 1000),
        Scheduler(None, allocator),
    ]


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy], ids=lambda way: way.__name__)
def test_owners_are_neither_pickled_nor_copied(way):
    allocator, all_of_them = owners()
    before = allocator.stats()
    for owner in all_of_them:
        with refuses(TypeError, type(owner).__name__):
            way(owner)
    assert allocator.stats() == before
    allocator.check()
