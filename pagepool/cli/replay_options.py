"""The arguments of `pagepool replay`."""

from __future__ import annotations

import argparse
import re
from typing import Any

from pagepool.cli.usage import between, file_name, size_in_bytes
from pagepool.prefix.eviction import POLICIES
from pagepool.replay.attend import GEOMETRIES
from pagepool.replay.clock import CostModel
from pagepool.replay.cluster import ROUTES

__all__ = ["DEFAULT_BLOCKS", "DEFAULT_BLOCK_SIZE", "add_arguments"]

# Slightly less than the peak need of the bundled trace, so that requests wait for blocks and some are preempted.
DEFAULT_BLOCKS = 3072
DEFAULT_BLOCK_SIZE = 16
MAX_BLOCKS = 2**31 - 1
MAX_BATCH = 65_536
MAX_BUDGET = 1 << 24
MAX_WORKERS = 65_536
MAX_MICROSECONDS = 10**12


def _several(parse: Any) -> Any:
    return lambda text: [parse(part) for part in text.split(",")]


def _policy(text: str) -> str:
    if text not in POLICIES:
        raise argparse.ArgumentTypeError(f"{text[:24]!r} is not one of {', '.join(POLICIES)}")
    return text


def _cost(text: str) -> CostModel:
    try:
        return CostModel.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _route(text: str) -> str:
    if text not in ROUTES:
        raise argparse.ArgumentTypeError(f"{text[:24]!r} is not one of {', '.join(ROUTES)}")
    return text


def _link(text: str) -> tuple[float, int]:
    """Parse GB per second and microseconds."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?),([0-9]{1,12})", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text[:24]!r} is not a link such as 12.5,100: GB per second, microseconds")
    return float(match[1]), int(match[2])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pagepool replay`."""
    parser.add_argument(
        "trace",
        nargs="?",
        type=file_name,
        metavar="TRACE",
        help="a ptrace-1 file, plain or .xz; default: the bundled trace, 2,000 requests of Azure's 2023 chat trace",
    )
    parser.add_argument("--requests", type=between(1, MAX_BLOCKS), metavar="N", help="only the first N requests")
    parser.add_argument(
        "--clock",
        choices=("virtual", "none"),
        default="virtual",
        help="virtual (default): run the whole scheduler; none: send one prompt after the other through the prefix "
        "cache alone, for traces with prefix blocks",
    )
    parser.add_argument(
        "--reference",
        action="store_true",
        help="use the allocator, prefix cache and attention in plain Python, for comparison; slow",
    )
    _add_pool(parser.add_argument_group("pool and scheduler"))
    _add_attention(parser.add_argument_group("attention on real memory"))
    _add_prefix_cache(parser.add_argument_group("prefix cache"))
    _add_users(parser.add_argument_group("users"))
    _add_hybrid(parser.add_argument_group("hybrid models, with --clock none"))
    _add_workers(parser.add_argument_group("many workers"))
    _add_output(parser.add_argument_group("results"))
    parser.epilog = (
        "Counts and virtual times are the same in every run. ns_per_block_op is the wall time of the scheduler's "
        "block operations (allocating and freeing blocks, filling block tables, appending to the last block) divided "
        "by the number of blocks allocated and freed; sched_us_per_step is the wall time of schedule and commit, block "
        "operations included."
    )


def _add_pool(group: Any) -> None:
    add = group.add_argument
    add(
        "--blocks",
        type=between(1, MAX_BLOCKS),
        metavar="N",
        help=f"blocks of the pool; default: {DEFAULT_BLOCKS}, or more if the longest request needs more; with --attend "
        "at most 2 GiB",
    )
    add(
        "--block-size",
        type=between(1, 1024),
        metavar="N",
        help=f"tokens per block; default: {DEFAULT_BLOCK_SIZE}, with --clock none the block size of the trace",
    )
    add("--budget", type=between(1, MAX_BUDGET), default=512, metavar="N", help="tokens per step; default: 512")
    add("--max-batch", type=between(1, MAX_BATCH), default=256, metavar="N", help="running sequences; default: 256")
    add(
        "--cost",
        type=_cost,
        default=CostModel(),
        metavar="STEP,PREFILL,DECODE",
        help="virtual microseconds per step, per prefill token, per decode token; default: 10000,60,150",
    )


def _add_attention(group: Any) -> None:
    add = group.add_argument
    add(
        "--attend",
        choices=sorted(GEOMETRIES),
        metavar="GEOMETRY",
        help=f"store K/V and run decode with the shapes of a model: {', '.join(GEOMETRIES)}",
    )


def _add_prefix_cache(group: Any) -> None:
    add = group.add_argument
    add(
        "--policy",
        type=_several(_policy),
        metavar="NAME,...",
        help=f"cache prefixes and evict by this policy: {', '.join(POLICIES)}; with --clock none also several, "
        "default: lru",
    )
    add(
        "--capacity",
        type=_several(between(0, MAX_BLOCKS)),
        metavar="N,...",
        help="blocks of the cache, with --clock none; default: unlimited. Memory grows with use, not with N",
    )


def _add_users(group: Any) -> None:
    add = group.add_argument
    add(
        "--users",
        type=between(1, MAX_BATCH),
        metavar="N",
        help="N users, each of them runs one session of the trace after the other, and waits for each answer and for "
        "the recorded think time. A request without a session is a session of its own",
    )


def _add_hybrid(group: Any) -> None:
    add = group.add_argument
    add(
        "--hybrid",
        type=size_in_bytes,
        metavar="BYTES",
        help="count the hits that a hybrid model with recurrent states of BYTES (such as 16M) can use. States are "
        "saved at the ends of prompts, where prompts differ, and every 16,384 tokens",
    )


def _add_workers(group: Any) -> None:
    add = group.add_argument
    add(
        "--workers",
        type=between(1, MAX_WORKERS),
        metavar="N",
        help="N engines with one clock, each with a pool of --blocks and a prefix cache (default policy: gittins)",
    )
    add(
        "--route",
        type=_several(_route),
        metavar="NAME,...",
        help=f"how the worker of a request is chosen: {', '.join(ROUTES)}; one run for each; default: cost",
    )
    add(
        "--staleness",
        type=between(0, MAX_MICROSECONDS),
        metavar="US",
        help="microseconds until the router learns about the changes of a step; default: 0",
    )
    add(
        "--link",
        type=_link,
        metavar="GBPS,US",
        help="move pages from another worker if this takes less time than computing them: GB per second, and "
        "microseconds per transfer",
    )


def _add_output(group: Any) -> None:
    add = group.add_argument
    add(
        "--html",
        type=file_name,
        metavar="FILE",
        help="write an interactive page that needs only a browser: pool, batches and latency over time",
    )
    add(
        "--json",
        type=file_name,
        metavar="FILE",
        help="write the results as JSON. FILE of this option or --html may be -, standard output; no table is "
        "printed then",
    )
