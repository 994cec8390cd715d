"""Log probabilities of prompts match the logits, for any chunks, cache hits, other requests and preemptions."""

import numpy as np
import pytest
from fake_runner import Bytes, FakeRunner, random_logits, reason_of
from refusals import refuses

from pagepool import SchedulerConfig
from pagepool.engine import Engine, SamplingParams
from pagepool.errors import RequestRejected

SECONDS = 60
PROMPT = [*b"a prompt of some length"]


def full_logits(tokens):
    return np.random.default_rng(tokens).standard_normal(256).astype(np.float32)


def new_engine(chunk=5, **options):
    runner = FakeRunner(next_token=full_logits, **options)
    return Engine(runner, Bytes(), config=SchedulerConfig(max_batch_sequences=8, max_prefill_tokens=chunk))


def check(generation, prompt, count):
    """Return log probabilities by definition: log-softmax in float64."""
    first, *found = generation.prompt_logprobs
    assert first is None and [token.token_id for token in found] == list(prompt[1:])
    for place, token in enumerate(found, 1):
        logits = full_logits(list(prompt[:place])).astype(np.float64)
        wanted = logits - np.log(np.exp(logits).sum())
        order = np.argsort(-wanted)
        assert token.logprob == pytest.approx(wanted[token.token_id])
        assert token.rank == list(order).index(token.token_id) + 1
        assert token.top_logprobs == pytest.approx({int(index): wanted[index] for index in order[:count]})
        assert list(token.top_logprobs) == order[:count].tolist()


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_each_token_of_the_prompt_has_the_probability_of_the_logits_before_it(chunk):
    with new_engine(chunk) as engine:
        wanted = engine.submit(PROMPT, SamplingParams(6, logprobs=1)).result(SECONDS)
        assert wanted.prompt_logprobs is None
        generation = engine.submit(PROMPT, SamplingParams(6, prompt_logprobs=3))
        next(generation)
        check(generation, PROMPT, 3)  # complete before the first token
        assert generation.result(SECONDS).token_ids == wanted.token_ids
        check(engine.submit(PROMPT[:1], SamplingParams(1, prompt_logprobs=0)).result(SECONDS), PROMPT[:1], 0)
        engine.check()


def test_such_a_request_does_not_read_the_prefix_cache_and_others_find_its_pages():
    with new_engine() as engine:
        for _ in range(2):
            generation = engine.submit(PROMPT, SamplingParams(1, prompt_logprobs=0)).result(SECONDS)
            check(generation, PROMPT, 0)
            assert generation.num_cached == 0
        assert engine.submit(PROMPT, SamplingParams(1)).result(SECONDS).num_cached == 20


def test_without_new_tokens_it_ends_when_its_prompt_is_computed():
    with new_engine(max_model_len=len(PROMPT)) as engine:
        params = SamplingParams(0, prompt_logprobs=1, stop_token_ids=range(256))
        generation = engine.submit(PROMPT, params).result(SECONDS)
        check(generation, PROMPT, 1)
        assert (generation.token_ids, generation.text, generation.finish_reason) == ([], "", "length")
        assert list(generation) == [] and engine.stats()["generated_tokens"] == 0
        with refuses(RequestRejected, len(PROMPT), 1):
            engine.submit(PROMPT, SamplingParams(1, prompt_logprobs=1))
        with refuses(ValueError, "max_new_tokens", 1, 0):
            SamplingParams(0)
        engine.check()


def test_many_requests_with_preemptions_get_what_each_gets_alone():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(32, 127, rng.integers(1, 40)).tolist() for _ in range(24)]
    params = [
        SamplingParams(int(rng.integers(0, 20)), prompt_logprobs=2, ignore_eos=True)
        if number % 2
        else SamplingParams(12, ignore_eos=True)
        for number in range(24)
    ]
    with new_engine() as engine:
        alone = [engine.submit(*one).result(SECONDS) for one in zip(prompts, params, strict=True)]
    with new_engine(7, num_blocks=20) as engine:
        running = [engine.submit(*one) for one in zip(prompts, params, strict=True)]
        for generation, wanted, prompt, one in zip(running, alone, prompts, params, strict=True):
            assert generation.result(SECONDS).finish_reason == "length"
            assert generation.prompt_logprobs == wanted.prompt_logprobs and generation.text == wanted.text
            if one.prompt_logprobs is not None:
                check(generation, prompt, 2)
        assert sum(engine.scheduler.stats()["actions"].values()) > 0
        engine.check()


def test_invalid_logits_end_only_their_request():
    def next_token(tokens):
        return np.full(256, np.nan, np.float32) if tokens == [1, 2] else random_logits(tokens)

    with Engine(FakeRunner(next_token=next_token), Bytes()) as engine:
        bad = engine.submit([1, 2, 3], SamplingParams(2, prompt_logprobs=0))
        good = engine.submit([4, 5, 6], SamplingParams(2, prompt_logprobs=0))
        assert (reason_of(bad), reason_of(good)) == ("error", "length")
        assert "nan" in str(bad.error) and len(good.prompt_logprobs) == 3
        engine.check()


@pytest.mark.parametrize("count", [-1, 21])
def test_a_wrong_number_is_refused(count):
    with refuses(ValueError, "prompt_logprobs", 0, 20, count):
        SamplingParams(prompt_logprobs=count)
