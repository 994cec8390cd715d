"""vLLM's manager of tiers over a `PageStoreTier`, without a device: the test writes and reads the chunks in memory.

As a program, it runs random prompts over the store in argv[1] until it is killed, and prints a line for each.
"""

import random
import sys
from hashlib import blake2b
from time import sleep
from types import SimpleNamespace

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

CHUNK = 3000  # bytes
MODULE = "pagepool.integrations.vllm"


def spec_of(model="model", layers=("0", "1")):
    config = SimpleNamespace(
        groups=(OffloadingGroupConfig(16, tuple(layers), 0),),
        model=OffloadingModelConfig(model, "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        kv_cache_layout="NHD",
        canonical_layout=False,
        replicated_layout=False,
    )
    return SimpleNamespace(config=config)


def content(key):
    return np.frombuffer(blake2b(key, digest_size=60).digest() * (CHUNK // 60), np.uint8)


def new_request(manager, number, tokens, groups=(0,)):
    """Return a request that `manager` knows, and its keys: one list for each group."""
    request = ReqContext(str(number))
    keys = [[make_offload_key(bytes(tokens[: end + 1]), group) for end in range(len(tokens))] for group in groups]
    for end, row in enumerate(zip(*keys, strict=True), 1):
        for key in row:
            request.set_offload_key_position(key, end)
    manager.on_new_request(request)
    return request, keys


class Tiers:
    """A CPU tier of `chunks` chunks and the store behind it."""

    def __init__(self, path, *, chunks=24, max_bytes=48 << 20, weights="sha256:1", spec=None):
        self.memory = np.zeros((chunks, CHUNK), np.int8)
        region = SimpleNamespace(create_kv_memoryview=lambda: memoryview(self.memory), cleanup=lambda: None)
        self.primary = CPUPrimaryTierOffloadingManager(chunks, region, "GittinsCachePolicy", MODULE)
        config = {"type": "PageStoreTier", "module_path": MODULE, "path": str(path), "max_bytes": max_bytes}
        config |= {} if weights is None else {"weights": weights}
        view = self.primary.get_kv_memoryview()
        self.tier = SecondaryTierFactory.create_secondary_tier(config, view, spec or spec_of())
        self.manager = TieringOffloadingManager(self.primary, [self.tier])
        self.count = 0

    def step(self):
        self.manager.on_schedule_end(ScheduleEndContext([], []))
        sleep(0)

    def run(self, tokens):
        """Run a request. Check every chunk that is read, and return how many there were."""
        self.count += 1
        request, [keys] = new_request(self.manager, self.count, tokens)
        found, waits = 0, True
        while waits:
            found, waits = 0, False
            for key in keys:
                result = self.manager.lookup(key, request)
                waits |= result in (LookupResult.RETRY, LookupResult.HIT_PENDING)
                if result == LookupResult.MISS:
                    break
                found += 1
            self.step()
        if found:
            places = self.manager.prepare_load(keys[:found], request).block_ids
            for key, place in zip(keys[:found], places, strict=True):
                assert np.array_equal(self.memory[place].view(np.uint8), content(key)), "a chunk of another key"
            self.manager.complete_load(keys[:found], request)
        stored = self.manager.prepare_store(keys[found:], request)
        if stored is not None and stored.keys_to_store:
            for key, place in zip(stored.keys_to_store, stored.store_spec.block_ids, strict=True):
                self.memory[place] = content(key).view(np.int8)
            self.manager.complete_store(stored.keys_to_store, request)
        self.manager.on_request_finished(request)
        self.step()
        return found

    def settle(self):
        """Wait for the disk, and let vLLM take the results."""
        self.tier.drain_jobs()
        self.step()
        self.step()

    def close(self):
        self.settle()
        self.manager.shutdown()


def prompt(source):
    start = source.randrange(8)
    return [start, *(source.randrange(2) for _ in range(source.randrange(1, 12)))]


if __name__ == "__main__":
    tiers, source = Tiers(sys.argv[1], max_bytes=int(sys.argv[2])), random.Random(int(sys.argv[3]))
    while True:
        print(tiers.run(prompt(source)), flush=True)
