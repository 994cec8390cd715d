"""Speed of prefill as a share of the machine's multiply-add rate, both measured in alternation in one process.

    python bench/prefill.py [--threads 1,2] [--all] [--json FILE]
    python bench/prefill.py --cell 32/8x128:8x512+3584 [--dtype bfloat16]    one cell: heads, sequences x new + cached
    python bench/prefill.py --peer torch,vllm [--arithmetic exact,bf16x2,bf16] [--peers build/peers]
                                       with torch's scaled_dot_product_attention and vLLM's kernels

A round measures the rate, prefill, and the rate again. It is repeated while the two rates differ by more than 10 %. The
share is relative to the higher rate, and the median over the rounds is printed. Operations are products and sums over
the tokens that the causal mask admits: 4 * heads * dim * (new * cached + new * (new + 1) / 2) per sequence. AVX2 is
compared with multiply-adds in vectors of 8. With AMX, "bf16x2" and "bf16" can exceed the rate of multiply-adds.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # fallback: the package of the checkout

from interleave import Process, bound_of, counts
from machine import Machine, cpu_name
from peers import python_with

import pagepool

MOST_DIFFERENCE = 0.10  # between the rates before and after a call
ATTEMPTS = 20  # at a round
CELL = re.compile(r"(\d+)/(\d+)x(\d+):(\d+)x(\d+)(?:\+(\d+))?(?::(\d+))?")
PEER_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Cell:
    """Sequences with `new` tokens after `cached` tokens."""

    heads: int
    kv_heads: int
    dim: int
    sequences: int
    new: int
    cached: int = 0
    block_size: int = 16
    dtype: str = "float32"
    arithmetic: str = "exact"

    @classmethod
    def parse(cls, text):
        found = CELL.fullmatch(text)
        if not found:
            raise argparse.ArgumentTypeError(f"{text} is not HEADS/KV_HEADSxDIM:SEQUENCESxNEW[+CACHED][:BLOCK_SIZE]")
        return cls(*(int(number) for number in found.groups(default="0")[:6]), int(found[7] or 16))

    @property
    def operations(self):
        seen = self.new * self.cached + self.new * (self.new + 1) // 2
        return 4 * self.heads * self.dim * self.sequences * seen

    def __str__(self):
        cached = f"+{self.cached}" if self.cached else ""
        block = f":{self.block_size}" if self.block_size != 16 else ""
        return f"{self.heads}/{self.kv_heads}x{self.dim}:{self.sequences}x{self.new}{cached}{block}"


PLAIN = [Cell.parse(text) for text in ("32/8x128:1x4096", "14/2x64:1x4096", "32/8x128:8x512+3584")]
PLAIN += [Cell.parse(text) for text in ("32/8x128:1x512", "32/8x128:1x128")]
LONG = PLAIN[0]
OTHERS = [replace(LONG, dim=dim) for dim in (80, 96, 112, 256)]
OTHERS += [replace(LONG, heads=4 * group, kv_heads=4, new=2048) for group in range(1, 13)]
OTHERS += [replace(LONG, block_size=block_size) for block_size in (32, 64, 128, 256)]
OTHERS += [replace(LONG, sequences=256, new=300)]
LONGEST = Cell(4, 1, 128, 1, 131072)
MINUTES = 1e13  # operations of a call that takes minutes: it is measured once, without a warm-up call


class Prefill:
    """The K and V pages of a cell in shuffled blocks, and its queries."""

    def __init__(self, cell, wide=True):
        rng = np.random.default_rng(1)
        length = cell.cached + cell.new
        blocks = -(-length // cell.block_size)
        layout = pagepool.KvLayout(1, cell.kv_heads, cell.dim, cell.block_size, cell.dtype)
        self.cell = cell
        self.pool = pagepool.KvCachePool.from_layout(layout, blocks * cell.sequences)
        self.tables = rng.permutation(blocks * cell.sequences).astype(np.int32).reshape(cell.sequences, blocks)
        for table in self.tables:
            k, v = rng.standard_normal((2, length, cell.kv_heads, cell.dim), np.float32)
            slots = (table.astype(np.int64)[:, None] * cell.block_size + np.arange(cell.block_size)).reshape(-1)
            self.pool.append(0, slots[:length], k, v)
        self.q = rng.standard_normal((cell.sequences * cell.new, cell.heads, cell.dim), np.float32)
        if not wide and cell.dtype == "bfloat16":  # NumPy has no bfloat16: pass its bits
            self.q = (self.q.view(np.uint32) >> 16).astype(np.uint16)
        self.out = np.empty_like(self.q)
        self.starts = (np.arange(cell.sequences + 1) * cell.new).astype(np.int32)
        self.lens = np.full(cell.sequences, length, np.int32)

    def run(self, threads):
        pagepool.prefill(
            self.q,
            self.pool,
            0,
            self.tables,
            self.lens,
            self.starts,
            out=self.out,
            arithmetic=self.cell.arithmetic,
            num_threads=threads,
        )

    def seconds(self, threads, least):
        """Return the mean time of a call, over as many calls as take at least `least` seconds."""
        calls, begin = 0, time.perf_counter()
        while calls == 0 or time.perf_counter() - begin < least:
            self.run(threads)
            calls += 1
        return (time.perf_counter() - begin) / calls


def calm(before, after):
    """Return true if the two rates agree, so that no other load disturbed the call between them."""
    return abs(before - after) <= MOST_DIFFERENCE * max(before, after)


def share_of(prefill, machine, threads, options):
    """Return a row of the table: medians over the rounds."""
    cell, rounds, repeated = prefill.cell, [], 0
    bound = bound_of("ours", {})
    wanted = options.rounds
    if cell.operations > MINUTES:
        wanted = 1
    else:
        prefill.run(threads)  # wakes the workers
    while len(rounds) < wanted:
        before = machine.rate(bound, threads)
        took = prefill.seconds(threads, options.seconds)
        after = machine.rate(bound, threads)
        if calm(before, after) or repeated == ATTEMPTS:
            rounds.append((took, cell.operations / took / max(before, after), max(before, after)))
        else:
            repeated += 1
    took, share, rate = (median(column) for column in zip(*rounds, strict=True))
    return {
        "cell": str(cell),
        "dtype": cell.dtype,
        "arithmetic": cell.arithmetic,
        "isa": pagepool.cpu_info()["isa"],
        "threads": threads,
        "ms": 1e3 * took,
        "gflops": cell.operations / took / 1e9,
        "bound": bound,
        "bound_gflops": rate / 1e9,
        "share": share,
        "repeated": repeated,
        "disturbed": repeated == ATTEMPTS,
    }


HEAD = (
    f"{'heads:prompts':24} {'dtype':9} {'arithmetic':10} {'isa':16} {'threads':>7} {'ms':>10} {'GFLOP/s':>8} "
    f"{'bound':9} {'share':>5}"
)


def print_row(row):
    print(
        f"{row['cell']:24} {row['dtype']:9} {row['arithmetic']:10} {row['isa']:16} {row['threads']:7} "
        f"{row['ms']:10.2f} {row['gflops']:8.1f} {row['bound']:9} {row['share']:5.2f}",
        flush=True,
    )


def cells_of(options):
    """Yield each cell with its numbers of threads."""
    if options.cell:
        plain = options.cell
    else:
        plain = PLAIN + (OTHERS if options.all else [])
    cells = [(replace(cell, dtype=dtype), options.threads) for cell in plain for dtype in options.dtype]
    if not options.cell and "bfloat16" in options.dtype:
        for arithmetic in ("bf16x2", "bf16"):
            cells.append((replace(LONG, dtype="bfloat16", arithmetic=arithmetic), options.threads))
    if not options.cell and options.all:
        cells.append((LONGEST, [1]))
    return cells


def measure(cells, machine, options):
    rows = []
    for cell, threads in cells:
        prefill = Prefill(cell)
        for count in threads:
            rows.append(share_of(prefill, machine, count, options))
            print_row(rows[-1])
    return rows


def measure_avx2(options):
    """Measure the long prompt on AVX2 in a second process: a process has one instruction set."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = [sys.executable, __file__, "--cell", str(LONG), "--dtype", "float32", "--json", str(found)]
        command += ["--threads", ",".join(map(str, options.threads)), "--seconds", str(options.seconds)]
        command += ["--rounds", str(options.rounds)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PAGEPOOL_ISA": "avx2"})
        rows = json.loads(found.read_text())["rows"]
    for row in rows:
        print_row(row)
    return rows


def question_of(name, cell, threads, seconds):
    """Return the request to a peer, or None if the peer cannot run the cell."""
    asked = {"heads": cell.heads, "kv_heads": cell.kv_heads, "dim": cell.dim, "length": cell.new, "dtype": cell.dtype}
    if name == "vllm":
        asked |= {"sequences": cell.sequences, "cached": cell.cached}
    elif cell.cached or cell.sequences > 1:
        return None
    return asked | {"threads": threads, "seconds": seconds}


def beside(ours, name, peer, machine, threads, options):
    """Return a row that compares pagepool with a peer, or the peer's error."""
    cell, pairs, shares, repeated = ours.cell, [], [], 0
    ours.run(threads)
    while len(pairs) < options.rounds:
        before = machine.rate("fma", threads)
        peer.tell(**question_of(name, cell, threads, options.seconds))
        answer = peer.answer()
        if "failed" in answer:
            return answer["failed"]
        pair = ours.seconds(threads, options.seconds), answer["seconds"]
        after = machine.rate("fma", threads)
        if not calm(before, after) and repeated < ATTEMPTS:
            repeated += 1
            continue
        pairs.append(pair)
        shares.append([cell.operations / took / max(before, after) for took in pair])
    mine, theirs = (1e3 * median(column) for column in zip(*pairs, strict=True))
    share, peer_share = (median(column) for column in zip(*shares, strict=True))
    return {
        "cell": str(cell),
        "dtype": cell.dtype,
        "arithmetic": cell.arithmetic,
        "peer": name,
        "threads": threads,
        "ms": mine,
        f"{name}_ms": theirs,
        "times": median(b / a for a, b in pairs),
        "tokens": cell.new,
        "share": share,
        f"{name}_share": peer_share,
    }


def compare(options, machine):
    """Compare prefill with peers and the FMA rate, round by round; pages, K, V, queries and results have one dtype."""
    rows = []
    cells = options.cell or [replace(LONG, new=length) for length in PEER_LENGTHS]
    print(f"{'heads:prompts':24} {'dtype':9} {'arithmetic':10} threads   ours, ms  peer, ms  times  share   peer")
    for name in options.peer:
        python = python_with(name, {"torch": ("sdpa", "vllm"), "vllm": ("vllm",)}[name], options.peers)
        if python is None:
            continue
        peer = Process(python, "", {}, f"sides/{name}_prefill.py")
        for cell in cells:
            for dtype in options.dtype:
                for arithmetic in options.arithmetic if dtype == "bfloat16" else ["exact"]:
                    ours = Prefill(replace(cell, dtype=dtype, arithmetic=arithmetic), wide=False)
                    for threads in options.threads:
                        if not question_of(name, ours.cell, threads, options.seconds):
                            continue
                        row = beside(ours, name, peer, machine, threads, options)
                        if isinstance(row, str):
                            print(f"{name}: {row}")
                            continue
                        rows.append(row)
                        print(
                            f"{cell!s:24} {dtype:9} {arithmetic:10} {threads:7} {row['ms']:10.2f} "
                            f"{row[f'{name}_ms']:10.2f} {row['times']:6.2f} {row['share']:6.2f} "
                            f"{row[f'{name}_share']:6.2f} {name}",
                            flush=True,
                        )
        peer.quit()
    return rows


def main(arguments=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="also other dims, groups and blocks, and the longest prompt")
    parser.add_argument("--cell", type=Cell.parse, action="append", help="HEADS/KV_HEADSxDIM:SEQUENCESxNEW[+CACHED]")
    parser.add_argument("--dtype", type=lambda text: text.split(","), default="float32,bfloat16", help="comma list")
    parser.add_argument("--threads", type=counts, default="1,2", help="comma list of numbers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.15, help="minimum time of prefill per round")
    names = {"type": lambda text: text.split(",")}
    parser.add_argument("--peer", **names, nargs="?", const="torch", help="compare with torch, vllm (comma list)")
    parser.add_argument("--arithmetic", **names, default="exact", help="comma list, with --peer and bfloat16")
    parser.add_argument("--peers", default="build/peers", metavar="DIR", help="folder of the environments")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to this file")
    options = parser.parse_args(arguments)
    machine = Machine()
    result = {"machine": cpu_name(), "date": time.strftime("%Y-%m-%d"), "cpu_info": pagepool.cpu_info()}
    if options.peer:
        result["peers"] = compare(options, machine)
    else:
        print(HEAD)
        result["rows"] = measure(cells_of(options), machine, options)
        info = pagepool.cpu_info()
        if not options.cell and info["isa"].startswith("avx512") and "avx2" in info["available"]:
            result["rows"] += measure_avx2(options)
        if any(row["disturbed"] for row in result["rows"]):
            print(f"neighbours disturbed some rounds {ATTEMPTS} times: the rows marked in --json are to be repeated")
    machine.close()
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
