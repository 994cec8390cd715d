"""Run by test_no_memory.py with failing_malloc: each allocation of each operation fails in turn.

Prints as JSON the number of allocations that failed each operation, or the error.
"""

import numpy as np
from failing import fail_all

from pagepool import (
    AttentionSequenceState,
    BlockAllocator,
    BlockTables,
    EvictionPolicy,
    KvCachePool,
    KvLayout,
    PagedSeqState,
    PrefixCache,
    SsmStatePool,
    StateLayout,
    decode,
    prefill,
)
from pagepool.integrations.transformers.elementwise import DecoderLayers, QuantisedWeights
from pagepool.memory.batch import group_append
from pagepool.memory.block_tables import append_batch, release_batch
from pagepool.prefix.directory import PrefixDirectory
from pagepool.prefix.events import name_row
from pagepool.prefix.stored_pages import move_page

PROMPT = list(range(400))
NAMES = name_row(range(800), 2, bytes(16))
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="bfloat16")
# Prefill with heads of this size needs more scratch than a thread keeps for its next call.
LARGE = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1024, block_size=4, dtype="float32")
QUERIES, RESULTS = np.ones((2, 600, 1024), np.float32), np.ones((2, 600, 1024), np.float32)
STARTS, LENS, TABLES = np.array([0, 2], np.int32), np.array([6], np.int32), np.array([[0, 1]], np.int32)
# A layer of zeros. Its rows need more workspace than a thread keeps for its next call.
ZEROS, QUANTISED = np.zeros((200_002, 32), np.float32), np.ones((200_000, 32), np.float32)
ADDRESSES = ZEROS.ctypes.data + -ZEROS.ctypes.data % 64, QUANTISED.ctypes.data
MESSAGES = set()
PAGE, PIECE = bytearray(4000), bytes(10)
STATES = StateLayout(layers=[{"a": ((4,), "float32")}, {"b": ((2, 3), "float32")}])


