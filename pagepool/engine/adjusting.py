"""Penalties, logit biases and bad words: changes to logits that depend on earlier tokens, as in vLLM."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Adjuster", "adjusts"]


def adjusts(params: Any) -> bool:
    """Return true if `SamplingParams` need an `Adjuster`: a penalty, a bias or bad words."""
    penalties = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0
    return penalties or bool(params.logit_bias or params.bad_words)


class Adjuster:
    """Changes the logits of one request at each token.

    Parameters
    ----------
    params : SamplingParams
        The request's parameters, with token ids in `bad_words`.
    prompt, output : sequence of int
        Token ids of the prompt, and of the output so far.

    Examples
    --------
    >>> from pagepool.engine.sampling import SamplingParams
    >>> adjuster = Adjuster(SamplingParams(presence_penalty=1.0, logit_bias={2: 5.0}), [0], [1])
    >>> adjuster.adjusted(np.zeros(3, np.float32)).tolist()
    [0.0, -1.0, 5.0]
    """

    def __init__(self, params: Any, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._params = params
        self._bias_ids = np.array([token for token, _ in params.logit_bias], np.int64)
        self._bias = np.array([bias for _, bias in params.logit_bias], np.float32)
        self._output: list[int] = []
        # `_known` and `_seen`: distinct tokens of prompt and output, for the repetition penalty. `_ids` and `_counts`:
        # distinct tokens of the output with their counts; `_places` has the index of each one.
        self._known = set(prompt) if params.repetition_penalty != 1.0 else set[int]()
        self._seen = array("q", self._known)
        self._ids, self._counts, self._places = array("q"), array("d"), dict[int, int]()
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        """Add a sampled token to the output."""
        if token not in self._known:
            self._known.add(token)
            self._seen.append(token)
        self._output.append(token)
        place = self._places.setdefault(token, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token)
            self._counts.append(0.0)
        self._counts[place] += 1.0

    def adjusted(self, logits: Any) -> Any:
        """Return the changed logits of the next token, as a new array."""
        params, logits = self._params, logits.copy()
        for word in params.bad_words:
            begun = len(word) - 1
            if not begun or self._output[-begun:] == list(word[:-1]):
                logits[word[-1]] = -np.inf
        logits[self._bias_ids] += self._bias
        if params.repetition_penalty != 1.0:
            seen = np.array(self._seen, np.int64)
            values, penalty = logits[seen], np.float32(params.repetition_penalty)
            logits[seen] = np.where(values > 0, values / penalty, values * penalty)
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            counts = np.array(self._counts, np.float32)
            penalties = np.float32(params.frequency_penalty) * counts + np.float32(params.presence_penalty)
            logits[np.array(self._ids, np.int64)] -= penalties
        return logits
