"""decode over a latent cache (MLA): one KV head of 576 dims (the first 512 are V), shared by 16 or 128 query heads.

    python bench/latent.py [--dtype bfloat16,float32] [--arithmetic exact,bf16x2,bf16] [--threads 1,2] [--rounds 5]
    python bench/latent.py --peer vllm [--peers build/peers]    with vLLM's decode over its latent cache

Every loaded element serves all query heads, so arithmetic is the limit. The output is the fraction of the f32 FMA rate
measured in the same run, in alternating rounds of (rate, decode). A product or a sum counts as one operation, so a call
has 2 * heads * tokens * (576 + 512). The pages are cold: calls rotate over the layers of a pool. With a peer, queries
and results have the dtype of the pages, and `times` is the median over the rounds of the peer's time over ours.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # fallback: the package of the checkout

from interleave import Process
from machine import Machine, cpu_name
from peers import python_with

import pagepool

HEAD_DIM, V_HEAD_DIM, BLOCK_SIZE = 576, 512, 64
SHAPES = [(heads, sequences, 4096) for heads in (16, 128) for sequences in (1, 16)]
COLD_BYTES = 100e6
SCALE = 192**-0.5


class Latent:
    """Sequences in shuffled blocks, the same in every layer."""

    def __init__(self, heads, num_seqs, context, dtype, arithmetic, wide=True):
        rng = np.random.default_rng(1)
        one = pagepool.KvLayout(1, 1, HEAD_DIM, BLOCK_SIZE, dtype, v_head_dim=V_HEAD_DIM, v_in_k=True)
        blocks = num_seqs * context // BLOCK_SIZE
        self.layers = max(1, round(COLD_BYTES / (blocks * one.block_bytes)))
        layout = pagepool.KvLayout(self.layers, 1, HEAD_DIM, BLOCK_SIZE, dtype, v_head_dim=V_HEAD_DIM, v_in_k=True)
        self.pool = pagepool.KvCachePool.from_layout(layout, blocks)
        self.tables = rng.permutation(blocks).astype(np.int32).reshape(num_seqs, -1)
        self.lens = np.full(num_seqs, context, np.int32)
        self.q = rng.standard_normal((num_seqs, heads, HEAD_DIM), np.float32)
        self.arithmetic = arithmetic
        self.out = np.empty((num_seqs, heads, V_HEAD_DIM), np.float32)
        if not wide and dtype == "bfloat16":  # NumPy has no bfloat16: pass its bits
            self.q = (self.q.view(np.uint32) >> 16).astype(np.uint16)
            self.out = np.empty(self.out.shape, np.uint16)
        self.question = {"heads": heads, "sequences": num_seqs, "context": context, "dim": HEAD_DIM}
        self.question |= {"v_dim": V_HEAD_DIM, "scale": SCALE, "dtype": dtype, "copies": self.layers}
        self.operations = 2 * heads * num_seqs * context * (HEAD_DIM + V_HEAD_DIM)
        k = rng.standard_normal((blocks * BLOCK_SIZE, 1, HEAD_DIM), np.float32)
        for layer in range(self.layers):
            self.pool.append(layer, np.arange(len(k)), k)

    def seconds(self, threads, calls):
        times = []
        for call in range(calls + 1):  # the first call wakes the workers
            begin = time.perf_counter()
            pagepool.decode(
                self.q, self.pool, call % self.layers, self.tables, self.lens, sm_scale=SCALE, out=self.out,
                arithmetic=self.arithmetic, num_threads=threads,
            )  # fmt: skip
            times.append(time.perf_counter() - begin)
        return median(times[1:])


def cells_of(options):
    """Yield each cell, its dtype, its arithmetic and its number of threads."""
    for heads, num_seqs, context in SHAPES:
        for dtype in options.dtype.split(","):
            for arithmetic in options.arithmetic.split(",") if dtype == "bfloat16" else ["exact"]:
                latent = Latent(heads, num_seqs, context, dtype, arithmetic, wide=not options.peer)
                for threads in map(int, options.threads.split(",")):
                    yield latent, f"{heads:5}  {num_seqs:9}  {dtype:9} {arithmetic:10} {threads:7}", threads


def measure(options):
    machine = Machine()
    print("heads  sequences  dtype     arithmetic threads   decode ms  GFLOP/s  share of FMA")
    for latent, cell, threads in cells_of(options):
        pairs = []
        for _ in range(options.rounds):
            rate = machine.rate("fma", threads)
            pairs.append((rate, latent.operations / latent.seconds(threads, 1)))
        ours, share = median(b for _, b in pairs), median(b / a for a, b in pairs)
        print(f"{cell}  {latent.operations / ours * 1e3:10.3f}  {ours / 1e9:7.1f}  {share:.2f}", flush=True)
    machine.close()


def compare(options):
    python = python_with("vllm", ("vllm",), options.peers)
    if python is None:
        return
    peer = Process(python, "", {}, "sides/vllm_latent.py")
    print("heads  sequences  dtype     arithmetic threads    ours, ms    vllm, ms  times")
    for latent, cell, threads in cells_of(options):
        pairs = []
        for _ in range(options.rounds):
            peer.tell(**latent.question, threads=threads, seconds=0.1)
            answer = peer.answer()
            if "failed" in answer:
                print(f"{cell}  vllm: {answer['failed']}")
                break
            pairs.append((latent.seconds(threads, 1), answer["seconds"]))
        else:
            ours, theirs = (1e3 * median(column) for column in zip(*pairs, strict=True))
            print(f"{cell}  {ours:10.3f}  {theirs:10.3f}  {median(b / a for a, b in pairs):.2f}", flush=True)
    peer.quit()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", default="bfloat16,float32")
    parser.add_argument("--arithmetic", default="exact", help="comma list, for bfloat16")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", choices=["vllm"], help="compare with this peer")
    parser.add_argument("--peers", default="build/peers", metavar="DIR", help="folder of the environments")
    options = parser.parse_args(arguments)
    print(f"{cpu_name()}, {pagepool.cpu_info()['isa']}")
    (compare if options.peer else measure)(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
