"""Send a burst to a cluster of engines and kill one of its processes midway: a table and a picture.

    python bench/cluster.py                         # 2 decode engines, 1 prefill engine; kills a decode engine
    python bench/cluster.py --kill prefill          # or front_end, or none
    python bench/cluster.py --runs 10               # ten runs; exits with status 1 if a run fails

`make cluster-demo` runs this. It starts a cluster with the tiny model. Each run does four things:

1. It streams 48 requests with 6 shared prefixes at once.
2. It kills a process with SIGKILL after a quarter of the tokens (the prefill engine: after the first 15 tokens).
3. It repeats the requests that the front end cut off, with the same request ids.
4. It compares all tokens with the output of a single engine. A token may differ where that engine's two largest
   logits differ by less than 0.001.

Then all processes must run again, and every allocator must be empty. Needs the extras `ray`, `transfer` and `plot`,
and httpx.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import logging
import os
import signal
import sys
import threading
import time
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import httpx

from pagepool.cli.output import show
from pagepool.cluster.ray import serve
from pagepool.engine import Engine, SamplingParams
from pagepool.integrations.transformers.pretrained import load_pretrained

MODEL = Path(__file__).resolve().parent / "tiny_llama"
BUILD = Path(__file__).resolve().parents[1] / "build"
PICTURE, MESSAGES = BUILD / "cluster.svg", BUILD / "cluster.log"
PORT = 8702
URL = f"http://127.0.0.1:{PORT}"
SECONDS = 120
NUM_REQUESTS, NUM_BEGINNINGS, NUM_TOKENS = 48, 6, 64
NEAR = 1e-3
# Fraction of the tokens after which the process is killed. Prefill engines work at the start, so they die early.
SHARE = {"decode": 0.25, "front_end": 0.25, "prefill": 0.005}
COLOURS = ["#17479e", "#e0913a", "#8e6bb5", "#c9524f", "#5f9e6e", "#8a8a8a"]


@dataclass
class Answer:
    """The response to one request: token texts, their arrival times, and the number of attempts."""

    tokens: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    asked: int = 0
    is_whole: bool = False


def prompts() -> list[str]:
    """Return prompts with shared prefixes of about 300 tokens, cut from the source of this repository's engine."""
    source = inspect.getsource(sys.modules[Engine.__module__])
    step = len(source) // NUM_BEGINNINGS
    beginnings = [source[start * step : start * step + 900] for start in range(NUM_BEGINNINGS)]
    return [f"{beginnings[number % NUM_BEGINNINGS]}\n# {number}\n" for number in range(NUM_REQUESTS)]


def answers_of_one_engine(texts: list[str]) -> list[list[tuple[str, bool]]]:
    """Return for each request its token texts, and for each token whether the second-best logit was a near tie."""
    model, tokenizer = load_pretrained(MODEL, "float32")
    with Engine(model, tokenizer, num_blocks=2048) as engine:
        generations = [engine.submit(text, SamplingParams(NUM_TOKENS, logprobs=2)) for text in texts]
        found = []
        for generation in generations:
            row = []
            for token in generation:
                best, second = sorted(token.top_logprobs.values(), reverse=True)[:2]
                text = tokenizer.decode([token.token_id], skip_special_tokens=True)
                row.append((text, best - second < NEAR))
            found.append(row)
        return found


async def stream(client: httpx.AsyncClient, text: str, request_id: str, answer: Answer) -> None:
    """Send the request once. Tokens of an earlier attempt are dropped."""
    answer.asked += 1
    answer.tokens, answer.times = [], []
    body = {"prompt": text, "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": 0, "stream": True}
    headers = {"x-request-id": request_id}
    try:
        async with client.stream("POST", f"{URL}/v1/completions", json=body, headers=headers) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    logprobs = (json.loads(line[6:]).get("choices") or [{}])[0].get("logprobs")
                    if logprobs:
                        answer.tokens += logprobs["tokens"]
                        answer.times.append(time.monotonic())
                answer.is_whole = answer.is_whole or line == "data: [DONE]"
    except httpx.HTTPError:  # the front end died
        answer.is_whole = False


