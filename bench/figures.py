"""The headline figures, ours beside reference and numpy, all from one run: python bench/figures.py [--json FILE]

The sides of a figure take turns, so that a neighbour on the machine disturbs all of them; the median is printed. The
comparison of decode with the memory's streaming limit is limit.py.
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

sys.path.append(str(Path(__file__).parent.parent))  # the checkout, where no pagepool is installed

import workloads
from workloads import Work

SECONDS = 0.4  # measured per side of a figure


@dataclass
class Figure:
    """One row: its sides in the order of the columns, `unit` a power of ten of seconds per operation."""

    name: str
    sides: dict[str, Callable[[], Work]]
    unit: str = "ns"
    per: str = "operation"
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
        scale = {"ns": 1e9, "us": 1e6, "ms": 1e3}[self.unit]
        self.values = {side: median(spent) * scale for side, spent in times.items()}


def once(work):
    """Seconds per operation of one run."""
    start = time.perf_counter()
    work.run()
    return (time.perf_counter() - start) / work.ops


def all_sides(make, sides=("ours", "reference", "numpy")):
    return {side: lambda side=side: make(side) for side in sides}


def whole(make, side):
    """The workload with the whole of a run as its operation."""
    return Work(make(side).run, 1)


def figures():
    two = ("ours", "reference")
    return [
        Figure("allocate + free, no GIL, from Cython", {"ours": workloads.nogil_pair}, per="pair"),
        Figure("allocate_n(64) + free, no GIL, from Cython", {"ours": workloads.nogil_bulk}, per="block"),
        Figure("allocate + free, from Python", all_sides(workloads.allocator_pair), per="pair"),
        Figure("allocate_n(64) + free, from Python", all_sides(workloads.allocator_bulk), per="block"),
        Figure("PagedSeqState.append, one token", all_sides(workloads.table_append, two), per="token"),
        Figure("append_batch, one token for 256 sequences", all_sides(workloads.table_append_batch, two), per="token"),
        Figure("BlockTables.fill", all_sides(workloads.table_fill), per="sequence"),
        Figure("KvCachePool.append, 8 heads of 128, bf16, prefill", all_sides(workloads.append_kv), per="token"),
        Figure(
            "KvCachePool.append, 8 heads of 128, bf16, decode step",
            all_sides(lambda side: workloads.append_kv(side, prefill=False)),
            per="token",
        ),
        Figure(
            "decode, 8 x 512 tokens, 14/2 heads of 64, 1 thread",
            all_sides(lambda side: whole(workloads.decode_step, side)),
            unit="ms",
            per="call",
        ),
        Figure(
            "decode, 1 x 512 tokens, 32/4 heads, no GIL, from Cython",
            {"ours": lambda: workloads.small_decode(python=False)},
            unit="us",
            per="call",
        ),
        Figure(
            "decode, 1 x 512 tokens, 32/4 heads, from Python",
            {"ours": lambda: workloads.small_decode(python=True)},
            unit="us",
            per="call",
        ),
        Figure(
            "scheduler step, 256 running, 1,000 waiting",
            all_sides(lambda side: workloads.scheduler_step(side, 1_000), two),
            unit="us",
            per="sequence",
        ),
        Figure(
            "scheduler step, 256 running, 100,000 waiting",
            all_sides(lambda side: workloads.scheduler_step(side, 100_000), two),
            unit="us",
            per="sequence",
        ),
    ]


def line(figure):
    ours = figure.values["ours"]
    cells = [f"{figure.name:<55}", f"{figure.unit} / {figure.per:<9}", f"{ours:>9.2f}"]
    for side in ("reference", "numpy"):
        value = figure.values.get(side)
        cells.append(f"{'':>19}" if value is None else f"{value:>10.2f} ({value / ours:>5.1f}x)")
    return "  ".join(cells)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    print(
        f"{platform.machine()}, CPython {platform.python_version()}, {time.strftime('%Y-%m-%d')}; medians of one run\n"
    )
    print(f"{'':<55}  {'':<14}  {'ours':>9}  {'reference':>19}  {'numpy':>19}")
    results = figures()
    for figure in results:
        figure.measure()
        print(line(figure), flush=True)
    if arguments.json:
        rows = [{"name": f.name, "unit": f.unit, "per": f.per, **f.values} for f in results]
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
