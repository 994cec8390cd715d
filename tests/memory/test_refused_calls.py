"""Refused calls, a table for each API: type, names and numbers of the error; a refused call changes nothing."""

import numpy as np
import pytest
from refusals import refuses

from pagepool import (
    AttentionSequenceState,
    BlockAllocator,
    BlockTables,
    HybridSequence,
    InvalidBlock,
    InvalidSlot,
    KvCachePool,
    KvGroup,
    KvLayout,
    PagedSeqState,
    PoolExhausted,
    ScheduledBatch,
    SequencePool,
    SsmStatePool,
    StaleHandle,
    StateLayout,
)

LAYOUT = KvLayout(1, 2, 8, 16, "float32")
HUGE = 10**30


def refused(world, use, error, words):
    with refuses(error, *words, unchanged=world.picture):
        use(world)


class Tables:
    """BlockTables with two rows of two blocks, and sequences for them."""

    def __init__(self):
        self.allocator = BlockAllocator(32)
        self.one, self.long, self.closed, self.window = (PagedSeqState(self.allocator, 4) for _ in range(4))
        self.one.append(6)
        self.long.append(9)
        self.closed.close()
        self.window.append(7)
        self.window.drop_before(5)
        self.tables = BlockTables(2, 2).fill([self.one])

    def picture(self):
        tables = self.tables
        arrays = (tables.block_tables, tables.seq_lens, tables.slot_mapping, tables.query_start_loc)
        return [array.tolist() for array in arrays]


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (lambda it: BlockTables(-1, 2), ValueError, ("max_seqs", 0, 2147483646, -1)),
        (lambda it: BlockTables(2, HUGE), ValueError, ("max_blocks_per_seq", 0, 2147483646, HUGE)),
        (lambda it: BlockTables(2**30, 2**31 - 2), MemoryError, (1073741824, 2147483646)),
        (lambda it: it.tables.fill(None), TypeError, ("states", "ScheduledBatch", "PagedSeqState", "None")),
        (lambda it: it.tables.fill(5), TypeError, ("states", "ScheduledBatch", "PagedSeqState", "int", 5)),
        (lambda it: it.tables.fill([it.one, 5]), TypeError, ("sequence", 1, "PagedSeqState", "int")),
        (lambda it: it.tables.fill([it.one] * 3), ValueError, (3, 2)),
        (lambda it: it.tables.fill([it.one, it.long]), ValueError, ("sequence", 1, 3, 2)),
        (lambda it: it.tables.fill([it.one, it.closed]), StaleHandle, ("sequence", 1)),
        (lambda it: it.tables.fill([it.one], 5), TypeError, ("num_tokens", "None", "int", 5)),
        (lambda it: it.tables.fill([it.one], [None]), TypeError, ("NoneType",)),
        (lambda it: it.tables.fill([it.one], []), ValueError, ("num_tokens", 0, 1)),
        (lambda it: it.tables.fill([it.one], [-1]), ValueError, ("sequence", 0, 6, -1)),
        (lambda it: it.tables.fill([it.one], [HUGE]), ValueError, ("sequence", 0, 6, HUGE)),
        (lambda it: it.tables.fill([it.window], [4]), ValueError, (4, 7, 0)),
        (lambda it: it.tables.fill(ScheduledBatch.empty(), []), ValueError, ("num_tokens",)),
    ],
)
def test_block_tables(use, error, words):
    refused(Tables(), use, error, words)


