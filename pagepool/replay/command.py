"""`pagepool replay`: from arguments to a finished replay."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from pagepool.config import SchedulerConfig
from pagepool.replay.attend import Attention
from pagepool.replay.driver import Replay
from pagepool.replay.geometry import GEOMETRIES
from pagepool.replay.hybrid_pass import StateOptions, hybrid_pass
from pagepool.replay.hybrid_report import hybrid_results, print_hybrid
from pagepool.replay.meter import MeteredAccount
from pagepool.replay.options import DEFAULT_BLOCK_SIZE, DEFAULT_BLOCKS, UsageError
from pagepool.replay.order import in_order
from pagepool.replay.prefix_pass import cache_passes
from pagepool.replay.prefix_report import pass_results, print_comparison, print_passes
from pagepool.replay.progress import progress
from pagepool.replay.prompts import PassError, Prompts
from pagepool.replay.ptrace import Trace, read_trace
from pagepool.replay.report import print_table, results

__all__ = ["bundled_trace", "run"]

ATTEND_BYTES = 2 << 30
CLOCKLESS = ("policy", "compare", "capacity", "cache_partial", "users", "order", "hybrid", "state_budget")


def bundled_trace() -> Path:
    """The trace that comes with the package: the first 2,000 requests of azure2023_conv."""
    return Path(__file__).parent.parent / "data" / "azure2023_conv_head.ptrace.xz"


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
    for option in CLOCKLESS:
        if getattr(options, option):
            raise UsageError(f"--{option.replace('_', '-')} needs --clock none")
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
    if options.state_budget and not options.hybrid:
        raise UsageError("--state-budget needs --hybrid")
    if options.cache_partial and options.hybrid:
        raise UsageError("--cache-partial does not go with --hybrid, which uses full blocks")
    if options.compare and options.policy:
        raise UsageError("--policy and --compare both name policies; give one of them")
    path = options.trace or bundled_trace()
    trace = read_trace(path, options.requests, prefixes=True)
    memory = importlib.import_module("pagepool.reference" if options.reference else "pagepool")
    order = options.order or ("turns" if options.users else "arrival")
    try:
        prompts = Prompts(
            trace, options.block_size, options.cache_partial, in_order(trace, order, options.users, options.seed)
        )
    except PassError as error:
        raise UsageError(f"{path}: {error}") from None
    except ValueError as error:
        raise UsageError(str(error)) from None
    capacities = options.capacity or (_steps(prompts.most_ids) if options.compare else [None])
    policies = options.compare or options.policy or ["lru"]
    about = {"order": order, "users": options.users}
    if options.hybrid:
        states = StateOptions(options.hybrid, options.state_budget, options.state_grid)
        return hybrid_results(
            prompts,
            [hybrid_pass(memory, prompts, policy, capacity, states) for policy in policies for capacity in capacities],
            states,
            about,
        ), print_hybrid
    passes = cache_passes(memory, prompts, policies, capacities, sweep=not options.reference)
    return pass_results(prompts, passes, about), print_comparison if options.compare else print_passes


def _steps(blocks: int) -> list[int]:
    """Eight capacities up to all of the blocks, each twice the one before."""
    return sorted({max(1, blocks >> shift) for shift in range(8)})


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
