"""What `--plot` and `--html` draw of a hybrid model's passes: what the states save, over their bytes and the trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

from pagepool.replay.hybrid_pass import HybridPass, StateOptions, hybrid_pass
from pagepool.replay.prompts import Prompts

__all__ = ["HybridRecord", "hybrid_picture", "recorded_passes"]

MOST_WINDOWS = 160
HALVES = 9


class HybridRecord:
    """What one pass did over the trace, in windows of as many prompts each, and what others of it would have had.

    full_blocks == sum(full), hit_blocks == sum(hit), usable_blocks == sum(usable): nothing is left out.
    """

    def __init__(self, prompts: int) -> None:
        self.per_window = max(1, -(-prompts // MOST_WINDOWS))
        self.prompts = 0
        self.full: list[int] = []
        self.hit: list[int] = []
        self.usable: list[int] = []
        self.states: list[int] = []  # at the end of a window
        self.every_block: list[int] = []
        self.budgets: list[tuple[int, int]] = []  # bytes of all states, usable blocks

    def __call__(self, full: int, hit: int, usable: int, states: int, cached: int) -> None:
        """After a prompt, as `hybrid_pass` tells it."""
        if self.prompts % self.per_window == 0:
            for values in (self.full, self.hit, self.usable, self.states, self.every_block):
                values.append(0)
        self.prompts += 1
        self.full[-1] += full
        self.hit[-1] += hit
        self.usable[-1] += usable
        self.states[-1], self.every_block[-1] = states, cached

    def ends(self) -> list[int]:
        """The number of prompts at the end of each window."""
        return [min((at + 1) * self.per_window, self.prompts) for at in range(len(self.full))]


def recorded_passes(
    memory: Any,
    prompts: Prompts,
    policies: list[str],
    capacities: list[int | None],
    options: StateOptions,
    tell: Callable[[int, str], None],
) -> list[tuple[HybridPass, HybridRecord]]:
    """Each pass with its record, and with what smaller budgets leave of it. `tell` is told how many
    prompts are done, each pass counted once."""
    found = []
    for policy, capacity in product(policies, capacities):
        record = HybridRecord(len(prompts))
        one = hybrid_pass(memory, prompts, policy, capacity, options, record)
        record.budgets = _budgets(memory, prompts, one, options)
        found.append((one, record))
        tell(len(found) * len(prompts), _name(one, True))
    return found


def _budgets(memory: Any, prompts: Prompts, one: HybridPass, options: StateOptions) -> list[tuple[int, int]]:
    """The usable blocks of the same pass over budgets: all bytes that its states take without one, down by halves."""

    def usable(budget: int | None) -> HybridPass:
        smaller = replace(options, budget_bytes=budget)
        return one if smaller == options else hybrid_pass(memory, prompts, one.policy, one.capacity, smaller)

    free = usable(None)
    most = free.states["peak_states"] * options.state_bytes
    found = {most: free.usable_blocks}
    if options.budget_bytes is not None:
        found[min(most, options.budget_bytes)] = one.usable_blocks
    for halves in range(1, HALVES + 1):
        if most >> halves >= options.state_bytes:
            found[most >> halves] = usable(most >> halves).usable_blocks
    found.pop(0, None)  # no state was ever kept
    return sorted(found.items())


def hybrid_picture(
    title: str, footer: str, table: list[list[str]], found: list[tuple[HybridPass, HybridRecord]]
) -> dict[str, Any]:
    """Of each pass: shares of full blocks, of all of them over the budget and of those of a window over the trace, and
    the states that are kept, beside a state at the end of every cached block."""
    several = len({one.policy for one, _ in found}) > 1
    return {
        "title": title,
        "footer": footer,
        "facts": [],
        "timeline": None,
        "table": table,
        "curve": None,
        "hybrid": {
            "ends": found[0][1].ends() if found else [],
            "lines": [
                {
                    "name": _name(one, several or len(found) == 1),
                    "hit_rate": _share(one.hit_blocks, one.full_blocks),
                    "budgets": [(room, _share(usable, one.full_blocks)) for room, usable in record.budgets],
                    "hit": list(map(_share, record.hit, record.full)),
                    "usable": list(map(_share, record.usable, record.full)),
                    "states": record.states,
                    "every_block": record.every_block,
                }
                for one, record in found
            ],
        },
    }


def _name(one: HybridPass, with_policy: bool) -> str:
    room = "no bound" if one.capacity is None else f"{one.capacity:,} blocks"
    return f"{one.policy}, {room}" if with_policy else room


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
