"""The canonical order: in which order the kernels of decode add, so that the same input always gives the same bits.

One query head of one sequence; every step is one float32 operation. Positions are absolute, so that neither the block
size, nor the batch, nor the threads can change the order.

    1 chunk   512 tokens from position 0, 512, 1024, ...; each starts from m = -inf, l = 0, o = 0
    2 tile    32 tokens from a multiple of 32 within the chunk
    3 score   two fma chains over the dims of q and K, even dims and odd dims, each ascending from 0;
              then (even + odd) * sm_scale
    4 shift   new = max(m, scores of the tile); if new != m: c = exp(m - new), l = l * c, o = o * c
    5 weight  p[t] = exp(score[t] - new), 0 when that difference is below EXP_MIN
    6 sum     16 running sums: l[i] = l[i] + (p[i] + p[i+16]), p being 0 where the tile has no token; when the chunk is
              done l[i] += l[i+8], then l[i+4], l[i+2], l[i+1], and l is l[0]
    7 values  o[d] = fma(p[t], V[t][d], o[d]) for t ascending
    8 merge   the chunks before, a, and the next one, b: m = max(m_a, m_b), c_a = exp(m_a - m), c_b = exp(m_b - m),
              l = l_a * c_a + l_b * c_b (two products and a sum), o = fma(o_b, c_b, o_a * c_a)
    9 finish  out = o / l, lse = m + log(l)

A NaN among the scores does not count for the maximum; its weight is NaN and makes l and o NaN. While every score was
-inf the shift is 0, so that each of them weighs 0.

exp is the polynomial of `_exp`, good to a unit in the last place. With all of that the kernels' `out` has exactly these
bits: on every instruction set that has fma, and on the one that has none with `fused=False`, where each fma is a
product and a sum. Only log is the system's own.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, log, nan
from typing import NamedTuple

from pagepool.reference.rounding import f32, fma

__all__ = ["CHUNK", "EXP_MIN", "TILE", "attend"]

CHUNK = 512
TILE = 32
LANES = 16
EXP_MIN = f32(-87.33654)  # exp of anything smaller is not a normal float32
EXP_COEFFICIENTS = [
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
]

Fma = Callable[[float, float, float], float]
Vectors = list[list[float]]


class Partial(NamedTuple):
    """What a chunk leaves: the maximum, the sum of weights and the weighted sum of V."""

    m: float
    l: float  # noqa: E741 - the name that the literature uses
    o: list[float]


def attend(q: list[float], k: Vectors, v: Vectors, sm_scale: float, *, fused: bool = True) -> tuple[list[float], float]:
    """Output and lse of one query head over all tokens of its sequence; every number is a float32.

    >>> out, lse = attend([1.0, 0.0], [[0.0, 0.0], [0.0, 1.0]], [[1.0, 2.0], [3.0, 4.0]], 1.0)
    >>> out, round(lse, 6)
    ([2.0, 3.0], 0.693147)
    """
    if not k:
        return [0.0] * len(q), -inf
    once = fma if fused else _twice
    starts = range(0, len(k), CHUNK)
    merged, *rest = [_chunk(q, k[s : s + CHUNK], v[s : s + CHUNK], sm_scale, once) for s in starts]
    for partial in rest:
        merged = _merge(merged, partial, once)
    if merged.l == 0.0:
        return [nan] * len(q), -inf
    return [f32(x / merged.l) for x in merged.o], f32(merged.m + f32(log(merged.l)))


def _twice(a: float, b: float, c: float) -> float:
    return f32(f32(a * b) + c)


def _chunk(q: list[float], k: Vectors, v: Vectors, sm_scale: float, fma: Fma) -> Partial:
    m, sums, o = -inf, [0.0] * LANES, [0.0] * len(q)
    for start in range(0, len(k), TILE):
        scores = [_score(q, key, sm_scale, fma) for key in k[start : start + TILE]]
        m, sums, o = _tile(m, sums, o, scores, v[start : start + TILE], fma)
    return Partial(m, _tree_sum(sums), o)


def _score(q: list[float], key: list[float], sm_scale: float, fma: Fma) -> float:
    chains = [0.0, 0.0]
    for d, (a, b) in enumerate(zip(q, key, strict=True)):
        chains[d % 2] = fma(a, b, chains[d % 2])
    return f32(f32(chains[0] + chains[1]) * f32(sm_scale))


def _tile(
    old: float, sums: list[float], o: list[float], scores: list[float], values: Vectors, fma: Fma
) -> tuple[float, list[float], list[float]]:
    m = _maximum(old, *scores)
    if m != old:
        c = _exp(old, m, fma)
        sums, o = [f32(x * c) for x in sums], [f32(x * c) for x in o]
    weights = [_exp(score, m, fma) for score in scores]
    for p, value in zip(weights, values, strict=True):
        o = [fma(p, y, x) for x, y in zip(o, value, strict=True)]
    lanes = weights + [0.0] * (TILE - len(weights))
    sums = [f32(sums[i] + f32(lanes[i] + lanes[i + LANES])) for i in range(LANES)]
    return m, sums, o


def _tree_sum(lanes: list[float]) -> float:
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [f32(lanes[i] + lanes[i + half]) for i in range(half)]
    return lanes[0]


def _merge(a: Partial, b: Partial, fma: Fma) -> Partial:
    m = _maximum(a.m, b.m)
    c_a, c_b = _exp(a.m, m, fma), _exp(b.m, m, fma)
    o = [fma(y, c_b, f32(x * c_a)) for x, y in zip(a.o, b.o, strict=True)]
    return Partial(m, f32(f32(a.l * c_a) + f32(b.l * c_b)), o)


def _maximum(*numbers: float) -> float:
    """The largest that is no NaN."""
    return max([x for x in numbers if x == x], default=-inf)


def _exp(score: float, maximum: float, fma: Fma) -> float:
    """exp(score - maximum), 0 below EXP_MIN: x = n ln 2 + r with n whole, a polynomial in r (Cephes), times 2**n."""
    x = f32(score - (0.0 if maximum == -inf else maximum))
    if x < EXP_MIN:
        return 0.0
    magic = 12582912.0  # 1.5 * 2**23: adding it leaves no room for a fraction
    n = f32(fma(x, f32(1.44269504), magic) - magic)
    r = fma(n, f32(2.12194440e-4), fma(n, -0.693359375, x))
    p, *others = map(f32, EXP_COEFFICIENTS)
    for coefficient in others:
        p = fma(p, r, coefficient)
    return f32(f32(fma(p, f32(r * r), r) + 1.0) * 2.0**n)
