"""A thousand cancelled, abandoned and cut off requests with half of the needed blocks leave nothing in use."""

import asyncio
import gc
import importlib.util
import json
import os
import random
import subprocess
import sys
import threading
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

for name in ("starlette", "uvicorn", "prometheus_client", "httpx", "openai"):
    pytest.importorskip(name, reason=f"{name} is not installed: make test-models")
BENCH = Path(__file__).parents[2] / "bench"
if not BENCH.is_dir():
    pytest.skip("needs bench/ of a checkout", allow_module_level=True)
sys.path.append(str(BENCH))

from fake_runner import Bytes, FakeRunner  # noqa: E402
from test_serve import SECONDS, serving, wait_until  # noqa: E402

import pagepool  # noqa: E402
from pagepool import SchedulerConfig  # noqa: E402
from pagepool.engine import Engine, SamplingParams  # noqa: E402
from pagepool.engine.generation import Generation  # noqa: E402

load = importlib.import_module("load")

REQUESTS = 1000
WAYS = ("whole", "in a coroutine", "cancelled", "abandoned", "never read", "coroutine cancelled")
THREADS = 8
TOKENS = 24
# The prompts have no common prefix: shared blocks would need less memory.
PROMPTS = [f"{number} def function(argument):\n    return argument\n" for number in range(100)]
# Half of the blocks that the longest requests of all threads need.
BLOCKS = THREADS * -(-(len(PROMPTS[-1]) + TOKENS) // 4) // 2


def ask(engine, choice):
    """Send one request, end it in one of several ways, and check its result; return the way."""
    way = choice.choice(WAYS)
    prompt = choice.choice(PROMPTS)
    generation = engine.submit(
        prompt[: choice.randint(1, len(prompt))],
        SamplingParams(
            choice.randint(1, TOKENS),
            temperature=choice.choice([0.0, 1.0]),
            seed=choice.randint(0, 9),
            stop=choice.choice([(), "a", "zz"]),
        ),
    )
    if way == "whole":
        tokens = list(generation)
        assert [token.token_id for token in tokens] == generation.token_ids
        assert generation.finish_reason in ("length", "stop")
    elif way == "cancelled":
        next(generation)
        generation.cancel()
        assert generation.result(SECONDS).finish_reason in ("length", "stop", "abort")
    elif way == "abandoned":
        for _ in generation:
            if choice.random() < 0.3:
                break
    elif way in ("in a coroutine", "coroutine cancelled"):

        async def read():
            return [token async for token in generation]

        async def read_for(seconds):
            try:
                await asyncio.wait_for(read(), seconds)
            except asyncio.TimeoutError:
                generation.cancel()

        asyncio.run(read_for(SECONDS if way == "in a coroutine" else 0.002))
    return way


def test_a_thousand_requests_in_process_leave_nothing():
    ways, sizes, errors = Counter(), [], []
    config = SchedulerConfig(max_batch_sequences=8)
    with Engine(FakeRunner(num_blocks=BLOCKS, step_seconds=0.0005), Bytes(), config=config) as engine:

        def ask_many(number):
            choice = random.Random(number)
            try:
                for _ in range(REQUESTS // THREADS // 2):
                    ways[ask(engine, choice)] += 1
            except BaseException as error:
                errors.append(error)

        tracemalloc.start()
        try:
            for half in range(2):
                threads = [threading.Thread(target=ask_many, args=(number + 100 * half,)) for number in range(THREADS)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(SECONDS)
                assert not errors, errors
                gc.collect()
                wait_until(lambda: engine.num_requests == 0)
                engine.check()
                sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        stats = engine.stats()
        assert stats["ended"]["error"] == 0 and sum(stats["ended"].values()) == sum(ways.values())
        assert stats["ended"]["abort"] > 100 and stats["scheduler"]["preemptions"] > 0
    assert set(ways) == set(WAYS) and sum(ways.values()) >= REQUESTS - 2 * THREADS
    assert sizes[1] - sizes[0] < 100_000
    # `isinstance` reads __class__, which makes some torch objects warn.
    assert not [thing for thing in gc.get_objects() if type(thing) is Generation]


@pytest.mark.slow
def test_a_thousand_requests_over_http_leave_nothing():
    def ends(counts):
        return sum(counts.values()) >= REQUESTS

    with serving(FakeRunner(num_blocks=BLOCKS, step_seconds=0.0005)) as served:
        counts, first = asyncio.run(load.load(served.url, THREADS, PROMPTS, TOKENS, seed=0, ends=ends))
        assert len(first) >= counts["stream"]
        assert set(counts) == set(load.WAYS) and sum(counts.values()) >= REQUESTS
        wait_until(served.is_idle)
        served.engine.check()
        stats = served.engine.stats()
        assert stats["ended"]["error"] == 0 and stats["ended"]["abort"] > 50
        assert stats["scheduler"]["preemptions"] > 0
        found = load.metrics(served.url)
        assert found['pagepool:kv_blocks{pool="kv",state="used"}'] == 0


@pytest.mark.slow  # `make load-test` does the same
def test_a_server_under_load_gives_no_error_leaks_nothing_and_drains():
    if not (BENCH / "tiny_llama" / "model.safetensors").is_file() or importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch, and bench/tiny_llama of a checkout")
    environment = {**os.environ, "PYTHONPATH": str(Path(pagepool.__file__).parents[1])}
    command = [sys.executable, str(BENCH / "load.py"), "--seconds", "8"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["requests"] >= 8 and found["errors"] == 0 and set(found["ended"]) <= set(load.WAYS)
