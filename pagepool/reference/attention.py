"""Decode attention in plain Python: float64, online softmax over pages. Oracle of the tests, baseline of the bench.

    x[s, h, t] = sm_scale * q[s, h] . K[s, t, h / G]      G = num_qo_heads / num_kv_heads
                 with a soft cap: cap * tanh(x / cap);    then, with ALiBi: x + slope[h] * (t - (seq_len - 1))
    lse[s, h] = log(sum_t exp(x[s, h, t]) + exp(sink[h]))    t over all tokens, or the last window_left + 1
    out[s, h] = sum_t exp(x[s, h, t] - lse[s, h]) * V[s, t, h / G]

What IEEE arithmetic makes of special values is the result: a NaN among the scores, or a score of +inf, makes the
head's output NaN; a score of -inf has weight 0; scores that are all -inf give NaN and the lse -inf. The order in which
the kernels add is in `pagepool.reference.canonical`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, inf, log, nan, sqrt, tanh
from typing import Any, NamedTuple

import numpy as np

__all__ = ["decode"]

Vectors = list[list[float]]
State = tuple[float, float, list[float]]  # maximum, sum of weights, weighted sum of V: both relative to the maximum


class Variant(NamedTuple):
    """What bends scores and limits what is seen; slopes and sinks, if any, have a number per query head."""

    window_left: int
    cap: float
    slopes: list[float] | None
    sinks: list[float] | None

    def first_seen(self, seq_len: int) -> int:
        return max(0, seq_len - 1 - self.window_left) if self.window_left >= 0 else 0

    def bend(self, score: float, h: int, position: int) -> float:
        """`position` is that of the token from the query's: 0 or below."""
        if self.cap:
            score = self.cap * tanh(score / self.cap)
        return score + self.slopes[h] * position if self.slopes is not None else score


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
    """One query token per sequence attends over its pages: float64 `(n_seqs, num_qo_heads, v_head_dim)`, or `out`.

    The arguments are those of `pagepool.decode`; `pool` may be a reference pool or a compiled one. With `return_lse`
    the result is `(out, lse)`. `num_threads` is ignored.

    >>> from pagepool import KvLayout
    >>> from pagepool.reference import KvCachePool
    >>> pool = KvCachePool.from_layout(KvLayout(1, 1, 8, block_size=2), 4)
    >>> pool.append(0, [3], [[[0.5] * 8]], [[[2.0] * 8]])
    >>> decode([[[1.0] * 8]], pool, 0, [[1]], [2]).shape
    (1, 1, 8)
    """
    slopes, sink_scores = (None if x is None else np.asarray(x).tolist() for x in (alibi_slopes, sinks))
    variant = Variant(window_left, logits_soft_cap, slopes, sink_scores)
    queries: list[Vectors] = np.asarray(q).tolist()
    scale = 1.0 / sqrt(pool.layout.head_dim) if sm_scale is None else sm_scale
    tables, lengths = np.asarray(block_tables).tolist(), np.asarray(seq_lens).tolist()
    v_head_dim = pool.layout.v_head_dim
    rows = []
    for heads, table, length in zip(queries, tables, lengths, strict=True):
        tokens = pages(pool, layer, table, variant.first_seen(length), length)
        rows.append(_attend(heads, v_head_dim, tokens, length, scale, variant))
    shape = np.asarray(q).shape
    result = np.array([[head for head, _ in row] for row in rows]).reshape(*shape[:2], v_head_dim)
    if out is not None:
        out[...] = result
        result = out
    lse = np.array([[number for _, number in row] for row in rows]).reshape(shape[:2])
    return (result, lse) if return_lse else result


def pages(pool: Any, layer: int, table: list[int], first: int, seq_len: int) -> Iterator[tuple[int, Any, Any]]:
    """The tokens from `first` on, a page at a time: the first one's position, K and V as lists `[token][kv head][dim]`.

    No other page is read.
    """
    size = pool.layout.block_size
    for start in range(first // size * size, seq_len, size):
        block = np.array(table[start // size : start // size + 1], dtype=np.int32)
        k, v = pool.gather(layer, block, min(size, seq_len - start))
        begin = max(first, start)
        yield begin, k[begin - start :].tolist(), v[begin - start :].tolist()


def _attend(
    heads: Vectors, v_head_dim: int, kv: Iterator[tuple[int, Any, Any]], seq_len: int, scale: float, variant: Variant
) -> list[tuple[list[float], float]]:
    """All query heads of one sequence: (output, log of the sum of exponentials) of each."""
    if not seq_len:
        return [([0.0] * v_head_dim, -inf) for _ in heads]
    running: list[State] = [(-inf, 0.0, [0.0] * v_head_dim) for _ in heads]
    for begin, k_page, v_page in kv:
        group = len(heads) // len(k_page[0])
        for h, q in enumerate(heads):
            keys = [token[h // group] for token in k_page]
            values = [token[h // group] for token in v_page]
            products = [scale * sum([a * b for a, b in zip(q, key, strict=True)]) for key in keys]
            scores = [variant.bend(x, h, t - (seq_len - 1)) for t, x in enumerate(products, begin)]
            running[h] = _absorb(running[h], scores, values)
    if variant.sinks is not None:  # a score with a value of nothing
        sinks = zip(running, variant.sinks, strict=True)
        running = [_absorb(state, [sink], [[0.0] * len(state[2])]) for state, sink in sinks]
    return [_finish(state) for state in running]


def _absorb(state: State, scores: list[float], values: Vectors) -> State:
    """Some tokens more."""
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