async def burst(texts: list[str], answers: list[Answer], name: str, pid: int, share: float) -> float:
    """Send all requests at once, repeat incomplete ones until all are complete, and return the time of the kill.

    name   prefix of the run's request ids
    pid    process to kill, 0 to kill none
    share  fraction of all tokens after which the process is killed
    """
    limits = httpx.Limits(max_connections=NUM_REQUESTS)
    killed_at = 0.0
    async with httpx.AsyncClient(timeout=SECONDS, limits=limits) as client:
        tasks = [
            asyncio.create_task(stream(client, text, f"{name}-{number}", answer))
            for number, (text, answer) in enumerate(zip(texts, answers, strict=True))
        ]
        while not all(task.done() for task in tasks):
            come = sum(len(answer.tokens) for answer in answers)
            if pid and not killed_at and come >= share * NUM_REQUESTS * NUM_TOKENS:
                killed_at = time.monotonic()
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.01)
        end = time.monotonic() + SECONDS
        while cut := [number for number, answer in enumerate(answers) if not answer.is_whole]:
            if time.monotonic() > end:
                break
            await asyncio.sleep(0.5)  # the front end restarts
            await asyncio.gather(
                *(stream(client, texts[number], f"{name}-{number}", answers[number]) for number in cut)
            )
    return killed_at


def compare(answers: list[Answer], wanted: list[list[tuple[str, bool]]]) -> tuple[int, int]:
    """Count the answers that diverge from the single engine at a near tie, and the wrong answers."""
    near = wrong = 0
    for answer, row in zip(answers, wanted, strict=True):
        parts = next((at for at, (text, _) in enumerate(row) if answer.tokens[at : at + 1] != [text]), None)
        if parts is not None and row[parts][1] and len(answer.tokens) == len(row):
            near += 1
        elif parts is not None or len(answer.tokens) != len(row):
            wrong += 1
    return near, wrong


class MainThreadOutput:
    """A stream that writes the text of the main thread to `terminal`, and of all other threads to `log`.

    A thread of Ray prints a message for each process that is killed. They would appear between the tables.
    """

    def __init__(self, terminal: TextIO, log: TextIO) -> None:
        self._terminal, self._log = terminal, log

    def __getattr__(self, name: str) -> Any:
        stream = self._terminal if threading.current_thread() is threading.main_thread() else self._log
        return getattr(stream, name)


class Running:
    """A running cluster, queried through Serve's handles."""

    def __init__(self) -> None:
        from ray import serve as ray_serve

        self._serve = ray_serve
        logging.getLogger("ray.serve").setLevel("ERROR")
        os.environ.setdefault("RAY_worker_niceness", "0")  # with Ray's 15, other work can keep workers from starting
        engine = {"num_blocks": 1024}
        self._cluster = serve(MODEL, 2, 1, dtype="float32", port=PORT, threads=1, engine=engine)
        self.front_end = self._cluster.front_end
        self.wait(lambda: len(self.workers()) == 3)

    def wait(self, condition: Any) -> None:
        """Wait until the condition holds, up to two minutes."""
        end = time.monotonic() + SECONDS
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"the cluster did not reach the expected state within {SECONDS} s")
            time.sleep(0.2)

    def stats(self) -> dict[str, Any]:
        """`FrontEnd.stats`"""
        found: dict[str, Any] = self.front_end.stats.remote().result(timeout_s=SECONDS)
        return found

    def workers(self) -> dict[str, Any]:
        """Return the workers that the front end knows."""
        found: dict[str, Any] = self.stats()["workers"]
        return found

    def ask(self, worker: str, side: str, method: str) -> Any:
        """Call a method of one worker."""
        handle = self._serve.get_deployment_handle(side, "pagepool")
        return getattr(handle, method).remote(worker).result(timeout_s=SECONDS)

    def victim(self, what: str) -> tuple[str, int]:
        """Return name and pid of a worker with this role, or of the front end."""
        if what == "front_end":
            return what, self.front_end.pid.remote().result(timeout_s=SECONDS)
        name = min(name for name, worker in self.workers().items() if worker["side"] == what)
        return name, self.ask(name, what, "pid")

    def is_whole(self, victim: str) -> bool:
        """Return true if three workers run and the killed worker is not among them."""
        workers = self.workers()
        return len(workers) == 3 and victim not in workers

    def is_idle(self) -> bool:
        """Return true if no request runs."""
        stats = self.stats()
        return not stats["requests"] and not any(worker["requests"] for worker in stats["workers"].values())

    def close(self) -> None:
        """End all processes."""
        self._cluster.close()


def counts_of(stats: dict[str, Any]) -> dict[str, int]:
    """Return the front end's counters that a run increments."""
    found = {name: stats[name] for name in ("lost_workers", "cached_tokens", "moved_tokens")}
    for name in ("forecast_tokens", "found_tokens"):
        found[name] = sum(router[name] for router in stats["routers"].values())
    return found


