"""Cost of decode's variants relative to plain decode, measured in alternation: limit.py --variants."""

import tempfile
from pathlib import Path
from statistics import median

import numpy as np
from shapes import SHAPES
from sides.common import Case, times_of, write_case
from sides.ours import Side

import pagepool

WINDOW = 1024
LIMIT = {"window": 1.30}  # time relative to decode of a context as long as the window
PLAIN_LIMIT = 1.15


def calls_of(side, heads, threads):
    """{name: (call, name of the call that it is compared with)}"""
    slopes = np.linspace(0.01, 0.5, heads, dtype=np.float32)
    sinks = np.linspace(-1, 1, heads, dtype=np.float32)
    context = int(side.lens[0])
    short = np.minimum(side.lens, WINDOW)

    def call(lens=side.lens, **extra):
        def run(i):
            layer = i % side.case.copies
            pagepool.decode(side.q, side.pool, layer, side.tables, lens, out=side.out, num_threads=threads, **extra)

        return run

    calls = {
        "plain": (call(), "plain"),
        "soft cap": (call(logits_soft_cap=30.0), "plain"),
        "sinks": (call(sinks=sinks), "plain"),
        "ALiBi": (call(alibi_slopes=slopes), "plain"),
        "all three": (call(logits_soft_cap=30.0, sinks=sinks, alibi_slopes=slopes), "plain"),
    }
    if context > WINDOW:
        calls[f"{WINDOW} tokens"] = (call(lens=short), f"{WINDOW} tokens")
        calls["window"] = (call(window_left=WINDOW - 1), f"{WINDOW} tokens")
    return calls


def variants(options):
    """Prints and returns a row for each shape, dtype, number of threads and variant."""
    rows, turn = [], 0
    print("shape dtype     threads  variant             ms   ratio  beside          at most")
    for shape in options.shape:
        with tempfile.TemporaryDirectory() as folder:
            write_case(shape, Path(folder))
            for dtype in options.dtype:
                side = Side(Case(shape, dtype, folder))
                for threads in options.threads:
                    calls = calls_of(side, SHAPES[shape][0], threads)
                    times = {name: [] for name in calls}
                    for _ in range(options.rounds):
                        for name, (call, _) in calls.items():
                            spent, turn = times_of(call, turn, options.seconds)
                            times[name].append(median(spent))
                    for name, (_, beside) in calls.items():
                        pairs = zip(times[name], times[beside], strict=True)
                        row = {
                            "shape": shape,
                            "dtype": dtype,
                            "threads": threads,
                            "variant": name,
                            "ms": 1e3 * median(times[name]),
                            "ratio": median(ours / other for ours, other in pairs),
                            "beside": beside,
                        }
                        rows.append(row)
                        if name != beside:
                            most = f"{LIMIT.get(name, PLAIN_LIMIT):.2f}"
                            print(
                                f"{shape:5} {dtype:9} {threads:7}  {name:12} {row['ms']:9.3f}  {row['ratio']:6.2f}  "
                                f"{beside:12} {most:>10}",
                                flush=True,
                            )
    return {"variants": rows}
