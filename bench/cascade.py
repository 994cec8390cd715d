"""Decode of sequences with a common prefix: cascade reads it once, plain decode reads it once per sequence.

    python bench/cascade.py [--dtype bfloat16,float32] [--arithmetic exact,bf16x2,bf16] [--threads 1,2] [--rounds N]
    python bench/cascade.py --peer vllm [--peers build/peers]    with vLLM's decode of the same sequences

Each round measures both methods in alternation. The calls rotate over layers that fill 300 MB, so that K and V are
never in a CPU cache. The limit of the machine is the longer of two times, both measured in the same round: all
multiply-adds at the FMA rate, and all bytes at the stream's rate, with the shared bytes counted once.
`share` is the limit divided by cascade's time. `gain` is plain decode's time divided by cascade's time. Both are
medians over the rounds. For sequences without a common prefix, `gain` shows the cost of searching for one.

With a peer, queries and results have the dtype of the pages, and `times` is the median over the rounds of the peer's
time over cascade's. vLLM's CPU kernels have no cascade: they read the prefix once for each sequence.
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

BLOCK_SIZE = 16
COLD = 300e6
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# sequences, shared tokens, own tokens, query heads, kv heads, head_dim
CASES = [
    (32, 8192, 512, 32, 8, 128),
    (32, 8192, 512, 32, 32, 128),
    (8, 8192, 512, 32, 8, 128),
    (32, 2048, 512, 14, 2, 64),
    (32, 0, 2048, 32, 8, 128),
]


class Case:
    """Sequences in a pool of several layers with the same tables."""

    def __init__(self, case, dtype, arithmetic, wide=True):
        num_seqs, shared, own, self.num_qo_heads, num_kv_heads, self.head_dim = case
        shared_blocks, own_blocks = shared // BLOCK_SIZE, own // BLOCK_SIZE
        num_blocks = shared_blocks + num_seqs * own_blocks
        self.num_bytes = num_blocks * BLOCK_SIZE * num_kv_heads * self.head_dim * 2 * ITEM_BYTES[dtype]
        self.flops = 4 * num_seqs * (shared + own) * self.num_qo_heads * self.head_dim
        self.layers = max(1, int(COLD / self.num_bytes))
        layout = pagepool.KvLayout(self.layers, num_kv_heads, self.head_dim, BLOCK_SIZE, dtype)
        self.pool = pagepool.KvCachePool.from_layout(layout, num_blocks)
        rng = np.random.default_rng(1)
        ids = rng.permutation(num_blocks).astype(np.int32)
        common = np.repeat(ids[None, :shared_blocks], num_seqs, 0)
        self.tables = np.concatenate([common, ids[shared_blocks:].reshape(num_seqs, own_blocks)], 1)
        self.seq_lens = np.full(num_seqs, shared + own, np.int32)
        for layer in range(self.layers):
            for begin in range(0, num_blocks * BLOCK_SIZE, 1 << 16):
                slots = np.arange(begin, min(begin + (1 << 16), num_blocks * BLOCK_SIZE))
                kv = rng.standard_normal((len(slots), num_kv_heads, self.head_dim), np.float32)
                self.pool.append(layer, slots, kv, kv)
        self.q = rng.standard_normal((num_seqs, self.num_qo_heads, self.head_dim), np.float32)
        if not wide and dtype == "bfloat16":  # NumPy has no bfloat16: pass its bits
            self.q = (self.q.view(np.uint32) >> 16).astype(np.uint16)
        self.out = np.empty_like(self.q)
        self.arithmetic = arithmetic
        self.question = {"heads": self.num_qo_heads, "kv_heads": num_kv_heads, "dim": self.head_dim, "dtype": dtype}
        self.question |= {"sequences": num_seqs, "length": 1, "cached": shared + own - 1, "shared": shared}
        self.question |= {"copies": self.layers}

    def seconds(self, threads, cascade):
        """Return the time of one layer in seconds."""
        begin = time.perf_counter()
        for layer in range(self.layers):
            pagepool.decode(
                self.q, self.pool, layer, self.tables, self.seq_lens, out=self.out, arithmetic=self.arithmetic,
                num_threads=threads, cascade=cascade,
            )  # fmt: skip
        return (time.perf_counter() - begin) / self.layers


def measure(machine, case, threads, rounds):
    """Return the medians over the rounds: seconds of cascade, its gain and its share of the limit."""
    case.seconds(threads, True)  # page-faults the workspace in
    spent, gains, shares = [], [], []
    stretch = min(case.num_bytes, 100 << 20)
    for turn in range(rounds):
        ways = {way: case.seconds(threads, way) for way in ((True, False), (False, True))[turn % 2]}
        stream = machine.stream(stretch, 4, threads, 3) * case.num_bytes / stretch
        limit = max(case.flops / machine.rate("fma", threads), stream)
        spent.append(ways[True])
        gains.append(ways[False] / ways[True])
        shares.append(limit / ways[True])
    return median(spent), median(gains), median(shares)


def cells_of(options):
    """Yield each case with the text of its row and its number of threads."""
    for shape in CASES:
        num_seqs, shared, own, num_qo_heads, num_kv_heads, head_dim = shape
        for dtype in options.dtype.split(","):
            for arithmetic in options.arithmetic.split(",") if dtype == "bfloat16" else ["exact"]:
                case = Case(shape, dtype, arithmetic, wide=not options.peer)
                for threads in map(int, options.threads.split(",")):
                    row = (
                        f"{num_seqs:9} {shared:7} {own:6}  {num_qo_heads:2}/{num_kv_heads:<2} {head_dim:6}  {dtype:9} "
                    )
                    yield case, f"{row}{arithmetic:10} {threads:6}", threads
                case.pool.close()


HEAD = "sequences  shared    own  heads   dim  dtype     arithmetic threads"


def compare(options):
    python = python_with("vllm", ("vllm",), options.peers)
    if python is None:
        return
    peer = Process(python, "", {}, "sides/vllm_prefill.py")
    print(f"{HEAD}  ours, ms  vllm, ms  times")
    for case, row, threads in cells_of(options):
        case.seconds(threads, True)  # page-faults the workspace in
        pairs = []
        for _ in range(options.rounds):
            peer.tell(**case.question, threads=threads, seconds=0.1)
            answer = peer.answer()
            if "failed" in answer:
                print(f"{row} vllm: {answer['failed']}")
                break
            pairs.append((case.seconds(threads, True), answer["seconds"]))
        else:
            ours, theirs = (1e3 * median(column) for column in zip(*pairs, strict=True))
            print(f"{row} {ours:9.3f} {theirs:9.3f} {median(b / a for a, b in pairs):6.2f}", flush=True)
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
    if options.peer:
        compare(options)
        return 0
    machine = Machine()
    print(f"{HEAD}        ms   gain  share")
    for case, row, threads in cells_of(options):
        seconds, gain, share = measure(machine, case, threads, options.rounds)
        print(f"{row} {seconds * 1e3:9.3f} {gain:6.2f} {share:6.2f}", flush=True)
    machine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
