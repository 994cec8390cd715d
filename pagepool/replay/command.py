"""`pagepool replay`: from arguments to a finished replay."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from pagepool.config import SchedulerConfig
from pagepool.replay.arrivals import Users
from pagepool.replay.attend import Attention
from pagepool.replay.driver import Replay
from pagepool.replay.files import STDOUT, check_writable, written_to
from pagepool.replay.geometry import GEOMETRIES
from pagepool.replay.meter import MeteredAccount, MeteredCache
from pagepool.replay.options import CLOCK_ORDERS, DEFAULT_BLOCK_SIZE, DEFAULT_BLOCKS, UsageError
from pagepool.replay.outcome import Outcome, bundled_trace
from pagepool.replay.page import page
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
    files = {name: getattr(options, name) for name in ("json", "plot", "html") if getattr(options, name)}
    streamed = [f"--{name}" for name, file in files.items() if file == STDOUT]
    if len(streamed) > 1:
        raise UsageError(f"{' and '.join(streamed)} cannot both be standard output; name a file for one of them")
    for file in files.values():
        check_writable(file)
    if options.plot:
        _check_plot()
    outcome = run_passes(options) if options.clock == "none" else _replay(options)
    if not outcome.numbers["requests"]:
        print("pagepool: the trace has no requests", file=sys.stderr)
    for name, file in files.items():
        with written_to(file):
            _write(name, outcome, file)
    if not streamed:
        with written_to(STDOUT):
            outcome.show(outcome.numbers)


def _write(name: str, outcome: Outcome, file: str) -> None:
    """One of the results, by the name of its option, to a file or to standard output."""
    if name == "plot":
        draw(outcome.picture, sys.stdout.buffer if file == STDOUT else file)
        return
    text = page(outcome.picture) if name == "html" else json.dumps(outcome.numbers, indent=2) + "\n"
    if file == STDOUT and hasattr(sys.stdout, "buffer"):
        sys.stdout.buffer.write(text.encode())  # what the page names itself, whatever a terminal speaks
    elif file == STDOUT:
        sys.stdout.write(text)  # a caller's io.StringIO
    else:
        Path(file).write_text(text, encoding="utf-8")


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
