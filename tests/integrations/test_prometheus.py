"""A scrape shows the values of stats(), and the counts of blocks by state add up to the total."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from refusals import refuses

from pagepool import (
    BlockAllocator,
    KvCachePool,
    KvLayout,
    PagedSeqState,
    PrefixCache,
    PrefixStore,
    Scheduler,
    SchedulerConfig,
    SequencePool,
    SsmStatePool,
    StateLayout,
)
from pagepool.cluster.router import Router
from pagepool.integrations.prometheus import PagepoolCollector
from pagepool.prefix.fingerprint import fingerprint_of


def world():
    layout = KvLayout(1, 1, 8, block_size=4, dtype="float32")
    kv = KvCachePool.from_layout(layout, 12)
    ssm = SsmStatePool.from_layout(StateLayout(layers=[{"h": ((4,), "float32")}]), 3)
    cache = PrefixCache(kv.allocator, 4)
    state = PagedSeqState(kv.allocator, 4)
    state.append(10)
    cache.cache_blocks(list(range(8)), state.blocks)
    state.truncate(3)
    kv.allocator.free(cache.match_prefix(list(range(8))))
    ssm.alloc(7)
    return kv, ssm, cache, state


def test_stats_keep_used_evictable_and_free_apart():
    kv, ssm, _cache, state = world()
    figures = kv.stats()
    assert (figures["used"], figures["evictable"], figures["free"], figures["peak"]) == (1, 1, 10, 3)
    assert figures["bytes"] == 2 * 4 * 2 * 8 * 4 and figures["capacity_bytes"] == 6 * figures["bytes"]
    assert figures["sequences"] == 1 and figures["available"] == 10
    both = SequencePool(kv, ssm).stats()
    assert both["kv"] == figures and both["ssm"]["used"] == 1
    state.close()
    assert kv.allocator.stats()["evictable"] == 2 and SequencePool(ssm=ssm).stats().keys() == {"ssm"}


def test_a_scrape_shows_hits_by_tier_and_the_store(tmp_path):
    kv = KvCachePool.from_layout(KvLayout(1, 1, 8, block_size=4, dtype="float32"), 12)
    with PrefixStore(tmp_path, fingerprint_of(kv, "a"), 1 << 20) as store:
        cache, registry = PrefixCache(kv.allocator, store=store), CollectorRegistry()
        registry.register(PagepoolCollector(caches={"prompts": cache, "none": PrefixCache(kv.allocator, 4)}))
        blocks = kv.allocator.allocate_n(2)
        cache.cache_blocks(list(range(8)), blocks)
        kv.allocator.free(blocks)
        assert cache.flush()
        kv.allocator.free(cache.match_prefix(range(8)))
        cache.evict(2)
        kv.allocator.free(cache.match_prefix(range(4)))

        def value(name, **labels):
            return registry.get_sample_value(f"pagepool:{name}", {"cache": "prompts", **labels})

        assert value("prefix_cache_tier_hits_total", tier="memory") == 2
        assert value("prefix_cache_tier_hits_total", tier="store") == 1
        events = {
            event: value("store_pages_total", event=event) for event in ("written", "evicted", "refused", "dropped")
        }
        assert events == {"written": 2, "evicted": 0, "refused": 0, "dropped": 0}
        assert (
            value("store_bytes_total", direction="read") == 256
            and value("store_bytes_total", direction="written") == 512
        )
        assert value("store_is_writer") == 1 and 8192 <= value("store_disk_bytes") <= 1 << 20


def test_a_scrape_shows_them():
    kv, ssm, cache, _state = world()
    scheduler = Scheduler(SchedulerConfig(block_size=4, max_sequences=1), kv)
    for _ in range(3):
        scheduler.add_request([1, 2, 3], 6)
    scheduler.schedule()
    registry = CollectorRegistry()
    registry.register(PagepoolCollector(scheduler, {"kv": kv, "ssm": ssm}, {"prompts": cache}))
    text = generate_latest(registry).decode()
    value = registry.get_sample_value
    assert value("pagepool:num_requests_running") == 1 and value("pagepool:num_requests_waiting") == 2
    assert value("pagepool:num_preemptions_total") == 0
    blocks = [value("pagepool:kv_blocks", {"pool": "kv", "state": s}) for s in ("used", "evictable", "free")]
    assert blocks == [2, 1, 9] and sum(blocks) == 12
    assert value("pagepool:kv_cache_usage_perc", {"pool": "kv"}) == pytest.approx(2 / 12)
    assert value("pagepool:states", {"pool": "ssm", "state": "used"}) == 1
    assert value("pagepool:kv_bytes", {"pool": "ssm"}) == 16 and value("pagepool:peak", {"pool": "kv"}) == 3
    assert value("pagepool:prefix_cache_queries_total", {"cache": "prompts"}) == 2
    assert value("pagepool:prefix_cache_hits_total", {"cache": "prompts"}) == 2
    assert "# HELP pagepool:kv_cache_usage_perc" in text


def test_an_empty_result_is_not_an_error():
    registry = CollectorRegistry()
    registry.register(PagepoolCollector())
    assert generate_latest(registry) == b""
    registry.register(PagepoolCollector(pools={"none": BlockAllocator(0)}))
    assert registry.get_sample_value("pagepool:kv_cache_usage_perc", {"pool": "none"}) == 0


def test_the_forecast_error_of_a_router_is_a_metric():
    router, registry = Router(4), CollectorRegistry()
    registry.register(PagepoolCollector(routers={"front": router}))
    router.update("a", 1, [], load=0, room=0)
    router.choose(range(9))
    for found in (3, 20):
        router.report(router.choose(range(9)), found)  # the router expects 8 since the first choice
    name = {"router": "front"}
    value = registry.get_sample_value
    assert value("pagepool:router_choices_total", name) == 3
    assert value("pagepool:router_found_tokens_total", name) == 23
    assert value("pagepool:router_snapshots_total", name) == 0
    error = "pagepool:router_forecast_error_tokens_total"
    assert value(error, {**name, "direction": "over"}) == 5 and value(error, {**name, "direction": "under"}) == 12


def test_what_cannot_be_shown_is_refused_at_once():
    allocator = BlockAllocator(4)
    cache, ssm = PrefixCache(allocator), SsmStatePool.from_layout(StateLayout([{"h": ((2,), "float32")}]), 1)
    for arguments, words in (
        ({"scheduler": allocator}, ("scheduler", "Scheduler", "BlockAllocator")),
        ({"pools": [allocator]}, ("pools", "list")),
        ({"pools": {"kv": cache}}, ("pools", "kv", "BlockAllocator", "PrefixCache")),
        ({"pools": {"both": SequencePool(ssm=ssm)}}, ("pools", "both", "SequencePool")),
        ({"caches": {"prompts": allocator}}, ("caches", "prompts", "PrefixCache", "BlockAllocator")),
        ({"routers": {"front": 5}}, ("routers", "front", "Router", "int", 5)),
    ):
        with refuses(TypeError, *words):
            PagepoolCollector(**arguments)
