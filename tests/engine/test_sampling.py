"""Tokens are drawn with the probabilities of the sampling parameters, from the request's own generator."""

from collections import Counter

import numpy as np
import pytest
from refusals import refuses

from pagepool.engine.drawing import draw
from pagepool.engine.sampling import Sampler, SamplingParams, _largest, sampling_defaults_of


def sampler(**params):
    return Sampler(SamplingParams(max_new_tokens=1, **params))


def random_logits(size, seed=0):
    return (np.random.default_rng(seed).standard_normal(size) * 3).astype(np.float32)


def wanted_probabilities(logits, temperature=1.0, top_k=0, top_p=1.0):
    """Apply temperature, then top_k, then top_p to the remaining tokens, like transformers' logits processors."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    if top_k:
        order = order[:top_k]
    weights = np.exp(scaled[order] - scaled.max())
    weights /= weights.sum()
    weights[np.cumsum(weights) - weights >= top_p] = 0.0
    found = np.zeros(len(logits))
    found[order] = weights / weights.sum()
    return found


@pytest.mark.parametrize("size", [1, 2, 256, 257, 1000])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 5, "top_p": 0.5}])
def test_tokens_are_drawn_as_often_as_they_are_likely(size, params):
    logits, count = random_logits(size), 1000
    wanted = wanted_probabilities(logits, **params)
    one = sampler(**{"temperature": 1.0, "seed": 5, **params})
    found = np.bincount([one.sample(logits) for _ in range(count)], minlength=size)
    assert not found[wanted == 0.0].any()
    # Five standard deviations, plus 3 for rare tokens.
    assert (np.abs(found - count * wanted) <= 5 * np.sqrt(count * wanted * (1 - wanted)) + 3).all()


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_of_equal_tokens_the_first_are_in_top_p(top_p):
    logits = np.zeros(5000, np.float32)
    one = sampler(temperature=1.0, top_p=top_p, seed=1)
    found = {one.sample(logits) for _ in range(1000)}
    assert max(found) < int(np.ceil(5000 * top_p)) and max(found) > 0.98 * 5000 * top_p


@pytest.mark.parametrize("size", [1, 100, 128, 129, 1000, 5000])
def test_the_largest_values_are_found_for_any_count(size):
    for seed in range(20):
        values = np.round(random_logits(size, seed) * 2) / 2  # with ties
        for count in {1, size // 128, size // 128 + 1, size // 2, size - 1, size} - {0}:
            wanted = np.sort(np.argsort(-values, kind="stable")[:count])
            assert _largest(values, count).tolist() == wanted.tolist()


def test_of_equal_tokens_the_first_are_in_top_k():
    logits = np.zeros(100, np.float32)
    one = sampler(temperature=1.0, top_k=4, seed=2)
    assert {one.sample(logits) for _ in range(200)} == {0, 1, 2, 3}


def test_equal_seeds_draw_equal_tokens_and_no_seed_draws_others():
    logits = random_logits(1000)

    def drawn(seed):
        one = sampler(temperature=2.0, seed=seed)
        return tuple(one.sample(logits) for _ in range(20))

    assert drawn(3) == drawn(3) != drawn(4)
    assert len({drawn(None) for _ in range(4)}) == 4


def test_seeds_that_differ_anywhere_draw_other_tokens_and_negative_ones_are_refused():
    logits = random_logits(1000)

    def drawn(seed):
        one = sampler(temperature=2.0, seed=seed)
        return tuple(one.sample(logits) for _ in range(20))

    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**63, 2**63 + 1, 2**64, 2**64 + 1, 2**200]
    assert len({drawn(seed) for seed in seeds}) == len(seeds)
    assert drawn(np.int64(7)) == drawn(7)
    for seed in (-1, -7, -(2**70)):
        with refuses(ValueError, "seed", seed):
            SamplingParams(seed=seed)


@pytest.mark.parametrize("options", [{}, {"top_k": 20}, {"top_p": 0.3}, {"top_k": 50, "top_p": 0.5}], ids=str)
@pytest.mark.parametrize("num_drawn", [0, 1, 7, 19])
def test_a_sampler_continues_where_another_stopped(num_drawn, options):
    logits = random_logits(1000)
    params = SamplingParams(max_new_tokens=1, temperature=2.0, seed=3, **options)
    whole = Sampler(params)
    drawn = [whole.sample(logits) for _ in range(20)]
    rest = Sampler(params, num_drawn)
    assert [rest.sample(logits) for _ in range(20 - num_drawn)] == drawn[num_drawn:]


def test_greedy_takes_the_best_and_draws_nothing():
    logits = random_logits(50)
    assert {sampler(seed=seed).sample(logits) for seed in range(5)} == {int(logits.argmax())}
    assert {sampler(temperature=1e-30, seed=seed).sample(logits) for seed in range(5)} == {int(logits.argmax())}


def test_any_temperature_draws_a_possible_token():
    logits = random_logits(50)
    logits[10:] = -np.inf
    for temperature in (5e-324, 1e-40, 1e40, 1e308):
        one = sampler(temperature=temperature, seed=0)
        assert {one.sample(logits) for _ in range(50)} <= set(range(10))


def test_impossible_tokens_are_never_drawn():
    logits = np.full(600, -np.inf, np.float32)
    logits[[3, 300, 599]] = 1.0
    one = sampler(temperature=5.0, seed=0)
    assert set(Counter(one.sample(logits) for _ in range(300))) == {3, 300, 599}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_of_no_use_are_refused(value):
    logits = random_logits(50)
    logits[7] = value
    with refuses(ValueError, 7, value):
        sampler().sample(logits)


@pytest.mark.parametrize("count", [1, 2, 3, 255, 256, 257, 300, 512])
def test_the_share_at_the_very_end_belongs_to_the_last_possible_token(monkeypatch, count):
    one = sampler(temperature=1.0)
    monkeypatch.setattr(one._random, "random", lambda: 1.0 - 2.0**-53)
    for seed in range(50):
        logits = np.full(1100, -np.inf, np.float32)
        logits[:count] = random_logits(count, seed)
        assert one.sample(logits) == count - 1


def drawn_as_defined(logits, temperature, top_p, numbers):
    """Draw in float64, token by token. Return None if rounding could decide the result."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    needed, near = top_p * weights.sum(), 1e-5 * weights.sum()
    order = np.argsort(-weights, kind="stable")
    for number in numbers:
        ends = np.cumsum(weights)
        target = number * ends[-1]
        place = int(np.searchsorted(ends, target, side="right"))
        ahead = order[: int(np.flatnonzero(order == place)[0])]
        share = weights[ahead].sum()
        if np.abs(ends - target).min() < near or abs(share - needed) < near:
            return None
        if top_p >= 1.0 or share < needed:
            return place
        weights = np.where(np.isin(np.arange(len(weights)), ahead), weights, 0.0)
    raise AssertionError("too few numbers")