class Elastic:
    """A pool of 4 to 8 pages, 3 of them in use."""

    def __init__(self):
        self.pool = KvCachePool.from_layout(LAYOUT, 4, max_blocks=8)
        self.blocks = self.pool.allocator.allocate_n(3)
        self.pool.page(2)[:] = 7

    def picture(self):
        self.pool.allocator.check()
        return self.pool.stats(), self.pool.allocator.stats(), self.pool.page(2).sum()


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (lambda it: it.pool.grow(3), ValueError, ("num_blocks", 4, 8, 3)),
        (lambda it: it.pool.grow(9), ValueError, ("num_blocks", 4, 8, 9)),
        (lambda it: it.pool.grow(HUGE), ValueError, ("num_blocks", 4, 8, HUGE)),
        (lambda it: it.pool.grow(None), TypeError, ("num_blocks", "None")),
        (lambda it: it.pool.grow(5.0), TypeError, ("num_blocks", "float", "5.0")),
        (lambda it: it.pool.shrink(5), ValueError, ("num_blocks", 0, 4, 5)),
        (lambda it: it.pool.shrink(-1), ValueError, ("num_blocks", 0, 4, -1)),
        (lambda it: it.pool.shrink("2"), TypeError, ("num_blocks", "str", "2")),
        (lambda it: KvCachePool(8, 4).grow(5), ValueError, ("num_blocks", 4, 5)),
        (lambda it: KvCachePool.from_layout(LAYOUT, 4, max_blocks=3), ValueError, ("max_blocks", 4, 2147483647, 3)),
        (lambda it: KvCachePool.from_layout(LAYOUT, 4, it.pool.allocator), ValueError, (8, 4)),
        (lambda it: it.pool.allocator.allocate_n(6), PoolExhausted, (6, 5, 8)),
        (lambda it: it.pool.allocator.free([2, 3]), InvalidBlock, (1, 3, 0)),
    ],
)
def test_elastic_pools(use, error, words):
    refused(Elastic(), use, error, words)


class Both:
    """Two pages and two states, one of each in use."""

    def __init__(self):
        self.pool = SequencePool(KvCachePool(8, 2), SsmStatePool(2, lambda i: AttentionSequenceState(4)))
        self.pool.alloc_kv()
        self.pool.alloc_ssm(7)

    def picture(self):
        return self.pool.stats(), [self.pool.ssm_slot(i).request_id for i in range(2)]


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (lambda it: SequencePool(5), TypeError, ("kv", "KvCachePool", "None", "int", 5)),
        (lambda it: SequencePool(None, 5), TypeError, ("ssm", "SsmStatePool", "None", "int", 5)),
        (lambda it: it.pool.free_kv(1), InvalidBlock, (1, 0)),
        (lambda it: it.pool.free_kv(2), InvalidBlock, ("block", 2)),
        (lambda it: it.pool.free_kv(-1), InvalidBlock, ("block", -1, 2)),
        (lambda it: it.pool.free_kv(HUGE), InvalidBlock, ("block", HUGE, 32, 2147483647)),
        (lambda it: it.pool.free_kv("0"), TypeError, ("str",)),
        (lambda it: it.pool.release_ssm(1), InvalidSlot, ("slot", 1, 2)),
        (lambda it: it.pool.release_ssm(2), InvalidSlot, ("slot", 2)),
        (lambda it: it.pool.release_ssm("0"), TypeError, ("str", "0")),
        (lambda it: it.pool.ssm_slot(-1), InvalidSlot, ("slot", -1, 2)),
        (lambda it: it.pool.ssm_slot(None), TypeError, ("None",)),
        (lambda it: it.pool.alloc_ssm("7"), TypeError, ("request_id", "str", "7")),
        (lambda it: SequencePool(it.pool.kv).alloc_ssm(7), InvalidSlot, ("recurrent",)),
        (lambda it: SequencePool(None, it.pool.ssm).alloc_kv(), InvalidSlot, ("key-value",)),
    ],
)
def test_sequence_pools(use, error, words):
    refused(Both(), use, error, words)


