"""A model for tests: what it stores for a token depends on all before it, so that a page from elsewhere shows."""

from zlib import crc32

import numpy as np

from pagepool import BlockTables, KvCachePool, KvLayout

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")


def marks(tokens):
    """One number per token, made of it and all before it."""
    mark, found = 0, []
    for token in tokens:
        mark = crc32(b"%d" % token, mark)
        found.append(mark % 1_000_003)
    return np.array(found, np.float32)


class Engine:
    """Stores what a batch feeds, then checks that everything a sequence can see is what it ought to be."""

    def __init__(self, num_blocks):
        self.pool = KvCachePool.from_layout(LAYOUT, num_blocks)
        self.tables = BlockTables(64, num_blocks)

    def run(self, scheduler, batch):
        if batch.is_empty:
            return
        tables = self.tables.fill(batch)
        rows = []
        for seq_id, tokens, drafts in zip(batch.seq_ids, batch.tokens, batch.lookahead, strict=True):
            seq = scheduler.get_sequence(seq_id)
            rows.append(marks(seq.all_tokens[: seq.fed])[-len(tokens) :])
            rows.append(np.full(drafts, -1, np.float32))
        values = np.concatenate(rows)[:, None, None] * np.ones((1, 1, 8), np.float32)
        self.pool.append(0, tables.slot_mapping, values, -values)
        for seq_id, state in zip(batch.seq_ids, batch.states, strict=True):
            seq = scheduler.get_sequence(seq_id)
            k, v = self.pool.gather(0, state.blocks, seq.fed)
            assert (k[:, 0, 0] == marks(seq.all_tokens[: seq.fed])).all(), f"sequence {seq_id} sees wrong keys"
            assert (v == -k).all()
