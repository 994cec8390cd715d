"""A fake model: K and V of a token depend on all tokens before it, so that a page of another sequence is detected."""

from zlib import crc32

import numpy as np

from pagepool import BlockTables, KvCachePool, KvGroup, KvLayout, SsmStatePool, StateLayout

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")


def marks(tokens):
    """Return one number per token, a checksum of it and all tokens before it."""
    mark, found = 0, []
    for token in tokens:
        mark = crc32(b"%d" % token, mark)
        found.append(mark % 1_000_003)
    return np.array(found, np.float32)


def marks_of_drafts(engine, seq, count):
    if engine.draft is None or not count:
        return np.full(count, -1, np.float32)
    fed = seq.all_tokens[: seq.fed]
    return marks(fed + engine.draft(fed, count))[-count:]


class Engine:
    """Stores K and V of a batch, then checks all K and V that its sequences can attend to.

    `draft(tokens, count)` returns the drafts behind the fed tokens. Without it no draft is ever accepted.
    """

    def __init__(self, num_blocks, draft=None):
        self.draft = draft
        self.pool = KvCachePool.from_layout(LAYOUT, num_blocks)
        self.tables = BlockTables(64, num_blocks)
        self.states = None

    def run(self, scheduler, batch):
        if batch.is_empty:
            return
        tables = self.tables.fill(batch)
        rows = []
        for seq_id, tokens, drafts in zip(batch.seq_ids, batch.tokens, batch.lookahead, strict=True):
            seq = scheduler.get_sequence(seq_id)
            rows.append(marks(seq.all_tokens[: seq.fed])[-len(tokens) :])
            rows.append(marks_of_drafts(self, seq, drafts))
        values = np.concatenate(rows)[:, None, None] * np.ones((1, 1, 8), np.float32)
        self.pool.append(0, tables.slot_mapping, values, -values)
        for seq_id, state in zip(batch.seq_ids, batch.states, strict=True):
            seq = scheduler.get_sequence(seq_id)
            k, v = self.pool.gather(0, state.blocks, seq.fed)
            assert (k[:, 0, 0] == marks(seq.all_tokens[: seq.fed])).all(), f"sequence {seq_id} sees wrong keys"
            assert (v == -k).all()


class HybridEngine:
    """The same for hybrid sequences: layer i belongs to group i, and the state is the mark of the last token.

    A batch runs only once: a recurrent state must not process a token twice.
    """

    def __init__(self, num_blocks, windows, slots=None, draft=None):
        self.draft = draft
        layout = KvLayout(num_layers=len(windows), num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
        self.pool = KvCachePool.from_layout(layout, num_blocks)
        self.tables = BlockTables(64, 1000)
        self.groups = [KvGroup(self.pool.allocator, 4, window) for window in windows]
        self.states = None
        if slots is not None:
            self.layout = StateLayout(layers=[{"h": ((1,), "float64")}])
            self.states = SsmStatePool.from_layout(self.layout, slots)
        self.ran = None

    def run(self, scheduler, batch):
        if batch.is_empty or batch is self.ran:
            return
        self.ran = batch
        rows = []
        for seq_id, tokens, state, drafts in zip(
            batch.seq_ids, batch.tokens, batch.states, batch.lookahead, strict=True
        ):
            seq = scheduler.get_sequence(seq_id)
            known = marks(seq.all_tokens[: seq.fed])
            rows += [known[len(known) - len(tokens) :], marks_of_drafts(self, seq, drafts)]
            if self.states is not None:
                assert len(state.drafts) == drafts
                for slot, mark in zip(state.drafts, rows[-1], strict=True):
                    slot.view(0, "h")[0] = mark
                before = known[-len(tokens) - 1] if len(known) > len(tokens) else 0
                h = state.state.view(0, "h")
                assert h[0] == before, f"the state of {seq_id} has not processed its first tokens exactly once"
                h[0] = known[-1]
        values = np.concatenate(rows)[:, None, None] * np.ones((1, 1, 8), np.float32)
        for layer in range(len(self.groups)):
            self.tables.fill([state.kv[layer] for state in batch.states], batch.num_tokens)
            self.pool.append(layer, self.tables.slot_mapping, values, -values)
        for seq_id, state, fed in zip(batch.seq_ids, batch.states, batch.num_tokens, strict=True):
            seq = scheduler.get_sequence(seq_id)
            for layer, (group, table) in enumerate(zip(self.groups, state.kv, strict=True)):
                first = table.first_block * 4
                assert first <= max(0, state.len - fed - group.window if group.window is not None else 0)
                k, v = self.pool.gather(layer, table.blocks, seq.fed - first)
                assert (k[:, 0, 0] == marks(seq.all_tokens[: seq.fed])[first:]).all(), f"{seq_id} sees wrong keys"
                assert (v == -k).all()
