"""The arguments of `pagepool replay`."""

from __future__ import annotations

import argparse
import re
from typing import Any

from pagepool.config import KV_DTYPES
from pagepool.prefix.policies import POLICIES
from pagepool.replay.attend import GEOMETRIES
from pagepool.replay.clock import CostModel
from pagepool.replay.order import ORDERS, USER_ORDERS
from pagepool.replay.passes import BELADY

__all__ = ["CLOCK_ORDERS", "DEFAULT_BLOCKS", "DEFAULT_BLOCK_SIZE", "UsageError", "add_arguments"]

# Just below what the bundled hour needs at its peaks, so that requests wait for blocks and some are preempted.
DEFAULT_BLOCKS = 3072
DEFAULT_BLOCK_SIZE = 16
CLOCK_ORDERS = ("fcfs", "lpm")
MAX_BLOCKS = 2**31 - 1
MAX_BATCH = 65_536
MAX_THREADS = 256  # of decode
MAX_BUDGET = 1 << 24
MAX_BYTES = 1 << 50


class UsageError(ValueError):
    """The arguments do not go together, or name a file that cannot be written."""


def _between(low: int, high: int) -> Any:
    def parse(text: str) -> int:
        try:
            value = int(text) if len(text) <= 20 else high + 1
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be from {low} to {high}, not {text[:24]}")
        return value

    return parse


def _file(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the name of a file is empty")
    return text


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,12})([kMGT]?)", text)
    if match is None or not 1 <= (size := int(match[1]) << 10 * " kMGT".index(match[2] or " ")) <= MAX_BYTES:
        raise argparse.ArgumentTypeError(f"{text[:24]!r} is no size such as 4096, 512k, 16M or 2G, up to {MAX_BYTES}")
    return size


def _several(parse: Any) -> Any:
    return lambda text: [parse(part) for part in text.split(",")]


def _policy(text: str) -> str:
    if text not in (*POLICIES, BELADY):
        raise argparse.ArgumentTypeError(f"{text[:24]!r} is none of {', '.join((*POLICIES, BELADY))}")
    return text


def _cost(text: str) -> CostModel:
    try:
        return CostModel.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `pagepool replay`."""
    add = parser.add_argument
    add(
        "trace",
        nargs="?",
        type=_file,
        metavar="TRACE",
        help="a ptrace-1 file, .xz or plain; default: the bundled slice of Azure's",
    )
    add("--requests", type=_between(1, MAX_BLOCKS), metavar="N", help="replay only the first N requests")
    add(
        "--blocks",
        type=_between(1, MAX_BLOCKS),
        metavar="N",
        help=f"blocks of the pool; default: {DEFAULT_BLOCKS}, or as many as the longest request needs; with --attend "
        "at most as many as 2 GiB hold",
    )
    add(
        "--block-size",
        type=_between(1, 1024),
        metavar="N",
        help=f"tokens per block; default: {DEFAULT_BLOCK_SIZE}, or the trace's with --clock none",
    )
    add("--budget", type=_between(1, MAX_BUDGET), default=512, metavar="N", help="tokens of a step; default: 512")
    add("--max-batch", type=_between(1, MAX_BATCH), default=256, metavar="N", help="sequences at a time; default: 256")
    add(
        "--schedule",
        choices=("chunked", "prefill-first"),
        default="chunked",
        help="chunked: prompts share steps with decodes (default); prefill-first: while a prompt waits, steps hold "
        "whole prompts only, and the budget is at least the longest of them",
    )
    add(
        "--cost",
        type=_cost,
        default=CostModel(),
        metavar="STEP,PREFILL,DECODE",
        help="virtual microseconds per step, per prefill token, per decode token; default: 10000,60,150",
    )
    add(
        "--attend",
        choices=sorted(GEOMETRIES),
        metavar="GEOMETRY",
        help=f"store K/V and attend: {', '.join(GEOMETRIES)}",
    )
    add("--dtype", choices=tuple(KV_DTYPES), default="bfloat16", help="of the pages, with --attend; default: bfloat16")
    add(
        "--threads",
        type=_between(1, MAX_THREADS),
        metavar="N",
        help="threads of decode, with --attend; default: all cores",
    )
    add(
        "--reference",
        action="store_true",
        help="allocator, prefix cache, scheduler and attention in plain Python instead, to compare; slow",
    )
    add(
        "--clock",
        choices=("virtual", "none"),
        default="virtual",
        help="none: prompts through the prefix cache alone, in order, without time; for traces with prefix blocks",
    )
    add(
        "--policy",
        type=_several(_policy),
        metavar="NAME,...",
        help=f"keep prefixes for later requests, and evict by this policy: {', '.join(POLICIES)}; with --clock none "
        "there may be several, default: lru, and belady, the bound of all",
    )
    add(
        "--compare",
        type=_several(_policy),
        metavar="NAME,...",
        help="policies side by side over capacities: those of --capacity, or eight from 1/128 of all blocks up to all",
    )
    add(
        "--capacity",
        type=_several(_between(0, MAX_BLOCKS)),
        metavar="N,...",
        help="blocks of the prefix cache, with --clock none; default: unlimited. A bound: memory grows with use",
    )
    add(
        "--users",
        type=_between(1, MAX_BATCH),
        metavar="N",
        help="N users who take the sessions of the trace one after another, a request outside sessions is one; under "
        "the virtual clock each waits for the answer and the recorded think time",
    )
    add(
        "--order",
        choices=(*CLOCK_ORDERS, *ORDERS),
        help="in which waiting requests start: fcfs (default) or lpm, longest cached prefix first; with --clock none, "
        "of the prompts: arrival (default), session, turns (default with --users), think, random, prefix; --users goes "
        f"with {', '.join(USER_ORDERS)}",
    )
    add("--seed", type=_between(0, MAX_BLOCKS), default=0, metavar="N", help="of --order random; default: 0")
    add(
        "--hybrid",
        type=_bytes,
        metavar="BYTES",
        help="with --clock none: how much of the hits a hybrid model can use, whose recurrent state has BYTES (16M), "
        "with states kept at ends, where prompts part and on a grid",
    )
    add("--state-budget", type=_bytes, metavar="BYTES", help="of all states, with --hybrid; default: no bound")
    add(
        "--state-grid",
        type=_between(0, MAX_BUDGET),
        default=16_384,
        metavar="N",
        help="tokens from one state of the grid to the next, with --hybrid; 0: none; default: 16384",
    )
    add("--cache-partial", action="store_true", help="cache the last, partial block too, with --clock none")
    parser.epilog = (
        "Counts and virtual times are the same in every run. ns_per_block_op is the wall time of taking and giving "
        "back blocks, the filling of block tables and appends into the last block included, over blocks taken and "
        "given back; sched_us_per_step is that of a whole schedule and commit, block operations included."
    )
    add(
        "--plot",
        type=_file,
        metavar="FILE",
        help="draw a PNG: the pool, batches and latency over time, or with --clock none the hit rate over capacity; "
        "with --hybrid what is usable over the bytes of states and over the trace; needs matplotlib",
    )
    add("--html", type=_file, metavar="FILE", help="the same as a page to look into; it needs nothing but a browser")
    add(
        "--json",
        type=_file,
        metavar="FILE",
        help="write the results to FILE as JSON; - is standard output, without the table, here and for --plot and "
        "--html, one of the three",
    )
