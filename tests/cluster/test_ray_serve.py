"""A cluster on Ray Serve with two decode workers, one prefill worker and a front end; the tests kill each of them.

`make test-ray` creates an environment with Ray, NIXL and torch.
"""

import json
import os
import signal
import socket
import threading
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
from ray_cluster import MARKS, MODEL

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # pydantic's warning, caused by Ray
    for name in ("ray.serve", "torch", "transformers", "starlette", "httpx", "openai"):
        pytest.importorskip(name, reason=f"{name} is not installed: make test-ray")

if find_spec("nixl_cu12") is None:
    pytest.skip("nixl-cu12 is not installed: make test-ray", allow_module_level=True)

import httpx
import openai
from ray import serve as ray_serve

from pagepool.cluster.ray import serve
from pagepool.engine import Engine, SamplingParams
from pagepool.integrations.transformers.pretrained import load_pretrained

PORT = 8701
URL = f"http://127.0.0.1:{PORT}"
SECONDS = 120
NEW = 48
NEAR = 1e-3  # rounding can change the order of logits that differ by less
SOURCE = Path(__file__).read_text(encoding="utf-8")
BEGINNINGS = [SOURCE[start : start + 700] for start in (0, 2000, 4000)]
PROMPTS = [BEGINNINGS[number % 3] + f"# {number}\n" for number in range(24)]

pytestmark = MARKS


def parent_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def process_of_serve(name, pid):
    """Return a process of Serve, such as its controller: it has this name, and the same parent as a worker."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if parent_of(place.name) == parent_of(pid) and name in (place / "cmdline").read_bytes():
                return int(place.name)
        except OSError:  # the process ended meanwhile
            continue
    raise AssertionError(f"there is no {name}")


def wait_until(condition, seconds=SECONDS):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timeout"
        time.sleep(0.1)


class Served:
    """The cluster, and a single engine's answers to the same prompts."""

    def __init__(self, handle):
        self.handle = handle
        self.openai = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=SECONDS)
        model, self.tokenizer = load_pretrained(MODEL, "float32")
        self.alone = Engine(model, self.tokenizer, num_blocks=1024)
        generations = [self.alone.submit(prompt, SamplingParams(NEW, logprobs=2)) for prompt in PROMPTS]
        self.wanted = [list(generation) for generation in generations]
        self.near_ties = 0

    def stats(self):
        return self.handle.stats.remote().result(timeout_s=SECONDS)

    def side(self, kind):
        return {name for name, worker in self.stats()["workers"].items() if worker["side"] == kind}

    def pids(self, kind):
        return [self.ask(kind, "pid", name) for name in self.side(kind)]

    def ask(self, kind, method, worker):
        handle = ray_serve.get_deployment_handle(kind, "pagepool")
        return getattr(handle, method).remote(worker).result(timeout_s=SECONDS)

    def is_idle(self):
        stats = self.stats()
        return stats["requests"] == 0 and all(worker["requests"] == 0 for worker in stats["workers"].values())

    def check(self, number, tokens):
        """Check that the tokens equal the single engine's tokens. After a near tie any tokens are accepted."""
        for place, (found, wanted) in enumerate(zip(tokens, self.wanted[number], strict=True)):
            if found != self.tokenizer.decode([wanted.token_id], skip_special_tokens=True):
                first, second = sorted(wanted.top_logprobs.values(), reverse=True)[:2]
                assert first - second < NEAR, f"prompt {number}, token {place}: {found!r}"
                self.near_ties += 1
                return


def stream(number, take, **options):
    """Stream the answer to a prompt; pass the texts of its tokens to `take`, and return the last line."""
    body = {"prompt": PROMPTS[number], "max_tokens": NEW, "temperature": 0, "logprobs": 0, "stream": True}
    headers = {"x-request-id": options["request_id"]} if "request_id" in options else {}
    last = ""
    with httpx.stream("POST", f"{URL}/v1/completions", json=body, headers=headers, timeout=SECONDS) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                data = json.loads(line[6:])
                assert "error" not in data, data
                logprobs = data["choices"][0]["logprobs"]
                take(logprobs["tokens"] if logprobs else [])
            last = line or last
    return last


