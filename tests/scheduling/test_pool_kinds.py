"""The kinds of pool that a scheduler takes."""

from refusals import refuses

import pagepool
from pagepool import Scheduler


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
