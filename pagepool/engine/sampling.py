"""The next token of one sequence from its logits: greedy or drawn, by a generator of the request's own."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, log
from typing import Any

import numpy as np

from pagepool._arguments import integer, real, wrong
from pagepool.engine.adjusting import Adjuster, adjusts
from pagepool.engine.drawing import draw

__all__ = ["Sampler", "SamplingParams", "check_logits", "logprobs_of", "sampling_defaults_of"]

LOWEST = 1e-30  # smallest temperature in float32; smaller ones give the same result, as do ones above its inverse
MAX_LOGPROBS = 20  # the limit of OpenAI's API
MAX_BIAS = 100.0  # as OpenAI's
MAX_BAD_WORDS = 256
MAX_BAD_LENGTH = 16_384  # characters of all bad words together
MAX_STOP = 64
MAX_STOP_LENGTH = 16_384  # characters of all stop strings together
LEAST = -3e38  # a logit in float32
ROW = 128  # logits per row: the maxima of rows bound the search for the largest logits


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Parameters
    ----------
    max_new_tokens : int or None
        Maximum number of generated tokens. None: as many as fit. 0: only the prompt is computed, for `prompt_logprobs`.
    temperature : float
        Divides the logits. 0: always the most likely token.
    top_k : int
        Draw only from the k most likely tokens. 0: from all.
    top_p : float
        Draw only from the most likely tokens that together have this probability, above 0 and up to 1.
    seed : int or None
        Seed of the request's own generator, at least 0. The same seed draws the same numbers, whichever other requests
        run. None: a new seed for each request.
    stop : str or sequence of str
        Strings that end the text. They are not part of it. Up to 64, of 16,384 characters together.
    stop_token_ids : sequence of int
        Tokens that end the text, in addition to the stop tokens of the model.
    ignore_eos : bool
        Whether the stop tokens of the model do not end the text.
    min_tokens : int
        Number of tokens before a stop token or a stop string may end the text.
    min_p : float
        Draw only tokens with at least this share, from 0 to 1, of the highest probability.
    presence_penalty : float
        Subtracted from the logit of each token that was generated, from -2 to 2.
    frequency_penalty : float
        Subtracted once for each time that the token was generated, from -2 to 2.
    repetition_penalty : float
        Positive logits of tokens of the prompt and of generated tokens are divided by it, negative ones multiplied.
    logit_bias : mapping
        From token ids to a number that is added to the logit, from -100 to 100. Kept as pairs.
    bad_words : sequence
        Up to 256 words that are not generated, with or without a space before them. A word may also be token ids.
    logprobs : int or None
        Number of the most likely tokens that are reported with each token, from 0 to 20. None: no log probabilities.
    prompt_logprobs : int or None
        The same for the tokens of the prompt. None: the prompt may begin with cached pages, and their log
        probabilities are not known.

    Raises
    ------
    TypeError, ValueError
        For a field of a wrong type or out of range.

    Examples
    --------
    >>> SamplingParams(max_new_tokens=8, temperature=0.7, seed=1, stop="end").stop
    ('end',)
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: Any = ()
    stop_token_ids: Any = ()
    logprobs: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Any = ()
    bad_words: Any = ()
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            integer("max_new_tokens", self.max_new_tokens, 1 if self.prompt_logprobs is None else 0)
        if real("temperature", self.temperature, 0.0) == float("inf"):
            raise ValueError("temperature must be finite, not inf")
        integer("top_k", self.top_k, 0)
        if not 0.0 < real("top_p", self.top_p) <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.seed is not None:
            object.__setattr__(self, "seed", integer("seed", self.seed, 0))  # random takes -1 for 1
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise wrong("ignore_eos", "a bool", self.ignore_eos)
        integer("min_tokens", self.min_tokens, 0)
        for name in ("stop", "stop_token_ids"):
            if not isinstance(getattr(self, name), Iterable) or isinstance(getattr(self, name), Mapping):
                raise wrong(name, "a sequence", getattr(self, name))
        object.__setattr__(self, "stop", _read_stop(self.stop))
        ids = frozenset(integer("a stop token", token, 0) for token in self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ids)
        if not 0.0 <= real("min_p", self.min_p) <= 1.0:
            raise ValueError(f"min_p must be from 0 to 1, not {self.min_p}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= real(name, getattr(self, name)) <= 2.0:
                raise ValueError(f"{name} must be from -2 to 2, not {getattr(self, name)}")
        if not 0.0 < real("repetition_penalty", self.repetition_penalty) < float("inf"):
            raise ValueError(f"repetition_penalty must be above 0 and finite, not {self.repetition_penalty}")
        object.__setattr__(self, "logit_bias", _read_bias(self.logit_bias))
        object.__setattr__(self, "bad_words", _read_words(self.bad_words))


def sampling_defaults_of(model: Any) -> dict[str, Any]:
    """The model's own defaults of fields of `SamplingParams`: those that its `generation_config` sets.

    They are as they stand there, and may be no `SamplingParams`. `do_sample` is not read, as in vLLM.
    """
    config: Any = getattr(model, "generation_config", None)
    found = config.to_diff_dict() if hasattr(config, "to_diff_dict") else {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {name: found[name] for name in names if found.get(name) is not None}


def _read_stop(stop: Any) -> tuple[str, ...]:
    """The stop strings."""
    texts: tuple[str, ...] = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(texts) > MAX_STOP:
        raise ValueError(f"stop may have up to {MAX_STOP} strings, not {len(texts)}")
    for text in texts:
        if not isinstance(text, str):
            raise wrong("a stop string", "a str", text)
        if not text:
            raise ValueError("a stop string needs at least 1 character, got 0")
    length = sum(map(len, texts))
    if length > MAX_STOP_LENGTH:
        raise ValueError(f"stop may have up to {MAX_STOP_LENGTH} characters together, not {length}")
    return texts


def _read_bias(bias: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of a token id and its bias, by token id."""
    if not isinstance(bias, Mapping | tuple):
        raise wrong("logit_bias", "a mapping from token ids to numbers", bias)
    found = {}
    for token, value in dict(bias).items():
        number = float(real("a bias of logit_bias", value))
        found[integer("a token of logit_bias", token, 0)] = min(MAX_BIAS, max(-MAX_BIAS, number))
    return tuple(sorted(found.items()))