class Burst:
    """Streams of all prompts at once."""

    def __init__(self):
        self.tokens = [[] for _ in PROMPTS]
        self.ends = [None] * len(PROMPTS)
        self.changed = threading.Condition()
        self.threads = [threading.Thread(target=self._run, args=(number,)) for number in range(len(PROMPTS))]
        for thread in self.threads:
            thread.start()

    def _run(self, number):
        def take(texts):
            with self.changed:
                self.tokens[number] += texts
                self.changed.notify_all()

        try:
            self.ends[number] = stream(number, take, request_id=f"{id(self)}-{number}")
        except (httpx.HTTPError, AssertionError) as error:
            self.ends[number] = error

    def wait_for_tokens(self, count, streams=1):
        """Wait until `count` tokens have come, from at least `streams` streams."""
        with self.changed:
            assert self.changed.wait_for(
                lambda: sum(map(len, self.tokens)) >= count and sum(map(bool, self.tokens)) >= streams, SECONDS
            ), "timeout"

    def join(self):
        for thread in self.threads:
            thread.join(SECONDS)


@pytest.fixture(scope="module")
def served():
    with serve(MODEL, 2, 1, dtype="float32", port=PORT, threads=1, engine={"num_blocks": 512}) as cluster:
        found = Served(cluster.front_end)
        wait_until(lambda: len(found.stats()["workers"]) == 3)
        pids = found.pids("decode") + found.pids("prefill")
        try:
            yield found
            wait_until(found.is_idle)
            found.alone.check()
            for kind in ("decode", "prefill"):
                for name in found.side(kind):
                    assert found.ask(kind, "check_empty", name) == (name, 0)
        finally:
            found.alone.close()
            found.openai.close()
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    print(f"near ties: {found.near_ties}")


def test_a_burst_is_answered_as_by_one_engine_and_the_forecasts_hold(served):
    burst = Burst()
    burst.join()
    assert burst.ends == ["data: [DONE]"] * len(PROMPTS)
    for number, tokens in enumerate(burst.tokens):
        served.check(number, tokens)
    stats = served.stats()
    assert stats["lost_workers"] == 0 and stats["moved_tokens"] > 0
    for router in stats["routers"].values():
        assert abs(router["forecast_tokens"] - router["found_tokens"]) <= 0.01 * router["found_tokens"]


def test_openai_s_client_gets_chats_and_errors(served):
    answer = served.openai.chat.completions.create(
        model="tiny_llama", messages=[{"role": "user", "content": "def f"}], max_tokens=8, temperature=0
    )
    assert answer.usage.completion_tokens == 8
    with pytest.raises(openai.NotFoundError, match="model 'other' does not exist"):
        served.openai.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match=r"5000 .* 1024"):
        served.openai.completions.create(model="tiny_llama", prompt="x", max_tokens=5000)
    assert "pagepool:router_choices_total" in httpx.get(f"{URL}/metrics").text


def test_a_stream_that_its_client_leaves_is_cancelled_at_the_worker(served):
    def aborted():
        stats = served.stats()
        return stats["ended"]["abort"], sum(worker["ended"]["abort"] for worker in stats["workers"].values())

    of_front_end, of_workers = aborted()
    pids = served.pids("decode")
    chunks = served.openai.completions.create(model="tiny_llama", prompt="def ", max_tokens=900, stream=True)
    next(iter(chunks))
    for pid in pids:  # no worker can end the request before the front end cancels it
        os.kill(pid, signal.SIGSTOP)
    try:
        chunks.close()
        wait_until(lambda: served.stats()["requests"] == 0)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    wait_until(lambda: aborted() == (of_front_end + 1, of_workers + 1))
    wait_until(served.is_idle)


def test_workers_that_stop_during_their_calls_of_the_front_end_do_not_stop_it(served):
    pids, front_end = served.pids("decode"), served.handle.pid.remote().result(timeout_s=SECONDS)
    os.kill(front_end, signal.SIGSTOP)
    try:
        time.sleep(1)  # each worker has sent news and waits for the answer
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    finally:
        os.kill(front_end, signal.SIGCONT)
    try:
        for _ in range(20):
            assert served.handle.stats.remote().result(timeout_s=5)["requests"] == 0
            time.sleep(0.1)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    tokens = served.openai.completions.create(model="tiny_llama", prompt="def ", max_tokens=8)
    assert tokens.usage.completion_tokens == 8


def test_serve_s_controller_that_is_killed_costs_no_request_and_no_worker(served):
    sides = {kind: served.side(kind) for kind in ("decode", "prefill")}
    front_end = served.handle.pid.remote().result(timeout_s=SECONDS)
    controller = process_of_serve(b"ServeController", front_end)
    burst = Burst()
    burst.wait_for_tokens(100)
    os.kill(controller, signal.SIGKILL)
    burst.join()
    assert burst.ends == ["data: [DONE]"] * len(PROMPTS)
    wait_until(lambda: controller_of(front_end) not in (None, controller))
    time.sleep(10)  # in this time, a new controller stops replicas that do not answer it
    assert {kind: served.side(kind) for kind in sides} == sides
    assert stream(0, [].extend) == "data: [DONE]"


