"""A store with a real model: after a restart or crash the tokens are the same, and the prompt is not computed again."""

import json
import os
import re
import signal
import time

import pytest

for name in ("torch", "transformers"):
    pytest.importorskip(name, reason=f"{name} is not installed: make test-models")

import torch  # noqa: E402
from families import each, prompts, tiny_model  # noqa: E402
from test_generate import SECONDS, run, served, start  # noqa: E402

from pagepool import Engine, SamplingParams  # noqa: E402
from pagepool.cli.model_options import model_directory  # noqa: E402
from pagepool.integrations.transformers.pretrained import load_pretrained  # noqa: E402
from pagepool.integrations.transformers.storing import digest_of_weights, model_fingerprint  # noqa: E402
from pagepool.prefix.session import load_session, save_session  # noqa: E402
from pagepool.prefix.store_folder import stores_in  # noqa: E402
from pagepool.prefix.store_report import describe  # noqa: E402
from pagepool.scheduling import prefix_adapter  # noqa: E402

STORE_BYTES = 64 << 20
RECURRENT = ["Mamba2", "Bamba", "Qwen3Next", "Jamba", "FalconH1", "Zamba2", "Lfm2"]
PARAMS = SamplingParams(16)


def answers(engine):
    running = [engine.submit(prompt, PARAMS) for prompt in prompts((70, 33, 130, 9))]
    found = [generation.result(SECONDS) for generation in running]
    engine.check()
    return [generation.token_ids for generation in found], [generation.num_cached for generation in found]


@pytest.mark.parametrize("family", each(["Llama", "Gemma3", "DeepseekV3", "Gemma4", *RECURRENT]))
def test_an_engine_with_the_store_of_another_one_generates_the_same_tokens(family, tmp_path, monkeypatch):
    monkeypatch.setattr(prefix_adapter, "PART_BYTES", 1)  # one block of each group at a time
    with Engine(tiny_model(family)) as engine:
        wanted, _ = answers(engine)
    for cached in ([0, 0, 0, 0], [64, 32, 128, 0]):
        with Engine(tiny_model(family), store=tmp_path, store_bytes=STORE_BYTES) as engine:
            assert answers(engine) == (wanted, cached)


def test_one_weight_that_differs_in_one_bit_finds_nothing(tmp_path):
    models = [tiny_model("Llama"), tiny_model("Llama")]
    assert digest_of_weights(models[0]) == digest_of_weights(models[1])
    with torch.no_grad():
        weight = next(models[1].parameters())
        weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(9.0))
    assert digest_of_weights(models[0]) != digest_of_weights(models[1])
    for model in models:
        with Engine(model, store=tmp_path, store_bytes=STORE_BYTES) as engine:
            assert answers(engine)[1] == [0, 0, 0, 0]


@pytest.mark.filterwarnings("ignore::UserWarning:peft")  # about several adapters in one model
def test_adapters_that_change_keys_change_the_fingerprint():
    """The tensors of the first four models are equal: what differs are attributes of peft's layers."""
    peft = pytest.importorskip("peft", reason="peft is not installed: make test-models")
    tuners = pytest.importorskip("peft.tuners.tuners_utils")

    def adapted(alpha=4, active=True, use="x", names=("x", "y"), merged=False):
        model = tiny_model("Llama")
        torch.manual_seed(6)
        for name in names:
            config = peft.LoraConfig(r=4, lora_alpha=alpha, target_modules=["k_proj"], init_lora_weights=False)
            peft.inject_adapter_in_model(config, model, adapter_name=name)
        for layer in model.modules():
            if isinstance(layer, tuners.BaseTunerLayer):
                layer.set_adapter(use)
                layer.enable_adapters(active)
                if merged:
                    layer.merge()
        return model.eval()

    kinds = [{}, {"alpha": 64}, {"active": False}, {"use": "y"}, {"merged": True}, {"names": ("x",)}]
    for weights in (None, "a digest"):
        prints = [model_fingerprint(adapted(**kind), (), 16, weights) for kind in kinds]
        assert prints[0] == model_fingerprint(adapted(), (), 16, weights)
        assert len({found.text for found in prints}) == len(kinds)
        assert model_fingerprint(tiny_model("Llama"), (), 16, weights).text.count("adapters") == 0


def test_pages_of_another_dtype_are_not_used(tmp_path):
    for dtype in ("float32", "bfloat16", "int8"):
        with Engine(tiny_model("Llama"), dtype=dtype, store=tmp_path, store_bytes=STORE_BYTES) as engine:
            assert answers(engine)[1] == [0, 0, 0, 0]


@pytest.mark.parametrize("family", each(["Gemma3", "Gemma4", *RECURRENT]))
def test_a_session_has_the_pages_of_every_group_and_the_state(family, tmp_path):
    prompt, more = prompts((130, 40))
    with Engine(tiny_model(family)) as engine:
        tokens = [*prompt, *engine.submit(prompt, PARAMS).result(SECONDS).token_ids]
        options = {"num_groups": len(engine.runner.groups or (0,)), "checkpoints": engine.runner.checkpoints}
        fingerprint = engine.runner.fingerprint("a")
        saved = save_session(tmp_path / "session", engine.prefix_cache, fingerprint, tokens, **options)
    with Engine(tiny_model(family), prefix_cache=False) as engine:
        wanted = engine.submit([*tokens, *more], PARAMS).result(SECONDS).token_ids
    with Engine(tiny_model(family)) as engine:
        options["checkpoints"] = engine.runner.checkpoints
        session = load_session(tmp_path / "session", engine.prefix_cache, engine.runner.fingerprint("a"), **options)
        generation = engine.submit([*session.tokens.tolist(), *more], PARAMS).result(SECONDS)
        engine.check()
    assert saved == session.num_cached == generation.num_cached >= 128 and generation.token_ids == wanted


