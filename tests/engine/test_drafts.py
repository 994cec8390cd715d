"""Drafts change no token, and rejected drafts leave no trace in texts, pages and counters."""

import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
from fake_runner import Bytes, FakeRunner, random_logits, reason_of, says
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from scripted_drafts import drafting
from share import examples

from pagepool import SchedulerConfig
from pagepool.engine import Engine, SamplingParams
from pagepool.engine.drafts import MAX_AGE, Acceptance, Drafter, Drafts, StepCosts, best_count, verify
from pagepool.engine.logits import Logits
from pagepool.engine.sampling import Sampler

SECONDS = 60
SAMPLED = {"temperature": 0.9, "seed": 7, "ignore_eos": True}
PARAMS = {
    "greedy": {},
    "sampled": SAMPLED,
    "top_k, top_p and min_p": {**SAMPLED, "top_k": 40, "top_p": 0.8, "min_p": 0.01},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "log probabilities": {"logprobs": 3, "prompt_logprobs": 2},
    "sampled log probabilities": {**SAMPLED, "logprobs": 3},
    "bias and bad words": {"logit_bias": {65: 3.0}, "bad_words": ["e", "A"]},
    "stop string": {**SAMPLED, "stop": ["a", "B"]},
    "stop string after some tokens": {**SAMPLED, "stop": ["a", "B"], "min_tokens": 9},
    "stop tokens": {**SAMPLED, "stop_token_ids": [50, 70, 90]},
    "stop tokens after some tokens": {**SAMPLED, "stop_token_ids": range(32, 64), "min_tokens": 12},
    "greedy stop tokens after some tokens": {"stop_token_ids": range(32, 64), "min_tokens": 12},
    "no token left": {"bad_words": [chr(code) for code in range(33, 127) if code != 65] + [(32,), (65, 65, 65)]},
}


def with_free_rows(engine):
    """Let drafts cost nothing, whatever the steps of the machine take."""
    engine._drafts.costs.costs = lambda first, last: [1.0] * (last - first + 1)
    return engine


def outcome(generation):
    """Return the tokens, texts, log probabilities, finish reason and error of a generation."""
    reason = reason_of(generation)
    tokens = list(generation._pending)
    error = None if generation.error is None else str(generation.error)
    return generation.token_ids, generation.text, reason, error, tokens, generation.prompt_logprobs


def outcomes(engine, prompts, **params):
    running = [engine.submit(prompt, SamplingParams(24, **params)) for prompt in prompts]
    found = [outcome(generation) for generation in running]
    engine.check()
    return found, running


def prompts_of(count, seed=0):
    rng = random.Random(seed)
    return [[rng.randint(32, 126) for _ in range(rng.randint(1, 13))] for _ in range(count)]


def cached_texts_have_their_own_pages(engine, texts):
    """Every cached block has the keys of its tokens. The fake model stores the token itself as the key."""
    pool, found = engine.runner.pool, 0
    for text in texts:
        blocks = engine.prefix_cache.match_prefix(text)
        if len(blocks):
            k, _ = pool.gather(0, blocks, len(blocks) * pool.block_size)
            assert k[:, 0, 0].astype(int).tolist() == text[: len(k)]
            pool.allocator.free(blocks)
        found += len(blocks)
    return found


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_every_token_text_and_log_probability_is_the_same(params):
    prompts = prompts_of(6)
    with Engine(FakeRunner(256), Bytes()) as engine:
        expected, _ = outcomes(engine, prompts, **params)
    known = {tuple(prompt): found[0] for prompt, found in zip(prompts, expected, strict=True)}
    texts = {prompt: tokens + [65] * 24 for prompt, tokens in known.items()}  # drafts also go on behind the end
    with drafting(Engine(FakeRunner(256), Bytes(), drafts="ngram"), texts, seed=1) as engine:
        found, running = outcomes(engine, prompts, **params)
        assert found == expected
        stats = engine.stats()
        assert stats["accepted_tokens"] == sum(one.num_accepted for one in running) > 0
        assert stats["drafted_tokens"] - stats["accepted_tokens"] == sum(one.num_rejected for one in running) > 0
        assert stats["generated_tokens"] == sum(len(one.token_ids) for one in running)
        whole = [prompt + one.token_ids for prompt, one in zip(prompts, running, strict=True)]
        assert cached_texts_have_their_own_pages(engine, whole)


