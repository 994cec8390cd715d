"""Engines and servers of one model over one shared pool."""

import os
import signal

import pytest

for name in ("torch", "transformers"):
    pytest.importorskip(name, reason=f"{name} is not installed: make test-models")

from families import prompts, tiny_model  # noqa: E402
from test_generate import SECONDS, served  # noqa: E402

from pagepool import Engine, SamplingParams  # noqa: E402

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


def test_another_model_and_models_with_states_are_refused(name):
    with Engine(tiny_model("Llama"), num_blocks=64, shared_pool=name):
        model = tiny_model("Llama")
        model.model.norm.weight.data[0] += 1
        with pytest.raises(ValueError, match=r"fingerprint\.weights"):
            Engine(model, num_blocks=64, shared_pool=name)
        with pytest.raises(ValueError, match="room for 64 blocks, not 65"):
            Engine(tiny_model("Llama"), num_blocks=65, shared_pool=name)
        with pytest.raises(ValueError, match="max_events 5"):
            Engine(tiny_model("Llama"), num_blocks=64, shared_pool=name, prefix_events=5)
    with pytest.raises(ValueError, match="recurrent states"):
        Engine(tiny_model("Jamba"), num_blocks=64, shared_pool=name)


def test_servers_share_prefixes_and_one_that_is_killed_or_restarted_changes_no_answer(name):
    httpx = pytest.importorskip("httpx", reason="httpx is not installed: make test-models")
    options = ("--shared-pool", name, "--pool-bytes", "16M", "--show-cached-tokens")
    prompt = "class Reader:\n    def read(self): return 1\n" * 20
    body = {"model": "tiny_llama", "prompt": prompt, "max_tokens": 16, "temperature": 0}

    def ask(url):
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS).json()
        usage = answer["usage"]
        return answer["choices"][0]["text"], usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    servers = [served(*options), served(*options)]
    try:
        text, num_prompt, cached = ask(servers[0][2])
        assert cached == 0
        most = (num_prompt - 1) // 16 * 16
        assert ask(servers[1][2]) == (text, num_prompt, most)
        stream = {**body, "stream": True, "max_tokens": 200}
        with httpx.stream("POST", f"{servers[0][2]}/v1/completions", json=stream, timeout=SECONDS) as response:
            for line in response.iter_lines():
                if line:
                    break
            servers[0][0].kill()
        assert servers[0][0].wait(SECONDS) == -signal.SIGKILL
        servers[0][0].communicate()
        assert ask(servers[1][2]) == (text, num_prompt, most)
        servers[0] = served(*options)
        assert ask(servers[0][2]) == (text, num_prompt, most)
    finally:
        for process, *_ in servers:
            process.send_signal(signal.SIGTERM)
            process.wait(SECONDS)
            process.communicate()
    assert [process.returncode for process, *_ in servers] == [0, 0]
