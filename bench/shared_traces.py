"""Write two synthetic traces for `pagepool replay --workers`, in which all prompts begin with the same block.

    python bench/shared_traces.py FOLDER

`shared.ptrace`         3,000 prompts of 600 to 100,000 tokens. They share the first 512 tokens and nothing else.
`conversations.ptrace`  6,000 turns of conversations, about four each. They share the first 512 tokens, and each turn
                        begins with the turn before it.
"""

from __future__ import annotations

import heapq
import json
import sys
from itertools import count
from pathlib import Path
from random import Random

BLOCK = 512
SECOND = 1_000_000  # microseconds
MOST = 120_000  # tokens of a prompt


def shared(num_requests: int = 3_000, per_second: float = 3.0, seed: int = 1) -> list[list]:
    """Return the requests of `shared.ptrace`."""
    random, rows, time, following = Random(seed), [], 0.0, 1
    for _ in range(num_requests):
        time += random.expovariate(per_second)
        length = min(100_000, max(600, int(random.lognormvariate(8.7, 0.9))))
        blocks = -(-length // BLOCK) - 1
        rows.append([int(time * SECOND), length, random.randint(20, 400), [0, 1, following, blocks]])
        following += blocks
    return rows


def conversations(num_requests: int = 6_000, per_second: float = 3.4, turns: int = 4, seed: int = 2) -> list[list]:
    """Return the requests of `conversations.ptrace`; `turns` is the mean number of turns."""
    random, rows, waiting, order = Random(seed), [], [], count()
    following, begins = 1, 0.0
    while len(rows) < num_requests:
        if not waiting or begins <= waiting[0][0]:  # a new conversation
            time, length, runs = begins, min(90_000, max(700, int(random.lognormvariate(8.8, 1.1)))), [0, 1]
            left = min(20, int(random.expovariate(1 / (turns - 1))))
            begins += random.expovariate(per_second / turns)
        else:
            time, _, before, runs, left = heapq.heappop(waiting)
            length, runs = before + 50 + int(random.lognormvariate(6.8, 0.9)), [*runs]
        blocks = -(-length // BLOCK) - sum(runs[1::2])
        if length > MOST:
            continue
        rows.append([int(time * SECOND), length, random.randint(20, 600), [*runs, following, blocks]])
        if left:  # the next turn fills the last block, which gets a new id
            kept = [*runs, following, blocks - 1] if blocks > 1 else runs
            heapq.heappush(waiting, (time + 5 + random.expovariate(1 / 60), next(order), length, kept, left - 1))
        following += blocks
    return rows


def write(folder: Path, name: str, rows: list[list]) -> None:
    """Write a trace in the format ptrace-1."""
    head = {"fmt": "ptrace-1", "name": name, "block": BLOCK, "unit": "us", "licence": "none", "n": len(rows)}
    lines = [json.dumps(line) for line in (head, *rows)]
    (folder / f"{name}.ptrace").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    place = Path(sys.argv[1])
    write(place, "shared", shared())
    write(place, "conversations", conversations())
