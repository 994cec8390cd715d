"""Calls that are refused, a table for each API: the type of the error, its sentence, and that nothing has changed."""

import re

import numpy as np
import pytest

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


def refuses(world, use, error, sentence):
    """That `use` raises exactly this, and that the picture of the world is as before."""
    before = world.picture()
    with pytest.raises(error, match=f"^{re.escape(sentence)}$") as caught:
        use(world)
    assert caught.type is error
    assert world.picture() == before


class Tables:
    """Tables of two rows of two blocks, and sequences to fill them with."""

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
    ("use", "error", "sentence"),
    [
        (lambda it: BlockTables(-1, 2), ValueError, "max_seqs must be from 0 to 2147483646, not -1"),
        (lambda it: BlockTables(2, HUGE), ValueError, f"max_blocks_per_seq must be from 0 to 2147483646, not {HUGE}"),
        (lambda it: BlockTables(2**30, 2**31 - 2), MemoryError, "no memory for 1073741824 rows of 2147483646 blocks"),
        (
            lambda it: it.tables.fill(None),
            TypeError,
            "states must be a ScheduledBatch or a sequence of PagedSeqState, not None",
        ),
        (
            lambda it: it.tables.fill(5),
            TypeError,
            "states must be a ScheduledBatch or a sequence of PagedSeqState, not int: 5",
        ),
        (lambda it: it.tables.fill([it.one, 5]), TypeError, "sequence 1 must be a PagedSeqState, not int"),
        (lambda it: it.tables.fill([it.one] * 3), ValueError, "cannot fill 3 sequences into 2 rows"),
        (
            lambda it: it.tables.fill([it.one, it.long]),
            ValueError,
            "sequence 1 has 3 blocks of tokens, a row has room for 2",
        ),
        (
            lambda it: it.tables.fill([it.one, it.closed]),
            StaleHandle,
            "sequence 1 was closed: its blocks may have another owner by now",
        ),
        (
            lambda it: it.tables.fill([it.one], 5),
            TypeError,
            "num_tokens must be a sequence of integers or None, not int: 5",
        ),
        (lambda it: it.tables.fill([it.one], [None]), TypeError, "a number of tokens must be an integer, not NoneType"),
        (lambda it: it.tables.fill([it.one], []), ValueError, "num_tokens has 0 entries for 1 sequences"),
        (
            lambda it: it.tables.fill([it.one], [-1]),
            ValueError,
            "sequence 0 has 6 tokens, its last -1 cannot be computed",
        ),
        (
            lambda it: it.tables.fill([it.one], [HUGE]),
            ValueError,
            f"sequence 0 has 6 tokens, its last {HUGE} cannot be computed",
        ),
        (
            lambda it: it.tables.fill([it.window], [4]),
            ValueError,
            "the last 4 of 7 tokens of sequence 0 cannot be computed: the first 4 were given back",
        ),
        (
            lambda it: it.tables.fill(ScheduledBatch.empty(), []),
            ValueError,
            "num_tokens comes with the batch and cannot be given beside it",
        ),
    ],
)
def test_block_tables(use, error, sentence):
    refuses(Tables(), use, error, sentence)


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
    ("use", "error", "sentence"),
    [
        (lambda it: it.pool.grow(3), ValueError, "num_blocks must be from 4 to 8, not 3"),
        (lambda it: it.pool.grow(9), ValueError, "num_blocks must be from 4 to 8, not 9"),
        (lambda it: it.pool.grow(HUGE), ValueError, f"num_blocks must be from 4 to 8, not {HUGE}"),
        (lambda it: it.pool.grow(None), TypeError, "num_blocks must be an integer, not None"),
        (lambda it: it.pool.grow(5.0), TypeError, "num_blocks must be an integer, not float: 5.0"),
        (lambda it: it.pool.shrink(5), ValueError, "num_blocks must be from 0 to 4, not 5"),
        (lambda it: it.pool.shrink(-1), ValueError, "num_blocks must be from 0 to 4, not -1"),
        (lambda it: it.pool.shrink("2"), TypeError, "num_blocks must be an integer, not str: '2'"),
        (lambda it: KvCachePool(8, 4).grow(5), ValueError, "num_blocks must be from 4 to 4, not 5"),
        (
            lambda it: KvCachePool.from_layout(LAYOUT, 4, max_blocks=3),
            ValueError,
            "max_blocks must be from 4 to 2147483647, not 3",
        ),
        (
            lambda it: KvCachePool.from_layout(LAYOUT, 4, it.pool.allocator),
            ValueError,
            "the allocator has 8 blocks, the pool only 4 pages",
        ),
        (lambda it: it.pool.allocator.allocate_n(6), PoolExhausted, "asked for 6 blocks, 5 of 8 are free"),
        (
            lambda it: it.pool.allocator.free([2, 3]),
            InvalidBlock,
            "cannot drop 1 reference of block 3: it is free and has 0",
        ),
    ],
)
def test_elastic_pools(use, error, sentence):
    refuses(Elastic(), use, error, sentence)


