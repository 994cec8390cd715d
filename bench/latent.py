"""decode over a latent cache (MLA): one KV head of 576 dims (the first 512 are V), shared by 16 or 128 query heads.

    python bench/latent.py [--dtype bfloat16,float32] [--threads 1,2] [--rounds 5]

Every loaded element serves all query heads, so arithmetic is the limit. The output is the fraction of the f32 FMA rate
measured in the same run, in alternating rounds of (rate, decode). A product or a sum counts as one operation, so a call
has 2 * heads * tokens * (576 + 512). The pages are cold: calls rotate over the layers of a pool.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # fallback: the package of the checkout

from machine import Machine

import pagepool

HEAD_DIM, V_HEAD_DIM, BLOCK_SIZE = 576, 512, 64
SHAPES = [(heads, sequences, 4096) for heads in (16, 128) for sequences in (1, 16)]
COLD_BYTES = 100e6


class Latent:
    """Sequences in shuffled blocks, the same in every layer."""

    def __init__(self, heads, num_seqs, context, dtype):
        rng = np.random.default_rng(1)
        one = pagepool.KvLayout(1, 1, HEAD_DIM, BLOCK_SIZE, dtype, v_head_dim=V_HEAD_DIM, v_in_k=True)
        blocks = num_seqs * context // BLOCK_SIZE
        self.layers = max(1, round(COLD_BYTES / (blocks * one.block_bytes)))
        layout = pagepool.KvLayout(self.layers, 1, HEAD_DIM, BLOCK_SIZE, dtype, v_head_dim=V_HEAD_DIM, v_in_k=True)
        self.pool = pagepool.KvCachePool.from_layout(layout, blocks)
        self.tables = rng.permutation(blocks).astype(np.int32).reshape(num_seqs, -1)
        self.lens = np.full(num_seqs, context, np.int32)
        self.q = rng.standard_normal((num_seqs, heads, HEAD_DIM), np.float32)
        self.operations = 2 * heads * num_seqs * context * (HEAD_DIM + V_HEAD_DIM)
        k = rng.standard_normal((blocks * BLOCK_SIZE, 1, HEAD_DIM), np.float32)
        for layer in range(self.layers):
            self.pool.append(layer, np.arange(len(k)), k)

    def seconds(self, threads, calls):
        times = []
        for call in range(calls + 1):  # the first call wakes the workers
            begin = time.perf_counter()
            pagepool.decode(
                self.q, self.pool, call % self.layers, self.tables, self.lens, sm_scale=192**-0.5, num_threads=threads
            )
            times.append(time.perf_counter() - begin)
        return median(times[1:])


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", default="bfloat16,float32")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    machine = Machine()
    print("heads  sequences  dtype     threads   decode ms  GFLOP/s  share of FMA")
    for heads, num_seqs, context in SHAPES:
        for dtype in options.dtype.split(","):
            latent = Latent(heads, num_seqs, context, dtype)
            for threads in map(int, options.threads.split(",")):
                pairs = []
                for _ in range(options.rounds):
                    rate = machine.rate("fma", threads)
                    pairs.append((rate, latent.operations / latent.seconds(threads, 1)))
                ours, share = median(b for _, b in pairs), median(b / a for a, b in pairs)
                took = latent.operations / ours * 1e3
                cells = f"{heads:5}  {num_seqs:9}  {dtype:9} {threads:7}"
                print(f"{cells}  {took:10.3f}  {ours / 1e9:7.1f}  {share:.2f}", flush=True)
    machine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
