"""Penalties, biases, bad words and min_p as in vLLM, checked token by token against plain NumPy."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from fake_runner import Bytes, FakeRunner, random_logits, says
from refusals import refuses

from pagepool.engine import Engine, SamplingParams
from pagepool.engine.adjusting import Adjuster
from pagepool.engine.sampling import Sampler
from pagepool.errors import RequestRejected

SECONDS = 60
SIZE = 50
PROMPT, OUTPUT = [3, 4, 4, 9], [4, 7, 7, 7, 12]
CASES = [
    {"presence_penalty": 1.5},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.3, "presence_penalty": 0.4},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5, "frequency_penalty": 1.0},
    {"logit_bias": {0: 3.0, 49: -100.0, 7: 2.5}},
    {"bad_words": [[5], [7, 12, 8], [12, 9], [7, 3]]},
    {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.2,
        "logit_bias": {4: 4.0, 12: -4.0},
        "bad_words": [[4], [12, 7]],
    },
]


def logits_of(seed, size=SIZE):
    return (np.random.default_rng(seed).standard_normal(size) * 3).astype(np.float32)


def wanted(
    logits,
    prompt,
    output,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
    logit_bias=None,
    bad_words=(),
):
    """Adjust logits in vLLM's order: bad words, biases, repetition penalty, then frequency and presence penalties."""
    found = logits.astype(np.float64)
    for word in bad_words:
        if len(word) - 1 <= len(output) and output[len(output) - len(word) + 1 :] == word[:-1]:
            found[word[-1]] = -np.inf
    for token in range(len(found)):
        found[token] += (logit_bias or {}).get(token, 0.0)
        if token in prompt or token in output:
            found[token] = found[token] / repetition_penalty if found[token] > 0 else found[token] * repetition_penalty
        found[token] -= frequency_penalty * output.count(token)
        found[token] -= presence_penalty * (token in output)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_are_adjusted_by_previous_tokens(case):
    params = SamplingParams(**case)
    for count in range(len(OUTPUT) + 1):
        adjuster = Adjuster(params, PROMPT, OUTPUT[:count])
        for output in range(count, len(OUTPUT) + 1):
            logits = logits_of(output)
            before = logits.copy()
            found = adjuster.adjusted(logits)
            assert found.dtype == np.float32 and (logits == before).all()
            np.testing.assert_allclose(found, wanted(logits, PROMPT, OUTPUT[:output], **case), rtol=1e-5, atol=1e-5)
            if output < len(OUTPUT):
                adjuster.add(OUTPUT[output])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_sampler_continues_after_the_tokens_of_an_earlier_run(case, temperature):
    params = SamplingParams(temperature=temperature, seed=1, **case)
    whole, tokens = Sampler(params, 0, PROMPT), []
    for place in range(12):
        tokens.append(whole.sample(logits_of(place)))
        if temperature == 0.0:
            assert tokens[-1] == wanted(logits_of(place), PROMPT, tokens[:-1], **case).argmax()
    for begun in (1, 5, 11):
        rest = Sampler(params, begun, PROMPT + tokens[:begun])
        assert [rest.sample(logits_of(place)) for place in range(begun, 12)] == tokens[begun:]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("min_p", [0.02, 0.3, 1.0])
def test_min_p_keeps_tokens_above_its_share_of_the_highest_probability(min_p, temperature):
    logits = logits_of(1)
    weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    possible = np.where(weights >= min_p, weights, 0.0)
    possible /= possible.sum()
    one = Sampler(SamplingParams(temperature=temperature, seed=3, min_p=min_p))
    found = np.bincount([one.sample(logits) for _ in range(2000)], minlength=SIZE)
    assert not found[possible == 0.0].any()
    assert (np.abs(found - 2000 * possible) <= 5 * np.sqrt(2000 * possible * (1 - possible)) + 3).all()


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.5}, {"temperature": 1e308}, {"temperature": 5e-324}])
def test_min_p_goes_with_the_other_parameters(options):
    logits = logits_of(1)
    logits[:5] = -np.inf
    one = Sampler(SamplingParams(**{"temperature": 1.0, "seed": 3, "min_p": 0.5, **options}))
    assert {one.sample(logits) for _ in range(200)} <= set(range(5, SIZE))
    assert Sampler(SamplingParams(min_p=1.0)).sample(logits) == logits.argmax()


def test_requests_without_them_get_the_same_logits():
    for params in (SamplingParams(), SamplingParams(min_p=0.5, min_tokens=5, temperature=1.0), SamplingParams(seed=1)):
        assert Sampler(params)._adjuster is None


def test_log_probabilities_are_still_the_model_s_own():
    logits = logits_of(1)
    plain, changed = (Sampler(SamplingParams(logprobs=3, **options)) for options in ({}, {"logit_bias": {2: 50}}))
    assert changed.sample(logits) == 2 != plain.sample(logits)
    assert changed.logprobs(logits, 2) == plain.logprobs(logits, 2)


