"""Wrong arguments are refused with one sentence that names the argument, and nothing changes."""

import pytest
from refusals import refuses

from pagepool import BlockAllocator, KvLayout, PrefixCache, Scheduler, SchedulerConfig, Tenant


def test_a_scheduler_names_a_wrong_argument():
    scheduler = Scheduler(SchedulerConfig(), BlockAllocator(8))
    scheduler.add_request([1, 2], 4)
    scheduler.schedule()
    before = (scheduler.num_steps, scheduler.total_count)
    for call, error, words in (
        (lambda: scheduler.add_request([1], 5, tenant=[]), TypeError, ("tenant", "list")),
        (lambda: scheduler.add_request([1], 5, extra_keys=5), TypeError, ("extra_keys", "int")),
        (lambda: scheduler.add_request([1], 5, extra_keys="a"), TypeError, ("extra_keys", "str")),
        (lambda: scheduler.add_request([1], 5, reads_cache=1), TypeError, ("reads_cache", "int")),
        (lambda: scheduler.commit(None, []), TypeError, ("batch", "ScheduledBatch", "None")),
        (lambda: scheduler.commit(scheduler.outstanding, 5), TypeError, ("tokens", "int", 5)),
        (lambda: scheduler.add_request(5, 4), TypeError, ("prompt_tokens", "int", 5)),
        (lambda: scheduler.add_request({7}, 4), TypeError, ("prompt_tokens", "set", 7)),
        (lambda: scheduler.commit(scheduler.outstanding, {7}), TypeError, ("tokens", "set", 7)),
        (lambda: scheduler.add_request([1], 4, "x"), TypeError, ("priority", "str", "x")),
        (lambda: scheduler.add_request([1], 1.5), TypeError, ("max_tokens", "float", "1.5")),
        (lambda: scheduler.add_request([1], 4, cache_salt=1.5), TypeError, ("cache_salt", 1.5)),
    ):
        with refuses(error, *words):
            call()
        assert (scheduler.num_steps, scheduler.total_count) == before
    scheduler.schedule()


@pytest.mark.parametrize(
    "lacks", [["inserted"], ["match_held"], ["evictable", "inserted"], ["cached_tokens"], ["evict", "evictable"]]
)
def test_methods_of_a_foreign_prefix_cache_are_checked_at_construction(lacks):
    class Foreign:
        def __getattr__(self, name):
            if name in lacks:
                raise AttributeError(name)
            return getattr(cache, name)

    cache = PrefixCache(BlockAllocator(8), 4)
    config = SchedulerConfig(block_size=4)
    with refuses(TypeError, "prefix_cache", "PrefixCache", ", ".join(lacks)):
        Scheduler(config, cache.allocator, Foreign())
    lacks.clear()
    scheduler = Scheduler(config, cache.allocator, Foreign())
    scheduler.add_request([1] * 9, 12)
    while scheduler.has_work:
        batch = scheduler.schedule()
        scheduler.commit(batch, [7] * len(batch))
    assert cache.num_cached == 2


def test_a_scheduler_refuses_an_object_that_is_not_a_cache():
    with refuses(TypeError, "prefix_cache", "PrefixCache", "None", "int", 5):
        Scheduler(None, BlockAllocator(8), 5)


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


def test_a_wrong_config_value_is_named():
    for call, error, words in (
        (lambda: SchedulerConfig(max_sequences=2.5), TypeError, ("max_sequences", "float", "2.5")),
        (lambda: SchedulerConfig(lookahead=-1), ValueError, ("lookahead", 0, -1)),
        (lambda: SchedulerConfig(block_size=0), ValueError, ("block_size", 1, 1024, 0)),
        (lambda: Tenant(weight=None), TypeError, ("weight", "None")),
        (lambda: Tenant(max_blocks="2"), TypeError, ("max_blocks", "str", "2")),
        (lambda: KvLayout(1, 1, 8, block_size=2000), ValueError, ("block_size", 1, 1024, 2000)),
    ):
        with refuses(error, *words):
            call()