class Shown:
    """An array that supports only DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


class World:
    """The objects of all operations, and the state that a failed operation must not change."""

    def __init__(self):
        self.pool = KvCachePool.from_layout(LAYOUT, 400)
        self.allocator = self.pool.allocator
        self.many = self.allocator.allocate_n(100).tolist()
        self.parent = PagedSeqState(self.allocator, 4)
        self.parent.append(6)
        self.child = self.parent.fork()
        self.tables = BlockTables(4, 400)
        self.states = [self.parent, self.child]
        self.k = np.ones((3, 1, 8), np.float32)
        self.strided = np.ones((3, 2, 8), np.float32)[:, :1]
        self.slots = np.array([0, 1, 2])
        self.views = [memoryview(array) for array in (self.slots, self.k, self.k)]
        self.shown = [Shown(array) for array in (self.slots.astype(np.int32), self.k, self.k)]
        self.large = KvCachePool.from_layout(LARGE, 2)
        self.ssm = SsmStatePool.from_layout(STATES, 3)
        self.ssm.alloc(1)
        self.cache = PrefixCache(self.allocator, 4, "gittins", max_events=8)
        self.cache.cache_blocks(PROMPT[:40], self.many)
        self.directory = PrefixDirectory(3)
        self.directory.add(0, NAMES[:480])

    def decode(self, ints=np.int32, **options):
        """Return the last two tokens of two sequences with shared blocks."""
        q, starts = np.ones((4, 1, 8), np.float32), np.array([0, 2, 4], np.int32)
        tables = np.array([self.parent.blocks] * 2, ints)
        lens = np.array([6, 6], np.int32)
        return decode(q, self.pool, 0, tables, lens, query_start_loc=starts, num_threads=1, **options)

    def prefill(self):
        """Write the missing results; on failure, write nothing."""
        RESULTS[:] = 12345.0
        try:
            prefill(QUERIES, self.large, 0, TABLES, LENS, STARTS, out=RESULTS, num_threads=1)
        except MemoryError as error:
            MESSAGES.add(str(error))
            assert (RESULTS == 12345.0).all()
            raise

    def picture(self):
        self.allocator.check()
        self.ssm.check()
        self.cache.check()
        self.directory.check()
        states = [(state.len, state.blocks) for state in self.states]
        counts = [self.allocator.ref_count(b) for b in range(110)]
        held = [self.directory.num_blocks(number) for number in range(3)]
        return states, counts, self.allocator.free_count, self.ssm.free_count, held, bytes(memoryview(self.pool))


def quantised_layer():
    """Write the results of a quantised layer; on failure, write nothing."""
    QUANTISED[:] = 5.0
    try:
        QuantisedWeights(32, [(1, 32, ADDRESSES[0], 0)]).run(ADDRESSES[0], 0, len(QUANTISED), ADDRESSES[1], 1)
    except MemoryError:
        assert (QUANTISED == 5.0).all()
        raise
    assert (QUANTISED == 0.0).all()


def decoder_layers():
    """Make a decoder of one layer."""
    linear, norm = (32, 0, 0, 0), (0, 0.0)
    DecoderLayers(32, 1, 1, 8, [(*4 * [linear], norm, norm, None, None, 0, 1.0, 0, 0)], norm)


OPERATIONS = {
    "small allocator": lambda world: BlockAllocator(8),
    "large allocator": lambda world: BlockAllocator(1 << 20),
    "allocate": lambda world: world.allocator.allocate(),
    "allocate_n": lambda world: world.allocator.allocate_n(150),
    "free a list": lambda world: world.allocator.free(world.many),
    "share a list": lambda world: world.allocator.share(world.many),
    "bad free": lambda world: world.allocator.free([*world.many, 399]),
    "state": lambda world: PagedSeqState(world.allocator),
    "state with a large table": lambda world: PagedSeqState(world.allocator, 4, 1 << 20),
    "append": lambda world: world.child.append(3),
    "append of many blocks": lambda world: world.child.append(900),
    "reserve": lambda world: world.child.ensure_capacity(900),
    "fork": lambda world: world.parent.fork(),
    "adopt": lambda world: PagedSeqState(world.allocator, 4).adopt(world.many, 400),
    "append to groups": lambda world: group_append(world.states, 300, [4, 0]),
    "owners": lambda world: world.allocator.owners(),
    "truncate": lambda world: world.parent.truncate(2),
    "append_batch": lambda world: append_batch(world.states, [2, 700]),
    "release_batch": lambda world: release_batch(world.states),
    "tables": lambda world: BlockTables(64, 64),
    "fill": lambda world: world.tables.fill(world.states, [6, 6]),
    "flat pool": lambda world: KvCachePool(64, 64),
    "pool": lambda world: KvCachePool.from_layout(LAYOUT, 64),
    "fifth pool of an allocator": lambda world: [
        KvCachePool.from_layout(LAYOUT, 400, world.allocator) for _ in range(5)
    ],
    "append of k and v": lambda world: world.pool.append(0, world.slots, world.k, world.k),
    "append of k and v with other strides": lambda world: world.pool.append(0, world.slots, world.k, world.strided),
    "append by the buffer protocol": lambda world: world.pool.append(0, *world.views),
    "append of int32 slots": lambda world: world.pool.append(0, world.slots.astype(np.int32), world.k, world.k),
    "append of float16": lambda world: world.pool.append(0, world.slots, *[world.k.astype(np.float16)] * 2),
    "gather": lambda world: world.pool.gather(0, world.many, 300),
    "decode of trees": lambda world: world.decode(custom_mask=[np.ones((2, 2), bool), None]),
    "decode of bits": lambda world: world.decode(custom_mask=np.full(4, 255, np.uint8)),
    "decode by tables of int64": lambda world: world.decode(np.int64),
    "decode with every result": lambda world: world.decode(return_lse=True),
    "prefill": lambda world: world.prefill(),
    "page": lambda world: world.pool.page(3),
    "numpy": lambda world: world.pool.numpy(),
    "dlpack": lambda world: world.pool.__dlpack__(),
    "dlpack copy": lambda world: world.pool.__dlpack__(max_version=(1, 0), copy=True),
    "prefix cache": lambda world: PrefixCache(world.allocator, 4, "gittins", max_events=8),
    "match_prefix": lambda world: world.cache.match_prefix(PROMPT),
    "match_tokens": lambda world: world.cache.match_tokens(PROMPT[:38]),
    "cache_blocks": lambda world: world.cache.cache_blocks(PROMPT, world.many),
    "cache_blocks under a new salt": lambda world: world.cache.cache_blocks(
        PROMPT[:80], world.many[20:], cache_salt="s"
    ),
    "cache_blocks behind a start": lambda world: world.cache.cache_blocks(PROMPT, world.many, start=10),
    "pass through the cache": lambda world: world.cache.touch(PROMPT[::-1]),
    "evict": lambda world: world.cache.evict(100),
    "reset of the cache": lambda world: world.cache.reset_prefix_cache(),
    "events": lambda world: world.cache.drain_events(),
    "snapshot": lambda world: world.cache.snapshot(),
    "eviction policy": lambda world: EvictionPolicy("gittins", 100),
    "key of an eviction policy": lambda world: EvictionPolicy("lru", 100).insert(b"a" * 40, b"b"),
    "directory": lambda world: PrefixDirectory(100),
    "directory that grows": lambda world: world.directory.add(1, NAMES),
    "directory of a snapshot": lambda world: world.directory.replace(0, NAMES),
    "look-up in a directory": lambda world: world.directory.prefix_lengths(NAMES),
    "names": lambda world: name_row(PROMPT, 4, bytes(16)),
    "page in pieces": lambda world: move_page(PAGE, [PIECE] * 400, into_page=True),
    "states of a layout": lambda world: SsmStatePool.from_layout(STATES, 3),
    "states": lambda world: SsmStatePool(2, lambda i: AttentionSequenceState(4)),
    "lend": lambda world: world.ssm.alloc(5000),
    "quantised weights": lambda world: quantised_layer(),
    "decoder layers": lambda world: decoder_layers(),
    "append by dlpack": lambda world: world.pool.append(0, *world.shown),
    "numpy and its dlpack": lambda world: world.pool.numpy().__dlpack__(),
}


# These operations also run pure Python functions.
PLAIN_PYTHON = ["bad free", *list(OPERATIONS)[list(OPERATIONS).index("prefix cache") :]]

if __name__ == "__main__":
    fail_all(World, OPERATIONS, plain_python=PLAIN_PYTHON, refused=["bad free"])
    assert "no memory for the partial results of 1 sequences" in MESSAGES, MESSAGES
