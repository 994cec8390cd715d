"""`pagepool replay`: replay a trace with the virtual clock, or through the prefix cache alone."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pagepool.cli import tables
from pagepool.cli.output import STDOUT, check_writable, written_to
from pagepool.cli.progress import Progress
from pagepool.cli.replay_options import DEFAULT_BLOCK_SIZE, DEFAULT_BLOCKS
from pagepool.cli.usage import UsageError
from pagepool.config import SchedulerConfig
from pagepool.replay import picture, report
from pagepool.replay.attend import GEOMETRIES, Attention
from pagepool.replay.clock import OpenLoop, Users
from pagepool.replay.cluster import Cluster, ClusterOptions, Link
from pagepool.replay.driver import MeteredBlockManager, MeteredCache, Replay
from pagepool.replay.passes import StateOptions, cache_pass, hybrid_pass
from pagepool.replay.prompts import PassError, Prompts, TraceTokens
from pagepool.replay.ptrace import Trace, read_trace

__all__ = ["Outcome", "bundled_trace", "run"]

ATTEND_BYTES = 2 << 30
NEEDS_NO_CLOCK = ("capacity", "hybrid")
NEEDS_CLOCK = ("attend", "blocks", "users", "html")
NEEDS_WORKERS = ("route", "staleness", "link")
NOT_WITH_WORKERS = ("attend", "reference", "html")


@dataclass(frozen=True)
class Outcome:
    """Results of a replay: numbers for JSON, the function that prints them, and the picture for --html."""

    numbers: dict[str, Any]
    show: Callable[[dict[str, Any]], None]
    picture: dict[str, Any] | None = None


def bundled_trace() -> Path:
    """Return the path of the trace in the package: the first 2,000 requests of azure2023_conv."""
    return Path(__file__).parent.parent / "data" / "azure2023_conv_head.ptrace.xz"


def run(options: argparse.Namespace) -> None:
    """Read the trace, replay it, write the results. Raises `TraceError`, `UsageError`, `ReplayFailed`, `PoolError`."""
    files = {name: getattr(options, name) for name in ("json", "html") if getattr(options, name)}
    streamed = [f"--{name}" for name, file in files.items() if file == STDOUT]
    if len(streamed) > 1:
        raise UsageError(f"{' and '.join(streamed)} cannot both be standard output: give a file for one of them")
    for file in files.values():
        check_writable(file)
    _check_workers(options)
    if options.workers:
        outcome = _run_workers(options)
    else:
        outcome = _run_passes(options) if options.clock == "none" else _run_replay(options)
    if not outcome.numbers["requests"]:
        print("pagepool: the trace has no requests", file=sys.stderr)
    for name, file in files.items():
        with written_to(file):
            _write(name, outcome, file)
    if not streamed:
        with written_to(STDOUT):
            outcome.show(outcome.numbers)


def _write(name: str, outcome: Outcome, file: str) -> None:
    """Write the result of an option (`json` or `html`) to a file or to standard output."""
    text = picture.page(outcome.picture or {}) if name == "html" else json.dumps(outcome.numbers, indent=2) + "\n"
    if file == STDOUT and hasattr(sys.stdout, "buffer"):
        sys.stdout.buffer.write(text.encode())  # always UTF-8, as the page declares
    elif file == STDOUT:
        sys.stdout.write(text)  # a caller's io.StringIO
    else:
        Path(file).write_text(text, encoding="utf-8")


@contextmanager
def _as_usage_errors(path: str | Path) -> Iterator[None]:
    """Turn a `ValueError` into a `UsageError`. The message names the trace if the trace is wrong."""
    try:
        yield
    except PassError as error:
        raise UsageError(f"{path}: {error}") from None
    except ValueError as error:
        raise UsageError(str(error)) from None


def _check_workers(options: argparse.Namespace) -> None:
    """Raise `UsageError` for options that need `--workers`, and for options that cannot be used with it."""
    if options.workers and options.clock == "none":
        raise UsageError("--workers needs the virtual clock")
    for option in NOT_WITH_WORKERS if options.workers else NEEDS_WORKERS:
        value = getattr(options, option)
        if value is not None and value is not False:  # 0 counts as given
            needs = "cannot be used with" if options.workers else "needs"
            raise UsageError(f"--{option.replace('_', '-')} {needs} --workers")


def _check_clock(options: argparse.Namespace) -> None:
    """Raise `UsageError` for options that cannot be used with the virtual clock."""
    for option in NEEDS_NO_CLOCK:
        if getattr(options, option):
            raise UsageError(f"--{option.replace('_', '-')} needs --clock none")
    if options.policy and len(options.policy) > 1:
        raise UsageError("--policy with several policies needs --clock none")


def _run_workers(options: argparse.Namespace) -> Outcome:
    """Replay with several workers and the virtual clock, once for each route."""
    _check_clock(options)
    path = options.trace or bundled_trace()
    trace = read_trace(path, options.requests, prefixes=True)
    if not trace.block:
        raise UsageError(f"{path}: the trace has no prefix blocks, which --workers needs")
    blocks = _num_blocks(trace, options)
    link = Link(*options.link) if options.link else None
    policy = options.policy[0] if options.policy else "gittins"
    routes = options.route or ["cost"]
    clusters: list[Cluster] = []
    progress = Progress(len(trace) * len(routes))

    def show(cluster: Cluster) -> None:
        progress.update(len(trace) * len(clusters) + cluster.submitted, cluster.options.route)

    for route in routes:
        about = ClusterOptions(options.workers, route, options.staleness or 0, link)
        arrivals = Users(trace, options.users) if options.users else OpenLoop(trace)
        with _as_usage_errors(path):
            cluster = Cluster(trace, _config(options), options.cost, arrivals, blocks, policy, about)
        cluster.run(show)
        clusters.append(cluster)
    return Outcome(report.cluster_results(clusters, options.users), tables.print_cluster)


def _run_replay(options: argparse.Namespace) -> Outcome:
    """Replay with the scheduler and the virtual clock."""
    _check_clock(options)
    path = options.trace or bundled_trace()
    trace = read_trace(path, options.requests, prefixes=bool(options.policy))
    with _as_usage_errors(path):
        replay = _make_replay(trace, options)
    timeline = picture.Timeline(replay.block_manager.allocator.capacity) if options.html else None
    replay.run(Progress(len(trace)), *([timeline] if timeline else []))
    numbers = report.results(replay, options.users)
    if timeline is None:
        return Outcome(numbers, tables.print_table)
    timeline.end(replay)
    return Outcome(numbers, tables.print_table, picture.replay_picture(numbers, timeline))


def _num_blocks(trace: Trace, options: argparse.Namespace) -> int:
    """Return the number of blocks of a pool: enough for the longest request, at least `DEFAULT_BLOCKS`."""
    # A request without output tokens still generates one.
    needed = -(-(trace.longest() + 1) // (options.block_size or DEFAULT_BLOCK_SIZE))
    return max(DEFAULT_BLOCKS, needed) if options.blocks is None else int(options.blocks)


def _config(options: argparse.Namespace) -> SchedulerConfig:
    """Return the configuration of the scheduler."""
    return SchedulerConfig(
        max_sequences=options.max_batch,
        max_batch_sequences=options.max_batch,
        max_batch_tokens=options.budget,
        max_prefill_tokens=options.budget,
        block_size=options.block_size or DEFAULT_BLOCK_SIZE,
        policy="fcfs",
    )


def _make_replay(trace: Trace, options: argparse.Namespace) -> Replay:
    policy = options.policy[0] if options.policy else None
    memory = importlib.import_module("pagepool.reference" if options.reference else "pagepool")
    size = options.block_size or DEFAULT_BLOCK_SIZE
    geometry = GEOMETRIES[options.attend] if options.attend else None
    blocks = _num_blocks(trace, options)
    if options.blocks is None and geometry is not None:
        blocks = min(blocks, ATTEND_BYTES // geometry.layout(size).block_bytes)
    longest = min(trace.longest() + 1, blocks * size)  # longer requests are refused
    config = _config(options)
    attention = None
    if geometry is None:
        allocator = memory.BlockAllocator(blocks)
    else:
        pool = memory.KvCachePool.from_layout(geometry.layout(size), blocks)
        allocator = pool.allocator
        width = -(-longest // size)
        attention = Attention(memory, pool, geometry, options.max_batch, config.max_batch_tokens, width)
    cache = MeteredCache(memory.PrefixCache(allocator, size, policy)) if policy else None
    tokens = TraceTokens(trace) if policy else None
    manager = (
        importlib.import_module("pagepool.replay.plain").PlainBlockManager if options.reference else MeteredBlockManager
    )
    block_manager = manager(allocator, size)
    arrivals = Users(trace, options.users) if options.users else None
    return Replay(trace, config, block_manager, options.cost, attention, arrivals, cache, tokens)


def _run_passes(options: argparse.Namespace) -> Outcome:
    """Send the prompts through the prefix cache alone, once for each policy and capacity."""
    for option in NEEDS_CLOCK:
        if getattr(options, option) is not None:
            raise UsageError(f"--{option} cannot be used with --clock none")
    path = options.trace or bundled_trace()
    trace = read_trace(path, options.requests, prefixes=True)
    memory = importlib.import_module("pagepool.reference" if options.reference else "pagepool")
    with _as_usage_errors(path):
        prompts = Prompts(trace, options.block_size)
    states = StateOptions(options.hybrid) if options.hybrid else None
    found: list[Any] = []
    pairs = list(product(options.policy or ["lru"], options.capacity or [None]))
    progress = Progress(len(prompts) * len(pairs))
    for policy, room in pairs:
        progress.update(len(found) * len(prompts), f"{policy} with {'unlimited' if room is None else room} blocks")
        if states is None:
            found.append(cache_pass(memory, prompts, policy, room))
        else:
            found.append(hybrid_pass(memory, prompts, policy, room, states))
    if states is None:
        return Outcome(report.pass_results(prompts, found), tables.print_passes)
    return Outcome(report.hybrid_results(prompts, found, states), tables.print_hybrid)