class Both:
    """Two pages and two states, one of each in use."""

    def __init__(self):
        self.pool = SequencePool(KvCachePool(8, 2), SsmStatePool(2, lambda i: AttentionSequenceState(4)))
        self.pool.alloc_kv()
        self.pool.alloc_ssm(7)

    def picture(self):
        return self.pool.stats(), [self.pool.ssm_slot(i).request_id for i in range(2)]


@pytest.mark.parametrize(
    ("use", "error", "sentence"),
    [
        (lambda it: SequencePool(5), TypeError, "kv must be a KvCachePool or None, not int: 5"),
        (lambda it: SequencePool(None, 5), TypeError, "ssm must be an SsmStatePool or None, not int: 5"),
        (lambda it: it.pool.free_kv(1), InvalidBlock, "cannot drop 1 reference of block 1: it is free and has 0"),
        (lambda it: it.pool.free_kv(2), InvalidBlock, "block 2 is out of range: there are 2 blocks"),
        (lambda it: it.pool.free_kv(-1), InvalidBlock, "block -1 is out of range: there are 2 blocks"),
        (
            lambda it: it.pool.free_kv(HUGE),
            InvalidBlock,
            f"block {HUGE} is out of range: ids have 32 bits, 2147483647 is the largest",
        ),
        (lambda it: it.pool.free_kv("0"), TypeError, "a block id must be an integer, not str"),
        (lambda it: it.pool.release_ssm(1), InvalidSlot, "slot 1 is free: 1 of 2 slots are used"),
        (lambda it: it.pool.release_ssm(2), InvalidSlot, "slot 2 is out of range: the pool has 2 slots"),
        (lambda it: it.pool.release_ssm("0"), TypeError, "a slot must be an integer, not str: '0'"),
        (lambda it: it.pool.ssm_slot(-1), InvalidSlot, "slot -1 is out of range: the pool has 2 slots"),
        (lambda it: it.pool.ssm_slot(None), TypeError, "a slot must be an integer, not None"),
        (lambda it: it.pool.alloc_ssm("7"), TypeError, "request_id must be an integer, not str: '7'"),
        (lambda it: SequencePool(it.pool.kv).alloc_ssm(7), InvalidSlot, "this pool has no recurrent states"),
        (lambda it: SequencePool(None, it.pool.ssm).alloc_kv(), InvalidSlot, "this pool has no key-value pages"),
    ],
)
def test_sequence_pools(use, error, sentence):
    refuses(Both(), use, error, sentence)


