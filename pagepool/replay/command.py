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
from pagepool.prefix.policies import POLICIES
from pagepool.replay.attend import Attention
from pagepool.replay.clock import CostModel
from pagepool.replay.driver import Replay
from pagepool.replay.geometry import GEOMETRIES
from pagepool.replay.meter import MeteredAccount
from pagepool.replay.prefix_pass import PassError, Prompts, cache_pass
from pagepool.replay.prefix_report import pass_results, print_passes
from pagepool.replay.progress import progress
from pagepool.replay.ptrace import Trace, read_trace
from pagepool.replay.report import print_table, results

__all__ = ["UsageError", "add_arguments", "bundled_trace", "run"]

# Just below what the bundled hour needs at its peaks, so that requests wait for blocks and some are preempted.
DEFAULT_BLOCKS = 3072
DEFAULT_BLOCK_SIZE = 16
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


def _several(parse: Any) -> Any:
    return lambda text: [parse(part) for part in text.split(",")]


def _policy(text: str) -> str:
    if text not in POLICIES:
        raise argparse.ArgumentTypeError(f"{text[:24]!r} is none of {', '.join(POLICIES)}")
    return text


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
    add(
        "--block-size",
        type=_between(1, 1024),
        metavar="N",
        help=f"tokens per block; default: {DEFAULT_BLOCK_SIZE}, or the trace's with --clock none",
    )
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
    add(
        "--clock",
        choices=("virtual", "none"),
        default="virtual",
        help="none: prompts through the prefix cache alone, in order, without time; for traces with prefix blocks",
    )
    add(
        "--policy",
        type=_several(_policy),
        metavar="NAME,...",
        help=f"of eviction, with --clock none: {', '.join(POLICIES)}; default: lru",
    )
    add(
        "--capacity",
        type=_several(_between(0, MAX_BLOCKS)),
        metavar="N,...",
        help="blocks of the prefix cache, with --clock none; default: unlimited",
    )
    add("--cache-partial", action="store_true", help="cache the last, partial block too, with --clock none")
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
    numbers, show = _passes(options) if options.clock == "none" else _replay(options)
    if options.json == "-":
        json.dump(numbers, sys.stdout, indent=2)
        print()
        return
    if options.json:
        Path(options.json).write_text(json.dumps(numbers, indent=2) + "\n")
    show(numbers)


def _replay(options: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Under the virtual clock: the results, and what prints them."""
    if options.policy or options.capacity or options.cache_partial:
        raise UsageError("--policy, --capacity and --cache-partial need --clock none")
    trace = read_trace(options.trace or bundled_trace(), options.requests)
    try:
        replay = _prepare(trace, options)
    except ValueError as error:
        raise UsageError(str(error)) from None
    with progress(len(trace)) as report:
        replay.run(report)
    return results(replay), print_table


def _passes(options: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Without a clock: a pass for each policy and capacity."""
    if options.attend or options.blocks is not None:
        raise UsageError("--attend and --blocks do not go with --clock none; --capacity bounds the prefix cache")
    trace = read_trace(options.trace or bundled_trace(), options.requests, prefixes=True)
    memory = importlib.import_module("pagepool.reference" if options.reference else "pagepool")
    try:
        prompts = Prompts(trace, options.block_size, options.cache_partial)
    except PassError as error:
        raise UsageError(f"{options.trace or bundled_trace()}: {error}") from None
    passes = [
        cache_pass(memory, prompts, policy, capacity)
        for policy in options.policy or ["lru"]
        for capacity in options.capacity or [None]
    ]
    return pass_results(prompts, passes), print_passes


def _check_writable(path: Path) -> None:
    """Raise now what would be raised after the whole replay."""
    target = path if path.exists() else path.parent
    if path.is_dir() or not os.access(target, os.W_OK):
        raise UsageError(f"{path}: cannot be written")


def _prepare(trace: Trace, options: argparse.Namespace) -> Replay:
    memory = importlib.import_module("pagepool.reference" if options.reference else "pagepool")
    size = options.block_size or DEFAULT_BLOCK_SIZE
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
