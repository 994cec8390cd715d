"""The next token of one sequence from its logits: greedy or drawn, by a generator of the request's own."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagepool.arguments import integer, real, wrong

__all__ = ["Sampler", "SamplingParams"]

LOWEST = 1e-30  # temperature that float32 has; one below does the same, and so at the other end
MAX_LOGPROBS = 20  # as OpenAI's API has it
CHUNK = 256  # weights that are summed at a time
FIRST_LOOK = 1024  # a whole vocabulary takes long to sort, and few tokens mostly have the share that top_p asks for


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    max_new_tokens  the most tokens that are generated, at least 1
    temperature     logits are divided by it; 0: always the most likely token
    top_k           only the k most likely tokens are drawn; 0: all
    top_p           only the most likely tokens are drawn that together have this probability, above 0 and up to 1
    seed            of the request's own generator: the same seed draws the same numbers, whatever runs beside it. None:
                    another one each time
    stop            strings that end the text when they come; they are not part of it. One string or several
    stop_token_ids  tokens that end it, beside those that end every text of the model
    logprobs        None, or how many of the most likely tokens are reported with each token, from 0 to 20

    Raises TypeError and ValueError for a field of a wrong type or out of range.

    >>> SamplingParams(max_new_tokens=8, temperature=0.7, seed=1, stop="end").stop
    ('end',)
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: Any = ()
    stop_token_ids: Any = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        integer("max_new_tokens", self.max_new_tokens, 1)
        if real("temperature", self.temperature, 0.0) == float("inf"):
            raise ValueError("temperature must be finite, not inf")
        integer("top_k", self.top_k, 0)
        if not 0.0 < real("top_p", self.top_p) <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.seed is not None:
            integer("seed", self.seed)
        if self.logprobs is not None:
            integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("stop", "stop_token_ids"):
            if not isinstance(getattr(self, name), Iterable):
                raise wrong(name, "a sequence", getattr(self, name))
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        for text in stop:
            if not isinstance(text, str):
                raise wrong("a stop string", "a str", text)
            if not text:
                raise ValueError("a stop string needs at least 1 character, got 0")
        object.__setattr__(self, "stop", stop)
        ids = frozenset(integer("a stop token", token, 0) for token in self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ids)


class Sampler:
    """Chooses the tokens of one request, one after another.

    The choice depends on the logits, the `SamplingParams` and how many tokens were drawn before: one number is drawn
    for each.

    num_drawn  how many tokens of this request an earlier run of it has drawn: it goes on behind them

    >>> logits = np.log(np.array([0.1, 0.6, 0.3], np.float32))
    >>> greedy = Sampler(SamplingParams(max_new_tokens=1))
    >>> greedy.sample(logits)
    1
    >>> sampler = Sampler(SamplingParams(max_new_tokens=5, temperature=1.0, seed=2))
    >>> [sampler.sample(logits) for _ in range(5)]
    [2, 2, 0, 0, 2]
    """

    def __init__(self, params: SamplingParams, num_drawn: int = 0) -> None:
        self.params = params
        self._random = random.Random(params.seed)
        if params.temperature != 0.0:
            for _ in range(num_drawn):
                self._random.random()

    def sample(self, logits: Any) -> int:
        """The next token, given the logits of all tokens, float32 of shape (vocab_size,).

        Raises ValueError when one of them is NaN or inf: the model has failed.
        """
        params = self.params
        best = int(logits.argmax())
        if not np.isfinite(logits[best]):
            raise ValueError(f"the logit of token {best} is {logits[best]}: the model's result is of no use")
        if params.temperature == 0.0:
            return best
        ids = None
        if 0 < params.top_k < len(logits):
            ids = _largest(logits, params.top_k)
            logits = logits[ids]
        temperature = np.float32(min(max(params.temperature, LOWEST), 1 / LOWEST))
        with np.errstate(over="ignore"):  # by a temperature near 0: what is less likely becomes impossible
            weights = np.exp((logits - logits.max()) / temperature)
        if params.top_p < 1.0:
            nucleus = _nucleus(weights, params.top_p)
            ids = nucleus if ids is None else ids[nucleus]
            weights = weights[nucleus]
        place = _draw(weights, self._random.random())
        return place if ids is None else int(ids[place])

    def logprobs(self, logits: Any, token: int) -> tuple[float | None, dict[int, float]]:
        """The natural logarithm of the model's own probability of `token`, and of the most likely tokens by id, most
        likely first: as many as the request's `logprobs`, which may be None: (None, {}).

        Temperature, `top_k` and `top_p` do not change them.
        """
        if self.params.logprobs is None:
            return None, {}
        best = logits.max()
        total = float(best) + float(np.log(np.exp(logits - best).sum(dtype=np.float64)))
        count = min(self.params.logprobs, len(logits))
        top = _largest(logits, count) if count else np.empty(0, np.intp)
        top = top[np.argsort(-logits[top], kind="stable")]
        return float(logits[token]) - total, {int(index): float(logits[index]) - total for index in top}


def _largest(values: Any, count: int) -> Any:
    """The indices of the `count` largest, rising; of equal ones the lower indices."""
    least = np.partition(values, -count)[-count]
    found = np.flatnonzero(values >= least)
    ties = np.flatnonzero(values[found] == least)
    return np.delete(found, ties[len(ties) - (len(found) - count) :])


def _nucleus(weights: Any, top_p: float) -> Any:
    """The indices of the fewest largest weights that have the share `top_p` of all together, rising."""
    values = np.sort(np.partition(weights, -FIRST_LOOK)[-FIRST_LOOK:] if len(weights) > FIRST_LOOK else weights)[::-1]
    ends = np.cumsum(values, dtype=np.float64)
    needed = top_p * weights.sum(dtype=np.float64)
    if ends[-1] < needed:
        ends = np.cumsum(np.sort(weights)[::-1], dtype=np.float64)
    return _largest(weights, min(int(np.searchsorted(ends, needed)) + 1, len(weights)))


def _draw(weights: Any, number: float) -> int:
    """The index whose share of `weights` has `number`, from 0 up to but not 1, in it."""
    # Of a whole vocabulary the sums of chunks are found first: running sums of all weights take ten times as long.
    sums = np.add.reduceat(weights, np.arange(0, len(weights), CHUNK), dtype=np.float64)
    ends = np.cumsum(sums)
    target = number * ends[-1]
    chunk = int(np.searchsorted(ends, target, side="right"))
    part = weights[chunk * CHUNK : (chunk + 1) * CHUNK]
    inside = np.cumsum(part, dtype=np.float64) + (ends[chunk] - sums[chunk])
    # Both sums are rounded: what lies behind the last end by that is the last possible index.
    place = min(int(np.searchsorted(inside, target, side="right")), int(np.flatnonzero(part)[-1]))
    return chunk * CHUNK + place
