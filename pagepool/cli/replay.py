"""`pagepool replay`: replay a trace with the virtual clock, or through the prefix cache alone."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagepool.cli import tables
from pagepool.cli.output import STDOUT, check_writable, written_to
from pagepool.cli.progress import Progress
from pagepool.cli.replay_options import DEFAULT_BLOCK_SIZE, DEFAULT_BLOCKS
from pagepool.cli.usage import UsageError
from pagepool.config import SchedulerConfig
from pagepool.prefix.eviction import POLICIES
from pagepool.replay import picture, report
from pagepool.replay.attend import GEOMETRIES, Attention
from pagepool.replay.clock import OpenLoop, Users
from pagepool.replay.cluster import Cluster, ClusterOptions, Link
from pagepool.replay.cluster_report import cluster_results
from pagepool.replay.driver import MeteredBlockManager, MeteredCache, Replay
from pagepool.replay.order import in_order
from pagepool.replay.passes import BELADY, PLAIN_POLICIES, StateOptions, cache_passes, hybrid_pass
from pagepool.replay.prompts import PassError, Prompts, TraceTokens
from pagepool.replay.ptrace import Trace, read_trace

__all__ = ["Outcome", "bundled_trace", "run"]

ATTEND_BYTES = 2 << 30
NEEDS_NO_CLOCK = ("compare", "capacity", "hybrid")
NEEDS_WORKERS = ("route", "staleness", "link")
NOT_WITH_WORKERS = ("attend", "reference", "html")


@dataclass(frozen=True)
class Outcome:
    """Results of a replay: numbers for JSON, the function that prints them, and the picture for --html."""

    numbers: dict[str, Any]
    show: Callable[[dict[str, Any]], None]
    picture: dict[str, Any]


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
    text = picture.page(outcome.picture) if name == "html" else json.dumps(outcome.numbers, indent=2) + "\n"
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
    if options.policy and (len(options.policy) > 1 or BELADY in options.policy):
        raise UsageError("--policy with several policies or belady needs --clock none")


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
    if policy in PLAIN_POLICIES:
        raise UsageError(f"--policy {policy} cannot be used with --workers; use one of {', '.join(POLICIES)}")
    routes = options.route or ["cost"]
    clusters: list[Cluster] = []
    with Progress(len(trace) * len(routes)) as progress:

        def show(cluster: Cluster) -> None:
            progress.update(len(trace) * len(clusters) + cluster.submitted, cluster.options.route)

        for route in routes:
            about = ClusterOptions(options.workers, route, options.staleness or 0, link)
            arrivals = Users(trace, options.users) if options.users else OpenLoop(trace)
            with _as_usage_errors(path):
                config = _config(options)
                cluster = Cluster(trace, config, options.cost, arrivals, blocks, policy, about)
            cluster.run(show)
            clusters.append(cluster)
    return Outcome(cluster_results(clusters, options.users), tables.print_cluster, {})


def _run_replay(options: argparse.Namespace) -> Outcome:
    """Replay with the scheduler and the virtual clock."""
    _check_clock(options)
    path = options.trace or bundled_trace()
    trace = read_trace(path, options.requests, prefixes=bool(options.policy))
    with _as_usage_errors(path):
        replay = _make_replay(trace, options)
    timeline = picture.Timeline(replay.block_manager.allocator.capacity) if options.html else None
    with Progress(len(trace)) as progress:
        replay.run(progress, *([timeline] if timeline else []))
    numbers = report.results(replay, options.users)
    if timeline is None:
        return Outcome(numbers, tables.print_table, {})
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
    in_python = options.reference or policy in PLAIN_POLICIES
    memory = importlib.import_module("pagepool.reference" if in_python else "pagepool")
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
    manager = importlib.import_module("pagepool.replay.plain").PlainBlockManager if in_python else MeteredBlockManager
    block_manager = manager(allocator, size)
    arrivals = Users(trace, options.users) if options.users else None
    return Replay(trace, config, block_manager, options.cost, attention, arrivals, cache, tokens)


def _run_passes(options: argparse.Namespace) -> Outcome:
    """Send the prompts through the prefix cache alone, once for each policy and capacity."""
    if options.attend or options.blocks is not None:
        raise UsageError("--attend and --blocks cannot be used with --clock none: use --capacity")
    if options.compare and options.policy:
        raise UsageError("--policy and --compare cannot be used together: both choose the policies")
    path = options.trace or bundled_trace()
    trace = read_trace(path, options.requests, prefixes=True)
    memory = importlib.import_module("pagepool.reference" if options.reference else "pagepool")
    with _as_usage_errors(path):
        prompts = Prompts(trace, options.block_size, in_order(trace, options.users))
    policies = options.compare or options.policy or ["lru"]
    if BELADY in policies and options.hybrid:
        raise UsageError("belady cannot be used with --hybrid: it bounds the hits of blocks, not of states")
    drawn = bool(options.html)
    capacities: list[int | None] = options.capacity or [None]
    # The horizontal axis of a picture is the capacity. With --hybrid it is the bytes of states.
    if not options.capacity and (options.compare or (drawn and not options.hybrid)):
        capacities = [*_doubling_to(prompts.most_ids)]
    if options.hybrid:
        return _run_hybrid(memory, prompts, policies, capacities, StateOptions(options.hybrid), options.users, drawn)
    try:
        with Progress(len(prompts) * len(policies) * len(capacities)) as progress:
            passes = cache_passes(memory, prompts, policies, capacities, not options.reference, progress.update)
    except PassError as error:
        raise UsageError(f"{path}: {error}") from None
    numbers = report.pass_results(prompts, passes, options.users)
    drawing = picture.pass_picture(numbers, prompts) if drawn else {}
    return Outcome(numbers, tables.print_comparison if options.compare else tables.print_passes, drawing)


def _run_hybrid(
    memory: Any,
    prompts: Prompts,
    policies: list[str],
    capacities: list[int | None],
    states: StateOptions,
    users: int | None,
    drawn: bool,
) -> Outcome:
    if not drawn:
        found = [hybrid_pass(memory, prompts, policy, room, states) for policy in policies for room in capacities]
        return Outcome(report.hybrid_results(prompts, found, states, users), tables.print_hybrid, {})
    with Progress(len(prompts) * len(policies) * len(capacities)) as progress:
        recorded = picture.recorded_passes(memory, prompts, policies, capacities, states, progress.update)
    numbers = report.hybrid_results(prompts, [one for one, _ in recorded], states, users)
    return Outcome(numbers, tables.print_hybrid, picture.hybrid_picture(numbers, recorded))


def _doubling_to(blocks: int) -> list[int]:
    """Return up to eight capacities; each is twice the one before, and the last is `blocks`."""
    return sorted({max(1, blocks >> shift) for shift in range(8)})
