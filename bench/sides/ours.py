"""pagepool: shuffled blocks of 16 tokens. The copies of K and V are layers of one pool."""

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # fallback: the package of the checkout

import pagepool
from pagepool.memory.quantisation import calibrate_channels
from sides.common import Call
from sides.common import Side as Base

BLOCK_SIZE = 16


class Side(Base):
    arithmetic = "exact"

    def __init__(self, case):
        super().__init__(case)
        num_seqs, context, num_kv_heads, head_dim = case.k.shape
        layout = pagepool.KvLayout(case.copies, num_kv_heads, head_dim, BLOCK_SIZE, case.dtype)
        self.tables = case.tables(BLOCK_SIZE)
        scale = None
        if case.dtype == "int4":  # int4 keys need a scale for each channel
            one = calibrate_channels(case.k[0] * case.UNIT)
            scale = np.broadcast_to(one, (case.copies, *one.shape[1:]))
        self.pool = pagepool.KvCachePool.from_layout(layout, self.tables.size, k_channel_scale=scale)
        self.lens = np.full(num_seqs, context, np.int32)
        self.q, self.out = case.q, np.empty_like(case.q)
        for row, table in enumerate(self.tables):
            slots = (table.astype(np.int64)[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1)
            k, v = case.k[row] * case.UNIT, case.v[row] * case.UNIT
            for layer in range(case.copies):
                self.pool.append(layer, slots, k, v)

    def calls(self, threads):
        q, pool, tables, lens, out = self.q, self.pool, self.tables, self.lens, self.out
        copies, arithmetic, decode = self.case.copies, self.arithmetic, pagepool.decode

        def run(i):
            return decode(q, pool, i % copies, tables, lens, out=out, arithmetic=arithmetic, num_threads=threads)

        return {f"pages of {BLOCK_SIZE}, {pagepool.cpu_info()['isa']}": Call(run)}


class Bf16(Side):
    """Queries and weights rounded to bfloat16, over bfloat16 pages."""

    arithmetic = "bf16"


class Bf16x2(Side):
    """With weights in two parts of bfloat16, for pages of bfloat16."""

    arithmetic = "bf16x2"
