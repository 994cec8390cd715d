"""`pagepool replay`: from arguments to a finished replay."""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import os
import sys
from pathlib import Path

from pagepool.config import SchedulerConfig
from pagepool.replay.arrivals import Users
from pagepool.replay.attend import Attention
from pagepool.replay.driver import Replay
from pagepool.replay.geometry import GEOMETRIES
from pagepool.replay.meter import MeteredAccount, MeteredCache
from pagepool.replay.options import CLOCK_ORDERS, DEFAULT_BLOCK_SIZE, DEFAULT_BLOCKS, UsageError
from pagepool.replay.outcome import Outcome, bundled_trace
from pagepool.replay.page import page, write_page
from pagepool.replay.passes import run_passes
from pagepool.replay.picture import replay_picture
from pagepool.replay.plot import draw, load
from pagepool.replay.prefix_pass import BELADY
from pagepool.replay.progress import progress
from pagepool.replay.prompts import PassError
from pagepool.replay.ptrace import Trace, read_trace
from pagepool.replay.report import print_table, results
from pagepool.replay.timeline import Timeline
from pagepool.replay.trace_tokens import TraceTokens

__all__ = ["run"]

ATTEND_BYTES = 2 << 30
CLOCKLESS = ("compare", "capacity", "cache_partial", "hybrid", "state_budget")


def run(options: argparse.Namespace) -> None:
    """Read the trace, replay it, write the results. Raises `TraceError`, `UsageError`, `ReplayFailed`."""
    streamed = [f"--{name}" for name in ("json", "plot", "html") if getattr(options, name) == "-"]
    if len(streamed) > 1:
        raise UsageError(f"{' and '.join(streamed)} cannot both be standard output; name a file for one of them")
    for name in (options.json, options.plot, options.html):
        if name and name != "-":
            _check_writable(Path(name))
    if options.plot:
        _check_plot()
    outcome = run_passes(options) if options.clock == "none" else _replay(options)
    if not outcome.numbers["requests"]:
        print("pagepool: the trace has no requests", file=sys.stderr)
    if options.plot:
        draw(outcome.picture, sys.stdout.buffer if options.plot == "-" else options.plot)
    if options.html == "-":
        print(page(outcome.picture), end="")
    elif options.html:
        write_page(outcome.picture, options.html)
    if options.json == "-":
        json.dump(outcome.numbers, sys.stdout, indent=2)
        print()
    elif options.json:
        Path(options.json).write_text(json.dumps(outcome.numbers, indent=2) + "\n")
    if not streamed:
        outcome.show(outcome.numbers)


def _replay(options: argparse.Namespace) -> Outcome:
    """Under the virtual clock."""
    for option in CLOCKLESS:
        if getattr(options, option):
            raise UsageError(f"--{option.replace('_', '-')} needs --clock none")
    if options.policy and (len(options.policy) > 1 or BELADY in options.policy):
        raise UsageError("several policies, and belady, need --clock none")
    if options.order and options.order not in CLOCK_ORDERS:
        raise UsageError(f"--order {options.order} needs --clock none; with a clock: {', '.join(CLOCK_ORDERS)}")
    path = options.trace or bundled_trace()
    trace = read_trace(path, options.requests, prefixes=bool(options.policy))
    try:
        replay = _prepare(trace, options)
    except PassError as error:
        raise UsageError(f"{path}: {error}") from None
    except ValueError as error:
        raise UsageError(str(error)) from None
    with progress(len(trace)) as report:
        if not (options.plot or options.html):
            replay.run(report)
            return Outcome(results(replay, options.users), print_table, {})
        timeline = Timeline(replay.account.allocator.capacity)

        def both(replay: Replay) -> None:
            report(replay)
            timeline(replay)

        replay.run(both)
        timeline.end(replay)
    numbers = results(replay, options.users)
    return Outcome(numbers, print_table, replay_picture(numbers, timeline))


def _check_plot() -> None:
    try:
        load()
    except ImportError as error:
        raise UsageError(f"--plot needs matplotlib, which is not installed ({error}); --html needs nothing") from None


def _check_writable(path: Path) -> None:
    """Raise now what would be raised after the whole replay."""
    if path.is_dir():
        reason = errno.EISDIR
    elif not path.parent.exists():
        reason = errno.ENOENT
    elif not path.parent.is_dir():
        reason = errno.ENOTDIR
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = errno.EACCES
    else:
        return
    raise UsageError(f"{path}: cannot be written: {os.strerror(reason)}")


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
        policy=options.order or "fcfs",
    )
    attention = None
    if geometry is None:
        allocator = memory.BlockAllocator(blocks)
    else:
        pool = memory.KvCachePool.from_layout(geometry.layout(size, options.dtype), blocks)
        allocator = pool.allocator
        width = -(-longest // size)
        attention = Attention(memory, pool, geometry, options.max_batch, budget, width, options.threads)
    cache = MeteredCache(memory.PrefixCache(allocator, size, options.policy[0])) if options.policy else None
    tokens = TraceTokens(trace) if options.policy else None
    scheduler = None
    if options.reference:
        plain = importlib.import_module("pagepool.replay.plain")
        scheduler = plain.PlainScheduler(config, allocator, cache)
        account = plain.PlainAccount(scheduler)
    else:
        account = MeteredAccount(allocator, size, config.watermark)
    arrivals = Users(trace, options.users) if options.users else None
    return Replay(trace, config, account, options.cost, attention, arrivals, cache, tokens, scheduler)