def test_arguments_that_cannot_be_get_one_sentence(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    store = ("--store", str(tmp_path))
    for arguments, said in (
        (store, "must be used together"),
        (("--store-bytes", "1M"), "must be used together"),
        ((*store, "--store-bytes", "64M", "--no-prefix-cache"), "--no-prefix-cache"),
        ((*store, "--store-bytes", "100k"), "max_bytes must be at least"),
        (("--store", str(file), "--store-bytes", "64M"), str(file)),
    ):
        code, _, err = run(capsys, "import", *arguments)
        assert code == 2 and said in err.splitlines()[-1]


@pytest.mark.slow
def test_generate_finds_the_prompt_of_an_earlier_process(tmp_path):
    for cached in (0, 288):
        file = tmp_path / "figures.json"
        process = start(
            "generate", "def main(): return " * 30, "--store", str(tmp_path / "store"), "--store-bytes", "64M",
            "--json", str(file), "--max-new-tokens", "8",
        )  # fmt: skip
        assert process.wait(SECONDS) == 0, process.communicate()[1]
        process.communicate()
        [output] = json.loads(file.read_text())["outputs"]
        assert output["cached_tokens"] == cached or (cached and output["cached_tokens"] >= 128)
    text = output["text"]
    assert text and (tmp_path / "store" / "weights.json").exists()


def num_stored(folder):
    """Return the number of pages in the stores of a folder."""
    return sum(describe(path).get("pages", 0) for path in stores_in(folder))


def test_a_server_that_was_killed_in_a_stream_finds_its_prompts_again(tmp_path):
    pytest.importorskip("httpx", reason="httpx is not installed: make test-models")
    import httpx

    options = ("--store", str(tmp_path), "--store-bytes", "64M", "--show-cached-tokens")
    prompt = "class Reader:\n    def read(self): return 1\n" * 20
    body = {"model": "tiny_llama", "prompt": prompt, "max_tokens": 16, "temperature": 0}
    process, _, url = served(*options)
    first = httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS).json()
    full = first["usage"]["prompt_tokens"] // 16
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True, "max_tokens": 200}) as response:
        for _ in response.iter_lines():  # pages are written at the second use of the prompt, which this request starts
            deadline = time.monotonic() + SECONDS
            while num_stored(tmp_path) < full and time.monotonic() < deadline:
                time.sleep(0.05)
            break
        process.kill()
    assert process.wait(SECONDS) == -signal.SIGKILL
    process.communicate()
    process, _, url = served(*options)
    second = httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS).json()
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (first["usage"]["prompt_tokens"] - 1) // 16 * 16
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(SECONDS) == 0
    process.communicate()


def test_a_text_goes_on_from_its_session(tmp_path):
    file, session = tmp_path / "figures.json", tmp_path / "session"
    common = ("--session", str(session), "--json", str(file), "--max-new-tokens", "8")
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    texts, prompt = [], "def main():\n    return 1\n" * 24
    for text in (prompt, " and"):
        process = start("generate", text, *common, env=environment)
        assert process.wait(SECONDS) == 0, process.communicate()[1]
        process.communicate()
        [output] = json.loads(file.read_text())["outputs"]
        texts.append(output["text"])
    assert output["cached_tokens"] >= output["prompt_tokens"] - 32 > 64
    with Engine(*load_pretrained(model_directory(None))) as engine:
        tokens = engine.encoder.encode(prompt)
        for text in texts:
            generation = engine.submit(tokens, SamplingParams(8)).result(SECONDS)
            assert generation.text == text
            tokens = [*tokens, *generation.token_ids, *engine.encoder.encode(" and", add_special_tokens=False)]


@pytest.mark.slow
def test_a_chat_goes_on_from_its_session(tmp_path):
    session = str(tmp_path / "session")
    options = ("generate", "--chat", "--threads", "1", "--max-new-tokens", "8", "--session", session)
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    lines = ["open a file and read every line of it\n", "close it\n"]
    process = start(*options, "--system", "write code", env=environment)
    assert "saved" in process.communicate(lines[0], SECONDS)[1]
    process = start(*options, env=environment)
    _, err = process.communicate(lines[1], SECONDS)
    cached, prompt_tokens = map(int, re.search(r"(\d+) of (\d+) prompt tokens cached", err).groups())
    process = start(*options[:-2], "--system", "write code", env=environment)
    _, err = process.communicate("".join(lines), SECONDS)
    assert re.findall(r"(\d+) of (\d+) prompt tokens cached", err)[1] == (str(cached), str(prompt_tokens))
    assert cached >= 16
    process = start("generate", "x", "--session", session, env=environment)
    assert "--chat" in process.communicate(None, SECONDS)[1] and process.returncode == 2