class Hybrid:
    """A sequence of 10 tokens, whose state is known at 9, another one of none, and a small one."""

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
    ("use", "error", "sentence"),
    [
        (lambda w: w.it.append(-1), ValueError, "the number of tokens cannot be -1"),
        (lambda w: w.small.append(9), ValueError, "9 tokens need 3 blocks, the maximum is 2"),
        (
            lambda w: w.it.append(HUGE),
            ValueError,
            f"{HUGE + 10} tokens need {(HUGE + 13) // 4} blocks, the maximum is 40",
        ),
        (lambda w: w.empty.append(150), PoolExhausted, "asked for 38 blocks, 35 of 40 are free"),
        (lambda w: w.it.rollback(-1), ValueError, "cannot roll back -1 of 10 tokens"),
        (lambda w: w.it.rollback(11), ValueError, "cannot roll back 11 of 10 tokens"),
        (
            lambda w: w.it.rollback(2),
            ValueError,
            "cannot roll back to 8 tokens: the oldest state checkpoint is at 9",
        ),
        (
            lambda w: w.it.rollback(w.foreign),
            StaleHandle,
            "the checkpoint at 0 is none of the 1 of this sequence",
        ),
        (lambda w: w.it.discard(w.foreign), StaleHandle, "the checkpoint at 0 is none of the 1 of this sequence"),
        (lambda w: w.it.truncate(-1), ValueError, "cannot truncate 10 tokens to -1"),
        (lambda w: w.it.truncate(11), ValueError, "cannot truncate 10 tokens to 11"),
        (
            lambda w: w.it.adopt([[0]], 4),
            ValueError,
            "cannot adopt 1 rows of blocks: there are 2 groups, with 10 tokens",
        ),
        (
            lambda w: w.empty.adopt([[0], [1]], 4),
            ValueError,
            "cannot adopt 2 rows of blocks: there are 1 groups, with 0 tokens",
        ),
        (lambda w: w.empty.adopt([[0]], 9), ValueError, "9 tokens do not match 1 blocks of 4"),
        (lambda w: w.empty.adopt([[0]], -1), ValueError, "num_tokens must be at least 0, not -1"),
        (
            lambda w: w.empty.adopt([[39]], 4),
            InvalidBlock,
            "cannot add 1 reference to block 39: it is free and has 0",
        ),
        (lambda w: w.empty.adopt([[99]], 4), InvalidBlock, "block 99 is out of range: there are 40 blocks"),
        (lambda w: [w.it.fork(), w.it.fork()], PoolExhausted, "asked for 1 slot, 0 of 2 are free"),
        (lambda w: w.small.fork(1.5), TypeError, "label must be an int, a str or None, not float: 1.5"),
        (lambda w: w.it.commit(), ValueError, "the sequence is in no transaction"),
        (
            lambda w: w.closed.append(1),
            StaleHandle,
            "the sequence 'a' was closed: its blocks may have another owner by now",
        ),
    ],
)
def test_hybrid_sequences(use, error, sentence):
    refuses(Hybrid(), use, error, sentence)


class Shown:
    """A tensor that has DLPack alone; or anything else in place of its capsule."""

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


SHAPE = "must have shape (1, 2, 8) (slots, num_kv_heads, head_dim), not"
DTYPE = "k must be float32, float16 or bfloat16 (uint16 bits), not"


@pytest.mark.parametrize(
    ("use", "error", "sentence"),
    [
        (lambda it: it.append(5), TypeError, "k must have the buffer protocol or __dlpack__, int has neither"),
        (lambda it: it.append(Shown(5)), TypeError, "__dlpack__ of Shown returned no DLPack capsule"),
        (lambda it: it.append(Shown(it.row.astype(np.int32))), TypeError, f"{DTYPE} DLPack 0:32"),
        (lambda it: it.append(Shown(it.row.astype(np.float64))), TypeError, f"{DTYPE} DLPack 2:64"),
        (lambda it: it.append(Shown(it.row[:, :1])), ValueError, f"k {SHAPE} (1, 1, 8)"),
        (lambda it: it.append(Shown(it.row[0])), ValueError, f"k {SHAPE} (2, 8)"),
        (lambda it: it.append(it.row, Shown(it.row[:, :, :7])), ValueError, f"v {SHAPE} (1, 2, 7)"),
        (lambda it: it.append(Shown(it.row[None, None])), ValueError, "k must have at most 4 dimensions, not 5"),
        (
            lambda it: it.append(Shown(np.zeros((1, 2, 16), np.float32)[:, :, ::2])),
            ValueError,
            "the last axis of k must be contiguous: its stride is 8 bytes, not 4",
        ),
        (
            lambda it: it.append(Shown(it.row[:, ::-1])),
            ValueError,
            "axis 1 of k must have a positive stride that is a multiple of 4 bytes, not -32",
        ),
    ],
)
def test_tensors_by_dlpack(use, error, sentence):
    refuses(Pages(), use, error, sentence)
