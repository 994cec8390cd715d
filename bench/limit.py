"""The streaming limit of this machine, in turn with `decode`, in one process.

    python bench/limit.py [--shape S1,S2] [--dtype bfloat16,float32] [--threads 1,2] [--rounds 7] [--json FILE]

Per shape, dtype and number of threads, rounds of (stream, decode) alternate; a round's stream is the best of three
prefetch distances, its decode the median of its calls. Printed are the medians over the rounds and the share of the
limit, which is the median of the rounds' shares. Both sides read the same number of cold bytes: the stream rotates over
copies of its buffer and decode over layers of its pool, enough to pass every cache that belongs to one core. The
workers of `decode` sleep while the stream runs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the checkout, where no pagepool is installed

from shapes import ITEM_BYTES, SHAPES

import pagepool

HERE = Path(__file__).resolve().parent

BLOCK_SIZE = 16
AHEAD = (0, 2048, 8192)  # prefetch distances of the stream, in bytes


class Stream:
    """bench/stream.c, built for this machine."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "libstream.so"
            flags = ["-O3", "-march=native", "-shared", "-fPIC", "-pthread"]
            subprocess.run(["gcc", *flags, str(HERE / "stream.c"), "-o", str(library)], check=True)
            self.lib = ctypes.CDLL(str(library))
        self.lib.stream_buffer.restype = ctypes.c_void_p
        self.lib.stream_buffer.argtypes = [ctypes.c_size_t]
        self.lib.stream_free.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.lib.stream_run.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_void_p,
        ]

    def allocate(self, num_bytes: int) -> int:
        buffer = self.lib.stream_buffer(num_bytes)
        if not buffer:
            raise MemoryError(f"no memory for a stream of {num_bytes} bytes")
        return int(buffer)

    def free(self, buffer: int, num_bytes: int) -> None:
        self.lib.stream_free(buffer, num_bytes)

    def seconds(self, buffer: int, num_bytes: int, copies: int, threads: int, calls: int) -> float:
        """The median call at the best prefetch distance."""
        results = []
        for ahead in AHEAD:
            times = (ctypes.c_double * calls)()
            if self.lib.stream_run(buffer, num_bytes, copies, threads, ahead, calls, times):
                raise RuntimeError("the stream could not start its threads")
            results.append(median(times))
        return min(results)


class Decode:
    """`decode` over shuffled blocks; the copies are layers of one pool, as in a model."""

    def __init__(self, shape: str, dtype: str, copies: int) -> None:
        num_qo_heads, num_kv_heads, head_dim, num_seqs, context = SHAPES[shape]
        rng = np.random.default_rng(1)
        layout = pagepool.KvLayout(copies, num_kv_heads, head_dim, BLOCK_SIZE, dtype)
        num_blocks = num_seqs * math.ceil(context / BLOCK_SIZE)
        self.pool = pagepool.KvCachePool.from_layout(layout, num_blocks)
        self.tables = rng.permutation(num_blocks).astype(np.int32).reshape(num_seqs, -1)
        self.lens = np.full(num_seqs, context, np.int32)
        self.q = rng.standard_normal((num_seqs, num_qo_heads, head_dim), np.float32)
        self.out = np.empty_like(self.q)
        self.copies = copies
        rows = rng.standard_normal((context, num_kv_heads, head_dim), np.float32)
        for row in self.tables:
            slots = (row.astype(np.int64)[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1)[:context]
            for layer in range(copies):
                self.pool.append(layer, slots, rows, rows[::-1].copy())

    def seconds(self, threads: int, calls: int) -> float:
        """The median call; one more before, not counted, wakes the workers."""
        times = []
        for call in range(calls + 1):
            begin = time.perf_counter()
            self.run(call % self.copies, threads)
            times.append(time.perf_counter() - begin)
        return median(times[1:])

    def run(self, layer: int, threads: int) -> None:
        pagepool.decode(self.q, self.pool, layer, self.tables, self.lens, out=self.out, num_threads=threads)


def kv_bytes(shape: str, dtype: str) -> int:
    _, num_kv_heads, head_dim, num_seqs, context = SHAPES[shape]
    return 2 * num_seqs * context * num_kv_heads * head_dim * ITEM_BYTES[dtype]


def measure(stream: Stream, shape: str, dtype: str, threads: list[int], rounds: int, cold: float) -> list[dict]:
    num_bytes = kv_bytes(shape, dtype)
    copies = max(1, min(256, math.ceil(cold / num_bytes)))
    calls = max(3, math.ceil(60e-3 / (num_bytes / 20e9)))
    decode = Decode(shape, dtype, copies)
    buffer = stream.allocate(num_bytes * copies)
    rows = []
    try:
        for count in threads:
            pairs = []
            for _ in range(rounds):
                time.sleep(0.002)  # 40 times what an idle worker spins
                limit = stream.seconds(buffer, num_bytes, copies, count, calls)
                pairs.append((limit, decode.seconds(count, calls)))
            rows.append(
                {
                    "shape": shape,
                    "dtype": dtype,
                    "threads": count,
                    "limit_ms": 1e3 * median(limit for limit, _ in pairs),
                    "decode_ms": 1e3 * median(ours for _, ours in pairs),
                    "limit_gb_per_s": num_bytes / median(limit for limit, _ in pairs) / 1e9,
                    "share": median(limit / ours for limit, ours in pairs),
                    "isa": pagepool.cpu_info()["isa"],
                }
            )
    finally:
        stream.free(buffer, num_bytes * copies)
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="S1", help="comma list of " + ", ".join(SHAPES))
    parser.add_argument("--dtype", default="bfloat16,float32", help="comma list of " + ", ".join(ITEM_BYTES))
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cold", type=float, default=600e6, help="bytes to rotate over")
    parser.add_argument("--json", help="also write the rows to this file")
    options = parser.parse_args(arguments)
    stream = Stream()
    results = []
    print("shape dtype     threads  limit ms   GB/s  decode ms  share of the limit")
    for shape in options.shape.split(","):
        for dtype in options.dtype.split(","):
            counts = [int(count) for count in options.threads.split(",")]
            for row in measure(stream, shape, dtype, counts, options.rounds, options.cold):
                results.append(row)
                print(
                    f"{row['shape']:5} {row['dtype']:9} {row['threads']:7}  {row['limit_ms']:8.3f} "
                    f"{row['limit_gb_per_s']:6.1f}  {row['decode_ms']:9.3f}  {row['share']:.2f}",
                    flush=True,
                )
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
