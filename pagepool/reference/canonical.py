"""The canonical order: in which order the kernels of decode add, so that the same input always gives the same bits.

One query head of one sequence; every step is one float32 operation. Positions are absolute, so that neither the block
size, nor the batch, nor the threads can change the order.

    1 chunk   512 tokens from position 0, 512, 1024, ...; each starts from m = -inf, l = 0, o = 0
    2 tile    32 tokens from a multiple of 32 within the chunk
    3 score   two fma chains over the dims of q and K, even dims and odd dims, each ascending from 0;
              then (even + odd) * sm_scale
    4 shift   new = max(m, scores of the tile); if new != m: c = exp(m - new), o = o * c, and l * c in step 6
    5 weight  p[t] = exp(score[t] - new), 0 when that difference is below EXP_MIN
    6 sum     lane i holds p[i], 0 where the tile has no token; lane i += lane i+16, then i+8, i+4, i+2, i+1;
              l = fma(l, c, lane 0), with c = 1 when the maximum stayed
    7 values  o[d] = fma(p[t], V[t][d], o[d]) for t ascending
    8 merge   chunk a and its successor b: m = max(m_a, m_b), l = fma(l_a, exp(m_a - m), l_b * exp(m_b - m)), o alike
    9 finish  out = o / l, lse = m + log(l)

exp and log are the nearest float32 here; the kernels use a polynomial that is as close as a few units in the last
place, the same on every thread.
"""

from __future__ import annotations

from math import exp, inf, log, nan
from typing import NamedTuple

from pagepool.reference.rounding import f32, fma

__all__ = ["CHUNK", "EXP_MIN", "TILE", "attend"]

CHUNK = 512
TILE = 32
EXP_MIN = -87.33654  # exp of anything smaller is not a normal float32

Vectors = list[list[float]]


class Partial(NamedTuple):
    """What a chunk leaves: the maximum, the sum of weights and the weighted sum of V."""

    m: float
    l: float  # noqa: E741 - the name that the literature uses
    o: list[float]


def attend(q: list[float], k: Vectors, v: Vectors, sm_scale: float) -> tuple[list[float], float]:
    """Output and lse of one query head over all tokens of its sequence; every number is a float32.

    >>> out, lse = attend([1.0, 0.0], [[0.0, 0.0], [0.0, 1.0]], [[1.0, 2.0], [3.0, 4.0]], 1.0)
    >>> out, round(lse, 6)
    ([2.0, 3.0], 0.693147)
    """
    if not k:
        return [0.0] * len(q), -inf
    starts = range(0, len(k), CHUNK)
    merged, *rest = [_chunk(q, k[s : s + CHUNK], v[s : s + CHUNK], sm_scale) for s in starts]
    for partial in rest:
        merged = _merge(merged, partial)
    if merged.l == 0.0:
        return [nan] * len(q), -inf
    return [f32(x / merged.l) for x in merged.o], f32(merged.m + f32(log(merged.l)))


def _chunk(q: list[float], k: Vectors, v: Vectors, sm_scale: float) -> Partial:
    partial = Partial(-inf, 0.0, [0.0] * len(q))
    for start in range(0, len(k), TILE):
        scores = [_score(q, key, sm_scale) for key in k[start : start + TILE]]
        partial = _tile(partial, scores, v[start : start + TILE])
    return partial


def _score(q: list[float], key: list[float], sm_scale: float) -> float:
    chains = [0.0, 0.0]
    for d, (a, b) in enumerate(zip(q, key, strict=True)):
        chains[d % 2] = fma(a, b, chains[d % 2])
    return f32(f32(chains[0] + chains[1]) * f32(sm_scale))


def _tile(partial: Partial, scores: list[float], values: Vectors) -> Partial:
    m = _maximum(partial.m, *scores)
    c = _exp(partial.m, m)
    weights = [_exp(score, m) for score in scores]
    o = [f32(x * c) for x in partial.o]
    for p, value in zip(weights, values, strict=True):
        o = [fma(p, y, x) for x, y in zip(o, value, strict=True)]
    return Partial(m, fma(partial.l, c, _tree_sum(weights)), o)


def _tree_sum(weights: list[float]) -> float:
    lanes = weights + [0.0] * (TILE - len(weights))
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [f32(lanes[i] + lanes[i + half]) for i in range(half)]
    return lanes[0]


def _merge(a: Partial, b: Partial) -> Partial:
    m = _maximum(a.m, b.m)
    c_a, c_b = _exp(a.m, m), _exp(b.m, m)
    o = [fma(x, c_a, f32(y * c_b)) for x, y in zip(a.o, b.o, strict=True)]
    return Partial(m, fma(a.l, c_a, f32(b.l * c_b)), o)


def _maximum(*numbers: float) -> float:
    """The largest; NaN when one is NaN."""
    return nan if any(x != x for x in numbers) else max(numbers)


def _exp(score: float, maximum: float) -> float:
    """exp(score - maximum): exactly 1 when they are equal, 0 below EXP_MIN and for a score of -inf."""
    x = f32(score - maximum)
    return 0.0 if score == -inf or x < EXP_MIN else f32(exp(x))
