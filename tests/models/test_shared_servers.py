"""Engines and servers of one model over one shared pool."""

import argparse
import contextlib
import json
import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

for name in ("torch", "transformers"):
    pytest.importorskip(name, reason=f"{name} is not installed: make test-models")

from families import prompts, tiny_model  # noqa: E402
from test_generate import SECONDS, served  # noqa: E402

from pagepool import Engine, SamplingParams  # noqa: E402
from pagepool.cli.model_options import TINY_LLAMA, add_model_arguments, open_engine  # noqa: E402

PARAMS = SamplingParams(16)


@pytest.fixture
def name():
    chosen = f"test-{os.getpid()}-{os.urandom(4).hex()}"
    yield chosen
    path = f"/dev/shm/pagepool-{chosen}"
    if os.path.exists(path):
        os.unlink(path)


def answers(engine):
    running = [engine.submit(prompt, PARAMS) for prompt in prompts((70, 33, 130, 9))]
    found = [generation.result(SECONDS) for generation in running]
    engine.check()
    return [generation.token_ids for generation in found], [generation.num_cached for generation in found]


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_a_second_engine_finds_the_prefixes_of_the_first_and_generates_the_same_tokens(family, name):
    with Engine(tiny_model(family), num_blocks=512) as engine:
        wanted, _ = answers(engine)
    with Engine(tiny_model(family), num_blocks=512, shared_pool=name) as first:
        assert answers(first) == (wanted, [0, 0, 0, 0])
        cached = first.prefix_cache.num_cached
        with Engine(tiny_model(family), num_blocks=512, shared_pool=name) as second:
            assert answers(second) == (wanted, [64, 32, 128, 0])
            assert second.prefix_cache.num_cached == cached
            assert second.runner.pool.stats()["processes"] == 2
        assert answers(first) == (wanted, [64, 32, 128, 0])
        assert first.runner.pool.allocator.in_use == first.prefix_cache.num_cached


def test_another_model_is_refused(name):
    with Engine(tiny_model("Llama"), num_blocks=64, shared_pool=name):
        model = tiny_model("Llama")
        model.model.norm.weight.data[0] += 1
        with pytest.raises(ValueError, match=r"fingerprint\.weights"):
            Engine(model, num_blocks=64, shared_pool=name)
        with pytest.raises(ValueError, match="room for 64 blocks, not 65"):
            Engine(tiny_model("Llama"), num_blocks=65, shared_pool=name)


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Jamba"])
def test_engines_with_a_shared_pool_a_store_and_events_go_on_after_a_reboot(family, name, tmp_path):
    options = {"num_blocks": 512, "store": tmp_path, "store_bytes": 64 << 20, "prefix_events": 10_000}
    with Engine(tiny_model(family), num_blocks=512) as engine:
        wanted, _ = answers(engine)
        computed_twice = answers(engine)
    with Engine(tiny_model(family), shared_pool=name, **options) as first:
        assert answers(first) == (wanted, [0, 0, 0, 0])
        kinds = {event.kind for event in first.prefix_cache.drain_events()}
        assert kinds == {"stored"} and first.prefix_cache.flush()
        with Engine(tiny_model(family), shared_pool=name, **options) as second:
            assert (first.store.is_writer, second.store.is_writer) == (True, False)
            assert answers(second) == computed_twice
            assert second.prefix_cache.name_snapshot().num_blocks == second.prefix_cache.num_cached
    os.unlink(f"/dev/shm/pagepool-{name}")
    with Engine(tiny_model(family), shared_pool=name, **options) as third:
        assert answers(third) == computed_twice
        third.prefix_cache.check()


def check_pool(options):
    """Attach as a server with these options would, and check that only the cache holds blocks."""
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    with open_engine(parser.parse_args(options), "serve") as engine:
        engine.check()
        assert engine.runner.pool.stats()["processes"] == 1


def test_servers_share_prefixes_and_one_that_is_killed_or_restarted_changes_no_answer(name, tmp_path):
    httpx = pytest.importorskip("httpx", reason="httpx is not installed: make test-models")
    model = tmp_path / "llama"
    shutil.copytree(TINY_LLAMA, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    options = ("--model", str(model), "--shared-pool", name, "--pool-bytes", "64M")
    path = f"/dev/shm/pagepool-{name}"

    def body(prompt, **more):
        return {"model": "llama", "prompt": prompt, "max_tokens": 16, "temperature": 0, **more}

    def ask(url, prompt):
        answer = httpx.post(f"{url}/v1/completions", json=body(prompt), timeout=SECONDS).json()
        usage = answer["usage"]
        return answer["choices"][0]["text"], usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]

    def break_off(url, prompt):
        streamed = body(prompt, stream=True, max_tokens=400)
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream("POST", f"{url}/v1/completions", json=streamed, timeout=SECONDS) as response,
        ):
            for _ in response.iter_lines():
                tokens_seen.release()

    tokens_seen = threading.Semaphore(0)
    long, *others = prompts((2048, 700, 650, 600, 550, 500, 450, 400))
    servers = [served(*options, "--show-cached-tokens") for _ in range(2)]
    urls = [url for *_, url in servers]
    try:
        first, second = urls
        text, computed = ask(first, long)
        assert computed == 2048
        allocated = os.stat(path).st_blocks
        text_of_second, computed = ask(second, long)
        assert text_of_second == text and computed < 32
        assert os.stat(path).st_blocks < 1.05 * allocated
        answers = {tuple(prompt): ask(second, prompt)[0] for prompt in others}
        with ThreadPoolExecutor(2 * len(others)) as clients:
            streams = [clients.submit(break_off, first, prompt[::-1]) for prompt in others]
            asked = [clients.submit(ask, second, prompt) for prompt in 5 * others]
            for _ in range(3 * len(others)):
                assert tokens_seen.acquire(timeout=SECONDS)
            servers[0][0].kill()
            for done in streams:
                done.result(SECONDS)
            assert [done.result(SECONDS)[0] for done in asked] == 5 * [answers[tuple(prompt)] for prompt in others]
        assert servers[0][0].wait(SECONDS) == -signal.SIGKILL
        servers[0][0].communicate()
        text_of_second, computed = ask(second, long)
        assert text_of_second == text and computed < 32
        servers[0] = served(*options, "--show-cached-tokens")
        text_of_third, computed = ask(servers[0][2], long)
        assert text_of_third == text and computed < 32
    finally:
        for process, *_ in servers:
            process.send_signal(signal.SIGTERM)
            process.wait(SECONDS)
            process.communicate()
    assert [process.returncode for process, *_ in servers] == [0, 0]
    check_pool(options)
