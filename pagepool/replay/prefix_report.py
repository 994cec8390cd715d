"""The results of passes through the prefix cache, as a dict for JSON and as a table."""

from __future__ import annotations

from typing import Any

from pagepool.replay.prefix_pass import CachePass, Prompts

__all__ = ["pass_results", "print_passes"]

ATTRIBUTION = {
    "mooncake_synthetic": "Trace: kvcache-ai/Mooncake, FAST25-release, Apache-2.0.",
    "claude_code_sessions": "Trace: callanjfox/kv-cache-tester, Apache-2.0.",
}


def pass_results(prompts: Prompts, passes: list[CachePass]) -> dict[str, Any]:
    """Everything counted. `prefix` is an object for one pass, a list of them for several; only `ns_per_block`, the wall
    time of look-up and insertion over the blocks given, differs from run to run. `capacity_blocks` null: unlimited.
    """
    rows = [
        {
            "policy": one.policy,
            "capacity_blocks": one.capacity,
            "full_blocks": one.full_blocks,
            "hit_blocks": one.hit_blocks,
            "evictions": one.evictions,
            "ns_per_block": one.nanoseconds / one.blocks if one.blocks else 0.0,
        }
        for one in passes
    ]
    return {
        "trace": prompts.trace.name,
        "licence": prompts.trace.licence,
        "requests": len(prompts.trace),
        "clock": "none",
        "block_size": prompts.block_size,
        "cache_partial": prompts.partial,
        "prefix": rows[0] if len(rows) == 1 else rows,
    }


def print_passes(numbers: dict[str, Any]) -> None:
    """Print a line for each pass to stdout."""
    rows = numbers["prefix"] if isinstance(numbers["prefix"], list) else [numbers["prefix"]]
    partial = ", partial blocks too" if numbers["cache_partial"] else ""
    blocks = f"{numbers['block_size']}-token blocks{partial}"
    print(f"prefix cache, {numbers['trace']}: {numbers['requests']:,} prompts, {blocks}")
    print(f"  {'policy':<8}{'capacity':>14}{'hits':>14}{'of full':>14}{'rate':>8}{'evictions':>14}{'ns/block':>10}")
    for row in rows:
        capacity = "unlimited" if row["capacity_blocks"] is None else f"{row['capacity_blocks']:,}"
        rate = row["hit_blocks"] / row["full_blocks"] if row["full_blocks"] else 0.0
        print(
            f"  {row['policy']:<8}{capacity:>14}{row['hit_blocks']:>14,}{row['full_blocks']:>14,}{rate:>8.1%}"
            f"{row['evictions']:>14,}{row['ns_per_block']:>10.1f}"
        )
    print(ATTRIBUTION.get(numbers["trace"], f"Trace: {numbers['trace']}, {numbers['licence']}."))
