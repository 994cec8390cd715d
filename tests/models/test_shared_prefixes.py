"""Prompts with shared prefixes, for models with windows and recurrent states: computed tokens, blocks left in use."""

import random

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test-models")
pytest.importorskip("transformers", reason="transformers is not installed: make test-models")

from families import each, prompts, tiny_model  # noqa: E402
from transformers import GenerationConfig  # noqa: E402

from pagepool import SchedulerConfig  # noqa: E402
from pagepool.engine import Engine, SamplingParams  # noqa: E402
from pagepool.integrations.transformers import release, use  # noqa: E402

# Windows, windows and full attention, recurrent states, recurrent states and full attention (two models).
FAMILIES = ["Mistral", "Gemma3", "Mamba2", "Bamba", "Qwen3Next"]
NUM_GROUPS = {"Gemma3": 4}
SECONDS = 300
LONG = prompts((130,))[0]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("PAGEPOOL_NUM_THREADS", "1")
    torch.set_num_threads(1)


def generated(engine, asked, at_once):
    """Return the results of the prompts, submitted one after another or at once."""
    if at_once:
        running = [engine.submit(prompt, SamplingParams(12)) for prompt in asked]
        return [generation.result(SECONDS) for generation in running]
    return [engine.submit(prompt, SamplingParams(12)).result(SECONDS) for prompt in asked]


def without_sharing(model, asked):
    """Return the tokens of an engine without a prefix cache."""
    with Engine(model, prefix_cache=False) as engine:
        return [generation.token_ids for generation in generated(engine, asked, at_once=False)]


def assert_nothing_is_left(engine):
    engine.check()
    engine.prefix_cache.check()
    engine.prefix_cache.reset_prefix_cache()
    assert engine.prefix_cache.allocator.in_use == 0
    assert engine.runner.states is None or engine.runner.states.used_count == 0


@pytest.mark.parametrize("family", each(FAMILIES))
def test_a_second_request_computes_only_what_is_new(family):
    model = tiny_model(family)
    asked = [LONG, LONG, LONG + prompts((20,), seed=2)[0]]
    with Engine(model) as engine:
        found = generated(engine, asked, at_once=False)
        assert [generation.num_cached for generation in found] == [0, 128, 128]
        assert_nothing_is_left(engine)
    assert [generation.token_ids for generation in found] == without_sharing(model, asked)


@pytest.mark.parametrize("family", each(FAMILIES))
def test_a_conversation_resumes_after_its_last_answer(family):
    """Recurrent states are kept at block borders: of the answer if it ends at one, otherwise of the prompt."""
    model = tiny_model(family)
    with Engine(model) as engine:
        for first, pages, state in ((LONG[:37], 48, 48), (LONG[50:80], 32, 16)):
            (answer,) = generated(engine, [first], at_once=False)
            asked = first + answer.token_ids + LONG[100:120]
            (second,) = generated(engine, [asked], at_once=False)
            assert second.num_cached == (pages if engine.runner.states is None else state)
            assert [second.token_ids] == without_sharing(model, [asked])
        assert_nothing_is_left(engine)


@pytest.mark.parametrize("family", each(FAMILIES))
def test_a_burst_shares_the_blocks_of_its_first_request(family):
    model = tiny_model(family)
    asked = [LONG[:100] + prompts((20,), seed=number)[0] for number in range(6)]
    with Engine(model) as engine:
        found = generated(engine, asked, at_once=True)
        assert sorted(generation.num_cached for generation in found) == [0] + 5 * [96]
        assert_nothing_is_left(engine)
    assert [generation.token_ids for generation in found] == without_sharing(model, asked)


@pytest.mark.parametrize("family", each(FAMILIES))
def test_a_salt_shares_nothing(family):
    with Engine(tiny_model(family)) as engine:
        found = [
            engine.submit(LONG, SamplingParams(4), cache_salt=salt).result(SECONDS) for salt in ("one", "other", "one")
        ]
        assert [generation.num_cached for generation in found] == [0, 0, 128]
        assert len({tuple(generation.token_ids) for generation in found}) == 1
        assert_nothing_is_left(engine)


@pytest.mark.parametrize("family", each(["Mistral", "Gemma3", "Bamba"]))
def test_a_pool_that_is_full_changes_no_token(family):
    """Cached blocks are evicted, requests are preempted, cancelled and repeated."""
    model, choice = tiny_model(family), random.Random(family)
    asked = [LONG[: choice.randint(60, 130)] + prompts((choice.randint(1, 30),), seed=choice.randint(0, 3))[0]
             for _ in range(16)]  # fmt: skip
    wanted = without_sharing(model, asked)
    config = SchedulerConfig(max_batch_sequences=8, max_prefill_tokens=48)
    with Engine(model, num_blocks=NUM_GROUPS.get(family, 1) * 14, config=config) as engine:
        for _ in range(2):
            running = [engine.submit(prompt, SamplingParams(12)) for prompt in asked]
            cancelled = choice.sample(range(16), 4)
            for number in cancelled:
                running[number].cancel()
            for number, generation in enumerate(running):
                generation.result(SECONDS)
                if number not in cancelled:
                    assert generation.token_ids == wanted[number]
            engine.check()
        assert engine.stats()["cached_tokens"] > 0
        assert_nothing_is_left(engine)


@pytest.mark.parametrize("family", each(FAMILIES))
@pytest.mark.parametrize("block_size", [16, 8])
def test_batches_of_a_model_in_use_share_prefixes(family, block_size):
    model = tiny_model(family)
    config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    runner = use(model, num_blocks=128, block_size=block_size)
    fed, forward = [], runner.forward
    runner.forward = lambda tokens, *rest: (fed.extend(map(len, tokens)), forward(tokens, *rest))[1]
    texts, counts = [], []
    for prompt in (LONG, LONG, LONG + LONG[:20]):
        (output,) = model.generate_batch([prompt], generation_config=config).values()
        texts.append(output.generated_tokens)
        counts.append(sum(fed))
        fed.clear()
    assert counts == [130 + 7, 2 + 7, 22 + 7]
    assert runner.states is None or runner.states.used_count == 0
    # `generate` evicts all blocks that only the prefix cache holds.
    one = model.generate(torch.tensor([LONG]), max_new_tokens=8, do_sample=False, pad_token_id=0)[0, 130:].tolist()
    del runner.forward
    release(model)
    alone = model.generate(torch.tensor([LONG]), max_new_tokens=8, do_sample=False, pad_token_id=0)[0, 130:].tolist()
    assert texts[0] == texts[1] == one == alone


@pytest.mark.parametrize("family", ["Mistral", "Gemma3"])
def test_generate_takes_blocks_that_only_the_prefix_cache_has(family):
    model = tiny_model(family)
    config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    runner = use(model, num_blocks=NUM_GROUPS.get(family, 1) * 12)
    for prompt in (LONG, LONG[60:]):
        model.generate_batch([prompt], generation_config=config)
    assert runner.pool.allocator.free_count < NUM_GROUPS.get(family, 1) * 6
    ids, options = torch.tensor([LONG[:90]]), {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    over_pages = model.generate(ids, **options).tolist()
    release(model)
    assert over_pages == model.generate(ids, **options).tolist()
