"""Draw the README's pictures: pagepool and peers as fractions of the limit, one PNG per dtype. `make figures` runs it.

    python bench/pictures.py [--peers build/peers]       measures like peers.py, about 5 minutes, and draws
    python bench/pictures.py --redraw                    draws build/pictures.json again
    python bench/pictures.py --prefill FILE              draws the results of `prefill.py --peer --json FILE`

Needs matplotlib. Everything measured goes to build/pictures.json.
"""

import argparse
import json
import sys
from pathlib import Path

from interleave import add_options
from peers import PEERS, add_peer_options, compare
from shapes import SHAPES

FOLDER = Path(__file__).resolve().parent / "pictures"
MEASURED = Path(__file__).resolve().parents[1] / "build" / "pictures.json"
TIMES = "\N{MULTIPLICATION SIGN}"
OURS, INK, FAINT = "#17479e", "#1a1a1a", "#8a8a8a"
COLOURS = {"vllm": "#e0913a", "openvino": "#8e6bb5", "flex": "#c9524f", "sdpa": "#e5a9a5", "ggml": "#5f9e6e"}
TITLES = {"ours": "pagepool", **{name: peer.title for name, peer in PEERS.items()}}
STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": FAINT,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
}


def shape_label(shape):
    num_qo_heads, num_kv_heads, head_dim, num_seqs, context = SHAPES[shape]
    return f"{shape}\n{num_qo_heads}/{num_kv_heads} {TIMES} {head_dim}\n{num_seqs} {TIMES} {context:,}"


def draw_panel(axes, rows, sides):
    """Draw the bars of one number of threads."""
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=2.2, foreground="white")]  # keeps text readable over a bar
    width = 0.86 / len(sides)
    for group, row in enumerate(rows):
        for place, name in enumerate(sides):
            side = row["sides"].get(name)
            if side is None:
                continue
            at = group - 0.43 + (place + 0.5) * width
            axes.bar(
                at, min(side["share"], 1.03), width * 0.92, color=OURS if name == "ours" else COLOURS[name], zorder=2
            )
            if name == "ours":
                wanted = row["target"] or 0
                hides = side["share"] < wanted < side["share"] + 0.08
                axes.text(
                    at,
                    min(wanted if hides else side["share"], 1.02) + 0.015,
                    f"{side['share']:.2f}",
                    ha="center",
                    va="bottom",
                    fontsize=8.5,
                    fontweight="bold",
                    color=OURS,
                    path_effects=halo,
                    zorder=4,
                )
                if row["target"] is not None:
                    ends = at - width * 0.62, at + width * 0.62
                    axes.hlines(row["target"], *ends, color=INK, lw=1.6, zorder=3, path_effects=halo)
    labels = [shape_label(row["shape"]) + ("\nFMA bound" if row["binds"] == "fma" else "") for row in rows]
    axes.set_xticks(range(len(rows)), labels, fontsize=8, linespacing=1.35)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_ylim(0, 1.1)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "", "0.5", "", "1"])
    axes.grid(axis="y", color="#e6e6e6", lw=0.8, zorder=0)
    axes.tick_params(length=0)
    for edge in ("top", "right", "left"):
        axes.spines[edge].set_visible(False)
    threads = rows[0]["threads"]
    axes.set_title(f"{threads} thread{'s' * (threads > 1)}", loc="left", fontsize=10, color=INK, pad=8)


