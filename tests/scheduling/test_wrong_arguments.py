"""What is no argument is refused in one sentence with its name, and nothing has changed."""

import pytest
from refusals import refuses

from pagepool import BlockAllocator, KvLayout, PrefixCache, Scheduler, SchedulerConfig, Tenant


def test_a_scheduler_names_what_is_wrong():
    scheduler = Scheduler(SchedulerConfig(), BlockAllocator(8))
    scheduler.add_request([1, 2], 4)
    scheduler.schedule(5.0)
    before = (scheduler.num_steps, scheduler.total_count)
    for call, error, words in (
        (lambda: scheduler.schedule("x"), TypeError, ("now", "str", "x")),
        (lambda: scheduler.schedule(float("nan")), ValueError, ("now", "nan")),
        (lambda: scheduler.schedule(float("inf")), ValueError, ("now", "inf")),
        (lambda: scheduler.add_request([1], 5, tenant=[]), TypeError, ("tenant", "list")),
        (lambda: scheduler.add_request([1], 5, extra_keys=5), TypeError, ("extra_keys", "int")),
        (lambda: scheduler.add_request([1], 5, extra_keys="a"), TypeError, ("extra_keys", "str")),
        (lambda: scheduler.schedule(1.0), ValueError, ("now", "5.0", "1.0")),
        (lambda: scheduler.commit(None, []), TypeError, ("batch", "ScheduledBatch", "None")),
        (lambda: scheduler.commit(scheduler.outstanding, 5), TypeError, ("tokens", "int", 5)),
        (lambda: scheduler.add_request(5, 4), TypeError, ("prompt_tokens", "int", 5)),
        (lambda: scheduler.add_request([1], 4, "x"), TypeError, ("priority", "str", "x")),
        (lambda: scheduler.add_request([1], 1.5), TypeError, ("max_tokens", "float", "1.5")),
        (lambda: scheduler.add_request([1], 4, cache_ttl="x"), TypeError, ("cache_ttl", "str", "x")),
        (lambda: scheduler.add_request([1], 4, cache_salt=1.5), TypeError, ("cache_salt", 1.5)),
        (lambda: scheduler.add_request([1], 4, cache_priority=None), TypeError, ("cache_priority",)),
    ):
        with refuses(error, *words):
            call()
        assert (scheduler.num_steps, scheduler.total_count) == before
    scheduler.schedule(5.0)


@pytest.mark.parametrize(
    "lacks", [["inserted"], ["match_held"], ["expire", "inserted"], ["cached_tokens"], ["evict", "evictable"]]
)
def test_a_foreign_prefix_cache_is_asked_at_once_for_what_a_step_will_ask(lacks):
    class Foreign:
        def __getattr__(self, name):
            if name in lacks:
                raise AttributeError(name)
            return getattr(cache, name)

    cache = PrefixCache(BlockAllocator(8), 4)
    config = SchedulerConfig(block_size=4, policy="lpm")
    with refuses(TypeError, "prefix_cache", "PrefixCache", ", ".join(lacks)):
        Scheduler(config, cache.allocator, Foreign())
    lacks.clear()
    scheduler = Scheduler(config, cache.allocator, Foreign())
    scheduler.add_request([1] * 9, 12)
    while scheduler.has_work:
        batch = scheduler.schedule()
        scheduler.commit(batch, [7] * len(batch))
    assert cache.num_cached == 2


def test_others_do_too():
    cache = PrefixCache(BlockAllocator(8), 4)
    worth = PrefixCache(BlockAllocator(8), 4, "priority")
    blocks = cache.allocator.allocate_n(1)
    for call, words in (
        (lambda: Scheduler(None, cache.allocator, 5), ("prefix_cache", "PrefixCache", "None", "int", 5)),
        (lambda: worth.cache_blocks([1, 2, 3, 4], blocks, ttl="x"), ("ttl", "str", "x")),
    ):
        with refuses(TypeError, *words):
            call()
    with refuses(ValueError, "policy", "None", "x"):
        cache.cache_blocks([1, 2, 3, 4], blocks, ttl="x")
    for call in (
        lambda: cache.cache_blocks([1, 2, 3, 4], blocks, now=float("nan")),
        lambda: worth.cache_blocks([1, 2, 3, 4], blocks, now=float("nan"), ttl=1.0),
    ):
        with pytest.raises(ValueError, match=r"now must be a (time|number), not nan"):
            call()
    assert cache.num_cached == worth.num_cached == 0


def test_a_batch_of_another_scheduler_is_refused():
    ours, other = Scheduler(), Scheduler()
    for scheduler in (ours, other):
        scheduler.add_request([1, 2], 9)
    early, batch = ours.schedule(), other.schedule()
    for call in (lambda: ours.commit(batch, [7]), lambda: ours.give_up(batch)):
        with refuses(ValueError, "batch", 1):
            call()
    assert other.get_sequence(1).output_tokens == [] and ours.get_sequence(1).output_tokens == []
    other.commit(batch, [7])
    ours.commit(early, [8])
    assert other.get_sequence(1).output_tokens == [7] and ours.get_sequence(1).output_tokens == [8]
    with refuses(TypeError, "batch", "ScheduledBatch", "int", 5):
        ours.give_up(5)


def test_a_config_names_what_is_wrong():
    for call, error, words in (
        (lambda: SchedulerConfig(max_sequences=2.5), TypeError, ("max_sequences", "float", "2.5")),
        (lambda: SchedulerConfig(lookahead=-1), ValueError, ("lookahead", 0, -1)),
        (lambda: SchedulerConfig(watermark="1"), TypeError, ("watermark", "str", "1")),
        (lambda: SchedulerConfig(watermark=float("nan")), ValueError, ("watermark", "nan")),
        (lambda: Tenant(weight=None), TypeError, ("weight", "None")),
        (lambda: Tenant(max_blocks="2"), TypeError, ("max_blocks", "str", "2")),
        (lambda: KvLayout(1, 1, 8, block_size=2000), ValueError, ("block_size", 1, 1024, 2000)),
    ):
        with refuses(error, *words):
            call()
