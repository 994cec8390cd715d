"""Load test of an engine or server: many requests are cancelled, abandoned or cut off. Counts how requests end.

    python bench/load.py                            # pagepool serve with the tiny model, 8 clients, for 10 minutes
    python bench/load.py --seconds 20 --clients 4
    python bench/load.py --clients 64 --attack 1    # two runs, the second with a prompt of 15 MB each second

Exits with status 1 if a request got an error, a block leaked or memory kept growing. `--attack` also reports the added
delay of the first tokens of small requests. Needs the extra `serve` and httpx.
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

# Number of requests out of ten that end in each way.
WAYS = ["whole"] * 3 + ["stream"] * 3 + ["leave"] * 2 + ["give up"] * 2
GROWTH = 1.1  # limit of the process's memory, relative to the end of the first quarter
SETTLED = 0.25
ATTACK_BYTES = 15_000_000


async def one_request(
    client: httpx.AsyncClient, choice: random.Random, prompts: list[str], tokens: int, first: list[float]
) -> str:
    """Send one request: read it whole, stream it, abandon the stream midway, or cancel before the first token.

    Appends the time to the first token of a stream, in seconds, to `first`. Returns how the request ended: one of
    `WAYS`, or "error: ..." with the cause.
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
    began = time.monotonic()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line and not last:
                first.append(time.monotonic() - began)
            last = line or last
            left -= bool(line)
            if left == 0:
                return way
    if last == "data: [DONE]":
        return way
    return f"error: {response.status_code} {last}"


async def load(url: str, clients: int, prompts: list[str], tokens: int, seed: int, ends) -> tuple[Counter, list[float]]:
    """Send requests from `clients` concurrent clients until `ends()`.

    Returns the number of requests that ended in each way, and the seconds to the first tokens of streams.
    """
    counts: Counter[str] = Counter()
    first: list[float] = []

    async def client_loop(number: int) -> None:
        choice = random.Random(f"{seed} {number}")
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:
            while not ends(counts):
                try:
                    ended = await one_request(client, choice, prompts, tokens, first)
                except httpx.HTTPError as error:
                    ended = f"error: {type(error).__name__} {error}"
                counts[ended] += 1

    await asyncio.gather(*(client_loop(number) for number in range(clients)))
    return counts, first