@examples(25)
@given(st.integers(0, 2**32), st.integers(10, 40), st.sampled_from([2, 8, 32]))
def test_a_small_pool_preempts_and_changes_no_token(seed, blocks, places):
    """`check` counts the blocks between two steps, while requests come, are cancelled and end."""
    rng = random.Random(seed)
    prompts = prompts_of(8, seed)
    kinds = [{}, SAMPLED, {**SAMPLED, "stop": ["a"]}]
    params = [SamplingParams(rng.randint(1, 26), **rng.choice(kinds)) for _ in prompts]
    with Engine(FakeRunner(256), Bytes()) as engine:
        running = [engine.submit(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        expected = [outcome(generation) for generation in running]
    texts = {tuple(prompt): found[0] for prompt, found in zip(prompts, expected, strict=True)}
    config = SchedulerConfig(max_batch_sequences=places, max_batch_tokens=40, lookahead=rng.randint(1, 7))
    with drafting(Engine(FakeRunner(blocks), Bytes(), config=config, drafts="ngram"), texts, seed) as engine:
        running = [engine.submit(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        cancelled = rng.sample(range(8), 2)
        for place in cancelled:
            if rng.random() < 0.7:
                next(running[place], None)
            running[place].cancel()
        while engine.num_requests:
            engine.check()
            time.sleep(0.0005)
        for place, (generation, known) in enumerate(zip(running, expected, strict=True)):
            if place in cancelled and reason_of(generation) == "abort":
                assert generation.token_ids == known[0][: len(generation.token_ids)]
            else:
                generation._pending.clear()
                assert outcome(generation)[:4] == known[:4]
        engine.check()
        cached_texts_have_their_own_pages(engine, [p + g.token_ids for p, g in zip(prompts, running, strict=True)])


def test_a_failed_step_ends_only_its_requests_and_leaves_no_draft_in_the_pages():
    fails = SimpleNamespace(at=3)

    def fail(tokens):
        if any(len(row) > 1 for row in tokens) and len(tokens) > 1:
            fails.at -= 1
        return RuntimeError("out of order") if fails.at == 0 else None

    prompts = [[65], [66], [67]]
    with Engine(FakeRunner(), Bytes()) as engine:
        expected, _ = outcomes(engine, prompts)
    texts = {tuple(prompt): found[0] for prompt, found in zip(prompts, expected, strict=True)}
    with drafting(Engine(FakeRunner(fails=fail), Bytes(), drafts="ngram"), texts, 5) as engine:
        found, _ = outcomes(engine, prompts)
        assert {one[2] for one in found} == {"error"}
        fails.at = -1
        found, _ = outcomes(engine, prompts)
        assert [one[0] for one in found] == [one[0] for one in expected]


def test_a_nan_behind_a_rejected_draft_does_no_harm_and_one_behind_an_accepted_draft_ends_the_request():
    def next_token(tokens):
        logits = random_logits(tokens)
        if tokens[-1] == 200 or len(tokens) == 20:
            logits[:] = np.nan
        return logits

    with Engine(FakeRunner(), Bytes()) as engine:
        text = engine.submit([65], SamplingParams(24)).result(SECONDS).token_ids
    wrong = [token if place % 3 else 200 for place, token in enumerate(text)]
    with drafting(Engine(FakeRunner(next_token=next_token), Bytes(), drafts="ngram"), {(65,): wrong}, 0) as engine:
        generation = engine.submit([65], SamplingParams(24))
        assert reason_of(generation) == "error" and "nan" in str(generation.error)
        assert generation.token_ids == text[: len(generation.token_ids)] and len(generation.token_ids) < 20
        engine.check()


def test_a_tokenizer_that_fails_at_an_accepted_draft_ends_the_request_once():
    class Failing(Bytes):
        def decode(self, ids, skip_special_tokens=True):
            if ids and ids[-1] == ord("f"):
                raise LookupError("f")
            return super().decode(ids, skip_special_tokens)

    text = [*b"abcdefghij"]
    engine = Engine(FakeRunner(next_token=says("abcdefghij" * 2)), Failing(), drafts="ngram")
    with drafting(engine, {(65,): text, (66,): text}, 0) as engine:
        engine._drafts.rng.random = lambda: 0.0  # every draft is right
        running = [engine.submit([token], SamplingParams(10)) for token in (65, 66)]
        assert [reason_of(generation) for generation in running] == ["error", "error"]
        assert engine.failure is None
        engine.check()


def test_drafts_behind_a_stop_string_are_not_accepted():
    text = [*b"abcdefghij"]
    engine = Engine(FakeRunner(next_token=says("abcdefghij" * 2)), Bytes(), drafts="ngram")
    with drafting(engine, {(65,): text}, 0, most=9) as engine:
        engine._drafts.rng = SimpleNamespace(random=lambda: 0.0, randint=lambda least, most: most)
        generation = engine.submit([65], SamplingParams(20, stop=["c"])).result(SECONDS)
        assert (generation.text, len(generation.token_ids)) == ("ab", 3)
        assert (generation.num_accepted, engine.stats()["accepted_tokens"]) == (2, 2)
        assert generation.num_rejected == engine.stats()["drafted_tokens"] - 2 > 0


def test_an_own_text_that_repeats_itself_takes_fewer_steps():
    text = "the quick brown fox jumps over the lazy dog. " * 6
    runner = FakeRunner(256, next_token=says(text + 20 * "?"))
    with with_free_rows(Engine(runner, Bytes(), drafts="ngram")) as engine:
        generation = engine.submit([65], SamplingParams(len(text))).result(SECONDS)
        stats = engine.stats()
        assert generation.text == text
        assert stats["scheduler"]["steps"] < stats["generated_tokens"] / 2
        assert stats["accepted_tokens"] == generation.num_accepted > len(text) / 2


@pytest.mark.parametrize("seed", [None, 3])
def test_an_answer_that_was_cached_is_drafted_for_its_own_tenant_alone(seed):
    """Random texts repeat no three tokens: only the cached texts of earlier requests can predict them."""
    params = SamplingParams(120, temperature=0.0 if seed is None else 0.7, seed=seed)

    def ask(engine, salt):
        before = engine.scheduler.num_steps
        generation = engine.submit([65, 66, 67], params, cache_salt=salt).result(SECONDS)
        return generation.token_ids, engine.scheduler.num_steps - before

    with with_free_rows(Engine(FakeRunner(512), drafts="ngram")) as engine:
        text, steps = ask(engine, "a")
        assert steps > 110
        for _ in range(3):
            ask(engine, "a")
        again, steps = ask(engine, "a")
        assert again == text and steps < 60
        other, steps = ask(engine, "b")
        assert other == text and steps > 110
        engine.check()


def test_an_own_prediction_is_used_while_it_is_right_more_often_than_a_cached_one():
    own, cached = Acceptance(), Acceptance()
    asked = []

    def following(tokens, most):
        asked.append(list(tokens))
        return [] if len(tokens) > 9 else [7, 8, 7, 8]

    drafter = Drafter([1, 2, 3, 4, 5], own, cached, following)
    for token in (6, 1, 2, 3):  # each prediction of the cached text is wrong
        drafter.add(token)
    assert asked == [[1, 2, 3, 4, 5, 6, 1, 2, 3][:end] for end in (6, 7, 8, 9)]
    for _ in range(9):
        own.note(3, True)
    own.measure()
    cached.measure()
    assert drafter.match.predict(3) == [4, 5, 6]
    for _ in range(99):
        cached.note(0, True)
    cached.measure()
    assert drafter.match.predict(3) == [7, 8, 7]
    drafter.add(4)
    drafter.add(9)
    assert len(asked) == 5 and drafter.match.place < 0  # no cached text goes on


def test_wrong_arguments_are_refused_and_a_runner_with_recurrent_states_is_named():
    with refuses(ValueError, "drafts", "ngram", "medusa"):
        Engine(FakeRunner(), drafts="medusa")
    with refuses(ValueError, "lookahead", 3, "drafts"):
        Engine(FakeRunner(), config=SchedulerConfig(lookahead=3))

    class Recurrent(FakeRunner):
        states = SimpleNamespace(used_count=0)

    with refuses(ValueError, "drafts", "Recurrent", "recurrent"):
        Engine(Recurrent(), drafts="ngram")


def test_drafts_are_at_most_the_lookahead_of_the_config():
    fed = []

    class Counting(FakeRunner):
        def forward(self, tokens, sequences, keep):
            fed.append(max(map(len, tokens)))
            return super().forward(tokens, sequences, keep)

    text = "0123456789" * 20
    runner = Counting(256, next_token=says(text))
    with with_free_rows(Engine(runner, config=SchedulerConfig(lookahead=4), drafts="ngram")) as engine:
        engine.submit([65], SamplingParams(180)).result(SECONDS)
    assert max(fed) == 5


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.7}], ids=str)
def test_100_000_draws_with_drafts_have_the_distribution_of_the_model(params):
    """Chi-square over the pairs of the first two tokens; the draft is the likely one, an unlikely one or a rare one."""
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((13, 12)).astype(np.float32)  # row 0, then the row after each token
    plain = SamplingParams(1 << 30, temperature=1.0, seed=11, **params)
    sampler = Sampler(plain)
    counts = np.zeros((12, 12))
    firsts = np.zeros(12)
    for number in range(100_000):
        draft = number % 12
        rows = Logits(logits[[0, 1 + draft]])
        drawn = [token for token, _ in verify(sampler, rows, [-1, -1], 0, [draft], ())]
        firsts[drawn[0]] += 1
        if len(drawn) == 2:
            assert drawn[0] == draft
            counts[draft, drawn[1]] += 1
    assert_drawn_from(firsts, probabilities(logits[0], **params))
    for draft in range(12):
        if counts[draft].sum():
            assert_drawn_from(counts[draft], probabilities(logits[1 + draft], **params))


def probabilities(logits, top_k=0, top_p=1.0):
    order = np.argsort(-logits, kind="stable")
    weights = np.exp(logits[order].astype(float))
    weights[top_k or len(weights) :] = 0.0
    weights /= weights.sum()
    weights[np.cumsum(weights) - weights >= top_p] = 0.0
    found = np.empty_like(weights)
    found[order] = weights / weights.sum()
    return found


def assert_drawn_from(counts, expected):
    total = counts.sum()
    assert not counts[expected == 0.0].any()
    possible = expected > 0.0
    square = ((counts - total * expected)[possible] ** 2 / (total * expected[possible])).sum()
    degrees = possible.sum() - 1
    # Wilson-Hilferty: a bound of 4.5 standard deviations; seeds are fixed.
    assert square <= degrees * (1 - 2 / (9 * degrees) + 4.5 * (2 / (9 * degrees)) ** 0.5) ** 3


@examples(100)
@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_a_prediction_is_what_followed_the_last_occurrence_of_the_last_tokens(prompt, new):
    drafter = Drafter(prompt, Acceptance(), Acceptance())
    text = list(prompt)
    place = length = None
    for token in new:
        drafter.add(token)
        if place is not None:
            place, length = (place + 1, length + 1) if text[place] == token else (None, None)
        text.append(token)
        if place is None:
            ends = [end for end in range(3, len(text)) if text[end - 3 : end] == text[-3:]]
            place, length = (ends[-1], 3) if ends and len(text) > 3 else (None, None)
        drafter._own._acceptance.rates = [1.0] * 8
        assert len(drafter.match.gains(4)) == (0 if place is None else 4)
        if place is not None:
            assert text[place - min(length, 3) : place] == text[len(text) - min(length, 3) :]
            expected = list(text)
            for step in range(5):
                expected.append(expected[place + step])
            assert drafter.match.predict(5) == expected[len(text) :]


def test_drafts_begin_only_after_predictions_were_right_and_end_when_they_are_wrong():
    drafts = Drafts()
    for _ in range(4):
        drafts.costs.note(1, 1.0)
    drafter = drafts.drafter([1, 2, 3, 4, 5, 6, 7, 8, 1, 2])
    drafter.add(3)
    assert drafts.choose({5: drafter}) == {}  # nothing was measured
    for token in (4, 5, 6, 7):
        drafter.add(token)
    assert drafts.choose({5: drafter})[5][:2] == [8, 1]
    for _ in range(400):
        for token in (1, 2, 3, 9):
            drafter.add(token)
            drafter.add(token + 10)
    drafts.own.measure()
    assert drafts.own.rates[2] < 0.5


@pytest.mark.parametrize(("per_row", "some"), [(0.01, True), (2.0, False)])
@pytest.mark.parametrize("decodes", [1, 8, 32])
def test_the_number_of_drafts_follows_the_measured_cost_of_a_row(per_row, some, decodes):
    costs = StepCosts()
    for rows in range(1, 65):
        for _ in range(2):
            costs.note(rows, 1.0 + per_row * rows)
    count = best_count(decodes, [0.6] * min(decodes, 16), costs.costs(decodes, 64))
    assert (count > 0) is some


def test_a_disturbed_step_does_not_cost_more_than_one_with_more_tokens():
    costs = StepCosts()
    for rows, seconds in ((2, 1.0), (4, 7.0), (9, 3.0)):
        costs.note(rows, seconds)
        costs.note(rows, 2 * seconds)
    assert costs.costs(2, 10) == pytest.approx([1.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0 + 2 / 7])
    assert costs.costs(1, 3) == [0.0, 0.0, 0.0] and best_count(1, [0.9, 0.9], costs.costs(1, 3)) == 0


def test_a_cost_is_measured_again_after_a_while():
    costs = StepCosts()
    for rows, seconds in ((1, 1.0), (1, 1.0), (4, 9.0), (4, 9.0)):
        costs.note(rows, seconds)
    assert costs.costs(1, 5) == pytest.approx([1.0, 1.0 + 8 / 3, 1.0 + 16 / 3, 9.0, 9.0 + 8 / 3])
    for _ in range(MAX_AGE + 1):
        costs.note(1, 1.0)
    assert costs.costs(1, 5) == [1.0] * 5


def test_the_drafts_of_a_step_are_the_most_likely_that_have_room():
    drafts = Drafts()
    drafters = {number: drafts.drafter(range(40)) for number in range(3)}
    for number, drafter in drafters.items():
        for token in range(3 + number):
            drafter.add(token)
        for rows in range(1, 65):
            drafts.costs.note(rows, 1.0)
    for _ in range(99):
        drafts.own.note(3, False)
        drafts.own.note(5, True)
    assert list(drafts.choose(drafters)) == [1, 2]
    assert drafts.choose(drafters, 4) == {1: [4, 5], 2: [5, 6]}
    assert drafts.choose(drafters, 0) == {}


def test_more_requests_than_rows_of_a_step_get_no_drafts():
    drafts = Drafts()
    drafters = {number: drafts.drafter([1, 2, 3] * 9) for number in range(64)}
    for drafter in drafters.values():
        drafter.add(1)
    assert drafts.choose(drafters) == {}