def _read_words(words: Any) -> tuple[str | tuple[int, ...], ...]:
    """Words as they are, or their token ids."""
    if not isinstance(words, Iterable):
        raise wrong("bad_words", "a sequence", words)
    words = (words,) if isinstance(words, str) else tuple(words)
    found: list[str | tuple[int, ...]] = []
    for word in words:
        if not isinstance(word, str):
            if not isinstance(word, Iterable):
                raise wrong("a word of bad_words", "a str or token ids", word)
            word = tuple(integer("a token of bad_words", token, 0) for token in word)
        if not (word.strip() if isinstance(word, str) else word):
            raise ValueError("a word of bad_words needs at least 1 token or a character that is no space, got 0")
        found.append(word)
    texts = sum(isinstance(word, str) for word in found)
    if texts > MAX_BAD_WORDS or len(found) > 2 * MAX_BAD_WORDS:
        raise ValueError(f"bad_words may have up to {MAX_BAD_WORDS} words, not {len(found)}")
    length = sum(len(word) for word in found if isinstance(word, str))
    if length > MAX_BAD_LENGTH:
        raise ValueError(f"bad_words may have up to {MAX_BAD_LENGTH} characters together, not {length}")
    return tuple(found)


class Sampler:
    """Chooses the tokens of one request, one after another.

    The choice depends on the logits, the `SamplingParams` and how many tokens were drawn before: each takes one number
    of the request's generator. Where `top_p` needs more for a token, that number begins another generator.

    num_drawn  how many tokens of this request an earlier run of it has drawn: it goes on behind them
    tokens     the prompt and these tokens, for penalties and bad words, which are token ids here

    >>> logits = np.log(np.array([0.1, 0.6, 0.3], np.float32))
    >>> greedy = Sampler(SamplingParams(max_new_tokens=1))
    >>> greedy.sample(logits)
    1
    >>> sampler = Sampler(SamplingParams(max_new_tokens=5, temperature=1.0, seed=2))
    >>> [sampler.sample(logits) for _ in range(5)]
    [2, 2, 0, 0, 2]
    """

    def __init__(self, params: SamplingParams, num_drawn: int = 0, tokens: Sequence[int] = ()) -> None:
        self.params = params
        self._adjuster: Adjuster | None = None
        if adjusts(params):
            begun = len(tokens) - num_drawn
            self._adjuster = Adjuster(params, tokens[:begun], tokens[begun:])
        self._num_tokens = num_drawn
        self._random = random.Random(params.seed)
        if params.temperature != 0.0:
            for _ in range(num_drawn):
                self._random.random()

    def sample(self, logits: Any) -> int:
        """The next token, given the logits of all tokens, float32 of shape (vocab_size,).

        Raises ValueError when one of them is NaN or inf: the model has failed.
        """
        if self._adjuster is None:
            return self._choose(logits)
        token = self._choose(self._adjuster.adjusted(logits))
        self._adjuster.add(token)
        return token

    def _choose(self, logits: Any) -> int:
        params = self.params
        if self._num_tokens < params.min_tokens:
            logits = logits.copy()
            logits[[token for token in params.stop_token_ids if token < len(logits)]] = -np.inf
        self._num_tokens += 1
        if params.temperature == 0.0:
            best = int(logits.argmax())
            check_logits(logits, logits[best])
            return best
        most = logits.max()
        check_logits(logits, most)
        temperature = min(max(params.temperature, LOWEST), 1.0 / LOWEST)
        if params.min_p > 0.0:
            least = max(log(params.min_p) * temperature, LEAST)
            logits = np.where(logits - most >= least, logits, np.float32(-np.inf))
        ids = None
        if 0 < params.top_k < len(logits):
            ids = _largest(logits, params.top_k)
            logits = logits[ids]
        numbers = self._numbers().__next__
        place = draw(np.ascontiguousarray(logits, np.float32), most, temperature, params.top_p, numbers)
        return place if ids is None else int(ids[place])

    def _numbers(self) -> Iterator[float]:
        first = self._random.random()
        yield first
        others = random.Random(first)
        while True:
            yield others.random()

    def logprobs(self, logits: Any, token: int) -> tuple[float | None, dict[int, float]]:
        """The natural logarithm of the model's own probability of `token`, and of the most likely tokens by id, most
        likely first: as many as the request's `logprobs`, which may be None: (None, {}).

        Nothing that the request asks for changes them: neither temperature nor `top_p`, penalties or biases.
        """
        if self.params.logprobs is None:
            return None, {}
        return logprobs_of(logits, token, self.params.logprobs)


