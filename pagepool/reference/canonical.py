"""The canonical order: in which order the kernels of decode add, so that the same input always gives the same bits.

One query head of one sequence; every step is one float32 operation. Positions are absolute, so that neither the block
size, nor the batch, nor the threads can change the order.

    1 chunk   512 tokens from position 0, 512, 1024, ...; each starts from m = -inf, l = 0, o = 0
    2 tile    32 tokens from a multiple of 32 within the chunk
    3 score   two fma chains over the dims of q and K, even dims and odd dims, each ascending from 0;
              then (even + odd) * sm_scale
    4 cap     with a soft cap: score = cap * tanh(score * (1 / cap))
    5 slope   with an ALiBi slope: score = fma(slope, position, score), position = t - (seq_len - 1), a whole number
              rounded to float32
    6 shift   new = max(m, scores of the tile); if new != m: c = exp(m - new), l = l * c, o = o * c
    7 weight  p[t] = exp(score[t] - new), 0 when that difference is below EXP_MIN
    8 sum     16 running sums: l[i] = l[i] + (p[i] + p[i+16]), p being 0 where the tile has no token; when the chunk is
              done l[i] += l[i+8], then l[i+4], l[i+2], l[i+1], and l is l[0]
    9 values  o[d] = fma(p[t], V[t][d], o[d]) for t ascending
   10 merge   the chunks before, a, and the next one, b: m = max(m_a, m_b), c_a = exp(m_a - m), c_b = exp(m_b - m),
              l = l_a * c_a + l_b * c_b (two products and a sum), o = fma(o_b, c_b, o_a * c_a)
   11 sink    with a sink: merged after the last chunk as one with m_b = sink, l_b = 1 and no values: o = o_a * c_a
   12 finish  out = o / l, lse = m + log(l)

With a window only the tokens from seq_len - 1 - window_left on are seen. Chunks and tiles without a seen token are left
out; the others keep their borders, and a token that is not seen is, like one past the end, not in its tile.

A NaN among the scores does not count for the maximum; its weight is NaN and makes l and o NaN. While every score was
-inf the shift is 0, so that each of them weighs 0. A sequence without tokens gives zeros and -inf, sink or not.

exp and tanh are those of `pagepool.reference.canonical_math`. With all of that the kernels' `out` has exactly these
bits: on every instruction set that has fma, and on the one that has none with `fused=False`, where each fma is a
product and a sum. Only log is the system's own.
"""

from __future__ import annotations

from math import inf, log, nan
from typing import NamedTuple

from pagepool.reference.canonical_math import EXP_MIN, Fma, exp, rounding_once_or_twice, tanh
from pagepool.reference.rounding import f32

__all__ = ["CHUNK", "EXP_MIN", "TILE", "attend"]

CHUNK = 512
TILE = 32
LANES = 16

Vectors = list[list[float]]


class Head(NamedTuple):
    """What one query head is given; tokens before `first` are not seen."""

    q: list[float]
    k: Vectors
    v: Vectors
    sm_scale: float
    first: int
    cap: float
    slope: float | None
    fma: Fma


class Partial(NamedTuple):
    """What a chunk leaves: the maximum, the sum of weights and the weighted sum of V."""

    m: float
    l: float  # noqa: E741 - the name that the literature uses
    o: list[float]


def attend(
    q: list[float],
    k: Vectors,
    v: Vectors,
    sm_scale: float,
    *,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    alibi_slope: float | None = None,
    sink: float | None = None,
    fused: bool = True,
) -> tuple[list[float], float]:
    """Output and lse of one query head over all tokens of its sequence; every number is a float32.

    K and V may have different dims. The options are those of `pagepool.decode`, for this head; without tokens the
    output has no dims to tell and is empty.

    >>> out, lse = attend([1.0, 0.0], [[0.0, 0.0], [0.0, 1.0]], [[1.0, 2.0], [3.0, 4.0]], 1.0)
    >>> out, round(lse, 6)
    ([2.0, 3.0], 0.693147)
    """
    if not k:
        return [], -inf
    first = max(0, len(k) - 1 - window_left) if window_left >= 0 else 0
    fma = rounding_once_or_twice(fused)
    head = Head(q, k, v, f32(sm_scale), first, f32(logits_soft_cap), alibi_slope, fma)
    merged, *rest = [_chunk(head, start) for start in range(first // CHUNK * CHUNK, len(k), CHUNK)]
    for partial in rest:
        merged = _merge(merged, partial, fma)
    if sink is not None:
        merged = _merge(merged, Partial(sink, 1.0, []), fma)
    if merged.l == 0.0:
        return [nan] * len(v[0]), -inf
    return [f32(x / merged.l) for x in merged.o], f32(merged.m + f32(log(merged.l)))


def _chunk(head: Head, begin: int) -> Partial:
    m, sums, o = -inf, [0.0] * LANES, [0.0] * len(head.v[0])
    end = min(begin + CHUNK, len(head.k))
    for start in range(max(begin, head.first // TILE * TILE), end, TILE):
        m, sums, o = _tile(head, range(max(start, head.first), min(start + TILE, end)), m, sums, o)
    return Partial(m, _tree_sum(sums), o)


def _score(head: Head, t: int) -> float:
    chains = [0.0, 0.0]
    for d, (a, b) in enumerate(zip(head.q, head.k[t], strict=True)):
        chains[d % 2] = head.fma(a, b, chains[d % 2])
    score = f32(f32(chains[0] + chains[1]) * head.sm_scale)
    if head.cap:
        score = f32(head.cap * tanh(f32(score * f32(1.0 / head.cap)), head.fma))
    if head.slope is not None:
        score = head.fma(head.slope, f32(t - (len(head.k) - 1)), score)
    return score


def _tile(
    head: Head, seen: range, old: float, sums: list[float], o: list[float]
) -> tuple[float, list[float], list[float]]:
    scores = [_score(head, t) for t in seen]
    m = _maximum(old, *scores)
    if m != old:
        c = _weight(old, m, head.fma)
        sums, o = [f32(x * c) for x in sums], [f32(x * c) for x in o]
    lanes = [0.0] * TILE
    for t, score in zip(seen, scores, strict=True):
        lanes[t % TILE] = p = _weight(score, m, head.fma)
        o = [head.fma(p, y, x) for x, y in zip(o, head.v[t], strict=True)]
    sums = [f32(sums[i] + f32(lanes[i] + lanes[i + LANES])) for i in range(LANES)]
    return m, sums, o


def _tree_sum(lanes: list[float]) -> float:
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [f32(lanes[i] + lanes[i + half]) for i in range(half)]
    return lanes[0]


def _merge(a: Partial, b: Partial, fma: Fma) -> Partial:
    m = _maximum(a.m, b.m)
    c_a, c_b = _weight(a.m, m, fma), _weight(b.m, m, fma)
    o = [f32(x * c_a) for x in a.o]
    if b.o:  # a sink has none
        o = [fma(y, c_b, x) for x, y in zip(o, b.o, strict=True)]
    return Partial(m, f32(f32(a.l * c_a) + f32(b.l * c_b)), o)


def _maximum(*numbers: float) -> float:
    """The largest that is no NaN."""
    return max([x for x in numbers if x == x], default=-inf)


def _weight(score: float, maximum: float, fma: Fma) -> float:
    return exp(f32(score - (0.0 if maximum == -inf else maximum)), fma)
