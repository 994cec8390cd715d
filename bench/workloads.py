"""Each workload for pagepool, the reference and NumPy, used by the benchmarks, figures.py and compare.py."""

import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from prefix import serve

import pagepool
from pagepool import KvLayout, Scheduler, SchedulerConfig, reference
from pagepool.cli import main
from pagepool.memory import batch
from pagepool.memory.generations import BlockGenerations

BLOCKS = 16_384
SEQS = 256


@dataclass
class Work:
    """`run()` does `ops` operations. It may return the seconds that count, as a float."""

    run: Callable[[], Any]
    ops: int


@cache
def nogil():
    """Compile nogil.pyx in a temporary folder, as a foreign package would, and import it."""
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension

    root = Path(pagepool.__file__).parent.parent
    with tempfile.TemporaryDirectory(prefix="pagepool-bench-") as folder:
        source = shutil.copy(Path(__file__).parent / "nogil.pyx", folder)
        extension = Extension(
            "nogil", [source], include_dirs=[pagepool.get_include()], extra_compile_args=["-O3", "-w"]
        )
        modules = cythonize([extension], include_path=[str(root)], language_level=3, build_dir=folder, quiet=True)
        command = Distribution({"ext_modules": modules}).get_command_obj("build_ext")
        command.build_lib = command.build_temp = folder
        command.ensure_finalized()
        command.run()
        spec = importlib.util.spec_from_file_location("nogil", command.get_ext_fullpath("nogil"))
        module = importlib.util.module_from_spec(spec)
        sys.modules["nogil"] = module
        spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------------------------------------- numpy


class NumpyAllocator:
    """NumPy allocator: an array as stack of free ids, an array of reference counts; bulk operations are slices."""

    def __init__(self, num_blocks):
        self.stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.refs = np.zeros(num_blocks, np.int32)
        self.top = num_blocks

    def allocate(self):
        return self.allocate_n(1)[0]

    def allocate_n(self, n):
        if n > self.top:
            raise MemoryError(f"requested {n} blocks, {self.top} are free")
        self.top -= n
        blocks = self.stack[self.top : self.top + n][::-1].copy()
        self.refs[blocks] = 1
        return blocks

    def free(self, blocks):
        blocks = np.atleast_1d(blocks)
        if (self.refs[blocks] < 1).any():
            raise ValueError("a block is not allocated")
        self.refs[blocks] -= 1
        freed = blocks[self.refs[blocks] == 0]
        self.stack[self.top : self.top + len(freed)] = freed
        self.top += len(freed)


