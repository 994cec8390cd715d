"""Reservations of tenants: what running sequences and cached prefixes keep together, whoever else asks."""

import pytest

from pagepool import BlockAllocator, PrefixCache, Scheduler, SchedulerConfig, Tenant
from pagepool.prefix.eviction import POLICIES as CACHE_POLICIES

BLOCK = 4


def make(num_blocks, policy="lru", **config):
    allocator = BlockAllocator(num_blocks)
    cache = PrefixCache(allocator, BLOCK, policy) if policy else None
    config = {"watermark": 0, **config}
    return Scheduler(SchedulerConfig(block_size=BLOCK, **config), allocator, cache), cache


def step(scheduler):
    batch = scheduler.schedule()
    scheduler.commit(batch, [7] * len(batch))
    return batch


def run_to_end(scheduler, limit=5000):
    for _ in range(limit):
        if not scheduler.has_work:
            return
        assert not step(scheduler).is_empty
    raise AssertionError(f"no end after {limit} steps")


@pytest.mark.parametrize("policy", sorted(CACHE_POLICIES))
def test_a_flood_of_one_tenant_never_takes_what_is_reserved_for_another(policy):
    scheduler, cache = make(24, policy, tenants={"quiet": Tenant(min_blocks=8)})
    for head in (1, 2):
        scheduler.add_request([head] * 16, 17, tenant="quiet")
        run_to_end(scheduler)
    for number in range(60):
        scheduler.add_request([100 + number] * (10 + number % 23), 50, tenant="loud")
        while scheduler.waiting_count > 4 or (number == 59 and scheduler.has_work):
            assert not step(scheduler).is_empty
            assert cache.reservations.cached(1) >= 8
    assert scheduler.num_preemptions > 0 and cache.stats()["evicted"] > 50
    for head in (1, 2):
        assert cache.cached_tokens([head] * 16) == 16
    seq_id = scheduler.add_request([*[2] * 16, 3], 20, tenant="quiet")
    step(scheduler)
    assert scheduler.get_sequence(seq_id).num_cached == 16
    cache.check()


def test_without_a_reservation_the_flood_takes_all():
    scheduler, cache = make(24)
    scheduler.add_request([1] * 16, 17, tenant="quiet")
    run_to_end(scheduler)
    for number in range(20):
        scheduler.add_request([100 + number] * 20, 50, tenant="loud")
    run_to_end(scheduler)
    assert cache.cached_tokens([1] * 16) == 0


def test_a_tenants_own_requests_take_its_reservation():
    scheduler, cache = make(8, tenants={"a": Tenant(min_blocks=8)})
    for head in range(6):
        scheduler.add_request([head] * 24, 32, tenant="a")
        run_to_end(scheduler)
    assert scheduler.num_preemptions == 0 and cache.reservations.cached(1) >= 6
    with pytest.raises(ValueError, match="4 tokens need 1 blocks, what is reserved for other tenants leaves 0"):
        scheduler.add_request([1], 4, tenant="b")


def test_running_and_cached_blocks_count_together():
    """With 6 cached blocks and a reservation of 8, a running sequence of 4 leaves 2 to others, and no more."""
    scheduler, cache = make(16, tenants={"a": Tenant(min_blocks=8)}, max_batch_tokens=64)
    scheduler.add_request([1] * 24, 25, tenant="a")
    run_to_end(scheduler)
    scheduler.add_request([2] * 14, 16, tenant="a")
    scheduler.add_request([3] * 20, 32, tenant="b")
    step(scheduler)
    # 9 are cached, 3 of them in use, and 1 is not full; of 6 idle ones 4 are reserved, and 1 is free.
    assert (cache.reservations.cached(1), scheduler._reservations.above("a"), scheduler._blocks.available()) == (
        9,
        2,
        3,
    )
    assert cache.reservations.get(1) == 7 and cache.evict(9) == 2
    cache.check()


def test_a_reservation_spares_the_sequences_of_a_tenant():
    def victims(actions=(), **tenants):
        scheduler, _ = make(12, None, tenants=tenants, preemption_actions=actions)
        for tenant in ("old", "big", "small"):
            scheduler.add_request([1] * 15, 32, tenant=tenant)
        while not scheduler.num_preemptions:
            step(scheduler)
        return [scheduler.get_sequence(seq_id).num_preemptions for seq_id in (1, 2, 3)]

    assert victims() == [0, 0, 1]
    assert victims(small=Tenant(min_blocks=4)) == [0, 1, 0]
    assert victims(small=Tenant(min_blocks=3)) == [0, 1, 0]  # it could not give one block
    assert victims(("partial",), small=Tenant(min_blocks=3)) == [0, 1, 1]  # it gives one, and one more was needed


