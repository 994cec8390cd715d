"""The headline figures of pagepool, its reference and NumPy: python bench/figures.py [--only WORD,...] [--json FILE]

One run measures everything. The implementations of a figure alternate, so that a noisy neighbour disturbs all of them.
Each cell is a median. The goal of a figure is an upper bound. compare.py measures the same figures of two builds.
limit.py measures decode relative to the machine's limits.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parent.parent))  # fallback: the package of the checkout

import workloads
from workloads import Work

SECONDS = 0.4  # measured per implementation of a figure
SCALES = {"ns": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0, "x": 1.0}


@dataclass
class Figure:
    """One row: `sides` in the order of the columns, `unit` per operation."""

    name: str
    sides: dict[str, Callable[[], Work]]
    unit: str = "ns"
    per: str = "operation"
    goal: float | None = None
    values: dict[str, float] = field(default_factory=dict)

    def measure(self):
        works = {side: make() for side, make in self.sides.items()}
        times = {side: [once(work)] for side, work in works.items()}
        deadline = time.perf_counter() + SECONDS * len(works)
        while time.perf_counter() < deadline:
            for side, work in works.items():
                if len(times[side]) < 3 or sum(times[side]) < SECONDS:
                    times[side].append(once(work))
            if all(len(spent) >= 3 and sum(spent) >= SECONDS for spent in times.values()):
                break
        self.values = {side: median(spent) * SCALES[self.unit] for side, spent in times.items()}


def once(work):
    """Return seconds per operation of one run. A run that returns a float has timed itself."""
    start = time.perf_counter()
    took = work.run()
    spent = time.perf_counter() - start
    return (took if isinstance(took, float) else spent) / work.ops


def ours(make, **options):
    return {"ours": lambda: make(**options)}


def all_sides(make, sides=("ours", "reference", "numpy"), **options):
    return {side: lambda side=side: make(side, **options) for side in sides}


def whole(side):
    """Decode of 8 x 512 tokens, where one operation is the whole call."""
    return Work(workloads.decode_step(side).run, 1)


def figures():
    two = ("ours", "reference")
    return [
        Figure("allocate + free, no GIL, from Cython", ours(workloads.nogil_pair), per="pair"),
        Figure("allocate_n(64) + free, no GIL, from Cython", ours(workloads.nogil_bulk), per="block"),
        Figure("the same with BlockGenerations", ours(workloads.nogil_pair, generations=True), per="pair"),
        Figure("the same for 64 blocks", ours(workloads.nogil_bulk, generations=True), per="block"),
        Figure("allocate + free, from Python", all_sides(workloads.allocator_pair), per="pair"),
        Figure("allocate_n(64) + free, from Python", all_sides(workloads.allocator_bulk), per="block"),
        Figure("PagedSeqState.append, one token", all_sides(workloads.table_append, two), per="token"),
        Figure("append_batch, one token for 256 sequences", all_sides(workloads.table_append_batch, two), per="token"),
        Figure("BlockTables.fill", all_sides(workloads.table_fill), per="sequence"),
        Figure("KvCachePool.append, 8 heads of 128, bf16, prefill", all_sides(workloads.append_kv), per="token"),
        Figure(
            "KvCachePool.append, 8 heads of 128, bf16, decode step",
            all_sides(workloads.append_kv, prefill=False),
            per="token",
        ),
        Figure("decode, 8 x 512 tokens, 14/2 heads of 64, 1 thread", all_sides(whole), "ms", "call"),
        Figure(
            "decode, 1 x 512 tokens, 32/4 heads, no GIL, from Cython",
            ours(workloads.small_decode, python=False),
            "us",
            "call",
        ),
        Figure(
            "decode, 1 x 512 tokens, 32/4 heads, from Python", ours(workloads.small_decode, python=True), "us", "call"
        ),
        *(
            Figure(
                f"scheduler step, 256 running, {waiting:,} waiting",
                ours(workloads.scheduler_step, waiting=waiting),
                "us",
                "sequence",
                goal=1.0,
            )
            for waiting in (1_000, 100_000)
        ),
        *(
            Figure(
                f"prefix cache, {policy}: look up, insert, evict",
                ours(workloads.prefix_cache, policy=policy),
                per="block",
                goal=goal,
            )
            for policy, goal in (("lru", 60.0), ("gittins", 120.0))
        ),
        Figure("pagepool replay, 1,000 requests, virtual clock", ours(workloads.replay), "s", "replay"),
        Figure("import pagepool, times import numpy", ours(workloads.import_ratio), "x", "import", goal=1.6),
    ]


def chosen(words):
    """Select the figures with a name that contains one of the words."""
    return [figure for figure in figures() if not words or any(word in figure.name for word in words.split(","))]


def line(figure):
    ours = figure.values["ours"]
    goal = "" if figure.goal is None else f"{figure.goal:g}"
    cells = [f"{figure.name:<55}", f"{figure.unit} / {figure.per:<9}", f"{ours:>9.2f}", f"{goal:>5}"]
    cells += [f"{figure.values[side]:>10.2f}" if side in figure.values else " " * 10 for side in ("reference", "numpy")]
    return "  ".join(cells).rstrip()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD,...", help="figures with one of these words in their name")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    print(
        f"{platform.machine()}, CPython {platform.python_version()}, {time.strftime('%Y-%m-%d')}; medians of one run\n"
    )
    print(f"{'':<55}  {'':<14}  {'ours':>9}  {'goal':>5}  {'reference':>10}  {'numpy':>10}")
    results = chosen(arguments.only)
    for figure in results:
        figure.measure()
        print(line(figure), flush=True)
    if arguments.json:
        rows = [{"name": f.name, "unit": f.unit, "per": f.per, "goal": f.goal, **f.values} for f in results]
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
