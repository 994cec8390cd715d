"""Compare the cache hits of eviction policies with LRU and with Belady's bound, on synthetic traces.

    python bench/eviction.py [--seeds 1,2] [--size BLOCKS] [--capacity 1000,3000,...] [--only NAME,...] [--markdown]

For each trace of `traces.py` and each capacity, a policy's figure is (its hits - LRU's hits) / (bound - LRU's hits).
0 is as good as LRU. 1 is as good as knowing all requests in advance. "!" marks a policy below LRU, with its difference
in hits. The last columns sum over all capacities. A hit is a block in the leading run of cached blocks of a prompt.
A dash means that LRU already reaches the bound.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parent.parent))  # fallback: the package of the checkout
import policies  # noqa: F401  # adds its policies to the reference
from traces import TRACES, make_trace

import pagepool
from pagepool import reference
from pagepool.reference.policies import belady_pass

OTHERS = ("arc", "s3fifo", "lfu")  # in plain Python
CAPACITIES = [1000, 3000, 5859, 10_000, 20_000, 30_000]


def hits_of(policy: str, rows: list[np.ndarray], capacity: int) -> int:
    """Return the number of blocks found in one pass."""
    memory = reference if policy in OTHERS else pagepool
    cache = memory.PrefixCache(memory.BlockAllocator(capacity), 1, policy)
    return sum(cache.touch(row) for row in rows)


def measure(rows: list[np.ndarray], capacities: list[int]) -> dict[str, list[int]]:
    """Return the hits of every policy and of the bound, one number for each capacity."""
    ids, ends = np.concatenate(rows), np.cumsum([len(row) for row in rows])
    found = {policy: [hits_of(policy, rows, room) for room in capacities] for policy in ("lru", "gittins", *OTHERS)}
    return found | {"belady": [belady_pass(ids, ends, room)[0] for room in capacities]}


def share(own: int, lru: int, best: int) -> str:
    """Return the gain over LRU as a fraction of the bound's gain over LRU."""
    text = "-" if best == lru else f"{(own - lru) / (best - lru):.2f}".replace("0.", ".")
    return text + (f"!{own - lru}" if own < lru else "")


def main() -> None:
    """Print a row for each trace and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--size", type=int, default=250_000)
    parser.add_argument("--capacity", default=",".join(map(str, CAPACITIES)))
    parser.add_argument("--only", default=",".join(TRACES))
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    capacities = [int(text) for text in options.capacity.split(",")]
    bar = " | " if options.markdown else "  "
    heads = ["gittins / ARC at " + f"{room:,}" for room in capacities]
    print(bar.join(["trace         ", "seed", "LRU  ", "bound", *heads, "gittins in sum", *OTHERS]))
    for name in options.only.split(","):
        for seed in map(int, options.seeds.split(",")):
            rows = make_trace(name, seed, options.size)
            found = measure(rows, capacities)
            blocks = len(capacities) * sum(map(len, rows))
            lru, best = sum(found["lru"]), sum(found["belady"])
            each = zip(found["gittins"], found["arc"], found["lru"], found["belady"], strict=True)
            cells = [f"{share(own, low, high)} / {share(arc, low, high)}" for own, arc, low, high in each]
            sums = [share(sum(found[policy]), lru, best).split("!")[0] for policy in ("gittins", *OTHERS)]
            print(bar.join([f"{name:<14}", f"{seed:>4}", f"{lru / blocks:.1%}", f"{best / blocks:.1%}", *cells, *sums]))


if __name__ == "__main__":
    main()
