"""A cluster on Ray starts, grows, and reports why it cannot start. `make test-ray` creates an environment."""

import contextlib
import importlib.util
import io
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings

import pytest
from ray_cluster import MARKS, MODEL

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # pydantic's warning, caused by Ray
    for name in ("ray.serve", "torch", "transformers", "starlette", "httpx"):
        pytest.importorskip(name, reason=f"{name} is not installed: make test-ray")

import httpx
import ray

from pagepool.cluster.ray import serve

PORT = 8704
URL = f"http://127.0.0.1:{PORT}"
SECONDS = 180

pytestmark = MARKS


def test_messages_of_ray_s_threads_do_not_reach_the_tables_of_the_demo():
    spec = importlib.util.spec_from_file_location("demo", MODEL.parent / "cluster.py")
    demo = sys.modules["demo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    terminal, log = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(demo.MainThreadOutput(terminal, log)):
        thread = threading.Thread(target=print, args=("A worker died",))
        thread.start()
        thread.join()
        print("a table")
    assert (terminal.getvalue(), log.getvalue()) == ("a table\n", "A worker died\n")
    assert len({prompt[:900] for prompt in demo.prompts()}) == demo.NUM_BEGINNINGS


def test_a_worker_that_cannot_start_says_why_and_leaves_no_ray():
    sentence = "did not start: ValueError: num_blocks must be at least 1, not -5"
    with pytest.raises(RuntimeError, match=sentence):
        serve(MODEL, 1, dtype="float32", port=PORT, engine={"num_blocks": -5})
    assert not ray.is_initialized()
    socket.create_server(("127.0.0.1", PORT)).close()


def test_workers_are_added_while_more_waits_than_one_can_compute():
    ends, statuses = threading.Event(), set()

    def load(seed):
        tokens = random.Random(seed)
        while not ends.is_set():
            body = {"prompt": [tokens.randrange(5, 400) for _ in range(900)], "max_tokens": 2}
            statuses.add(httpx.post(f"{URL}/v1/completions", json=body, timeout=SECONDS).status_code)

    threads = [threading.Thread(target=load, args=(seed,)) for seed in range(16)]
    with serve(MODEL, (1, 2), dtype="float32", port=PORT, threads=1, engine={"num_blocks": 512}) as cluster:
        try:
            for thread in threads:
                thread.start()
            end = time.monotonic() + SECONDS
            while len(cluster.front_end.stats.remote().result(timeout_s=SECONDS)["workers"]) < 2:
                assert time.monotonic() < end, "no worker was added"
                time.sleep(0.5)
        finally:
            ends.set()
            for thread in threads:
                thread.join(SECONDS)
    assert statuses == {200}
    assert not ray.is_initialized()


def test_the_command_serves_with_its_keys_drains_and_leaves_no_process(tmp_path):
    keys, body = tmp_path / "keys", {"prompt": "def ", "max_tokens": 900, "stream": True, "ignore_eos": True}
    keys.write_text("first")
    command = ["serve", "--workers", "2", "--port", str(PORT), "--threads", "1", "--model", str(MODEL)]
    process = subprocess.Popen(
        [sys.executable, "-m", "pagepool", *command, "--pool-bytes", "64M", "--api-key-file", str(keys)],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        end = time.monotonic() + SECONDS
        while status("/ready") != 200:
            assert time.monotonic() < end and process.poll() is None, "the command does not serve"
            time.sleep(0.2)
        assert (status("/v1/models"), status("/v1/models", "first"), status("/v1/models", "second")) == (401, 200, 401)
        keys.write_text("second")
        while status("/v1/models", "second") != 200:
            assert time.monotonic() < end, "the new key is not read"
            time.sleep(0.2)
        assert status("/v1/models", "first") == 401
        headers = {"authorization": "Bearer second"}
        with httpx.stream("POST", f"{URL}/v1/completions", json=body, headers=headers, timeout=SECONDS) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            while status("/ready") == 200:
                time.sleep(0.05)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        log = process.communicate()[1]
    assert f"tiny_llama at {URL}/v1" in log and '"POST /v1/completions" 200' in log
    assert "first" not in log and "second" not in log


def status(path, key=None):
    """Return the status of an answer, or None if the port is closed."""
    try:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.get(URL + path, headers=headers, timeout=SECONDS).status_code
    except httpx.ConnectError:
        return None