@pytest.mark.parametrize("size", [1, 7, 255, 256, 257, 3000])
@pytest.mark.parametrize("top_p", [0.01, 0.4, 0.9, 1.0])
def test_each_draw_matches_the_definition(size, top_p):
    generator, compared = np.random.default_rng(size), 0
    for case in range(100):
        logits = np.round(random_logits(size, case) * 4) / 4  # with ties
        temperature, numbers = generator.choice([0.3, 1.0, 3.0]), generator.random(100).tolist()
        wanted, left = drawn_as_defined(logits, temperature, top_p, numbers), iter(numbers)
        found = draw(logits, logits.max(), temperature, top_p, left.__next__)
        assert wanted is None or found == wanted
        compared += wanted is not None
    assert compared > 80


def test_the_defaults_of_a_model_are_what_its_generation_config_sets():
    class Config:
        def to_diff_dict(self):
            return {"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True, "eos_token_id": 3}

    class Model:
        generation_config = Config()

    assert sampling_defaults_of(Model()) == {"temperature": 0.6, "top_k": 20}
    assert sampling_defaults_of(None) == sampling_defaults_of(object()) == {}


def test_a_generator_that_fails_is_passed_on():
    logits = random_logits(300)
    with pytest.raises(ZeroDivisionError):
        draw(logits, logits.max(), 1.0, 0.9, lambda: 1 / 0)


@pytest.mark.parametrize("size", [300, 32_000])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95])
def test_exactly_the_most_likely_tokens_can_be_drawn(size, top_p):
    logits = random_logits(size)
    possible = set(np.flatnonzero(wanted_probabilities(logits, top_p=top_p)).tolist())
    one = sampler(temperature=1.0, top_p=top_p, seed=4)
    found = {one.sample(logits) for _ in range(2000)}
    assert found <= possible and len(found) > min(len(possible), 2000) * 0.3