def run(cluster: Running, number: int, kill: str, texts: list[str], wanted: list[list[tuple[str, bool]]]) -> bool:
    """Do one run, print its table, draw its picture, and return true if it succeeded."""
    answers = [Answer() for _ in texts]
    before = counts_of(cluster.stats())
    victim, pid = cluster.victim(kill) if kill != "none" else ("", 0)
    began = time.monotonic()
    killed_at = asyncio.run(burst(texts, answers, f"run-{number}", pid, SHARE.get(kill, 1.0)))
    seconds = time.monotonic() - began
    near, wrong = compare(answers, wanted)
    cluster.wait(lambda: cluster.is_whole(victim))
    whole_after = time.monotonic() - killed_at if killed_at else 0.0
    cluster.wait(cluster.is_idle)
    stats = cluster.stats()
    in_use = {name: cluster.ask(name, w["side"], "check_empty")[1] for name, w in stats["workers"].items()}
    after = counts_of(stats)
    # A restarted front end counts from zero.
    counts = after if kill == "front_end" else {name: count - before[name] for name, count in after.items()}
    forecast, found = counts["forecast_tokens"], counts["found_tokens"]
    apart = abs(forecast - found) / max(found, 1)
    cut = sum(answer.asked > 1 for answer in answers)
    rows = [
        ["requests, whole answers", f"{len(answers)}, {sum(answer.is_whole for answer in answers)}"],
        ["answers that part from one engine's, at a near tie", f"{near}"],
        ["answers that are wrong", f"{wrong}"],
        ["workers lost by requests", f"{counts['lost_workers']}"],
        ["answers cut with the front end, asked for again", f"{cut}"],
        ["tokens found cached, moved between workers", f"{counts['cached_tokens']:,}, {counts['moved_tokens']:,}"],
        ["forecast, found, tokens", f"{forecast:,}, {found:,}"],
        ["forecast and found apart", f"{apart:.2%}"],
        ["blocks in use at the end", f"{sum(in_use.values())} in {len(in_use)} workers"],
        ["seconds until all processes were there again", f"{whole_after:.1f}"],
        ["tokens a second", f"{sum(len(answer.tokens) for answer in answers) / seconds:,.0f}"],
        ["seconds until all answers were whole", f"{seconds:.1f}"],
    ]
    show(f"cluster, run {number}, killed: {kill}", [], rows)
    draw(answers, began, killed_at, f"{kill} {victim}" if victim != kill else kill)
    return wrong == 0 and apart <= 0.01 and not any(in_use.values()) and all(answer.is_whole for answer in answers)


def longest_gap(answers: list[Answer], killed_at: float) -> float:
    """Return the longest time without a token of one request that lasted over the kill or began after it."""
    pairs = [pair for answer in answers for pair in zip(answer.times, answer.times[1:], strict=False)]
    return max((after - before for before, after in pairs if after > killed_at), default=0.0)


def draw(answers: list[Answer], began: float, killed_at: float, killed: str) -> None:
    """Draw one line per request with its token arrivals, grouped by shared prefix, and the time of the kill.

    killed  role and name of the process that was killed
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.add_subplot()
    order = sorted(range(len(answers)), key=lambda number: (number % NUM_BEGINNINGS, number))
    for place, number in enumerate(order):
        times = [at - began for at in answers[number].times]
        colour = COLOURS[number % NUM_BEGINNINGS]
        label = f"beginning {number + 1}" if number < NUM_BEGINNINGS else None
        axes.plot(times, [place] * len(times), "|", color=colour, markersize=4, markeredgewidth=0.7, label=label)
    if killed_at:
        axes.axvline(killed_at - began, color="#1a1a1a", linewidth=1)
        gap = longest_gap(answers, killed_at)
        axes.text(killed_at - began, len(answers), f" kill -9: {killed}, longest gap {gap:.1f} s", va="bottom")
    figure.legend(loc="outside right upper", fontsize="small", markerscale=3, title="each mark is a token")
    axes.set(xlabel="seconds", ylabel="requests, by shared beginning", yticks=[], xlim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE)
    print(f"picture: {os.path.relpath(PICTURE)}")


def main() -> int:
    """Run the demo and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kill", choices=("decode", "prefill", "front_end", "none"), default="decode")
    parser.add_argument("--runs", type=int, default=1)
    options = parser.parse_args()
    texts = prompts()
    wanted = answers_of_one_engine(texts)
    BUILD.mkdir(exist_ok=True)
    with MESSAGES.open("w", encoding="utf-8") as log, redirect_stdout(MainThreadOutput(sys.stdout, log)):
        cluster = Running()
        try:
            right = [run(cluster, number, options.kill, texts, wanted) for number in range(1, options.runs + 1)]
        finally:
            cluster.close()
        print(f"{sum(right)} of {len(right)} runs right; Ray's messages: {os.path.relpath(MESSAGES)}")
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