def draw(measured, dtype, path):
    """Draw one picture with a panel for each number of threads."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = [row for row in measured["rows"] if row["dtype"] == dtype]
    threads = sorted({row["threads"] for row in rows})
    sides = [name for name in TITLES if any(name in row["sides"] for row in rows)]
    with pyplot.rc_context(STYLE):
        figure, panels = pyplot.subplots(1, len(threads), figsize=(5.3 * len(threads), 4.1), squeeze=False)
        for axes, count in zip(panels[0], threads, strict=True):
            draw_panel(axes, [row for row in rows if row["threads"] == count], sides)
        panels[0][0].set_ylabel("share of the limit")
        figure.suptitle(
            f"Decode attention, {dtype} pages: share of what the machine can do",
            x=0.045, y=0.975, ha="left", fontsize=12.5, fontweight="bold",
        )  # fmt: skip
        handles = [Patch(color=OURS if name == "ours" else COLOURS[name], label=TITLES[name]) for name in sides]
        if any(row["target"] is not None for row in rows):
            handles.append(Line2D([], [], color=INK, lw=1.6, label="asked of pagepool"))
        figure.legend(
            handles=handles, loc="upper left", bbox_to_anchor=(0.037, 0.925), ncols=len(handles), frameon=False,
            fontsize=9, handlelength=1.1, handleheight=0.9, columnspacing=1.5, handletextpad=0.5,
        )  # fmt: skip
        machine = measured["machine"]
        figure.text(
            0.045,
            0.022,
            f"Shape: query/KV heads {TIMES} head dim, sequences {TIMES} context. Limit: the longer of streaming K and "
            "V from memory and doing the multiply-adds at the FMA rate, same run.\n"
            f"{machine['cpu']}, {max(threads)} cores, {machine['date']}. Higher is better.",
            fontsize=7.5,
            color="#5c5c5c",
            va="bottom",
            linespacing=1.4,
        )
        figure.subplots_adjust(left=0.045, right=0.99, top=0.78, bottom=0.285, wspace=0.08)
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, dpi=110, metadata={"Software": None})
        pyplot.close(figure)


def draw_prefill(measured, path):
    """Draw pagepool's and torch's share of the FMA rate over the prompt length, a panel for each number of threads."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = measured["peers"]
    threads = sorted({row["threads"] for row in rows})
    dashes = {"float32": "-", "bfloat16": "--"}
    with pyplot.rc_context(STYLE):
        figure, panels = pyplot.subplots(1, len(threads), figsize=(5.3 * len(threads), 3.9), squeeze=False)
        for axes, count in zip(panels[0], threads, strict=True):
            for dtype, dash in dashes.items():
                own = sorted(
                    (row for row in rows if (row["threads"], row["dtype"]) == (count, dtype)), key=lambda r: r["tokens"]
                )
                tokens = [row["tokens"] for row in own]
                for name, key, colour in (("pagepool", "share", OURS), ("torch SDPA", "torch_share", COLOURS["flex"])):
                    shares = [row[key] for row in own]
                    axes.plot(tokens, shares, dash, color=colour, lw=1.8, marker="o", ms=3.5, label=f"{name}, {dtype}")
            axes.set_xscale("log", base=2)
            axes.set_xticks(tokens, [f"{number:,}" for number in tokens])
            axes.set_ylim(0, 1)
            axes.grid(axis="y", color="#e6e6e6", lw=0.8, zorder=0)
            axes.tick_params(length=0)
            axes.set_title(f"{count} thread{'s' * (count > 1)}", loc="left", fontsize=10, color=INK, pad=8)
            axes.set_xlabel("tokens of the prompt")
            for edge in ("top", "right", "left"):
                axes.spines[edge].set_visible(False)
        panels[0][0].set_ylabel("share of the FMA rate")
        figure.suptitle(
            "Prefill attention: share of the rate of multiply-adds",
            x=0.055, y=0.975, ha="left", fontsize=12.5, fontweight="bold",
        )  # fmt: skip
        figure.legend(
            *panels[0][0].get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(0.045, 0.925), ncols=4,
            frameon=False, fontsize=9, handlelength=2.4, columnspacing=1.5, handletextpad=0.5,
        )  # fmt: skip
        figure.text(
            0.055,
            0.022,
            f"One prompt, 32/8 heads {TIMES} 128, causal; the rate is measured in the same round. "
            f"{measured['machine']}, {max(threads)} cores, {measured['date']}. Higher is better.",
            fontsize=7.5,
            color="#5c5c5c",
            va="bottom",
        )
        figure.subplots_adjust(left=0.055, right=0.99, top=0.76, bottom=0.21, wspace=0.1)
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, dpi=110, metadata={"Software": None})
        pyplot.close(figure)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser, rounds=5, seconds=0.06)
    add_peer_options(parser)
    parser.add_argument("--prefill", type=Path, metavar="FILE", help="draw the results of prefill.py --peer")
    parser.add_argument("--redraw", action="store_true", help="draw the previous results")
    options = parser.parse_args(arguments)
    if options.prefill:
        draw_prefill(json.loads(options.prefill.read_text()), FOLDER / "prefill.png")
        return 0
    record = options.json or MEASURED
    if options.redraw:
        measured = json.loads(record.read_text())
    else:
        measured = compare(options)
        record.parent.mkdir(exist_ok=True)
        record.write_text(json.dumps(measured, indent=1) + "\n")
    for dtype in sorted({row["dtype"] for row in measured["rows"]}):
        path = FOLDER / f"{dtype}.png"
        draw(measured, dtype, path)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
