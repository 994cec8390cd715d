"""Time of decode relative to the machine's limit, both measured in alternation in one run.

    python bench/limit.py [--shape S1,S2] [--dtype bfloat16,float32] [--threads 1,2] [--isa avx2,avx512] [--json FILE]
    python bench/limit.py --arithmetic exact,bf16x2     products of bfloat16 against exact arithmetic
    python bench/limit.py --variants [--shape S1,S4]    soft cap, sinks, ALiBi and window against plain decode
    python bench/limit.py --busy [--shape S5]           2 threads while another process uses one core

A cell's limit is the longer of two times:

- memory: stream the cell's bytes of K and V, contiguous, at the best of three prefetch distances;
- compute: do its multiplications and additions at the FMA rate of `threads` cores. A forced AVX2 uses the rate of
  AVX2 vectors.

Each round measures stream, pages, FMA, decode, FMA. The faster of a round's two FMA rates counts. `share` is the median
of the rounds' limit / time. `of best` uses the fastest rate of all rounds instead. `pages` is the time to read the same
bytes in shuffled chunks of a page's size, at the best of seven access patterns (one chunk after another, or four
interleaved): it shows the cost of a block table over the stream. No read hits a CPU cache: all measurements rotate over
400 MB, and decode rotates over the layers of its pool.
"""

from __future__ import annotations

import argparse
import json
import sys
from statistics import median

from busy import busy
from interleave import Comparison, add_options, facts, names
from shapes import AVX2_TARGETS, ITEM_BYTES, target
from variants import variants

RATE_NAMES = {
    "fma": "f32 FMA, GFLOP/s",
    "fma_of_8": "f32 FMA of 8 lanes (AVX2), GFLOP/s",
    "dot": "bf16 dot (vdpbf16ps), GFLOP/s",
    "int8": "8-bit dot (vpdpbusd), 10^9 operations/s",
    "widen": "bf16 load + widen + FMA, GFLOP/s",
    "exp": "exp, degree 5, 10^9 values/s",
}


def print_facts(found):
    print(f"{found['cpu']}, {found['date']}; {found['buffer_mib']} MiB\n")
    columns = found["threads"]
    print(f"{'threads':<50}" + "".join(f"{column['threads']:>20}" for column in columns))
    rows = [("contiguous stream, GB/s", [f"{column['stream_gb_per_s']:.1f}" for column in columns])]
    for chunk in columns[0]["chunks_gb_per_s"]:
        pairs = [column["chunks_gb_per_s"][chunk] for column in columns]
        rows.append(
            (
                f"shuffled {chunk >> 10} KB, plain / prefetched / 4 at once, GB/s",
                [f"{pair['plain']:.1f} / {pair['prefetched']:.1f} / {pair['by_sides']:.1f}" for pair in pairs],
            )
        )
    for name, title in RATE_NAMES.items():
        rates = [column["rates_g_per_s"][name] for column in columns]
        rows.append((title, [f"{rate:.1f}" if rate else "none" for rate in rates]))
    for title, cells in rows:
        print(f"{title:<50}" + "".join(f"{cell:>20}" for cell in cells))
    print()


def print_row(row):
    for name, side in row["sides"].items():
        binds = "stream" if side["compute_ms"] <= row["stream_ms"] else "fma"
        bound = binds if row["bounds"][name] == "fma_of_8" else row["binds"]
        wanted = None if name.startswith("bf16") else target(row["shape"], row["dtype"], row["threads"], bound)
        reached = "" if wanted is None else f"{wanted:6.2f}  {'yes' if round(side['share'], 2) >= wanted else 'no'}"
        print(
            f"{row['shape']:5} {row['dtype']:9} {row['threads']:7} {row['stream_ms']:9.3f} "
            f"{row['stream_gb_per_s']:6.1f} {row['pages_ms']:9.3f} {side['compute_ms']:9.3f}  {binds:6} "
            f"{name:16} {side['ms']:9.3f} {side['stream_share']:9.2f} {side['best_share']:7.2f} "
            f"{side['share']:6.2f} {reached}",
            flush=True,
        )


def print_ratios(rows, first, second):
    """Print the first side's speed over the second's, and the ratio if only the first side's arithmetic limited it."""
    print(f"\nspeed of {first} over {second}\nshape dtype     threads   ratio  target  at its own rate")
    for row in rows:
        rounds = [row["sides"].get(side, {}).get("rounds") for side in (first, second)]
        if None in rounds:
            continue
        ratio = median(other["ms"] / ours["ms"] for ours, other in zip(*rounds, strict=True))
        wanted = AVX2_TARGETS.get(row["shape"], {}).get(ITEM_BYTES[row["dtype"]])
        asked = first == "avx2" and second.startswith("avx512")
        shown = f"{wanted:.2f}" if asked and wanted is not None else ""
        most = row["sides"][second]["ms"] / row["sides"][first]["compute_ms"]
        print(f"{row['shape']:5} {row['dtype']:9} {row['threads']:7}  {ratio:6.2f}  {shown:>6}  {most:15.2f}")


def shares(options):
    isas = options.isa.split(",") if options.isa else []
    sides = {isa: (sys.executable, "ours", {"PAGEPOOL_ISA": isa}) for isa in isas}
    if options.arithmetic:
        modules = {"exact": "ours", "bf16": "ours:Bf16", "bf16x2": "ours:Bf16x2"}
        isas, sides = [], {name: (sys.executable, modules[name], {}) for name in options.arithmetic}
    sides = sides or {"decode": (sys.executable, "ours", {})}
    rows = []
    with Comparison(sides, options) as comparison:
        found = facts(comparison.machine, options.threads)
        print_facts(found)
        print(
            "shape dtype     threads stream ms   GB/s  pages ms    FMA ms  binds  side                    ms  "
            "of stream of best  share target"
        )
        dtypes = ["bfloat16"] if {"bf16", "bf16x2"} & sides.keys() else options.dtype
        for shape in options.shape:
            for row in comparison.shape(shape, dtypes):
                rows.append(row)
                print_row(row)
    for isa in isas[:-1]:
        print_ratios(rows, isa, isas[-1])
    for name in ("bf16", "bf16x2"):
        if {"exact", name} <= sides.keys():
            print_ratios(rows, name, "exact")
    return {"machine": found, "rows": rows}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    parser.add_argument("--isa", help="comma list of instruction sets, each forced in its own process")
    parser.add_argument("--arithmetic", type=names(["exact", "bf16", "bf16x2"]), help="comma list: pages of bf16")
    parser.add_argument("--variants", action="store_true", help="the cost of soft cap, sinks, ALiBi and window")
    parser.add_argument("--busy", action="store_true", help="2 threads while another process uses one core")
    options = parser.parse_args(arguments)
    result = variants(options) if options.variants else busy(options) if options.busy else shares(options)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
