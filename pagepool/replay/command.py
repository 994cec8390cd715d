"""`pagepool replay`: from arguments to a finished replay."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from pagepool.config import KV_DTYPES, SchedulerConfig
from pagepool.replay.attend import Attention
from pagepool.replay.clock import CostModel
from pagepool.replay.driver import Replay
from pagepool.replay.geometry import GEOMETRIES
from pagepool.replay.meter import MeteredAccount
from pagepool.replay.progress import progress
from pagepool.replay.ptrace import Trace, read_trace
from pagepool.replay.report import print_table, results

__all__ = ["UsageError", "add_arguments", "bundled_trace", "run"]

# Just below what the bundled hour needs at its peaks, so that requests wait for blocks and some are preempted.
DEFAULT_BLOCKS = 3072
ATTEND_BYTES = 2 << 30
MAX_BLOCKS = 2**31 - 1
MAX_BATCH = 65_536
MAX_BUDGET = 1 << 24


class UsageError(ValueError):
    """The arguments do not go together, or name a file that cannot be written."""


def bundled_trace() -> Path:
    """The trace that comes with the package: the first 2,000 requests of azure2023_conv."""
    return Path(__file__).parent.parent / "data" / "azure2023_conv_head.ptrace.xz"


def _between(low: int, high: int) -> Any:
    def parse(text: str) -> int:
        try:
            value = int(text) if len(text) <= 20 else high + 1
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be from {low} to {high}, not {text[:24]}")
        return value

    return parse


def _cost(text: str) -> CostModel:
    try:
        return CostModel.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `pagepool replay`."""
    add = parser.add_argument
    add(
        "trace", nargs="?", metavar="TRACE", help="a ptrace-1 file, .xz or plain; default: the bundled slice of Azure's"
    )
    add("--requests", type=_between(0, MAX_BLOCKS), metavar="N", help="replay only the first N requests")
    add(
        "--blocks",
        type=_between(0, MAX_BLOCKS),
        metavar="N",
        help=f"blocks of the pool; default: {DEFAULT_BLOCKS}, or as many as the longest request needs; with --attend "
        "at most as many as 2 GiB hold",
    )
    add("--block-size", type=_between(1, 1024), default=16, metavar="N", help="tokens per block; default: 16")
    add("--budget", type=_between(1, MAX_BUDGET), default=512, metavar="N", help="tokens of a step; default: 512")
    add("--max-batch", type=_between(1, MAX_BATCH), default=256, metavar="N", help="sequences at a time; default: 256")
    add(
        "--schedule",
        choices=("chunked", "prefill-first"),
        default="chunked",
        help="chunked: prompts share steps with decodes (default); prefill-first: while a prompt waits, steps hold "
        "whole prompts only, and the budget is at least the longest of them",
    )
    add(
        "--cost",
        type=_cost,
        default=CostModel(),
        metavar="STEP,PREFILL,DECODE",
        help="virtual microseconds per step, per prefill token, per decode token; default: 10000,60,150",
    )
    add(
        "--attend",
        choices=sorted(GEOMETRIES),
        metavar="GEOMETRY",
        help=f"store K/V and attend: {', '.join(GEOMETRIES)}",
    )
    add("--dtype", choices=tuple(KV_DTYPES), default="bfloat16", help="of the pages, with --attend; default: bfloat16")
    add("--threads", type=_between(1, 1024), metavar="N", help="threads of decode, with --attend; default: all cores")
    add("--reference", action="store_true", help="use the pure-Python memory instead, to compare")
    parser.epilog = (
        "Counts and virtual times are the same in every run. ns_per_block_op is the wall time of taking and giving "
        "back blocks, the filling of block tables and appends into the last block included, over blocks taken and "
        "given back; sched_us_per_step is that of a whole schedule and commit, block operations included."
    )
    add("--json", metavar="FILE", help="write the results to FILE as JSON; - is standard output, without the table")


def run(options: argparse.Namespace) -> None:
    """Read the trace, replay it, write the results. Raises `TraceError`, `UsageError`, `ReplayFailed`."""
    if options.json and options.json != "-":
        _check_writable(Path(options.json))
    trace = read_trace(options.trace or bundled_trace(), options.requests)
    try:
        replay = _prepare(trace, options)
    except ValueError as error:
        raise UsageError(str(error)) from None
    with progress(len(trace)) as report:
        replay.run(report)
    numbers = results(replay)
    if options.json == "-":
        json.dump(numbers, sys.stdout, indent=2)
        print()
        return
    if options.json:
        Path(options.json).write_text(json.dumps(numbers, indent=2) + "\n")
    print_table(numbers)


def _check_writable(path: Path) -> None:
    """Raise now what would be raised after the whole replay."""
    target = path if path.exists() else path.parent
    if path.is_dir() or not os.access(target, os.W_OK):
        raise UsageError(f"{path}: cannot be written")


def _prepare(trace: Trace, options: argparse.Namespace) -> Replay:
    memory = importlib.import_module("pagepool.reference" if options.reference else "pagepool")
    size = options.block_size
    longest = trace.longest() + 1  # a request for no output still makes one
    geometry = GEOMETRIES[options.attend] if options.attend else None
    blocks = options.blocks
    if blocks is None:
        blocks = max(DEFAULT_BLOCKS, -(-longest // size))
        if geometry is not None:
            blocks = min(blocks, ATTEND_BYTES // geometry.layout(size, options.dtype).block_bytes)
    longest = min(longest, blocks * size)  # of those that are not refused
    budget = options.budget if options.schedule == "chunked" else max(options.budget, longest)
    config = SchedulerConfig(
        max_sequences=options.max_batch,
        max_batch_sequences=options.max_batch,
        max_batch_tokens=budget,
        max_prefill_tokens=budget,
        max_prefill_backlog=budget,
        block_size=size,
        schedule=options.schedule,
    )
    attention = None
    if geometry is None:
        allocator = memory.BlockAllocator(blocks)
    else:
        pool = memory.KvCachePool.from_layout(geometry.layout(size, options.dtype), blocks)
        allocator = pool.allocator
        width = -(-longest // size)
        attention = Attention(memory, pool, geometry, options.max_batch, budget, width, options.threads)
    return Replay(trace, config, MeteredAccount(allocator, size, config.watermark), options.cost, attention)