async def attack(url: str, prompts: list[str], every: float, ends) -> Counter:
    """Send a prompt of 15 MB every `every` seconds and abandon every second one at once; return how they ended."""
    text = "".join(prompts)
    text = (text * (ATTACK_BYTES // len(text) + 1))[:ATTACK_BYTES]
    body = json.dumps({"prompt": text}).encode()
    counts: Counter[str] = Counter()

    async def one(leaves: bool) -> None:
        headers = {"content-type": "application/json"}
        async with httpx.AsyncClient(base_url=url, timeout=0.2 if leaves else 300) as client:
            try:
                response = await client.post("/v1/completions", content=body, headers=headers)
                counts[str(response.status_code)] += 1
            except httpx.TimeoutException:
                counts["left"] += 1
            except httpx.HTTPError as error:
                counts[f"error: {type(error).__name__} {error}"] += 1

    tasks = []
    while not ends(None):
        tasks.append(asyncio.create_task(one(bool(len(tasks) % 2))))
        await asyncio.sleep(every)
    await asyncio.gather(*tasks)
    return counts


def metrics(url: str) -> dict[str, float]:
    """Return the server's /metrics by name and labels."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] != "#")}


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status).group(1)) * 1024


async def watch(pid: int, ends) -> list[int]:
    """Record the resident memory of a process once a second."""
    sizes = []
    while not ends(None):
        sizes.append(resident_bytes(pid))
        await asyncio.sleep(1)
    return sizes


def start_server(model: str | None, pool_bytes: str, threads: int) -> tuple[subprocess.Popen, str]:
    """Start `pagepool serve` at a free port; return its process and URL."""
    command = [sys.executable, "-m", "pagepool", "serve", "--port", "0", "--pool-bytes", pool_bytes]
    command += ["--threads", str(threads), *(["--model", model] if model else [])]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for line in server.stderr:
        if found := re.search(r"at (http://\S+)/v1", line):
            threading.Thread(target=shutil.copyfileobj, args=(server.stderr, sys.stderr), daemon=True).start()
            return server, found.group(1)
        print(line, end="", file=sys.stderr)
    raise SystemExit("the server ended before it accepted connections")


def percentile(values: list[float], share: float) -> float:
    """Return the value at the quantile `share` (0 to 1)."""
    return sorted(values)[int(share * (len(values) - 1))]


async def run(options: argparse.Namespace, pid: int, url: str, is_attacked: bool) -> dict:
    """Do one run of `--seconds`; return how the requests ended and the server's state after the run."""
    end = time.monotonic() + options.seconds
    prompts = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))]

    def ends(counts) -> bool:
        return time.monotonic() >= end

    async def no_attack() -> Counter:
        return Counter()

    began = time.monotonic()
    before = (await asyncio.to_thread(metrics, url))["pagepool:generation_tokens_total"]
    (counts, first), sizes, attacks = await asyncio.gather(
        load(url, options.clients, prompts, options.tokens, options.seed, ends),
        watch(pid, ends),
        attack(url, prompts, options.attack, ends) if is_attacked else no_attack(),
    )
    seconds = time.monotonic() - began
    for _ in range(100):  # the server still cancels the requests that were open at the end
        found = await asyncio.to_thread(metrics, url)
        running = found["pagepool:num_requests_running"] + found["pagepool:num_requests_waiting"]
        if not running:
            break
        await asyncio.sleep(0.1)
    settled = max(sizes[: max(1, int(len(sizes) * SETTLED))])
    tokens = found["pagepool:generation_tokens_total"] - before
    return {
        "seconds": round(seconds, 1),
        "clients": options.clients,
        "requests": sum(counts.values()),
        "ended": dict(sorted(counts.items())),
        "attacks": dict(sorted(attacks.items())),
        "errors": sum(count for name, count in (counts + attacks).items() if name.startswith("error")),
        "first_token": {name: round(percentile(first, share), 3) for name, share in (("p50", 0.5), ("p99", 0.99))},
        "left_running": running,
        "blocks_used": found['pagepool:kv_blocks{pool="kv",state="used"}'],
        "preemptions": found["pagepool:num_preemptions_total"],
        "generated_tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1),
        "memory_mib": {"settled": settled >> 20, "last": sizes[-1] >> 20, "max": max(sizes) >> 20},
        "memory_is_flat": max(sizes) <= GROWTH * settled,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600, help="default: 600")
    parser.add_argument("--clients", type=int, default=8, help="concurrent clients; default: 8")
    parser.add_argument("--tokens", type=int, default=96, help="maximum new tokens of a request; default: 96")
    parser.add_argument("--pool-bytes", default="1M", help="bytes of the server's pool; default: 1M")
    parser.add_argument("--threads", type=int, default=1, help="threads of the server; default: 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="default: the tiny model")
    parser.add_argument("--attack", type=float, metavar="S", help="run again with a prompt of 15 MB every S seconds")
    options = parser.parse_args()
    server, url = start_server(options.model, options.pool_bytes, options.threads)
    try:
        found = [asyncio.run(run(options, server.pid, url, False))]
        if options.attack:
            found.append(asyncio.run(run(options, server.pid, url, True)))
    finally:
        server.send_signal(signal.SIGTERM)
        status = server.wait(120)
    report = {**found[0], "server_status": status}
    if options.attack:
        ratio = found[1]["first_token"]["p99"] / found[0]["first_token"]["p99"]
        report = {"plain": found[0], "attacked": found[1], "p99_ratio": round(ratio, 2), "server_status": status}
    print(json.dumps(report, indent=2))
    is_good = not status and all(
        one["memory_is_flat"] and not (one["errors"] or one["left_running"] or one["blocks_used"]) for one in found
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
