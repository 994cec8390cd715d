"""Log probabilities of the tokens of a prompt, collected from its prefill chunks."""

from __future__ import annotations

from typing import Any

from pagepool.engine.generation import PromptToken
from pagepool.engine.sampling import check_logits, logprobs_of

__all__ = ["PromptLogprobs"]


class PromptLogprobs:
    """Collects the log probabilities of one prompt.

    `found` has a `PromptToken` for each token of the prompt, and None for the first token, which has no probability.

    Parameters
    ----------
    prompt : list of int
        The tokens of the prompt.
    count : int
        Number of most likely tokens that are reported with each token.

    Examples
    --------
    >>> import numpy as np
    >>> prompt = PromptLogprobs([5, 1, 0], count=0)
    >>> prompt.num_wanted(2)  # of a chunk that ends after the first 2 tokens
    2
    >>> prompt.add(np.zeros((2, 8), np.float32))
    >>> [token and token.token_id for token in prompt.found]
    [None, 1, 0]
    """

    def __init__(self, prompt: list[int], count: int) -> None:
        self._prompt, self._count = prompt, count
        self.found: list[PromptToken | None] = [None]

    def num_wanted(self, end: int) -> int:
        """Return how many of its last rows of logits a chunk must return if it ends after `end` prompt tokens."""
        return max(0, end - len(self.found) + 1) if len(self.found) < len(self._prompt) else 0

    def add(self, logits: Any) -> None:
        """Add the log probabilities of a chunk.

        Parameters
        ----------
        logits : ndarray of float32, shape (num_wanted, vocab_size)
            The chunk's rows. They are processed one by one, to save memory.

        Raises
        ------
        ValueError
            If the largest logit of a row is not finite: the model has failed.
        """
        for row, token in zip(logits, self._prompt[len(self.found) :], strict=False):
            check_logits(row, row.max())
            logprob, top = logprobs_of(row, token, self._count)
            rank = int((row > row[token]).sum()) + 1
            self.found.append(PromptToken(token, logprob, rank, top))