def logprobs_of(logits: Any, token: int, count: int) -> tuple[float, dict[int, float]]:
    """The natural logarithms of the probability of `token`, and of the `count` most likely tokens by id, most likely
    first. `logits` is float32 of shape (vocab_size,); the sum is float64."""
    best = logits.max()
    total = float(best) + float(np.log(np.exp(logits - best).sum(dtype=np.float64)))
    count = min(count, len(logits))
    top = _largest(logits, count) if count else np.empty(0, np.intp)
    top = top[np.argsort(-logits[top], kind="stable")]
    return float(logits[token]) - total, {int(index): float(logits[index]) - total for index in top}


def _largest(values: Any, count: int) -> Any:
    """The indices of the `count` largest, rising; of equal ones the lower indices."""
    rows = len(values) // ROW
    if count <= rows:  # `count` rows have a maximum of at least `bound`, and few other values reach it
        bound = np.partition(values[: rows * ROW].reshape(rows, ROW).max(1), -count)[-count]
        found = np.flatnonzero(values >= bound)
    else:
        found = np.arange(len(values))
    candidates = values[found]
    least = np.partition(candidates, -count)[-count]
    kept = candidates >= least
    ties = np.flatnonzero(candidates == least)
    kept[ties[len(ties) - (np.count_nonzero(kept) - count) :]] = False
    return found[kept]


def check_logits(logits: Any, most: Any) -> None:
    """Raise ValueError if the largest logit is not finite. NumPy takes NaN for the largest."""
    if not isfinite(most):
        raise ValueError(f"the logit of token {logits.argmax()} is {most}: the model's result is of no use")