def test_a_copy_beside_anothers_cached_block_counts_for_the_reservation():
    """Both have read the same tokens at once, and only the first one's blocks are cached. The copies are the second's:
    with them it is above its reservation, and gives before one that is at its own."""
    tenants = {"copy": Tenant(min_blocks=3), "quiet": Tenant(min_blocks=4)}
    config = {"max_batch_tokens": 512, "max_prefill_tokens": 512, "max_wait_steps": 1}  # so neither waits for the other
    scheduler, cache = make(20, tenants=tenants, **config)
    scheduler.add_request([1] * 48, 52)
    scheduler.add_request([1] * 16, 20, tenant="copy")
    scheduler.add_request([2] * 13, 16, tenant="quiet")
    assert step(scheduler).seq_ids == [1, 2, 3]
    assert step(scheduler).seq_ids == [1, 3]
    assert cache.reservations.cached(1) == 0 and scheduler._reservations.above("copy") == 0
    assert [scheduler.get_sequence(seq_id).num_preemptions for seq_id in (1, 2, 3)] == [0, 1, 0]
    run_to_end(scheduler)
    assert scheduler.get_sequence(3).num_preemptions == 0
    cache.check()


def holding(scheduler, cache, tenant):
    """What the equation says, block by block."""
    group, reservations = scheduler._reservations.group(tenant), scheduler._reservations
    own = {block for seq in reservations._sequences[tenant].values() if seq.kv is not None for block in seq.kv.blocks}
    return cache.reservations.cached(group) + sum(not cache.holds(block) for block in own)


@pytest.mark.parametrize("forget", ["reset", "discard"])
def test_what_the_cache_forgets_while_it_is_in_use_counts_on(forget):
    """Two of a tenant share 3 blocks that one of them computed; forgotten, they are its own, each once; and when
    another has had them cached again meanwhile, those of the two are copies beside his."""
    tenants = {"a": Tenant(min_blocks=8)}
    scheduler, cache = make(40, tenants=tenants, max_batch_tokens=512, max_prefill_tokens=512)
    for _ in range(2):
        scheduler.add_request([1] * 15, 40, tenant="a")
        step(scheduler)
    reservations, first, second = scheduler._reservations, *[scheduler.get_sequence(seq_id) for seq_id in (1, 2)]
    assert second.kv.blocks[:3] == first.kv.blocks[:3] and cache.reservations.cached(1) == 4
    shared = second.kv.blocks[:3]
    if forget == "reset":
        cache.reset_prefix_cache()
    else:
        cache.discard(shared)
    held = len({*first.kv.blocks, *second.kv.blocks})
    assert reservations.above("a") + 8 == holding(scheduler, cache, "a") == held
    scheduler.add_request([1] * 15, 17, tenant="b")
    for _ in range(16):
        step(scheduler)
        assert reservations.above("a") + 8 == holding(scheduler, cache, "a")
    assert cache.cached_tokens([1] * 12) == 12
    run_to_end(scheduler)
    assert reservations.above("a") + 8 == cache.reservations.cached(1)
    cache.check()


def test_a_cache_that_has_no_reservations_is_refused_where_tenants_have_some():
    class Without:
        def __init__(self, cache):
            self._cache = cache

        def __getattr__(self, name):
            if name in ("reservations", "count_outside"):
                raise AttributeError(name)
            return getattr(self._cache, name)

    allocator = BlockAllocator(8)
    cache = Without(PrefixCache(allocator, BLOCK))
    with pytest.raises(TypeError, match="as a PrefixCache: Without has no reservations, count_outside"):
        Scheduler(SchedulerConfig(block_size=BLOCK, tenants={"a": Tenant(min_blocks=1)}), allocator, cache)
    Scheduler(SchedulerConfig(block_size=BLOCK, tenants={"a": Tenant(max_blocks=4)}), allocator, cache)


def test_a_tenant_gives_no_more_than_what_is_above_its_reservation():
    scheduler, _ = make(12, None, tenants={"c": Tenant(min_blocks=3)}, preemption_actions=("partial",))
    for tenant in ("a", "b", "c"):
        scheduler.add_request([1] * 15, 32, tenant=tenant)
    for _ in range(200):
        step(scheduler)
        seq = scheduler.get_sequence(3)
        assert seq.fed >= 12
        assert seq.kv is None or scheduler._reservations.above("c") == -(-seq.kv.len // BLOCK) - 3  # waiting or not
    assert not scheduler.has_work and scheduler.get_sequence(3).num_preemptions


def test_what_can_never_be_kept_is_refused():
    tenants = {name: Tenant(min_blocks=8) for name in "abc"}
    with pytest.raises(ValueError, match="24 blocks are reserved for tenants, the pool has 20"):
        make(20, tenants=tenants)
    with pytest.raises(ValueError, match="a reservation of 9 blocks is above the quota of 8"):
        Tenant(max_blocks=8, min_blocks=9)
    with pytest.raises(ValueError, match="255 tenants have reservations, at most 254 can"):
        make(300, tenants={number: Tenant(min_blocks=1) for number in range(255)})
    scheduler, _ = make(26, tenants=tenants)
    with pytest.raises(ValueError, match="44 tokens need 11 blocks, what is reserved for other tenants leaves 10"):
        scheduler.add_request([1], 44, tenant="a")
    with pytest.raises(ValueError, match="12 tokens need 3 blocks, what is reserved for other tenants leaves 2"):
        scheduler.add_request([1], 12)
    assert scheduler.total_count == 0 and scheduler.add_request([1], 40, tenant="a") == 1
    assert Scheduler(SchedulerConfig(tenants=tenants)).add_request([1], 10**6) == 1  # without a pool there are none
