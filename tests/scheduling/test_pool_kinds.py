"""The kinds of pool that a scheduler takes."""

from refusals import refuses

import pagepool
from pagepool import Scheduler, SchedulerConfig


def test_the_pool_may_be_of_any_kind():
    layout = pagepool.KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=2)
    pool = pagepool.KvCachePool.from_layout(layout, 4)
    for kind in (pool, pagepool.SequencePool(kv=pool)):
        scheduler = Scheduler(pool=kind)
        scheduler.add_request([1] * 5, 8)
        batch = scheduler.schedule()
        assert batch.states[0].block_size == 2 and pool.allocator.in_use == 3
        with refuses(ValueError, 9, 5, 2, 4):
            scheduler.add_request([1], 9)
        scheduler.remove_sequence(1)
    ssm = pagepool.SsmStatePool(2, lambda i: pagepool.AttentionSequenceState(8))
    scheduler = Scheduler(pool=pagepool.SequencePool(ssm=ssm))
    scheduler.add_request([1], 10**9)
    assert scheduler.schedule().states == []


def test_the_pool_decides_the_block_size_and_a_config_must_not_contradict_it():
    pool = pagepool.KvCachePool.from_layout(pagepool.KvLayout(1, 1, 8, block_size=32), 4)
    for given in (None, 32):
        for memory in (pool, pool.allocator):
            scheduler = Scheduler(SchedulerConfig(block_size=given), memory)
            scheduler.add_request([1] * 33, 40)
            scheduler.schedule()
            assert pool.allocator.in_use == 2
            scheduler.remove_sequence(1)
    for memory in (pool, pool.allocator):
        with refuses(ValueError, "block_size", 32, 16):
            Scheduler(SchedulerConfig(block_size=16), memory)
    assert pool.allocator.in_use == 0


def test_a_config_must_not_contradict_the_groups():
    allocator = pagepool.BlockAllocator(8)
    for sizes, found in ([4, 4], "4"), ([4, 8], "4 and 8"):
        groups = [pagepool.KvGroup(allocator, size) for size in sizes]
        with refuses(ValueError, "block_size", 16, found):
            Scheduler(SchedulerConfig(block_size=16), allocator, groups=groups)
        Scheduler(None, allocator, groups=groups)
    assert allocator.in_use == 0
