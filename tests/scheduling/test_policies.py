"""Policies: order of requests and quotas."""

import pytest
from refusals import refuses

from pagepool import BlockAllocator, PrefixCache, Scheduler, SchedulerConfig, Tenant
from pagepool.config import CHOICES
from pagepool.scheduling.policies import POLICIES

BLOCK = 4


def make(num_blocks=64, cache=False, **config):
    allocator = BlockAllocator(num_blocks)
    prefix_cache = PrefixCache(allocator, BLOCK) if cache else None
    return Scheduler(SchedulerConfig(block_size=BLOCK, **config), allocator, prefix_cache)


def step(scheduler, token=7):
    batch = scheduler.schedule()
    scheduler.commit(batch, [token] * len(batch))
    return batch


def order_of_admission(scheduler, limit=1000):
    seen = []
    for _ in range(limit):
        if not scheduler.has_work:
            return seen
        seen += [seq_id for seq_id in step(scheduler).seq_ids if seq_id not in seen]
    raise AssertionError(f"requests still run after {limit} steps")


def test_the_config_names_every_policy():
    assert set(CHOICES["policy"]) == set(POLICIES)
    with refuses(ValueError, "policy", "priority", "fcfs", "fair", "sjf"):
        SchedulerConfig(policy="sjf")


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [1, 2, 3]), ("priority", [2, 3, 1])])
def test_first_come_and_priority(policy, order):
    scheduler = make(policy=policy, max_sequences=1)
    for priority in (5, 1, 1):
        scheduler.add_request([1] * 4, 6, priority)
    assert order_of_admission(scheduler) == order


def test_tenants_get_tokens_by_weight_for_any_request_sizes():
    tenants = {"b": Tenant(weight=2.0)}
    scheduler = make(policy="fair", max_sequences=2, max_batch_sequences=2, tenants=tenants)
    for _ in range(300):
        scheduler.add_request([1] * 8, 16, tenant="a")
    for _ in range(150):
        scheduler.add_request([1] * 4, 24, tenant="b")
    served = {"a": 0, "b": 0}
    for _ in range(800):
        batch = scheduler.schedule()
        for seq_id, tokens, is_prefill in zip(batch.seq_ids, batch.tokens, batch.is_prefill, strict=True):
            seq = scheduler.get_sequence(seq_id)
            served[seq.tenant] += len(tokens) * (1 if is_prefill else 2)
        scheduler.commit(batch, [7] * len(batch))
        # Weighted counters differ by at most the tokens of the two places.
        assert abs(served["a"] - served["b"] / 2) <= 2 * 24 * 2
    assert served["a"] > 300


def test_a_tenant_that_comes_back_gets_no_credit_for_its_absence():
    scheduler = make(policy="fair", max_sequences=1)
    scheduler.add_request([1] * 4, 5, tenant="idle")
    order_of_admission(scheduler)
    for _ in range(20):
        scheduler.add_request([1] * 8, 16, tenant="busy")
    for _ in range(60):
        step(scheduler)
    first = scheduler.add_request([1] * 8, 16, tenant="idle")
    for _ in range(4):
        scheduler.add_request([1] * 8, 16, tenant="idle")
    order = order_of_admission(scheduler)
    position = order.index(first)
    tenants = ["idle" if seq_id >= first else "busy" for seq_id in order[position : position + 8]]
    assert position <= 2 and tenants.count("idle") <= 5


def test_a_request_that_waits_for_its_quota_starts_when_another_ends():
    """This also holds if other requests meanwhile took more blocks than the ended request frees."""
    scheduler = make(92, max_batch_sequences=32, tenants={"a": Tenant(max_blocks=4)})
    for _ in range(8):
        scheduler.add_request([1] * 4, 44)
    first, second = [scheduler.add_request([2] * 4, 16, tenant="a") for _ in range(2)]
    while not scheduler.drain_finished():
        assert second not in step(scheduler).seq_ids
    assert scheduler.get_sequence(first) is None and second in step(scheduler).seq_ids


def test_a_quota_limits_its_tenant_and_no_other():
    scheduler = make(32, tenants={"a": Tenant(max_blocks=4)})
    for _ in range(3):
        scheduler.add_request([1] * 6, 8, tenant="a")  # 2 blocks each
    scheduler.add_request([1] * 6, 8, tenant="b")
    assert scheduler.schedule().seq_ids == [1, 2, 4]
    with refuses(ValueError, 20, 5, "a", 4):
        scheduler.add_request([1], 20, tenant="a")
    scheduler.finish_sequence(1)
    assert 3 in scheduler.schedule().seq_ids


def test_a_priority_is_strict():
    scheduler = make(max_sequences=1)
    slow = scheduler.add_request([2] * 4, 8, priority=9)
    for _ in range(60):
        scheduler.add_request([1] * 4, 6, priority=0)
    for _ in range(100):
        step(scheduler)
    assert not scheduler.get_sequence(slow).fed


@pytest.mark.parametrize("lane", [64, 300])
def test_a_line_from_which_most_are_removed_keeps_its_order(lane):
    scheduler = make(max_sequences=1)
    ids = [scheduler.add_request([1] * 4, 6, priority=number % 3) for number in range(lane)]
    for seq_id in ids:
        if seq_id % 5:
            scheduler.remove_sequence(seq_id)
    left = [seq_id for seq_id in ids if not seq_id % 5]
    assert order_of_admission(scheduler, 5000) == sorted(left, key=lambda seq_id: ((seq_id - 1) % 3, seq_id))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("policy", None, ValueError),
        ("lookahead", -1, ValueError),
        ("lookahead", 1.5, TypeError),
        ("tenants", {"a": 3}, TypeError),
    ],
)
def test_wrong_settings_are_named(name, value, error):
    with pytest.raises(error, match=name.rstrip("s")):
        SchedulerConfig(**{name: value})
