"""Loads an engine or a server with requests of which many are cancelled, abandoned or cut off, and counts what came.

    python bench/load.py                            # pagepool serve with the tiny model, 8 clients, for 10 minutes
    python bench/load.py --seconds 20 --clients 4

Ends with status 1 when a request got an error, a block leaked or memory kept growing. Needs the extra `serve`
and httpx.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import httpx

# Of ten requests, how many end in which way.
WAYS = ["whole"] * 3 + ["stream"] * 3 + ["leave"] * 2 + ["give up"] * 2
GROWTH = 1.1  # of the process's memory, from the end of the first quarter on
SETTLED = 0.25


async def one_request(client: httpx.AsyncClient, choice: random.Random, prompts: list[str], tokens: int) -> str:
    """One request, taken whole, streamed, left in the middle of its stream, or given up while nothing has come.

    Returns how it ended: one of `WAYS`, or "error: ..." with what was wrong.
    """
    way = choice.choice(WAYS)
    prompt = choice.choice(prompts)[: choice.randint(1, 400)]
    body = {"prompt": prompt, "max_tokens": choice.randint(1, tokens), "stream": way in ("stream", "leave")}
    if choice.random() < 0.5:
        body["seed"] = choice.randint(0, 1000)
    if not body["stream"]:
        timeout = choice.uniform(0.001, 0.05) if way == "give up" else None
        try:
            response = await client.post("/v1/completions", json=body, timeout=timeout)
        except httpx.TimeoutException:
            return way
        text = response.json()["choices"][0]["text"] if response.status_code == 200 else response.text
        return way if response.status_code == 200 else f"error: {response.status_code} {text}"
    left, last = choice.randint(1, 8) if way == "leave" else -1, ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            last = line or last
            left -= bool(line)
            if left == 0:
                return way
    if last == "data: [DONE]":
        return way
    return f"error: {response.status_code} {last}"


async def load(url: str, clients: int, prompts: list[str], tokens: int, seed: int, ends) -> Counter:
    """Sends requests from `clients` clients at a time until `ends()`; returns how often each way of ending came."""
    counts: Counter[str] = Counter()

    async def client_loop(number: int) -> None:
        choice = random.Random(f"{seed} {number}")
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:
            while not ends(counts):
                try:
                    ended = await one_request(client, choice, prompts, tokens)
                except httpx.HTTPError as error:
                    ended = f"error: {type(error).__name__} {error}"
                counts[ended] += 1

    await asyncio.gather(*(client_loop(number) for number in range(clients)))
    return counts


def metrics(url: str) -> dict[str, float]:
    """What the server's /metrics say, by name and labels."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] != "#")}


def resident_bytes(pid: int) -> int:
    """The memory of a process that is in RAM."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status).group(1)) * 1024


async def watch(pid: int, ends) -> list[int]:
    """The memory of a process, once a second."""
    sizes = []
    while not ends(None):
        sizes.append(resident_bytes(pid))
        await asyncio.sleep(1)
    return sizes


def start_server(model: str | None, pool_bytes: str, threads: int) -> tuple[subprocess.Popen, str]:
    """`pagepool serve` at a free port, and its address."""
    command = [sys.executable, "-m", "pagepool", "serve", "--port", "0", "--pool-bytes", pool_bytes]
    command += ["--threads", str(threads), *(["--model", model] if model else [])]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for line in server.stderr:
        if found := re.search(r"at (http://\S+)/v1", line):
            threading.Thread(target=shutil.copyfileobj, args=(server.stderr, sys.stderr), daemon=True).start()
            return server, found.group(1)
        print(line, end="", file=sys.stderr)
    raise SystemExit("the server has not started")


async def run(options: argparse.Namespace, pid: int, url: str) -> dict:
    end = time.monotonic() + options.seconds
    prompts = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))]

    def ends(counts) -> bool:
        return time.monotonic() >= end

    began = time.monotonic()
    counts, sizes = await asyncio.gather(
        load(url, options.clients, prompts, options.tokens, options.seed, ends), watch(pid, ends)
    )
    seconds = time.monotonic() - began
    for _ in range(100):  # what was left at the end is being cancelled
        found = await asyncio.to_thread(metrics, url)
        running = found["pagepool:num_requests_running"] + found["pagepool:num_requests_waiting"]
        if not running:
            break
        await asyncio.sleep(0.1)
    settled = max(sizes[: max(1, int(len(sizes) * SETTLED))])
    return {
        "seconds": round(seconds, 1),
        "clients": options.clients,
        "requests": sum(counts.values()),
        "ended": dict(sorted(counts.items())),
        "errors": sum(count for name, count in counts.items() if name.startswith("error")),
        "left_running": running,
        "blocks_used": found['pagepool:kv_blocks{pool="kv",state="used"}'],
        "preemptions": found["pagepool:num_preemptions_total"],
        "generated_tokens": found["pagepool:generation_tokens_total"],
        "tokens_per_second": round(found["pagepool:generation_tokens_total"] / seconds, 1),
        "memory_mib": {"settled": settled >> 20, "last": sizes[-1] >> 20, "max": max(sizes) >> 20},
        "memory_is_flat": max(sizes) <= GROWTH * settled,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600, help="default: 600")
    parser.add_argument("--clients", type=int, default=8, help="clients at a time; default: 8")
    parser.add_argument("--tokens", type=int, default=96, help="the most new tokens of a request; default: 96")
    parser.add_argument("--pool-bytes", default="1M", help="of the server's pool; default: 1M, half of what is needed")
    parser.add_argument("--threads", type=int, default=1, help="of the server; default: 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="default: the tiny model")
    options = parser.parse_args()
    server, url = start_server(options.model, options.pool_bytes, options.threads)
    try:
        found = asyncio.run(run(options, server.pid, url))
    finally:
        server.send_signal(signal.SIGTERM)
        status = server.wait(120)
    print(json.dumps({**found, "server_status": status}, indent=2))
    is_good = found["memory_is_flat"] and not (
        found["errors"] or found["left_running"] or found["blocks_used"] or status
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
