"""Decode attention in plain Python: float64, online softmax over pages. Oracle of the tests, baseline of the bench.

    out[s, h] = sum_t softmax_t(sm_scale * q[s, h] . K[s, t, h / G]) * V[s, t, h / G]   G = num_qo_heads / num_kv_heads
    lse[s, h] = log(sum_t exp(sm_scale * q[s, h] . K[s, t, h / G]))

What IEEE arithmetic makes of special values is the result: a NaN among the scores, or a score of +inf, makes the
head's output NaN; a score of -inf has weight 0; scores that are all -inf give NaN and the lse -inf. The order in which
the kernels add is in `pagepool.reference.canonical`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, inf, log, nan, sqrt
from typing import Any

import numpy as np

__all__ = ["decode", "refuse_variants"]

Vectors = list[list[float]]
State = tuple[float, float, list[float]]  # maximum, sum of weights, weighted sum of V: both relative to the maximum


def refuse_variants(window_left: int, logits_soft_cap: float, alibi_slopes: Any, sinks: Any) -> None:
    """Raises `NotImplementedError`, naming the argument, for a variant that is not neutral."""
    asked = {
        "window_left": window_left != -1,
        "logits_soft_cap": logits_soft_cap != 0.0,
        "alibi_slopes": alibi_slopes is not None,
        "sinks": sinks is not None,
    }
    for name, given in asked.items():
        if given:
            raise NotImplementedError(f"{name} is not supported yet")


def decode(
    q: Any,
    pool: Any,
    layer: int,
    block_tables: Any,
    seq_lens: Any,
    *,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    out: np.ndarray | None = None,
    return_lse: bool = False,
    num_threads: int | None = None,
) -> Any:
    """One query token per sequence attends over its pages: float64 `(n_seqs, num_qo_heads, head_dim)`, or `out`.

    The arguments are those of `pagepool.decode`; `pool` may be a reference pool or a compiled one. With `return_lse`
    the result is `(out, lse)`. `num_threads` is ignored.

    >>> from pagepool import KvLayout
    >>> from pagepool.reference import KvCachePool
    >>> pool = KvCachePool.from_layout(KvLayout(1, 1, 8, block_size=2), 4)
    >>> pool.append(0, [3], [[[0.5] * 8]], [[[2.0] * 8]])
    >>> decode([[[1.0] * 8]], pool, 0, [[1]], [2]).shape
    (1, 1, 8)
    """
    refuse_variants(window_left, logits_soft_cap, alibi_slopes, sinks)
    queries: list[Vectors] = np.asarray(q).tolist()
    scale = 1.0 / sqrt(pool.layout.head_dim) if sm_scale is None else sm_scale
    tables, lengths = np.asarray(block_tables).tolist(), np.asarray(seq_lens).tolist()
    rows = [
        _attend(heads, pages(pool, layer, table, length), scale)
        for heads, table, length in zip(queries, tables, lengths, strict=True)
    ]
    shape = np.asarray(q).shape
    result = np.array([[head for head, _ in row] for row in rows]).reshape(shape)
    if out is not None:
        out[...] = result
        result = out
    lse = np.array([[number for _, number in row] for row in rows]).reshape(shape[:2])
    return (result, lse) if return_lse else result


def pages(pool: Any, layer: int, table: list[int], seq_len: int) -> Iterator[tuple[Any, Any]]:
    """K and V of a sequence, a page at a time: nested lists `[token][kv head][dim]`."""
    size = pool.layout.block_size
    for start in range(0, seq_len, size):
        block = np.array(table[start // size : start // size + 1], dtype=np.int32)
        k, v = pool.gather(layer, block, min(size, seq_len - start))
        yield k.tolist(), v.tolist()


def _attend(heads: Vectors, kv: Iterator[tuple[Any, Any]], scale: float) -> list[tuple[list[float], float]]:
    """All query heads of one sequence: (output, log of the sum of exponentials) of each."""
    running: list[State | None] = [None] * len(heads)
    for k_page, v_page in kv:
        group = len(heads) // len(k_page[0])
        for h, q in enumerate(heads):
            keys = [token[h // group] for token in k_page]
            values = [token[h // group] for token in v_page]
            scores = [scale * sum([a * b for a, b in zip(q, key, strict=True)]) for key in keys]
            running[h] = _absorb(running[h] or (-inf, 0.0, [0.0] * len(q)), scores, values)
    return [_finish(state) if state else ([0.0] * len(q), -inf) for q, state in zip(heads, running, strict=True)]


def _absorb(state: State, scores: list[float], values: Vectors) -> State:
    """One page more."""
    m, total, o = state
    new = nan if any(s != s for s in [m, *scores]) else max(m, *scores)
    kept = _weight(m, new)
    total, o = total * kept, [x * kept for x in o]
    for score, value in zip(scores, values, strict=True):
        p = _weight(score, new)
        total += p
        o = [x + p * y for x, y in zip(o, value, strict=True)]
    return new, total, o


def _weight(score: float, maximum: float) -> float:
    """exp(score - maximum), and 0 for a score of -inf even if the maximum is -inf."""
    return 0.0 if score == -inf else exp(score - maximum)


def _finish(state: State) -> tuple[list[float], float]:
    m, total, o = state
    if total == 0.0:  # every score was -inf
        return [nan] * len(o), -inf
    return [x / total for x in o], m + log(total)
