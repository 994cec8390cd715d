"""Logits: the logits of a step, which are converted to float32 only for requests that need it."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagepool.engine.drawing import largest

__all__ = ["Logits"]


class Logits:
    """The logits of a step, one row for each token.

    Parameters
    ----------
    rows : ndarray, shape (n, vocab_size)
        float32, or uint16 with the bits of bfloat16.

    Examples
    --------
    >>> logits = Logits(np.array([[0.5, 2.0], [1.0, 0.0]], np.float32))
    >>> logits[1].tolist()
    [1.0, 0.0]
    >>> bits = (np.array([[0.5, 2.0]], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    >>> Logits(bits)[0].tolist(), Logits(bits).largest()
    ([0.5, 2.0], [1])
    """

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __getitem__(self, place: int | slice) -> Any:
        """Return a row, or the rows of a slice, in float32."""
        rows = self._rows[place]
        return (rows.astype(np.uint32) << 16).view(np.float32) if rows.dtype == np.uint16 else rows

    def is_right(self, place: slice) -> bool:
        """Whether the largest logit of each of these rows is finite. It is not if the last hidden state has a NaN."""
        return bool(np.isfinite(self[place].max(-1)).all())

    def largest(self) -> list[int]:
        """Return the token with the largest logit of each row in bfloat16, the first one if several are equal.

        The result is -1 for a row that must be read: a row in float32, or with NaN, or with an infinite largest logit.
        """
        return largest(self._rows) if self._rows.dtype == np.uint16 else [-1] * len(self._rows)
