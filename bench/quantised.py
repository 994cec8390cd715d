"""Compare decode and prefill over quantised pages with bfloat16 pages and with the limits of the machine.

    python bench/quantised.py [--shape S1,S2] [--threads 1,2] [--rounds N]      decode
    python bench/quantised.py --prefill [--threads 1,2] [--rounds N]           1 x 4,096 new tokens

Each round measures all kinds of pages in alternation. Each kind has layers that fill 400 MB, so that K and V are never
in a CPU cache. The columns are medians over the rounds:

- `gain`: time over bfloat16 pages (exact arithmetic), divided by the time over these pages
- `share`: the limit divided by the time. The limit is the longer of streaming the bytes and doing all products. Integer
  products of 16 by 8 bits need two vpdpbusd each; bfloat16 uses the FMA rate.
- `error`: RMS difference from float64 on the stored values, divided by the RMS of the result
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # fallback: the package of the checkout
from machine import Machine
from shapes import COLD, SHAPES, flops

import pagepool

BLOCK_SIZE = 16
KINDS = {
    "bfloat16": ("bfloat16", "bfloat16"),
    "int8": ("int8", "int8"),
    "int4": ("int4", "int4"),
    "int8 / int4": ("int8", "int4"),
}


class Pages:
    """K and V of a shape in one kind of pages, with enough layers to exceed every CPU cache."""

    def __init__(self, shape, kind, cold=COLD):
        self.num_qo_heads, num_kv_heads, self.head_dim, self.num_seqs, self.context = shape
        dtype, v_dtype = KINDS[kind]
        one = pagepool.KvLayout(1, num_kv_heads, self.head_dim, BLOCK_SIZE, dtype, v_dtype=v_dtype)
        num_blocks = self.num_seqs * self.context // BLOCK_SIZE
        self.num_bytes = num_blocks * one.block_bytes
        self.layers = max(1, int(cold / self.num_bytes))
        layout = pagepool.KvLayout(self.layers, num_kv_heads, self.head_dim, BLOCK_SIZE, dtype, v_dtype=v_dtype)
        scale = np.full((self.layers, num_kv_heads, self.head_dim), 4.0, np.float32) if dtype == "int4" else None
        self.pool = pagepool.KvCachePool.from_layout(layout, num_blocks, k_channel_scale=scale)
        rng = np.random.default_rng(1)
        self.tables = rng.permutation(num_blocks).astype(np.int32).reshape(self.num_seqs, -1)
        self.seq_lens = np.full(self.num_seqs, self.context, np.int32)
        kv = rng.standard_normal((1 << 16, num_kv_heads, self.head_dim), np.float32)
        for layer in range(self.layers):
            for begin in range(0, num_blocks * BLOCK_SIZE, 1 << 16):
                slots = np.arange(begin, min(begin + (1 << 16), num_blocks * BLOCK_SIZE))
                self.pool.append(layer, slots, kv[: len(slots)], kv[len(kv) - len(slots) :])
        self.rng = rng

    def queries(self, count):
        self.q = self.rng.standard_normal((count, self.num_qo_heads, self.head_dim), np.float32)
        self.out = np.empty_like(self.q)

    def decode(self, threads):
        """Return the seconds per layer."""
        begin = time.perf_counter()
        for layer in range(self.layers):
            pagepool.decode(self.q, self.pool, layer, self.tables, self.seq_lens, out=self.out, num_threads=threads)
        return (time.perf_counter() - begin) / self.layers

    def prefill(self, threads):
        starts = np.array([0, len(self.q)], np.int32)
        begin = time.perf_counter()
        pagepool.prefill(
            self.q,
            self.pool,
            0,
            self.tables[:1],
            self.seq_lens[:1],
            query_start_loc=starts,
            out=self.out,
            num_threads=threads,
        )
        return time.perf_counter() - begin

    def error(self):
        """Return the RMS error of the first sequence's result against float64, divided by the result's RMS."""
        k, v = (x.astype(np.float64) for x in self.pool.gather(self.layers - 1, self.tables[0], self.context))
        group, total, square = self.num_qo_heads // k.shape[1], 0.0, 0.0
        for head in range(self.num_qo_heads):
            scores = k[:, head // group] @ self.q[0, head].astype(np.float64) / np.sqrt(self.head_dim)
            weights = np.exp(scores - scores.max())
            right = weights @ v[:, head // group] / weights.sum()
            total += ((self.out[0, head] - right) ** 2).sum()
            square += (right**2).sum()
        return np.sqrt(total / square)


def compare(machine, shape, name, kinds, threads, rounds, is_prefill):
    pages = {kind: Pages(shape, kind, 1 if is_prefill else COLD) for kind in kinds}
    work = flops_of_prefill(shape) if is_prefill else flops(name)
    for side in pages.values():
        side.queries(side.context if is_prefill else side.num_seqs)
    run = {kind: side.prefill if is_prefill else side.decode for kind, side in pages.items()}
    for count in threads:
        times = {kind: [] for kind in kinds}
        shares = {kind: [] for kind in kinds}
        for turn in range(rounds + 1):
            order = list(kinds) if turn % 2 else list(kinds)[::-1]
            found = {kind: run[kind](count) for kind in order}
            if not turn:
                continue  # the first turn page-faults the workspace in
            ints, fma = machine.rate("int8", count) / 2, machine.rate("fma", count)
            for kind, side in pages.items():
                stretch = min(side.num_bytes, 100 << 20)
                stream = 0 if is_prefill else machine.stream(stretch, 4, count, 3) * side.num_bytes / stretch
                rate = ints if "int" in kind and "bfloat16" not in kind and ints else fma
                times[kind].append(found[kind])
                shares[kind].append(max(stream, work / rate) / found[kind])
        for kind, side in pages.items():
            gains = [other / own for other, own in zip(times["bfloat16"], times[kind], strict=True)]
            error = "" if is_prefill else f"{side.error():9.1e}"
            print(
                f"{name:6} {kind:16} {count:7} {median(times[kind]) * 1e3:9.3f} {median(gains):6.2f} "
                f"{median(shares[kind]):6.2f} {error}",
                flush=True,
            )
    for side in pages.values():
        side.pool.close()


def flops_of_prefill(shape):
    """Return the operations of causal attention over a whole prompt: a token attends to half of it on average."""
    num_qo_heads, _, head_dim, _, tokens = shape
    return 4 * tokens * (tokens + 1) // 2 * num_qo_heads * head_dim


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="S1,S2,S3,S4")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefill", action="store_true")
    options = parser.parse_args()
    machine, kinds = Machine(), options.kinds.split(",")
    threads = [int(count) for count in options.threads.split(",")]
    print("shape  pages            threads        ms   gain  share     error")
    if options.prefill:
        for heads in ((32, 8, 128), (14, 2, 64)):
            compare(machine, (*heads, 1, 4096), "4096", kinds, threads, options.rounds, True)
    else:
        for name in options.shape.split(","):
            compare(machine, SHAPES[name], name, kinds, threads, options.rounds, False)


if __name__ == "__main__":
    main()
