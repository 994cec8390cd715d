"""Decode attention in plain Python: float64, online softmax over pages. Test oracle and benchmark baseline.

    x[i, h, t] = sm_scale * q[i, h] . K[s, t, h / G]      G = num_qo_heads / num_kv_heads, s the sequence of query i
                 with a soft cap: cap * tanh(x / cap);    then, with ALiBi: x + slope[h] * (t - position[i])
    lse[i, h] = log(sum_t exp(x[i, h, t]) + exp(sink[h]))    t over the tokens that query i sees
    out[i, h] = sum_t exp(x[i, h, t] - lse[i, h]) * V[s, t, h / G]

Special values follow IEEE arithmetic. A NaN among the scores, or a score of +inf, makes the head's output NaN. A score
of -inf has weight 0. If all scores are -inf, the output is NaN and the lse is -inf. `pagepool.reference.canonical`
defines the order of the kernels' sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, inf, log, nan, sqrt, tanh
from typing import Any, NamedTuple

import numpy as np

from pagepool.reference.views import View, views

__all__ = ["decode"]

Vectors = list[list[float]]
State = tuple[float, float, list[float]]  # maximum m, sum of weights exp(x - m), weighted sum of V


class Variant(NamedTuple):
    """Soft cap, ALiBi slopes and sinks. Slopes and sinks are None or have one number per query head."""

    cap: float
    slopes: list[float] | None
    sinks: list[float] | None

    def bend(self, score: float, h: int, distance: int) -> float:
        """Apply soft cap and slope to a score. `distance` is t - position; only a mask allows it to be above 0."""
        if self.cap:
            score = self.cap * tanh(score / self.cap)
        return score + self.slopes[h] * distance if self.slopes is not None else score


class Result(NamedTuple):
    """The result of one query token: output and lse of each head."""

    out: Vectors
    lse: list[float]


def decode(
    q: Any,
    pool: Any,
    layer: int,
    block_tables: Any,
    seq_lens: Any = None,
    *,
    query_start_loc: Any = None,
    custom_mask: Any = None,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    out: np.ndarray | None = None,
    return_lse: bool = False,
    arithmetic: str = "exact",
    num_threads: int | None = None,
) -> Any:
    """Attend over the pages of each sequence. Returns float64 `(n_tokens, num_qo_heads, v_head_dim)`, or `out`.

    Takes the arguments of `pagepool.decode`. `pool` may be a reference pool or a compiled pool. With `return_lse` also
    returns the lse. `num_threads` is ignored. `arithmetic` is ignored as well: all arithmetics approximate this result.

    >>> from pagepool import KvLayout
    >>> from pagepool.reference import KvCachePool
    >>> pool = KvCachePool.from_layout(KvLayout(1, 1, 8, block_size=2), 4)
    >>> pool.append(0, [3], [[[0.5] * 8]], [[[2.0] * 8]])
    >>> decode([[[1.0] * 8]], pool, 0, [[1]], [2]).shape
    (1, 1, 8)
    """
    if hasattr(block_tables, "block_tables"):
        if seq_lens is not None or query_start_loc is not None:
            name = "query_start_loc" if seq_lens is None else "seq_lens"
            raise TypeError(f"{name} must be None when block_tables is a BlockTables")
        if block_tables.allocator not in (None, pool.allocator):
            raise ValueError("block_tables must be filled with sequences of the pool's allocator, not of another one")
        seq_lens, query_start_loc = block_tables.seq_lens, block_tables.query_start_loc
        block_tables = block_tables.block_tables
    if arithmetic not in ("exact", "bf16x2", "bf16", "auto"):
        raise ValueError(f"arithmetic must be 'exact', 'bf16x2', 'bf16' or 'auto', not {arithmetic!r}")
    slopes, sink_scores = (None if x is None else np.asarray(x).tolist() for x in (alibi_slopes, sinks))
    variant = Variant(logits_soft_cap, slopes, sink_scores)
    queries: list[Vectors] = np.asarray(q).tolist()
    scale = 1.0 / sqrt(pool.layout.head_dim) if sm_scale is None else sm_scale
    tables, lengths = np.asarray(block_tables), np.asarray(seq_lens).tolist()
    results: list[Result] = []
    for view in views(query_start_loc, lengths, window_left, custom_mask):
        table = tables[view.sequence].tolist()
        results.append(_attend(queries[len(results)], pool, layer, table, view, scale, variant))
    rows = np.asarray(q).shape[:2]
    result = np.array([each.out for each in results]).reshape(*rows, pool.layout.v_head_dim)
    if out is not None:
        out[...] = result
        result = out
    if not return_lse:
        return result
    return result, np.array([each.lse for each in results]).reshape(rows)


def pages(pool: Any, layer: int, table: list[int], first: int, seq_len: int) -> Iterator[tuple[int, Any, Any]]:
    """Yield the tokens from `first` on, page by page: position of the first token, then K and V.

    K and V are lists `[token][kv head][dim]`. Pages before `first` are not read.
    """
    size = pool.layout.block_size
    for start in range(first // size * size, seq_len, size):
        block = np.array(table[start // size : start // size + 1], dtype=np.int32)
        k, v = pool.gather(layer, block, min(size, seq_len - start))
        begin = max(first, start)
        yield begin, k[begin - start :].tolist(), v[begin - start :].tolist()


def _attend(
    heads: Vectors, pool: Any, layer: int, table: list[int], view: View, scale: float, variant: Variant
) -> Result:
    """Compute all query heads of one query token."""
    dims = pool.layout.v_head_dim
    if not view.seen:
        return Result([[0.0] * dims for _ in heads], [-inf] * len(heads))
    seen = set(view.seen)
    running: list[State] = [(-inf, 0.0, [0.0] * dims) for _ in heads]
    scored: list[dict[int, float]] = [{} for _ in heads]
    for begin, k_page, v_page in pages(pool, layer, table, view.seen[0], view.seen[-1] + 1):
        group = len(heads) // len(k_page[0])
        tokens = [i for i in range(len(k_page)) if begin + i in seen]
        for h, q in enumerate(heads):
            for i in tokens:
                product = scale * sum([a * b for a, b in zip(q, k_page[i][h // group], strict=True)])
                scored[h][begin + i] = variant.bend(product, h, begin + i - view.position)
            scores = [scored[h][begin + i] for i in tokens]
            running[h] = _absorb(running[h], scores, [v_page[i][h // group] for i in tokens])
    if variant.sinks is not None:  # a sink has a score, and its value is 0
        sinks = zip(running, variant.sinks, strict=True)
        running = [_absorb(state, [sink], [[0.0] * dims]) for state, sink in sinks]
    finished = [_finish(state) for state in running]
    return Result([out for out, _ in finished], [lse for _, lse in finished])


def _absorb(state: State, scores: list[float], values: Vectors) -> State:
    """Return the state after more tokens."""
    if not scores:
        return state
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
    """Return exp(score - maximum). A score of -inf gives 0, even if the maximum is -inf."""
    return 0.0 if score == -inf else exp(score - maximum)


def _finish(state: State) -> tuple[list[float], float]:
    m, total, o = state
    if total == 0.0:  # every score was -inf
        return [nan] * len(o), -inf
    return [x / total for x in o], m + log(total)
