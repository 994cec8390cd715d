"""Log probabilities of a prompt's own tokens, collected while the prompt is computed chunk by chunk."""

from __future__ import annotations

from typing import Any

from pagepool.engine.generation import PromptToken
from pagepool.engine.sampling import check_logits, logprobs_of

__all__ = ["PromptLogprobs"]


class PromptLogprobs:
    """Collects the log probabilities of one prompt.

    `found` has None for the first token, which follows from nothing, and a `PromptToken` for each further one.

    Parameters
    ----------
    prompt : list of int
        The tokens of the prompt.
    count : int
        How many of the most likely tokens are reported with each.

    Examples
    --------
    >>> import numpy as np
    >>> prompt = PromptLogprobs([5, 1, 0], count=0)
    >>> prompt.num_wanted(2)  # logits behind the first 2 tokens
    2
    >>> prompt.add(np.zeros((2, 8), np.float32))
    >>> [token and token.token_id for token in prompt.found]
    [None, 1, 0]
    """

    def __init__(self, prompt: list[int], count: int) -> None:
        self._prompt, self._count = prompt, count
        self.found: list[PromptToken | None] = [None]

    def num_wanted(self, end: int) -> int:
        """Number of last tokens whose logits are wanted of a chunk that ends behind `end` tokens."""
        return max(0, end - len(self.found) + 1) if len(self.found) < len(self._prompt) else 0

    def add(self, logits: Any) -> None:
        """Take the wanted logits of a chunk, float32 of shape (num_wanted, vocab_size). Computes one row at a time.

        Raises ValueError when the largest of a row is not finite: the model has failed.
        """
        for row, token in zip(logits, self._prompt[len(self.found) :], strict=False):
            check_logits(row, row.max())
            logprob, top = logprobs_of(row, token, self._count)
            rank = int((row > row[token]).sum()) + 1
            self.found.append(PromptToken(token, logprob, rank, top))
