"""Compare two builds of pagepool in alternating rounds: python bench/compare.py OLD [NEW]

    python bench/compare.py ../before                    the figures of figures.py, then decode of S1 to S5
    python bench/compare.py ../before --only prefix,scheduler --shape ""
    python bench/compare.py ../before --only decode --shape S1,S5 --threads 1 --rounds 9

OLD and NEW are folders that contain a built `pagepool`. NEW defaults to this checkout. Each build runs in its own
process, and both run the workloads of this checkout. Old and new alternate in each round. The table has both medians,
the median of the rounds' ratios (new over old), and the goal if the figure has one.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import median

from figures import SCALES, chosen, once
from interleave import Comparison, Process, add_options

ROOT = Path(__file__).resolve().parents[1]


def compare_figures(builds, options):
    """Print and return a row for each figure."""
    processes = {name: Process(sys.executable, "--worker", where, "compare.py") for name, where in builds.items()}
    rows = []
    try:
        for figure in chosen(options.only):
            spent = {name: [] for name in builds}
            for turn in range(options.rounds):
                for name in list(builds)[:: -1 if turn % 2 else 1]:
                    processes[name].tell(name=figure.name, seconds=options.seconds)
                    answer = processes[name].answer()
                    if "failed" in answer:
                        raise SystemExit(f"{name}, {figure.name}: {answer['failed']}")
                    spent[name].append(answer["seconds"] * SCALES[figure.unit])
            rows.append(row_of(figure.name, f"{figure.unit} / {figure.per}", spent, figure.goal))
    finally:
        for process in processes.values():
            process.quit()
    return rows


def compare_decode(builds, options):
    """Print and return a row for each cell of limit.py."""
    sides = {name: (sys.executable, "ours", where) for name, where in builds.items()}
    rows = []
    with Comparison(sides, options) as comparison:
        for shape in options.shape:
            for cell in comparison.shape(shape, options.dtype):
                name = f"decode, {shape}, {cell['dtype']}, {cell['threads']} thread{'s' * (cell['threads'] > 1)}"
                spent = {side: [one["ms"] for one in cell["sides"][side]["rounds"]] for side in builds}
                rows.append(row_of(name, "ms / call", spent, None))
    return rows


def row_of(name, unit, spent, goal):
    ratio = median(new / old for old, new in zip(spent["old"], spent["new"], strict=True))
    row = {"name": name, "unit": unit, "ratio": ratio, "goal": goal, **{side: median(spent[side]) for side in spent}}
    shown = "" if goal is None else f"{goal:g}"
    print(f"{name:<55}  {unit:<14}  {row['old']:>9.3f}  {row['new']:>9.3f}  {ratio:>7.3f}  {shown:>5}", flush=True)
    return row


def work_for(source, answers):
    """Answer {"name": figure, "seconds": s} with {"seconds": median of an operation}, until the input ends."""
    works = {}
    for line in source:
        question = json.loads(line)
        try:
            if question["name"] not in works:
                works.clear()  # frees the data of the previous figure
                (figure,) = [figure for figure in chosen("") if figure.name == question["name"]]
                works[figure.name] = figure.sides["ours"]()
                once(works[figure.name])
            times, spent = [], 0.0
            while len(times) < 3 or spent < question["seconds"]:
                times.append(once(works[question["name"]]))
                spent += times[-1] * works[question["name"]].ops
            answer = {"seconds": median(times)}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def main(arguments=None):
    if arguments is None and sys.argv[1:] == ["--worker"]:
        work_for(sys.stdin, sys.stdout)
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", metavar="OLD", help="a folder with a built pagepool")
    parser.add_argument("new", metavar="NEW", nargs="?", default=str(ROOT), help="another; default: this checkout")
    parser.add_argument("--only", default="", metavar="WORD,...", help="figures with one of these words in their name")
    add_options(parser, dtypes="bfloat16", rounds=5, seconds=0.1)
    options = parser.parse_args(arguments)
    folders = {"old": options.old, "new": options.new}
    builds = {name: {"PYTHONPATH": str(Path(folder).resolve())} for name, folder in folders.items()}
    print(f"{'':<55}  {'':<14}  {'old':>9}  {'new':>9}  {'new/old':>7}  {'goal':>5}")
    rows = compare_figures(builds, options)
    rows += compare_decode(builds, options) if options.shape else []
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
