"""An engine with a store finds the prompts of earlier engines."""

import re

import pytest
from fake_runner import FakeRunner

from pagepool import Engine, SamplingParams

STORE_BYTES = 16 << 20
PARAMS = SamplingParams(max_new_tokens=8)


def answers(engine, prompts):
    running = [engine.submit(prompt, PARAMS) for prompt in prompts]
    return [(generation.result().token_ids, generation.num_cached) for generation in running]


def test_an_engine_finds_the_prompts_of_the_engine_before_it(tmp_path):
    prompts = [list(range(1, 42)), list(range(60, 90)), [*range(1, 20), 7, 7, 7]]
    with Engine(FakeRunner()) as engine:
        wanted = [tokens for tokens, _ in answers(engine, prompts)]
    for number in range(3):
        with Engine(FakeRunner(), store=tmp_path, store_bytes=STORE_BYTES) as engine:
            found = answers(engine, prompts)
            assert [tokens for tokens, _ in found] == wanted
            assert [cached for _, cached in found][:2] == ([40, 28] if number else [0, 0])
            engine.check()
    with Engine(FakeRunner(), store=tmp_path, store_bytes=STORE_BYTES, weights_digest="others") as engine:
        assert answers(engine, prompts)[0][1] == 0


def test_a_pool_that_is_too_small_for_all_prompts_finds_them_in_the_store(tmp_path):
    """The cached prompts exceed the memory: 60 prompts of 10 blocks each, and a pool of 64 blocks."""
    prompts = [[number % 250 + 1, *range(1, 40)] for number in range(60)]
    with Engine(FakeRunner(), store=tmp_path, store_bytes=STORE_BYTES) as engine:
        wanted = [answers(engine, [prompt])[0][0] for prompt in prompts]
        assert engine.prefix_cache.flush()
        found = [answers(engine, [prompt])[0] for prompt in prompts]
        assert [tokens for tokens, _ in found] == wanted
        assert sum(cached for _, cached in found) >= 50 * 36
        engine.check()


def test_arguments_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match="store_bytes"):
        Engine(FakeRunner(), store=tmp_path)
    with pytest.raises(ValueError, match="prefix cache"):
        Engine(FakeRunner(), store=tmp_path, store_bytes=STORE_BYTES, prefix_cache=False)
    with pytest.raises(ValueError, match=re.escape("max_bytes") + r".*1000"):
        Engine(FakeRunner(), store=tmp_path, store_bytes=1000)