def controller_of(pid):
    try:
        return process_of_serve(b"ServeController", pid)
    except AssertionError:  # it is being started
        return None


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_worker_that_is_killed_costs_no_request_and_repeats_no_token(served, number, kind):
    before = served.side(kind)
    victim = sorted(before)[0]
    pid = served.ask(kind, "pid", victim)
    burst = Burst()
    burst.wait_for_tokens(300 if kind == "decode" else 5)
    os.kill(pid, number)
    burst.join()
    assert burst.ends == ["data: [DONE]"] * len(PROMPTS)
    for prompt, tokens in enumerate(burst.tokens):
        assert len(tokens) == NEW
        served.check(prompt, tokens)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), 10)

    def is_replaced():
        workers = served.side(kind)
        return len(workers) == len(before) and victim not in workers

    wait_until(is_replaced)


def test_the_prefix_caches_of_all_workers_are_reset(served):
    def cached_tokens():
        before = served.stats()["cached_tokens"]
        served.openai.completions.create(model="tiny_llama", prompt=PROMPTS[0], max_tokens=4)
        return served.stats()["cached_tokens"] - before

    def reset():
        return httpx.post(f"{URL}/reset_prefix_cache", json={}, timeout=SECONDS).status_code

    assert [reset(), cached_tokens(), cached_tokens() > 0, reset(), cached_tokens()] == [200, 0, True, 200, 0]


def test_a_request_id_is_answered_again_and_not_computed_again(served):
    first, again = [], []
    assert stream(0, first.extend, request_id="once") == "data: [DONE]"
    assert stream(0, again.extend, request_id="once") == "data: [DONE]"
    assert first == again
    before = served.stats()["generated_tokens"]
    stream(0, [].extend, request_id="once")
    assert served.stats()["generated_tokens"] == before
    response = httpx.post(f"{URL}/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "once"})
    assert response.status_code == 400 and "request_id 'once' was another request" in response.text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_front_end_that_is_killed_ends_its_connections_and_a_retry_is_answered_once(served, number):
    """Until the next front end answers, each request gets status 503 with Retry-After, and none is refused."""
    pid = served.handle.pid.remote().result(timeout_s=SECONDS)
    burst = Burst()
    # The next front end could answer a stream that has not begun, and it would not be in `cut`.
    burst.wait_for_tokens(100, streams=len(PROMPTS))
    os.kill(pid, number)
    burst.join()
    cut = [prompt for prompt, end in enumerate(burst.ends) if end != "data: [DONE]"]
    assert cut, "the burst was over before the front end died"
    assert not any(end is None for end in burst.ends)
    answers = [httpx.get(f"{URL}/health", timeout=SECONDS)]
    while answers[-1].status_code != 200:
        assert answers[-1].status_code == 503 and int(answers[-1].headers["retry-after"]) >= 1
        time.sleep(0.1)
        answers.append(httpx.get(f"{URL}/health", timeout=SECONDS))
    for prompt in cut:
        tokens = []
        assert stream(prompt, tokens.extend, request_id=f"{id(burst)}-{prompt}") == "data: [DONE]"
        served.check(prompt, tokens)
    before = served.stats()["generated_tokens"]
    assert before == len(cut) * NEW
    stream(cut[0], [].extend, request_id=f"{id(burst)}-{cut[0]}")
    assert served.stats()["generated_tokens"] == before
    wait_until(served.is_idle)


def test_the_http_server_has_the_limits_of_pagepool_serve(served):
    """The parser, hosts, origins and fields; the body is refused by its announced length, before it is sent."""
    post = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    cases = {
        post + "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n": 400,
        "GET /health HTTP/1.1\nHost: localhost\n\n": 400,
        f"GET /health HTTP/1.1\r\nHost: localhost\r\nX: {'x' * 40_000}\r\n\r\n": 431,
        "GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n": 403,
        "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n\r\n": 403,
        post + f"Content-Length: {1 << 40}\r\n\r\n": 413,
    }
    for text, status in cases.items():
        with socket.create_connection(("127.0.0.1", PORT), SECONDS) as client:
            client.sendall(text.encode())
            assert client.recv(65536).startswith(f"HTTP/1.1 {status} ".encode()), text[:80]
    for body in ({"prompt": "x", "other": 1}, {"prompt": "x", "n": 10_000}, {"prompt": "x", "stop": ["x"] * 100}):
        assert httpx.post(f"{URL}/v1/completions", json=body).status_code == 400, body
