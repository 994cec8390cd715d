"""For every family the engine generates the same tokens as transformers, and leaves no block in use."""

import gc
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test-models")
pytest.importorskip("transformers", reason="transformers is not installed: make test-models")

from fake_runner import reason_of  # noqa: E402
from families import FAMILIES, NEW_TOKENS, each, eager_tokens, prompts, tiny_model  # noqa: E402
from refusals import refuses  # noqa: E402
from scripted_drafts import drafting  # noqa: E402

import pagepool  # noqa: E402
from pagepool import SchedulerConfig  # noqa: E402
from pagepool.config import EQUAL_ROWS  # noqa: E402
from pagepool.engine import Engine, SamplingParams  # noqa: E402
from pagepool.integrations.transformers import recurrent  # noqa: E402

SECONDS = 300


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("PAGEPOOL_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", each(FAMILIES))
def test_greedy_tokens_are_those_of_transformers_eager_attention(family):
    with Engine(tiny_model(family)) as engine:
        running = [engine.submit(prompt, SamplingParams(NEW_TOKENS)) for prompt in prompts()]
        assert [generation.result(SECONDS).token_ids for generation in running] == eager_tokens(family)
        engine.check()


@pytest.mark.parametrize("family", each([*FAMILIES, "Zamba2", "Lfm2"]))
@pytest.mark.parametrize("blocks", [None, 60])
def test_drafts_change_no_greedy_token_in_float32(family, blocks):
    """Every second pool is so small that sequences with drafts are preempted."""
    texts = {tuple(prompt): tokens for prompt, tokens in zip(prompts(), eager_tokens(family), strict=True)}
    model = tiny_model(family)
    with drafting(Engine(model, num_blocks=blocks, drafts="ngram"), texts, seed=blocks) as engine:
        running = [engine.submit(prompt, SamplingParams(NEW_TOKENS)) for prompt in prompts()]
        assert [generation.result(SECONDS).token_ids for generation in running] == eager_tokens(family)
        stats = engine.stats()
        assert stats["drafted_tokens"] > stats["accepted_tokens"] > NEW_TOKENS
        engine.check()


