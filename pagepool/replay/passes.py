"""`pagepool replay --clock none`: from arguments to finished passes through the prefix cache."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from pagepool.replay.hybrid_pass import StateOptions, hybrid_pass
from pagepool.replay.hybrid_picture import hybrid_picture, recorded_passes
from pagepool.replay.hybrid_report import about_states, hybrid_results, hybrid_table, print_hybrid
from pagepool.replay.options import CLOCK_ORDERS, UsageError
from pagepool.replay.order import in_order
from pagepool.replay.outcome import Outcome, bundled_trace
from pagepool.replay.picture import lru_curve, pass_picture
from pagepool.replay.prefix_pass import BELADY, cache_passes
from pagepool.replay.prefix_report import footer, pass_results, print_comparison, print_passes, title
from pagepool.replay.progress import progress
from pagepool.replay.prompts import PassError, Prompts
from pagepool.replay.ptrace import read_trace

__all__ = ["run_passes"]


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