def test_parameters_can_be_pickled_compared_and_replaced():
    params = SamplingParams(5, logit_bias={7: 300, 2: -1}, bad_words=["a", [3, 4]], min_p=0.1)
    assert (params.logit_bias, params.bad_words) == (((2, -1.0), (7, 100.0)), ("a", (3, 4)))
    again = pickle.loads(pickle.dumps(params))
    assert again == params and hash(again) == hash(params) and replace(params, max_new_tokens=5) == params


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_p": -0.1}, ("min_p", -0.1)),
        ({"min_p": 1.1}, ("min_p", 1.1)),
        ({"presence_penalty": 2.1}, ("presence_penalty", 2.1)),
        ({"frequency_penalty": float("-inf")}, ("frequency_penalty", "-inf")),
        ({"repetition_penalty": 0}, ("repetition_penalty", 0)),
        ({"repetition_penalty": float("inf")}, ("repetition_penalty", "inf")),
        ({"logit_bias": {-1: 0.0}}, ("logit_bias", -1)),
        ({"logit_bias": {1: float("nan")}}, ("logit_bias", "nan")),
        ({"bad_words": [" "]}, ("bad_words", 0)),
        ({"bad_words": [[]]}, ("bad_words", 0)),
        ({"bad_words": ["x"] * 257}, ("bad_words", 256, 257)),
        ({"bad_words": ["x" * 16_385]}, ("bad_words", 16_384, 16_385)),
        ({"stop": ["x"] * 65}, ("stop", 64, 65)),
        ({"stop": ["x" * 8000, "y" * 8385]}, ("stop", 16_384, 16_385)),
    ],
)
def test_values_out_of_range_are_refused(options, words):
    with refuses(ValueError, *words):
        SamplingParams(**options)


@pytest.mark.parametrize(
    "options",
    [{"logit_bias": 3}, {"logit_bias": {"1": 1}}, {"bad_words": 3}, {"bad_words": [3]}, {"stop": {"a": 1}}],
)
def test_values_of_wrong_types_are_refused(options):
    with refuses(TypeError, *options):
        SamplingParams(**options)


ALL = CASES[-1] | {"logit_bias": {40: 4.0, 101: -4.0}, "bad_words": ["e", "th", [65]]}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5, "min_p": 0.05}])
def test_an_engine_samples_by_the_definition_and_continues_with_its_tokens(sampling):
    params = SamplingParams(16, **ALL, **sampling)
    with Engine(FakeRunner(), Bytes()) as engine:
        tokens = engine.submit("hello", params).result(SECONDS).token_ids
        assert tokens != engine.submit("hello", SamplingParams(16, **sampling)).result(SECONDS).token_ids
        if not sampling:
            case = ALL | {"bad_words": [[101], [116, 104], [65]]}
            for place, token in enumerate(tokens):
                logits = random_logits([*b"hello", *tokens[:place]])
                assert token == wanted(logits, [*b"hello"], tokens[:place], **case).argmax()
        for count in (1, 9, 15):
            request = engine.read([*b"hello", *tokens[:count]], replace(params, max_new_tokens=16 - count))
            assert engine._submit(request, count).result(SECONDS).token_ids == tokens[count:]


def test_a_request_that_was_preempted_counts_its_own_tokens():
    prompts = [f"prompt {number}" for number in range(8)]
    params = SamplingParams(40, presence_penalty=2.0, frequency_penalty=1.0, repetition_penalty=1.5)
    with Engine(FakeRunner(num_blocks=1000), Bytes()) as engine:
        alone = [engine.submit(prompt, params).result(SECONDS).token_ids for prompt in prompts]
    with Engine(FakeRunner(num_blocks=30), Bytes(), prefix_cache=False) as engine:
        found = [generation.result(SECONDS).token_ids for generation in [engine.submit(p, params) for p in prompts]]
        assert engine.stats()["scheduler"]["preemptions"] > 0
    assert found == alone


class Spaced(Bytes):
    """A tokenizer that encodes a space and the letter after it as one token, the capital letter."""

    def __call__(self, text, **options):
        words = text.split(" ")
        return {"input_ids": list("".join([words[0], *(word[:1].upper() + word[1:] for word in words[1:])]).encode())}


def test_bad_words_do_not_come_behind_a_space_either():
    with Engine(FakeRunner(next_token=says("an ox")), Spaced()) as engine:
        request = engine.read("x", SamplingParams(9, bad_words=["ox", " an"]))
        assert request.params.bad_words == ((*b"ox",), (*b"Ox",), (*b"an",), (*b"An",))
        assert b"ox" not in bytes(engine.submit("x", SamplingParams(9, bad_words="ox")).result(SECONDS).token_ids)
    with Engine(FakeRunner()) as engine, refuses(TypeError, "bad_words", "tokenizer"):
        engine.submit([1], SamplingParams(9, bad_words=["x"]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"logit_bias": {3: 1, 256: 1}}, ("logit_bias", 256)),
        ({"bad_words": [[3, 256]]}, ("bad_words", 256)),
        ({"bad_words": ["\ud800"]}, ("bad_words", 0)),
    ],
)
def test_tokens_that_the_model_does_not_know_are_refused(options, words):
    with Engine(FakeRunner(), Bytes()) as engine, refuses(RequestRejected, *words):
        engine.submit("x", SamplingParams(5, **options))