class NumpyPages:
    """K and V of one layer as arrays (slots, num_kv_heads, head_dim), in float32: numpy has no fast bfloat16."""

    def __init__(self, layout, num_blocks):
        shape = (num_blocks * layout.block_size, layout.num_kv_heads, layout.head_dim)
        self.k, self.v = np.zeros(shape, np.float32), np.zeros(shape, np.float32)

    def append(self, slots, k, v):
        self.k[slots], self.v[slots] = k, v

    def decode(self, q, block_tables, seq_lens, block_size):
        """Gather each sequence, then compute two matmuls and a softmax for all of its heads."""
        out = np.empty_like(q)
        scale = np.float32(1 / np.sqrt(q.shape[2]))
        for row, length in enumerate(seq_lens):
            tokens = np.arange(length)
            slots = block_tables[row, tokens // block_size] * block_size + tokens % block_size
            k, v = self.k[slots].transpose(1, 2, 0), self.v[slots].transpose(1, 0, 2)
            scores = np.matmul(q[row].reshape(k.shape[0], -1, q.shape[2]), k) * scale
            weights = np.exp(scores - scores.max(axis=2, keepdims=True))
            weights /= weights.sum(axis=2, keepdims=True)
            out[row] = np.matmul(weights, v).reshape(q.shape[1:])
        return out


# ---------------------------------------------------------------------------------------------------- allocator


def allocator_of(side, generations=False):
    make = {"ours": pagepool.BlockAllocator, "reference": reference.BlockAllocator, "numpy": NumpyAllocator}[side]
    allocator = make(BLOCKS)
    allocator.free(allocator.allocate_n(BLOCKS // 2))  # no longer fresh
    if generations:
        BlockGenerations(allocator)  # the allocator maintains generation words from now on
    return allocator


def allocator_pair(side, rounds=2_000):
    """allocate() and free() of one block, from Python."""
    allocator = allocator_of(side)
    allocate, free = allocator.allocate, allocator.free

    def run():
        for _ in range(rounds):
            free(allocate())

    return Work(run, rounds)


def allocator_bulk(side, rounds=50):
    """allocate_n(64) and free() of the 64, from Python; an operation is one block."""
    allocator = allocator_of(side)
    allocate_n, free = allocator.allocate_n, allocator.free

    def run():
        for _ in range(rounds):
            free(allocate_n(64))

    return Work(run, rounds * 64)


def nogil_pair(rounds=100_000, generations=False):
    """allocate() and free() of one block without the GIL, from a foreign Cython module."""
    allocator, loop = allocator_of("ours", generations), nogil().pairs

    def run():
        if loop(allocator, rounds):
            raise RuntimeError("an operation failed")

    return Work(run, rounds)


def nogil_bulk(rounds=5_000, generations=False):
    """64 blocks without the GIL, from a foreign Cython module; an operation is one block."""
    allocator, loop = allocator_of("ours", generations), nogil().bulk

    def run():
        if loop(allocator, rounds):
            raise RuntimeError("an operation failed")

    return Work(run, rounds * 64)


# ---------------------------------------------------------------------------------------------------- tables


def states_of(side, length):
    """`SEQS` sequences of `length` tokens."""
    api = reference if side == "reference" else pagepool
    allocator = api.BlockAllocator(BLOCKS)
    states = [api.PagedSeqState(allocator, 16, BLOCKS // SEQS) for _ in range(SEQS)]
    for state in states:
        state.append(length)
    return api, states


def table_ensure(side):
    """ensure_capacity(512) and release of one sequence after another: 32 blocks each; an operation is one block."""
    _, states = states_of(side, 0)

    def run():
        for state in states:
            state.ensure_capacity(512)
            state.release()

    return Work(run, SEQS * 32)


def table_append(side, tokens=32):
    """append() token by token, then truncate; an operation is one token."""
    _, states = states_of(side, 100)

    def run():
        for state in states:
            append = state.append
            for _ in range(tokens):
                append()
            state.truncate(100)

    return Work(run, SEQS * tokens)


def table_append_batch(side, steps=32):
    """append_batch of one token for each of 256 sequences, then truncate; an operation is one token."""
    _, states = states_of(side, 100)
    append_batch = (reference if side == "reference" else batch).append_batch
    ones = [1] * SEQS

    def run():
        for _ in range(steps):
            append_batch(states, ones)
        for state in states:
            state.truncate(100)

    return Work(run, SEQS * steps)


def table_fill(side, rounds=8):
    """BlockTables.fill of 256 sequences of 500 tokens; an operation is one sequence."""
    api, states = states_of(side, 500)
    if side == "numpy":
        return Work(lambda: [numpy_fill(states) for _ in range(rounds)], SEQS * rounds)
    tables = api.BlockTables(SEQS, BLOCKS // SEQS)
    return Work(lambda: [tables.fill(states) for _ in range(rounds)], SEQS * rounds)


def numpy_fill(states):
    """Build rows, lengths and slots from Python lists of blocks, as a plain engine does."""
    lens = np.array([state.len for state in states], np.int32)
    tables = np.zeros((len(states), BLOCKS // SEQS), np.int32)
    for row, state in enumerate(states):
        blocks = state.blocks
        tables[row, : len(blocks)] = blocks
    last = lens - 1
    slots = tables[np.arange(len(states)), last // 16].astype(np.int64) * 16 + last % 16
    return tables, lens, slots, np.arange(len(states) + 1, dtype=np.int32)


# ---------------------------------------------------------------------------------------------------- pages


def append_kv(side, dtype="bfloat16", prefill=True):
    """KvCachePool.append of float32 K and V with 8 heads of 128; an operation is one token.

    A prefill appends 1,024 consecutive tokens in shuffled blocks. A decode step appends one token to each of 256
    sequences. K is token-minor, so a decode step writes every element of K to a different cache line.
    """
    layout = KvLayout(1, 8, 128, dtype=dtype)
    blocks = np.random.default_rng(0).permutation(256).astype(np.int64)
    first = blocks * 16
    slots = (first[:64, None] + np.arange(16)).ravel() if prefill else first + blocks % 16
    if side == "reference":
        slots = slots[:4].copy()
    k, v = np.random.default_rng(1).standard_normal((2, len(slots), 8, 128), np.float32)
    if side == "numpy":
        pages = NumpyPages(layout, 256)
        return Work(lambda: pages.append(slots, k, v), len(slots))
    pool = (reference if side == "reference" else pagepool).KvCachePool.from_layout(layout, 256)
    return Work(lambda: pool.append(0, slots, k, v), len(slots))


def decode_step(side, dtype="bfloat16", num_seqs=8, length=512):
    """decode of 8 x 512 tokens, 14/2 heads of 64, one thread; an operation is a token and query head."""
    layout = KvLayout(1, 2, 64, dtype=dtype)
    rng = np.random.default_rng(0)
    width = length // layout.block_size
    tables = rng.permutation(num_seqs * width).astype(np.int32).reshape(num_seqs, width)
    seq_lens = np.full(num_seqs, length, np.int32)
    slots = np.arange(num_seqs * length, dtype=np.int64)
    k, v = rng.standard_normal((2, len(slots), 2, 64), np.float32)
    q = rng.standard_normal((num_seqs, 14, 64), np.float32)
    ops = num_seqs * length * 14
    if side == "numpy":
        pages = NumpyPages(layout, num_seqs * width)
        pages.append(slots, k, v)
        return Work(lambda: pages.decode(q, tables, seq_lens, layout.block_size), ops)
    pool = pagepool.KvCachePool.from_layout(layout, num_seqs * width)
    pool.append(0, slots, k, v)
    if side == "reference":
        return Work(lambda: reference.decode(q, pool, 0, tables, seq_lens), ops)
    out = np.empty_like(q)
    return Work(lambda: pagepool.decode(q, pool, 0, tables, seq_lens, out=out, num_threads=1), ops)


def small_decode(python, layers=64, calls=64):
    """decode of 1 x 512 tokens, 32/4 heads of 64, one thread, layer by layer; an operation is a call.

    It runs from Python, and from a foreign Cython module without the GIL. The difference is Python's cost per call.
    """
    rng = np.random.default_rng(0)
    pool = pagepool.KvCachePool.from_layout(KvLayout(layers, 4, 64), 32)
    k, v = rng.standard_normal((2, 512, 4, 64), np.float32)
    for layer in range(layers):
        pool.append(layer, np.arange(512), k, v)
    tables, lens = rng.permutation(32).astype(np.int32)[None], np.array([512], np.int32)
    q = rng.standard_normal((1, 32, 64), np.float32)
    out = np.empty_like(q)

    def run():
        for layer in range(calls):
            pagepool.decode(q, pool, layer % layers, tables, lens, out=out, num_threads=1)

    if python:
        return Work(run, calls)
    loop = nogil().decode
    return Work(lambda: loop(pool, q, tables, lens, out, calls), calls)


# ---------------------------------------------------------------------------------------------------- scheduler


def scheduler_step(waiting, running=SEQS, steps=8):
    """schedule + commit with 256 running and `waiting` waiting sequences; an operation is one sequence in one step.

    During the measurement no sequence finishes and none is admitted.
    """
    config = SchedulerConfig(max_sequences=running, max_batch_sequences=running, max_batch_tokens=2 * running)
    scheduler = Scheduler(config, pagepool.BlockAllocator(1_000_000))
    for _ in range(running + waiting):
        scheduler.add_request([1, 2, 3, 4], max_tokens=1_000_000)
    tokens = [7] * running
    while True:
        step = scheduler.schedule()
        scheduler.commit(step, [7] * len(step.seq_ids))
        if len(step.seq_ids) == running and not any(step.is_prefill):
            break

    def run():
        for _ in range(steps):
            scheduler.commit(scheduler.schedule(), tokens)

    return Work(run, running * steps)


# ---------------------------------------------------------------------------------------------------- prefix cache


def agent_prompts(agents=8, turns=20):
    """Return rows of block ids: agents in turn, with 100 shared blocks; contexts grow from 900 by 20 blocks a turn."""
    ids = iter(range(10**9))

    def new(blocks):
        return list(islice(ids, blocks))

    shared = new(100)
    contexts = [shared + new(800 + 25 * agent) for agent in range(agents)]
    for _ in range(turns):
        for context in contexts:
            context += new(20)
            yield np.array(context, np.int32)


def prefix_cache(policy, capacity=5_859, block_size=64):
    """Prompts of agents through a prefix cache with room for about half of their contexts, as in bench/prefix.py.

    An operation is a block, found or inserted, including the eviction that it causes. LRU finds only the shared blocks.
    """
    prompts = [(row, 0) for row in agent_prompts()]
    total = sum(len(row) for row, _ in prompts)
    return Work(lambda: serve(pagepool, prompts, block_size, capacity, policy).all / 1e9, total)


# ---------------------------------------------------------------------------------------------------- whole program


def replay(requests=1_000):
    """`pagepool replay` of the bundled trace, without the start of Python; an operation is the replay."""

    def run():
        with tempfile.TemporaryDirectory() as folder:
            numbers = Path(folder) / "numbers.json"
            with redirect_stdout(io.StringIO()):
                if main(["replay", "--requests", str(requests), "--json", str(numbers)]):
                    raise RuntimeError("the replay failed")
            return float(json.loads(numbers.read_text())["wall_s"])

    return Work(run, 1)


def import_ratio(pairs=5):
    """Time of `import pagepool` divided by the time of `import numpy`, each in fresh interpreters, in alternation.

    The first run of each does not count: it may have to compile the Python sources.
    """

    def seconds(module):
        program = f"import time; begin = time.perf_counter(); import {module}; print(time.perf_counter() - begin)"
        return float(
            subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, env=environment).stdout
        )

    environment = {**os.environ, "PYTHONPATH": str(Path(pagepool.__file__).parents[1])}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for module in ("pagepool", "numpy"):
        seconds(module)
    return Work(lambda: median(seconds("pagepool") / seconds("numpy") for _ in range(pairs)), 1)
