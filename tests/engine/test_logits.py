"""Logits in bfloat16: the largest one of a row, and rows in float32."""

import numpy as np
import pytest

from pagepool.engine.drawing import largest
from pagepool.engine.logits import Logits
from pagepool.engine.sampling import Sampler, SamplingParams


def bits_of(values):
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("n", [1, 7, 8, 1000, 32_001])
def test_the_largest_logit_is_that_of_numpy(n):
    rows = bits_of(np.random.default_rng(n).standard_normal((20, n)))
    assert largest(rows) == Logits(rows)[:].argmax(1).tolist()


@pytest.mark.parametrize(
    "values",
    [[1, 3, 3, 2], [-5, -2, -2], [-1, -0.0, 0.0], [-1, 0.0, -0.0], [-np.inf, 4.0], [-np.inf, -3e38], [1e-40, 0.0]],
)
def test_the_first_of_equal_logits_is_the_largest(values):
    rows = bits_of([values])
    assert largest(rows) == [int(Logits(rows)[0].argmax())]


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
def test_a_row_of_a_failed_model_must_be_read(value):
    rows = bits_of([[1, 2, 3], [1, value, 3], [-np.inf] * 3])
    assert largest(rows) == [2, -1, -1]
    with pytest.raises(ValueError, match="the model has failed"):
        Sampler(SamplingParams(1)).sample(Logits(rows)[1])


def test_rows_in_float32_are_read():
    rows = np.ones((2, 3), np.float32)
    assert Logits(rows).largest() == [-1, -1]
    assert Logits(rows)[1] is not None and Logits(rows)[0:2].dtype == np.float32


def test_only_plain_greedy_requests_take_the_largest_logit():
    assert Sampler(SamplingParams(4)).takes_largest
    for other in ({"temperature": 1.0}, {"logprobs": 0}, {"logit_bias": {1: 2.0}}):
        assert not Sampler(SamplingParams(4, **other)).takes_largest
    sampler = Sampler(SamplingParams(4, min_tokens=1, stop_token_ids=[2]))
    assert not sampler.takes_largest
    assert sampler.sample(np.array([0.0, 1.0, 2.0], np.float32)) == 1
    assert sampler.takes_largest and sampler.take(7) == 7
