"""Choose the next token of a request from its logits: greedy, or sampled with the request's own random generator."""

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
from pagepool.engine.structured import Matcher, Structured
from pagepool.errors import RequestRejected

__all__ = [
    "MAX_BAD_LENGTH",
    "MAX_BAD_WORDS",
    "MAX_BIASES",
    "MAX_LOGPROBS",
    "MAX_REPETITION_PENALTY",
    "MAX_STOP",
    "MAX_STOP_IDS",
    "MAX_STOP_LENGTH",
    "MIN_REPETITION_PENALTY",
    "Sampler",
    "SamplingParams",
    "check_logits",
    "logprobs_of",
    "sampling_defaults_of",
]

LOWEST = 1e-30  # lower bound of the temperature in float32; 1 / LOWEST is the upper bound. No result changes
MAX_LOGPROBS = 20  # the limit of OpenAI's API
MAX_BIAS = 100.0  # the limit of OpenAI's API
MAX_BIASES = 1024  # OpenAI: 300
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0  # no float32 logit of a model overflows
MAX_BAD_WORDS = 256
MAX_BAD_LENGTH = 16_384  # characters of all bad words together
MAX_STOP = 64
MAX_STOP_IDS = 1024
MAX_STOP_LENGTH = 16_384  # characters of all stop strings together
LEAST = -3e38  # close to the lowest float32
ROW = 128  # logits per row in the search for the largest logits


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters and stop conditions of one request.

    Parameters
    ----------
    max_new_tokens : int, optional
        Maximum number of generated tokens, at least 1. Default: as many as the model and the pool have room for. 0
        computes only the prompt and needs `prompt_logprobs`.
    temperature : float
        Logits are divided by it. 0: always the most likely token.
    top_k : int
        Sample only from the k most likely tokens. 0: from all tokens.
    top_p : float
        Sample only from the smallest set of most likely tokens with at least this total probability, above 0 and up
        to 1.
    seed : int, optional
        Seed of the request's own random generator, at least 0. The same seed gives the same random numbers, independent
        of other requests. Default: a new seed for each request.
    stop : str or sequence of str
        Strings that end the text. The text ends before the stop string. At most 64 strings with 16,384 characters
        together.
    stop_token_ids : iterable of int
        Tokens that end the text, in addition to the stop tokens of the model: at most 1,024.
    logprobs : int, optional
        Number of most likely tokens that are reported with each token, from 0 to 20. Default: no log probabilities.
    ignore_eos : bool
        Do not end the text at the stop tokens of the model. With `structured`, end it where nothing else is allowed.
    min_tokens : int
        A stop token or stop string can end the text only after this number of tokens. A complete text of `structured`
        ends earlier.
    min_p : float
        Sample only tokens with at least this fraction of the highest probability, from 0 to 1.
    presence_penalty : float
        Subtracted from the logit of each token that was generated, from -2 to 2.
    frequency_penalty : float
        Subtracted from a token's logit once for each time it was generated, from -2 to 2.
    repetition_penalty : float
        For tokens of the prompt and the output: positive logits are divided by it, negative ones multiplied. From 0.01
        to 100.
    logit_bias : mapping of int to float
        Added to the logits, by token id; clipped to -100 to 100. At most 1,024. Stored as sorted pairs.
    bad_words : str or sequence
        Words that are never generated, alone or after a space: at most 256 texts. A word can also be a sequence of
        token ids.
    prompt_logprobs : int, optional
        The same as `logprobs` for the tokens of the prompt. Such a request does not read the prefix cache, because the
        log probabilities of cached tokens are not known.
    structured : Structured, optional
        A grammar for the text: tokens that it forbids are never generated. A text that `max_new_tokens`, a stop string
        or `stop_token_ids` ends may be incomplete.
    skip_special_tokens : bool
        Leave special tokens of the tokenizer out of the text.

    Raises
    ------
    TypeError, ValueError
        If a field has a wrong type or is out of range.

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
    structured: Structured | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            integer("max_new_tokens", self.max_new_tokens, 1 if self.prompt_logprobs is None else 0)
        if real("temperature", self.temperature, 0.0) == float("inf"):
            raise ValueError("temperature must be finite, not inf")
        integer("top_k", self.top_k, 0)
        if not 0.0 < real("top_p", self.top_p) <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.seed is not None:
            object.__setattr__(self, "seed", integer("seed", self.seed, 0))  # Random(-1) and Random(1) are equal
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise wrong(name, "a bool", getattr(self, name))
        integer("min_tokens", self.min_tokens, 0)
        if not isinstance(self.structured, Structured | None):
            raise wrong("structured", "a Structured or None", self.structured)
        for name in ("stop", "stop_token_ids"):
            if not isinstance(getattr(self, name), Iterable) or isinstance(getattr(self, name), Mapping):
                raise wrong(name, "a sequence", getattr(self, name))
        object.__setattr__(self, "stop", _read_stop(self.stop))
        ids = frozenset(integer("a token of stop_token_ids", token, 0) for token in self.stop_token_ids)
        if len(ids) > MAX_STOP_IDS:
            raise ValueError(f"stop_token_ids must have at most {MAX_STOP_IDS} tokens, not {len(ids)}")
        object.__setattr__(self, "stop_token_ids", ids)
        if not 0.0 <= real("min_p", self.min_p) <= 1.0:
            raise ValueError(f"min_p must be from 0 to 1, not {self.min_p}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= real(name, getattr(self, name)) <= 2.0:
                raise ValueError(f"{name} must be from -2 to 2, not {getattr(self, name)}")
        low, high = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        if not low <= real("repetition_penalty", self.repetition_penalty) <= high:
            raise ValueError(f"repetition_penalty must be from {low} to {high}, not {self.repetition_penalty}")
        object.__setattr__(self, "logit_bias", _read_bias(self.logit_bias))
        object.__setattr__(self, "bad_words", _read_words(self.bad_words))

    def changed(self, **fields: Any) -> SamplingParams:
        """Return a copy with other values in some fields. They are not checked, nor are the fields checked again."""
        found = object.__new__(SamplingParams)
        found.__dict__.update(self.__dict__, **fields)
        return found


def sampling_defaults_of(model: Any) -> dict[str, Any]:
    """Return the defaults of `SamplingParams` in the `generation_config` of a model.

    The values are not checked. `do_sample` is not read, as in vLLM.
    """
    config: Any = getattr(model, "generation_config", None)
    found = config.to_diff_dict() if hasattr(config, "to_diff_dict") else {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {name: found[name] for name in names if found.get(name) is not None}


def _read_stop(stop: Any) -> tuple[str, ...]:
    """Check the stop strings and return them as a tuple."""
    texts: tuple[str, ...] = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(texts) > MAX_STOP:
        raise ValueError(f"stop must have at most {MAX_STOP} strings, not {len(texts)}")
    for text in texts:
        if not isinstance(text, str):
            raise wrong("a stop string", "a str", text)
        if not text:
            raise ValueError("a stop string needs at least 1 character, got 0")
    length = sum(map(len, texts))
    if length > MAX_STOP_LENGTH:
        raise ValueError(f"stop must have at most {MAX_STOP_LENGTH} characters in total, not {length}")
    return texts


def _read_bias(bias: Any) -> tuple[tuple[int, float], ...]:
    """Check the logit biases and return pairs (token id, bias), sorted by token id."""
    if not isinstance(bias, Mapping | tuple):
        raise wrong("logit_bias", "a mapping from token ids to numbers", bias)
    found = {}
    if len(bias) > MAX_BIASES:
        raise ValueError(f"logit_bias must have at most {MAX_BIASES} tokens, not {len(bias)}")
    for token, value in dict(bias).items():
        number = float(real("a bias of logit_bias", value))
        found[integer("a token of logit_bias", token, 0)] = min(MAX_BIAS, max(-MAX_BIAS, number))
    return tuple(sorted(found.items()))


def _read_words(words: Any) -> tuple[str | tuple[int, ...], ...]:
    """Check the bad words. Texts stay texts, token ids become tuples."""
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
            raise ValueError("a word of bad_words must have at least 1 token or 1 non-space character, not 0")
        found.append(word)
    texts = sum(isinstance(word, str) for word in found)
    if texts > MAX_BAD_WORDS or len(found) > 2 * MAX_BAD_WORDS:
        raise ValueError(f"bad_words must have at most {MAX_BAD_WORDS} words, not {len(found)}")
    length = sum(len(word) for word in found if isinstance(word, str))
    if length > MAX_BAD_LENGTH:
        raise ValueError(f"bad_words must have at most {MAX_BAD_LENGTH} characters in total, not {length}")
    return tuple(found)


class Sampler:
    """Chooses the tokens of one request.

    The choice depends on the logits, the `SamplingParams` and the number of earlier tokens. Each token uses exactly one
    number of the request's random generator. If `top_p` needs more numbers for a token, a second generator is seeded
    with that number.

    Parameters
    ----------
    params : SamplingParams
        The request's parameters, with token ids in `bad_words`.
    num_drawn : int
        Number of tokens that an earlier run of this request has sampled. The random generator continues after them.
    tokens : sequence of int
        The prompt, followed by these tokens. Used by penalties and bad words.
    matcher : Matcher, optional
        The state of `structured` behind these tokens.

    Examples
    --------
    >>> logits = np.log(np.array([0.1, 0.6, 0.3], np.float32))
    >>> greedy = Sampler(SamplingParams(max_new_tokens=1))
    >>> greedy.sample(logits)
    1
    >>> sampler = Sampler(SamplingParams(max_new_tokens=5, temperature=1.0, seed=2))
    >>> [sampler.sample(logits) for _ in range(5)]
    [2, 2, 0, 0, 2]
    """

    def __init__(
        self,
        params: SamplingParams,
        num_drawn: int = 0,
        tokens: Sequence[int] = (),
        matcher: Matcher | None = None,
    ) -> None:
        self.params, self._matcher = params, matcher
        self._adjuster: Adjuster | None = None
        if adjusts(params):
            begun = len(tokens) - num_drawn
            self._adjuster = Adjuster(params, tokens[:begun], tokens[begun:])
        self._num_tokens = num_drawn
        self._stop_ids = np.array(sorted(params.stop_token_ids), np.int64)
        self._random = random.Random(params.seed)
        if params.temperature != 0.0:
            for _ in range(num_drawn):
                self._random.random()

    def begin(self) -> None:
        """Start to compute the mask of `structured` in a thread, before the model computes the logits."""
        if self._matcher is not None:
            self._matcher.begin()

    def sample(self, logits: Any) -> int:
        """Choose the next token.

        Parameters
        ----------
        logits : ndarray of float32, shape (vocab_size,)
            Logits of all tokens; not modified.

        Returns
        -------
        int
            The token id.

        Raises
        ------
        ValueError
            If a logit is NaN or inf: the model has failed.
        RequestRejected
            If the parameters of the request leave no token that the model can choose, or its grammar is too complex.
        """
        own, adjuster, matcher = logits, self._adjuster, self._matcher
        if matcher is not None:
            logits = matcher.masked(logits)
        if adjuster is not None:
            logits = adjuster.adjusted(logits)
        is_early = self._num_tokens < self.params.min_tokens
        if is_early or (matcher is not None and self.params.ignore_eos):
            longer = logits.copy()
            longer[self._stop_ids[: np.searchsorted(self._stop_ids, len(logits))]] = -np.inf
            if matcher is None or longer.max() != -np.inf:  # else the text is complete
                logits = longer
        if logits is not own and logits.max() == -np.inf and isfinite(own.max()):
            names = "stop_token_ids with min_tokens" if is_early else "bad_words"
            names = names if matcher is None else "structured with the other parameters"
            sentence = f"{names} leave no token that the model can choose as token {self._num_tokens + 1}"
            raise RequestRejected(sentence, param=names.partition(" ")[0])
        token = self._choose(logits)
        if adjuster is not None:
            adjuster.add(token)
        if matcher is not None and token not in self.params.stop_token_ids:
            matcher.add(token)
        return token

    @property
    def takes_largest(self) -> bool:
        """True if the next token is the one with the largest logit, and the request needs no other logit."""
        params = self.params
        is_greedy = params.temperature == 0.0 and params.logprobs is None
        is_plain = self._adjuster is None and self._matcher is None
        return is_greedy and is_plain and self._num_tokens >= params.min_tokens

    def take(self, token: int) -> int:
        """Count a token that was chosen without `sample`, because `takes_largest` was true. Return it."""
        self._num_tokens += 1
        return token

    def _choose(self, logits: Any) -> int:
        params = self.params
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
        """Return the log probabilities that the request asks for.

        They are the model's own: temperature, `top_p`, penalties, biases and `structured` do not change them.

        Returns
        -------
        tuple
            As `logprobs_of` with the request's `logprobs` as `count`; `(None, {})` if that is None.
        """
        if self.params.logprobs is None:
            return None, {}
        return logprobs_of(logits, token, self.params.logprobs)


def logprobs_of(logits: Any, token: int, count: int) -> tuple[float, dict[int, float]]:
    """Return the natural log probability of `token`, and of the `count` most likely tokens.

    Parameters
    ----------
    logits : ndarray of float32, shape (vocab_size,)
        Logits of all tokens. Their exponentials are summed in float64.
    token : int
        A token id.
    count : int
        Number of most likely tokens.

    Returns
    -------
    tuple of float and dict
        The dict is by token id, most likely first.
    """
    best = logits.max()
    total = float(best) + float(np.log(np.exp(logits - best).sum(dtype=np.float64)))
    count = min(count, len(logits))
    top = _largest(logits, count) if count else np.empty(0, np.intp)
    top = top[np.argsort(-logits[top], kind="stable")]
    return float(logits[token]) - total, {int(index): float(logits[index]) - total for index in top}


def _largest(values: Any, count: int) -> Any:
    """Return the indices of the `count` largest values in rising order. Among equal values, lower indices win."""
    rows = len(values) // ROW
    if count <= rows:  # `count` rows have a maximum of at least `bound`, so the `count` largest values reach it as well
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
    """Raise ValueError if `most`, the largest logit, is not finite. NumPy's `max` returns NaN if any value is NaN."""
    if not isfinite(most):
        raise ValueError(f"the logit of token {logits.argmax()} is {most}: the model has failed")
