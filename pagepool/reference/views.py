"""The tokens that each query token sees, by its position, a mask and the window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

__all__ = ["View", "masks_of", "views"]


class View(NamedTuple):
    """The tokens `seen` by one query token. All of them are in [first, end)."""

    sequence: int
    position: int
    first: int
    end: int
    seen: list[int]


def views(query_start_loc: Any, seq_lens: list[int], window_left: int, custom_mask: Any) -> Iterator[View]:
    """Yield the view of every query token in order. Takes the arguments of `pagepool.decode`.

    >>> [view.seen for view in views([0, 2], [4], 2, None)]
    [[0, 1, 2], [1, 2, 3]]
    """
    counts = [1] * len(seq_lens) if query_start_loc is None else np.diff(np.asarray(query_start_loc)).tolist()
    masks = masks_of(custom_mask, counts, seq_lens)
    for sequence, (count, seq_len, mask) in enumerate(zip(counts, seq_lens, masks, strict=True)):
        for i in range(count):
            position = seq_len - count + i
            first = max(0, position - window_left) if window_left >= 0 else 0
            end = max(0, position + 1 if mask is None else seq_len)
            seen = [t for t in range(first, end) if mask is None or mask[i][t]]
            yield View(sequence, position, first, end, seen)


def masks_of(custom_mask: Any, counts: list[int], seq_lens: list[int]) -> list[Any]:
    """Return None (causal) or lists of bool [query token][token] for each sequence, from any form of `custom_mask`."""
    if custom_mask is None:
        return [None] * len(counts)
    if not isinstance(custom_mask, list | tuple):
        custom_mask = _per_sequence(np.asarray(custom_mask), counts, seq_lens)
    return [
        None if mask is None else _whole(np.asarray(mask), seq_len)
        for mask, seq_len in zip(custom_mask, seq_lens, strict=True)
    ]


def _per_sequence(mask: np.ndarray, counts: list[int], seq_lens: list[int]) -> list[np.ndarray]:
    if mask.ndim > 1:
        return [mask] * len(counts) if mask.ndim == 2 else list(mask)
    full = [(count, seq_len) for count, seq_len in zip(counts, seq_lens, strict=True)]
    if mask.dtype == np.uint8:
        masks, at = [], 0
        for rows, columns in full:
            size = -(-rows * columns // 8)
            bits = np.unpackbits(mask[at : at + size], bitorder="little")[: rows * columns]
            masks.append(bits.reshape(rows, columns).astype(bool))
            at += size
        return masks
    shapes = full if mask.size == sum(a * b for a, b in full) else [(count, count) for count in counts]
    ends = np.cumsum([a * b for a, b in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(mask, ends[:-1]), shapes, strict=True)]


def _whole(mask: np.ndarray, seq_len: int) -> list[list[bool]]:
    """Extend a mask over the last tokens to all tokens: a query token sees all earlier ones."""
    rows, width = mask.shape
    before = np.ones((rows, max(0, seq_len - width)), dtype=bool)
    whole: list[list[bool]] = np.concatenate([before, mask[:, max(0, width - seq_len) :]], axis=1).tolist()
    return whole
