"""`pagepool replay`: from arguments to results, under the virtual clock or through the prefix cache alone."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagepool.config import SchedulerConfig
from pagepool.replay.attend import GEOMETRIES, Attention
from pagepool.replay.clock import Users
from pagepool.replay.driver import MeteredAccount, MeteredCache, Replay
from pagepool.replay.options import CLOCK_ORDERS, DEFAULT_BLOCK_SIZE, DEFAULT_BLOCKS, UsageError
from pagepool.replay.order import in_order
from pagepool.replay.output import STDOUT, check_writable, written_to
from pagepool.replay.passes import BELADY, StateOptions, cache_passes, hybrid_pass
from pagepool.replay.picture import (
    Timeline,
    hybrid_picture,
    lru_curve,
    page,
    pass_picture,
    recorded_passes,
    replay_picture,
)
from pagepool.replay.plot import draw, load
from pagepool.replay.progress import progress
from pagepool.replay.prompts import PassError, Prompts, TraceTokens
from pagepool.replay.ptrace import Trace, read_trace
from pagepool.replay.report import (
    about_states,
    footer,
    hybrid_results,
    hybrid_table,
    pass_results,
    print_comparison,
    print_hybrid,
    print_passes,
    print_table,
    results,
    title,
)

__all__ = ["Outcome", "bundled_trace", "run", "run_passes"]


ATTEND_BYTES = 2 << 30
CLOCKLESS = ("compare", "capacity", "cache_partial", "hybrid", "state_budget")


@dataclass(frozen=True)
class Outcome:
    """The numbers, for JSON; what prints them as a table; what `--plot` and `--html` draw, empty when neither asks."""

    numbers: dict[str, Any]
    show: Callable[[dict[str, Any]], None]
    picture: dict[str, Any]


def bundled_trace() -> Path:
    """The trace that comes with the package: the first 2,000 requests of azure2023_conv."""
    return Path(__file__).parent.parent / "data" / "azure2023_conv_head.ptrace.xz"


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


def run_passes(options: argparse.Namespace) -> Outcome:
    """A pass for each policy and capacity. Raises `TraceError`, `UsageError`, `PoolError`."""
    if options.attend or options.blocks is not None:
        raise UsageError("--attend and --blocks do not go with --clock none; --capacity bounds the prefix cache")
    if options.order in CLOCK_ORDERS:
        raise UsageError(f"--order {options.order} is one of the scheduler, which --clock none does not run")
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
    drawn = bool(options.plot or options.html)
    several = options.compare or (drawn and not options.hybrid)  # a hybrid model's picture is over its states' bytes
    capacities: list[int | None] = options.capacity or ([*_steps(prompts.most_ids)] if several else [None])
    policies = options.compare or options.policy or ["lru"]
    about = {"order": order, "users": options.users}
    if BELADY in policies and (options.hybrid or options.cache_partial):
        raise UsageError("belady is a bound for full blocks: it goes with neither --hybrid nor --cache-partial")
    if options.hybrid:
        states = StateOptions(options.hybrid, options.state_budget, options.state_grid)
        return _hybrid(memory, prompts, policies, capacities, states, about, drawn)
    try:
        with progress(len(prompts) * len(policies) * len(capacities)) as shown:
            passes = cache_passes(memory, prompts, policies, capacities, not options.reference, shown.tell)
    except PassError as error:
        raise UsageError(f"{path}: {error}") from None
    numbers = pass_results(prompts, passes, about)
    picture = {}
    if drawn:
        rows = numbers["prefix"] if isinstance(numbers["prefix"], list) else [numbers["prefix"]]
        curve = lru_curve(prompts) if "lru" in policies else None
        picture = pass_picture(title(numbers), footer(numbers), rows, curve)
    return Outcome(numbers, print_comparison if options.compare else print_passes, picture)


def _hybrid(
    memory: Any,
    prompts: Prompts,
    policies: list[str],
    capacities: list[int | None],
    states: StateOptions,
    about: dict[str, Any],
    drawn: bool,
) -> Outcome:
    if not drawn:
        found = [hybrid_pass(memory, prompts, policy, room, states) for policy in policies for room in capacities]
        return Outcome(hybrid_results(prompts, found, states, about), print_hybrid, {})
    with progress(len(prompts) * len(policies) * len(capacities)) as shown:
        recorded = recorded_passes(memory, prompts, policies, capacities, states, shown.tell)
    numbers = hybrid_results(prompts, [one for one, _ in recorded], states, about)
    below = f"{footer(numbers)} In this picture: {about_states(numbers)}."
    return Outcome(numbers, print_hybrid, hybrid_picture(title(numbers), below, hybrid_table(numbers), recorded))


def _steps(blocks: int) -> list[int]:
    """Eight capacities up to all of the blocks, each twice the one before."""
    return sorted({max(1, blocks >> shift) for shift in range(8)})