class Hybrid:
    """A sequence of 10 tokens with a checkpoint at 9, an empty sequence, and a small sequence."""

    def __init__(self):
        self.blocks = BlockAllocator(40)
        states = SsmStatePool.from_layout(StateLayout(layers=[{"h": ((2,), "float32")}]), 2)
        self.it = HybridSequence([KvGroup(self.blocks, 4), KvGroup(self.blocks, 4, window=4)], states, label=3)
        self.it.append(9)
        self.it.checkpoint()
        self.it.append(1)
        self.empty = HybridSequence([KvGroup(self.blocks, 4)])
        self.foreign = self.empty.checkpoint()
        self.small = HybridSequence([KvGroup(self.blocks, 4, max_blocks_per_seq=2)])
        self.closed = HybridSequence([KvGroup(self.blocks, 4)], label="a")
        self.closed.close()

    def picture(self):
        found = []
        for sequence in (self.it, self.empty, self.small):
            sequence.check()
            found.append((sequence.stats(), [table.blocks for table in sequence.kv], len(sequence.checkpoints)))
        return found, self.blocks.stats()


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (lambda w: w.it.append(-1), ValueError, (-1,)),
        (lambda w: w.small.append(9), ValueError, (9, 3, 2)),
        (lambda w: w.it.append(HUGE), ValueError, (HUGE + 10, (HUGE + 13) // 4, 40)),
        (lambda w: w.empty.append(150), PoolExhausted, (38, 35, 40)),
        (lambda w: w.it.rollback(-1), ValueError, (-1, 10)),
        (lambda w: w.it.rollback(11), ValueError, (11, 10)),
        (lambda w: w.it.rollback(2), ValueError, (8, 9)),
        (lambda w: w.it.rollback(w.foreign), StaleHandle, (0, 1)),
        (lambda w: w.it.discard(w.foreign), StaleHandle, (0, 1)),
        (lambda w: w.it.truncate(-1), ValueError, (10, -1)),
        (lambda w: w.it.truncate(11), ValueError, (10, 11)),
        (lambda w: w.it.adopt([[0]], 4), ValueError, (1, 2, 10)),
        (lambda w: w.empty.adopt([[0], [1]], 4), ValueError, (2, 1, 0)),
        (lambda w: w.empty.adopt([[0]], 9), ValueError, (9, 1, 4)),
        (lambda w: w.empty.adopt([[0]], -1), ValueError, ("num_tokens", 0, -1)),
        (lambda w: w.empty.adopt([[39]], 4), InvalidBlock, (1, 39, 0)),
        (lambda w: w.empty.adopt([[99]], 4), InvalidBlock, ("block", 99, 40)),
        (lambda w: [w.it.fork(), w.it.fork()], PoolExhausted, (1, 0, 2)),
        (lambda w: w.small.fork(1.5), TypeError, ("label", "int", "str", "None", "float", "1.5")),
        (lambda w: w.closed.append(1), StaleHandle, ("a",)),
    ],
)
def test_hybrid_sequences(use, error, words):
    refused(Hybrid(), use, error, words)


class Shown:
    """A DLPack-only tensor, or an object that returns something else instead of a capsule."""

    def __init__(self, shown):
        self.shown = shown

    def __dlpack__(self, **options):
        return self.shown.__dlpack__(**options) if hasattr(self.shown, "__dlpack__") else self.shown


class Pages:
    """A pool, and the K and V of one token."""

    def __init__(self):
        self.pool = KvCachePool.from_layout(LAYOUT, 2)
        self.slots = np.zeros(1, np.int64)
        self.row = np.ones((1, 2, 8), np.float32)

    def append(self, k, v=None):
        self.pool.append(0, self.slots, k, self.row if v is None else v)

    def picture(self):
        return bytes(memoryview(self.pool))


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (lambda it: it.append(5), TypeError, ("k", "__dlpack__", "int")),
        (lambda it: it.append(Shown(5)), TypeError, ("__dlpack__",)),
        (
            lambda it: it.append(Shown(it.row.astype(np.int32))),
            TypeError,
            ("k", "float32", "float16", "bfloat16", 0, 32),
        ),
        (
            lambda it: it.append(Shown(it.row.astype(np.float64))),
            TypeError,
            ("k", "float32", "float16", "bfloat16", 2, 64),
        ),
        (lambda it: it.append(Shown(it.row[:, :1])), ValueError, ("k", "(1, 2, 8)", "(1, 1, 8)")),
        (lambda it: it.append(Shown(it.row[0])), ValueError, ("k", "(1, 2, 8)", "(2, 8)")),
        (lambda it: it.append(it.row, Shown(it.row[:, :, :7])), ValueError, ("v", "(1, 2, 8)", "(1, 2, 7)")),
        (lambda it: it.append(Shown(it.row[None, None])), ValueError, ("k", 4, 5)),
        (lambda it: it.append(Shown(np.zeros((1, 2, 16), np.float32)[:, :, ::2])), ValueError, ("k", 8, "bytes", 4)),
        (lambda it: it.append(Shown(it.row[:, ::-1])), ValueError, ("axis", 1, "k", 4, "bytes", -32)),
    ],
)
def test_tensors_by_dlpack(use, error, words):
    refused(Pages(), use, error, words)
