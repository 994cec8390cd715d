"""Helpers of the store tests: pages are a function of all tokens before them, so that a wrong page is detected."""

import zlib

import numpy as np

from pagepool import KvCachePool, KvLayout, PoolExhausted, PrefixCache
from pagepool.prefix.fingerprint import fingerprint_of
from pagepool.prefix.page_index import RECORD_BYTES
from pagepool.prefix.store import PrefixStore
from pagepool.prefix.store_files import RESERVED

BLOCK = 4
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=BLOCK, dtype="float32")
LEAST = 9 << 20  # bytes of a small store
SMALL = RESERVED + 14 * (4096 + RECORD_BYTES)  # bytes of a store with 14 slots


class World:
    """A pool, a store and a cache, as after the start of an engine."""

    def __init__(
        self, path, *, num_blocks=16, max_bytes=LEAST, weights="a", policy="lru", num_pools=1, shared=None, events=0
    ):
        self.pools = [KvCachePool.from_layout(LAYOUT, num_blocks, shared=shared)]
        self.allocator = self.pools[0].allocator
        for _ in range(num_pools - 1):
            self.pools.append(KvCachePool.from_layout(LAYOUT, num_blocks, self.allocator))
        self.store = PrefixStore(path, fingerprint_of(self.pools, weights), max_bytes)
        self.cache = PrefixCache(self.allocator, policy=policy, store=self.store, max_events=events)

    def run(self, tokens, **keys):
        """Serve a prompt: check the found pages and compute the missing ones. Return the number of found blocks."""
        blocks = self.cache.match_prefix(tokens, **keys).tolist()
        found, full = len(blocks), len(tokens) // BLOCK
        for number in range(found):
            self.check_page(blocks[number], tokens[: (number + 1) * BLOCK], keys)
        self.cache.evict(max(0, full - found - self.allocator.free_count))
        try:
            blocks += self.allocator.allocate_n(full - found).tolist()
        except PoolExhausted:  # another process of a shared pool may have taken the evicted blocks
            self.allocator.free(blocks)
            return found
        for number in range(found, full):
            for place, pool in enumerate(self.pools):
                pool.page(blocks[number])[:] = content(tokens[: (number + 1) * BLOCK], keys, place)
        self.cache.cache_blocks(tokens, blocks, start=found, **keys)
        self.allocator.free(blocks)
        return found

    def check_page(self, block, tokens, keys):
        for place, pool in enumerate(self.pools):
            page = pool.page(block)
            wanted = content(tokens, keys, place)
            assert (page == wanted).all(), f"wrong page of {tokens} under {keys}: {page} instead of {wanted}"

    def stop(self):
        """End without a flush, like a crash, but close the files."""
        self.store.close()

    def restart(self, path, **options):
        assert self.cache.flush()
        self.stop()
        return World(path, **options)


def content(tokens, keys, place=0):
    data = np.array(tokens, np.int32).tobytes() + repr((sorted(keys.items()), place)).encode()
    return np.float32(zlib.crc32(data) % 1_000_003)


def prompt(random):
    """Return a prompt of up to 12 blocks: a prefix of one of 8 long prompts, sometimes with a tail of one block."""
    family, length = random.integers(8), random.integers(1, 12) * BLOCK
    tokens = [1000 * int(family) + place for place in range(length)]
    return tokens + random.integers(0, 2, random.integers(2 * BLOCK)).tolist()