def test_drafts_change_no_greedy_token_with_packed_layers_in_bfloat16():
    """In steps of up to EQUAL_ROWS rows: more rows can change the last bit, with drafts and without."""
    tiny, wide = tiny_model("Qwen3"), {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    config = {**tiny.config.to_diff_dict(), **wide, "num_key_value_heads": 4, "head_dim": 64}
    short, most = [prompt[:8] for prompt in prompts()], EQUAL_ROWS // 8 - 1

    def tokens(drafts, texts):
        torch.manual_seed(0)
        model = type(tiny)(type(tiny.config)(**config)).to(torch.bfloat16).eval()
        with Engine(model, pack_weights=True, drafts=drafts) as engine:
            if drafts is not None:
                drafting(engine, texts, seed=1, most=most)
            running = [engine.submit(prompt, SamplingParams(NEW_TOKENS)) for prompt in short]
            found = [generation.result(SECONDS).token_ids for generation in running]
            return found, engine.stats().get("accepted_tokens")

    known, _ = tokens(None, {})
    texts = {tuple(prompt): [*found, *range(most)] for prompt, found in zip(short, known, strict=True)}
    found, accepted = tokens("ngram", texts)
    assert found == known and accepted > NEW_TOKENS


@pytest.mark.parametrize("family", ["Mamba2", "Bamba"])
def test_drafts_take_the_states_that_requests_leave_and_no_cached_state_has_a_rejected_draft(family):
    """Prompts that go on an answer begin with its kept state. Requests come, end and wait for a state."""
    texts = {tuple(prompt): tokens for prompt, tokens in zip(prompts(), eager_tokens(family), strict=True)}
    chats = {(*prompt, *tokens[:32]): tokens[32:] for prompt, tokens in texts.items()}
    config = SchedulerConfig(max_sequences=5, max_batch_sequences=5, max_prefill_tokens=16)
    with drafting(Engine(tiny_model(family), config=config, drafts="ngram"), texts | chats, seed=4) as engine:
        for known, count in ((texts, 32), (chats, 32), (texts, 48)):
            running = [engine.submit(list(prompt), SamplingParams(count)) for prompt in known]
            found = [generation.result(SECONDS).token_ids for generation in running]
            assert found == [tokens[:count] for tokens in known.values()]
            engine.check()
        stats = engine.stats()
        assert engine.runner.states.stats()["peak"] == 5 and engine.runner.states.used_count == 0
        assert stats["cached_tokens"] > 100 and stats["drafted_tokens"] > stats["accepted_tokens"] > 100


@pytest.mark.parametrize("kind", ["conv_states", "recurrent_states"])
def test_drafts_are_refused_for_recurrent_layers_with_functions_of_their_own(kind, monkeypatch):
    model = tiny_model("Bamba")
    known = recurrent.recurrence_of

    def without(module):
        found = known(module)
        return None if found is None else found._replace(takes=found.takes - {kind})

    monkeypatch.setattr("pagepool.integrations.transformers.attention.recurrence_of", without)
    with refuses(ValueError, "drafts", type(model).__name__, "recurrent"):
        Engine(model, drafts="ngram")


def test_drafts_are_refused_for_a_model_with_other_logits_for_drafts(monkeypatch):
    model = tiny_model("Bamba")
    monkeypatch.setattr("pagepool.integrations.transformers.forward.turns", lambda counts: [])
    with refuses(ValueError, "drafts", type(model).__name__, "recurrent"):
        Engine(model, drafts="ngram")


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Bamba"])
def test_a_pool_too_small_by_half_changes_no_token(family):
    blocks = sum(-(-(len(prompt) + NEW_TOKENS) // 16) for prompt in prompts()) // 2
    config = SchedulerConfig(max_batch_sequences=32, max_prefill_tokens=32)
    with Engine(tiny_model(family), num_blocks=blocks, config=config) as engine:
        running = [engine.submit(prompt, SamplingParams(NEW_TOKENS)) for prompt in prompts()]
        assert [generation.result(SECONDS).token_ids for generation in running] == eager_tokens(family)
        engine.check()


def test_a_request_draws_the_same_tokens_alone_and_in_a_batch():
    model = tiny_model("Llama")

    def drawn(seeds):
        with Engine(model) as engine:
            options = {"max_new_tokens": 32, "temperature": 0.8, "top_p": 0.9}
            running = [engine.submit(prompts()[seed % 8], SamplingParams(seed=seed, **options)) for seed in seeds]
            return [generation.result(SECONDS).token_ids for generation in running]

    together = drawn(range(12))
    assert [drawn([seed])[0] for seed in range(12)] == together
    assert len(set(map(tuple, together))) == 12


def test_a_failure_of_the_model_ends_only_the_requests_of_its_step():
    model = tiny_model("Llama")
    with Engine(model) as engine:
        first = engine.submit([5], SamplingParams(400))
        next(first)
        handle = model.register_forward_pre_hook(lambda *arguments: 1 / 0)
        assert reason_of(first) == "error" and isinstance(first.error, ZeroDivisionError)
        handle.remove()
        assert engine.submit([5], SamplingParams(4)).result(SECONDS).finish_reason == "length"
        engine.check()


def test_python_exits_cleanly_with_an_open_engine():
    program = "from families import tiny_model; from pagepool.engine import Engine, SamplingParams; "
    program += (
        "engine = Engine(tiny_model('Llama')); generation = engine.submit([5], SamplingParams(400)); next(generation)"
    )
    places = [str(Path(pagepool.__file__).parents[1]), str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_engine_that_is_closed_gives_its_memory_back():
    model = tiny_model("Llama")
    for _ in range(2):
        engine = Engine(model)
        engine.submit([5], SamplingParams(4)).result(SECONDS)
        engine.close()
        gc.collect()
        assert engine.runner.pool is None


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Bamba", "Mamba2"])
def test_cancels_leave_no_block_and_no_slot(family):
    choice = random.Random(family)
    config = SchedulerConfig(max_sequences=4, max_batch_sequences=4, max_prefill_tokens=16)
    with Engine(tiny_model(family), config=config) as engine:
        for round_number in range(4):
            running = [engine.submit(prompt, SamplingParams(12)) for prompt in prompts(seed=round_number)]
            for generation in choice.sample(running, 5):
                for _ in range(choice.randint(0, 3)):
                    next(generation, None)
                generation.cancel()
            for generation in running:
                assert generation.result(SECONDS).finish_reason in ("length", "abort")
            engine.check()
        ended = engine.stats()["ended"]
        assert ended["abort"] > 0 and ended["length"] >= 12 and ended["error"] == 0
