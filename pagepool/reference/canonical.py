"""The canonical order of the sums in the decode kernels. It makes the same input always give the same bits.

This is the computation for one query head of one query token. Every step is one float32 operation. Positions are
absolute, so the order does not depend on the block size, the batch or the threads. `position` is the position of the
query token: the last position of the sequence, or an earlier one if there are several query tokens.

    1 chunk   512 tokens from position 0, 512, 1024, ...; each starts from m = -LARGEST, l = 0, o = 0
    2 tile    32 tokens from a multiple of 32 within the chunk
    3 score   two fma chains over the dims of q * in_base_2(sm_scale) and K, even dims and odd dims, each ascending from
              0; then even + odd. Scores are in base 2: logits times log2(e)
    4 cap     with a soft cap: cap = in_base_2(soft cap), score = cap * tanh(score * (1 / cap))
    5 slope   with an ALiBi slope: score = fma(in_base_2(slope), distance, score); distance = t - position is an integer
              rounded to float32
    6 shift   new = max(scores of the tile) if new - m > 8, else new = m. If new != m: c = 2^(m - new), l = l * c,
              o = o * c. So p is at most 256
    7 weight  p[t] = 2^(score[t] - new)
    8 sum     16 running sums: l[i] = l[i] + (p[i] + p[i+16]), with p = 0 for missing tokens of the tile. At the end of
              the chunk: l[i] += l[i+8], then l[i+4], l[i+2], l[i+1]; the result is l[0]
    9 values  o[d] = fma(p[t], V[t][d], o[d]) for t ascending
   10 merge   a: all earlier chunks, b: the next chunk. m = max(m_a, m_b), c_a = 2^(m_a - m), c_b = 2^(m_b - m),
              l = l_a * c_a + l_b * c_b (two products and a sum), o = fma(o_b, c_b, o_a * c_a)
   11 sink    with a sink: merged after the last chunk, like a chunk with m_b = in_base_2(sink), l_b = 1 and no values:
              o = o_a * c_a
   12 finish  out = o / l. lse = m * log(2) + log(l) in float64, then rounded

Arithmetic "bf16" and "bf16x2" compute products as AMX's TDPBF16PS does, 32 elements at a time:

    tile_dot(sum, a, b) = sum + (even + odd), where even is the fma chain of a[0] b[0], a[2] b[2], ... from 0, and odd
    that of a[1] b[1], a[3] b[3], ...; subnormals among a, b, sum and results are zeros of their sign

Numbers are cut into parts of bfloat16. Of q and weights the first part is the nearest one, the next the nearest one of
what is left, and subnormal numbers are zeros. In "bf16x2" q has as many parts as hold it: 1 if it is bfloat16, 2 if
float16, 3 if float32; weights have 2. In "bf16" both have one. K and V have as many parts as hold them, from the dtype
of the pages, bfloat16 or float16: each is what is left, cut off after 8 bits; only the first part of an infinity is not
0. These steps are others:

    3 score   for each 32 dims, ascending: score = tile_dot(score, part of q, part of K), for each part of K, the
              smallest first: for each part of q, the smallest first. From 0
    4 cap     with a soft cap, an ALiBi slope or in_base_2(sm_scale) <= 0, the score is multiplied by
              in_base_2(sm_scale), bent as in steps 4 and 5, and factor is 1. Else factor is in_base_2(sm_scale)
    6 shift   one for the chunk: m = the largest score * factor of all its tokens, at least -LARGEST
    7 weight  p[t] = 2^fma(score[t], factor, -m). If |m| >= 2^28, each score is multiplied by factor first and factor is
              1: otherwise the rounding of m could make p[t] more than 2^8
    8 sum     of the parts of p, the smaller first: l[i] = (l[i] + part of p[2i+1]) + part of p[2i]. Blocks add p in
              "bf16x2", and its one part in "bf16"
    9 values  for each tile, ascending: o[d] = tile_dot(o[d], part of p, part of V[.][d]), in the same order of parts; a
              token that is not seen counts as p = 0 and V = 0. In the end o[d] = o[d] + 0, which makes -0 a 0

If K or V is quantised, q or the weights are rounded to integers. Sums of integers do not depend on their order. Then

    3 score   x[d] = q[d] * the scale of K's channel d, if it has one. L = max |x[d]|, M = min(32,512,
              (2^31 - 1) // (127 dims)); Q[d] = round(x[d] * (M / L)), ties to even; score = float32(sum of
              Q[d] K[t][d]) * (K's scale[t] * ((L / M) * in_base_2(sm_scale))). If L < 2^-100, all scores are 0
    9 values  per tile: x[t] = p[t] * V's scale[t], L = max x[t], W[t] = round(x[t] * (32,512 / L)), o[d] =
              fma(float32(sum of W[t] V[t][d]), L / 32,512, o[d]). If L < 2^-100, nothing is added. A scale that is not
              finite counts as 0, and makes o NaN if the p of its token is not 0

Without a mask, a query sees all tokens up to `position`. A window removes the tokens before position - window_left.
Chunks, tiles and pieces without a seen token are skipped; the borders of all other ones stay the same. Tokens that are
not seen are not part of their tile, like tokens after the end of the sequence.

A NaN score does not count for the maximum. Its weight is NaN and makes l and o NaN. m is never -inf, so a score of -inf
has weight 0. A query that sees no token gives zeros and lse -inf, with or without a sink.

2^, tanh and in_base_2 are the functions below. The kernels' `out` has exactly these bits on every instruction set with
fma. The instruction set without fma gives the bits of `fused=False`: each fma is a product and a sum. Only log comes
from the C library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, product
from math import copysign, inf, isfinite, log, nan
from typing import NamedTuple

from pagepool.reference.rounding import f32, fma, rounded_to_bf16, truncated_to_bf16

__all__ = [
    "CHUNK",
    "LARGEST",
    "TANH_BORDER",
    "TILE",
    "Quantised",
    "attend",
    "exp2",
    "in_base_2",
    "rounding_once_or_twice",
    "tanh",
    "tile_dot",
]

CHUNK = 512
TILE = 32
LANES = 16
SLACK = 8.0
M_OF_ROUNDED_SCORES = 2.0**28
PARTS = {"bfloat16": 1, "float16": 2, "float32": 3}  # bfloat16 numbers whose sum can be any number of the dtype
MOST = 32512
LEAST_QUANTISED = 2.0**-100

SMALLEST = 2.0**-126  # smallest normal float32
LARGEST = 2.0**128 - 2.0**104
LOG2_E = 1.4426950408889634
EXP2_COEFFICIENTS = [5.549622327e-2, 2.402576357e-1, 6.931472421e-1]
EIGHTHS = 1.5 * 2**20  # adding and subtracting it rounds a float32 to a multiple of 1/8
TANH_BORDER = 0.625
TANH_COEFFICIENTS = [
    -5.70498872745e-3,
    2.06390887954e-2,
    -5.37397155531e-2,
    1.33314422036e-1,
    -3.33332819422e-1,
]

Vectors = list[list[float]]
Fma = Callable[[float, float, float], float]


class Quantised(NamedTuple):
    """Quantised K or V: a row of integers and a scale for each token."""

    rows: list[list[int]]
    scales: list[float]
    channel_scale: list[float] | None = None  # one more factor for each dim of K


class Head(NamedTuple):
    """The input of one query head. Either q or `scale` contains log2(e). For a quantised K, q holds integers."""

    q: list[float]
    k: Vectors
    v: Vectors
    scale: float
    position: int
    seen: list[int]
    cap: float
    slope: float | None
    fma: Fma
    parts: tuple[int, int, int] | None  # of q, of the weights, of K and V, in the order of tiles
    k_scales: list[float] | None
    v_scales: list[float] | None


class Partial(NamedTuple):
    """The result of a chunk: shift, sum of weights, and weighted sum of V."""

    m: float
    l: float  # noqa: E741 - the name in the FlashAttention paper
    o: list[float]


def attend(
    q: list[float],
    k: Vectors | Quantised,
    v: Vectors | Quantised,
    sm_scale: float,
    *,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    alibi_slope: float | None = None,
    sink: float | None = None,
    position: int | None = None,
    mask: list[bool] | None = None,
    arithmetic: str = "exact",
    q_dtype: str = "float32",
    page_dtype: str = "bfloat16",
    fused: bool = True,
) -> tuple[list[float], float]:
    """Return output and lse of one query head over the tokens of its sequence. Every number is a float32.

    K and V may have different dims, and be `Quantised`. The options have the meanings of `pagepool.decode`. `mask` is
    true for each seen token. For a sequence without tokens the number of dims is unknown, so the output is empty.
    "bf16x2" depends on the dtype of the query, `q_dtype`, "bf16x2" and "bf16" on that of K and V, `page_dtype`.

    >>> out, lse = attend([1.0, 0.0], [[0.0, 0.0], [0.0, 1.0]], [[1.0, 2.0], [3.0, 4.0]], 1.0)
    >>> out, round(lse, 6)
    ([2.0, 3.0], 0.693147)
    """
    channels = k.channel_scale if isinstance(k, Quantised) else None
    (keys, k_scales), (values, v_scales) = _rows_and_scales(k), _rows_and_scales(v)
    position = len(keys) - 1 if position is None else position
    first = max(0, position - window_left) if window_left >= 0 else 0
    end = max(0, position + 1 if mask is None else len(keys))
    seen = [t for t in range(first, end) if mask is None or mask[t]]
    if not seen:
        return [0.0] * len(values[0] if values else []), -inf
    fma = rounding_once_or_twice(fused)
    of_page = PARTS[page_dtype]
    parts = {"exact": None, "bf16": (1, 1, of_page), "bf16x2": (PARTS[q_dtype], 2, of_page)}[arithmetic]
    scale = in_base_2(f32(sm_scale))
    if k_scales is not None:
        q, scale = _quantised_query(q, scale, channels)
    else:
        q, scale = (q, scale) if parts else ([f32(x * scale) for x in q], 1.0)
    cap, slope = in_base_2(f32(logits_soft_cap)), None if alibi_slope is None else in_base_2(alibi_slope)
    head = Head(q, keys, values, scale, position, seen, cap, slope, fma, parts, k_scales, v_scales)
    merged, *rest = [(_chunk_of_tiles if parts else _chunk)(head, tokens) for tokens in _split(seen, CHUNK)]
    for partial in rest:
        merged = _merge(merged, partial, fma)
    if sink is not None:
        merged = _merge(merged, Partial(in_base_2(sink), 1.0, []), fma)
    if merged.l == 0.0:
        return [nan] * len(values[0]), -inf
    return [f32(x / merged.l) for x in merged.o], f32(merged.m * log(2.0) + log(merged.l))


def _rows_and_scales(x: Vectors | Quantised) -> tuple[Vectors, list[float] | None]:
    if isinstance(x, Quantised):
        return [[float(integer) for integer in row] for row in x.rows], x.scales
    return x, None


def _quantised_query(q: list[float], scale: float, channels: list[float] | None) -> tuple[list[float], float]:
    """Return the integers of a query, and the factor of its scores without K's scale."""
    x = [f32(a * c) for a, c in zip(q, channels or [1.0] * len(q), strict=True)]
    largest, most = max(map(abs, x)), min(MOST, (2**31 - 1) // (127 * len(q)))
    if not all(map(isfinite, x)):
        return [0.0] * len(q), nan
    if largest < LEAST_QUANTISED:
        return [0.0] * len(q), 0.0
    up = f32(most / largest)
    return [float(round(f32(a * up))) for a in x], f32(f32(largest / most) * scale)


def _split(tokens: list[int], size: int) -> list[list[int]]:
    """Split tokens at multiples of `size`."""
    return [list(group) for _, group in groupby(tokens, lambda t: t // size)]


def _chunk(head: Head, tokens: list[int]) -> Partial:
    partial, sums = Partial(-LARGEST, 0.0, [0.0] * len(head.v[0])), [0.0] * LANES
    for tile in _split(tokens, TILE):
        partial, sums = _tile(head, tile, partial, sums)
    return partial._replace(l=_tree_sum(sums))


def _score(head: Head, t: int) -> float:
    k, total = head.k[t], 0.0
    if head.k_scales is not None:
        total = f32(sum(a * b for a, b in zip(head.q, k, strict=True)))
        return _transformed(head, t, f32(total * f32(head.k_scales[t] * head.scale)))
    chains = [0.0, 0.0]
    for d, (a, b) in enumerate(zip(head.q, k, strict=True)):
        chains[d % 2] = head.fma(a, b, chains[d % 2])
    total = f32(chains[0] + chains[1])
    return _transformed(head, t, f32(total * head.scale))


def _transformed(head: Head, t: int, score: float) -> float:
    if head.cap:
        score = f32(head.cap * tanh(f32(score * f32(1.0 / head.cap)), head.fma))
    if head.slope is not None:
        score = head.fma(head.slope, f32(t - head.position), score)
    return score


def _tile(head: Head, seen: list[int], old: Partial, sums: list[float]) -> tuple[Partial, list[float]]:
    o = old.o
    scores = [_score(head, t) for t in seen]
    m = old.m
    highest = _maximum(*scores)
    if f32(highest - m) > SLACK:
        m = highest
        c = _weight(old.m, m, head.fma)
        sums, o = [f32(x * c) for x in sums], [f32(x * c) for x in o]
    lanes = [0.0] * TILE
    for t, score in zip(seen, scores, strict=True):
        lanes[t % TILE] = _weight(score, m, head.fma)
    sums = [f32(sums[i] + f32(lanes[i] + lanes[i + LANES])) for i in range(LANES)]
    add = _add_tokens if head.v_scales is None else _add_integers
    o = add(head, seen, lanes, o)
    return Partial(m, old.l, o), sums


def _chunk_of_tiles(head: Head, tokens: list[int]) -> Partial:
    """A chunk in the order of tiles."""
    assert head.parts is not None
    q_parts, p_parts, page_parts = head.parts
    q, dims = [_in_parts(x, q_parts) for x in head.q], range(len(head.v[0]))
    bends = bool(head.cap) or head.slope is not None or not head.scale > 0.0
    factor = 1.0 if bends else head.scale
    scores = {}
    for t in tokens:
        score, k = 0.0, [_cut_off(x, page_parts) for x in head.k[t]]
        for d in range(0, len(q), TILE):
            for j, i in product(reversed(range(page_parts)), reversed(range(q_parts))):
                score = tile_dot(score, [x[i] for x in q[d : d + TILE]], [x[j] for x in k[d : d + TILE]])
        scores[t] = _transformed(head, t, f32(score * head.scale)) if bends else score
    m = _maximum(-LARGEST, *(f32(score * factor) for score in scores.values()))
    if abs(m) >= M_OF_ROUNDED_SCORES:
        scores, factor = {t: f32(score * factor) for t, score in scores.items()}, 1.0
    o, sums = [0.0 for _ in dims], [0.0] * LANES
    for seen in _split(tokens, TILE):
        lanes = [0.0] * TILE
        for t in seen:
            lanes[t % TILE] = exp2(head.fma(scores[t], factor, -m), head.fma)
        parts = [_in_parts(p, p_parts) for p in lanes]
        for part in reversed(range(p_parts)):
            sums = [f32(f32(sums[i] + parts[2 * i + 1][part]) + parts[2 * i][part]) for i in range(LANES)]
        first = seen[0] - seen[0] % TILE
        values = [head.v[t] if t in scores else [0.0 for _ in dims] for t in range(first, first + TILE)]
        cut = [[_cut_off(x, page_parts) for x in row] for row in values]
        for j, i in product(reversed(range(page_parts)), reversed(range(p_parts))):
            weights = [x[i] for x in parts]
            o = [tile_dot(o[d], weights, [row[d][j] for row in cut]) for d in dims]
    return Partial(m, _tree_sum(sums), [x + 0.0 for x in o])


def _in_parts(x: float, count: int) -> list[float]:
    """`count` bfloat16 that add up to nearly x, largest first."""
    parts = []
    for _ in range(count):
        parts.append(rounded_to_bf16(flushed(x)))
        x = f32(x - parts[-1])
    return parts


def _cut_off(x: float, count: int) -> list[float]:
    """`count` bfloat16 that add up to x, each what is left, cut off after 8 bits."""
    parts: list[float] = []
    for _ in range(count):
        parts.append(truncated_to_bf16(x))
        x = 0.0 if x == parts[-1] else x - parts[-1]
    return parts


def _add_tokens(head: Head, seen: list[int], lanes: list[float], o: list[float]) -> list[float]:
    for t in seen:
        o = [head.fma(lanes[t % TILE], y, x) for x, y in zip(o, head.v[t], strict=True)]
    return o


def _add_integers(head: Head, seen: list[int], lanes: list[float], o: list[float]) -> list[float]:
    scales = head.v_scales or []
    if any(not isfinite(scales[t]) and lanes[t % TILE] != 0.0 for t in seen):
        return [nan] * len(o)
    x = {t: f32(lanes[t % TILE] * (scales[t] if isfinite(scales[t]) else 0.0)) for t in seen}
    largest = max(x.values())
    if not all(map(isfinite, x.values())):
        return [nan] * len(o)
    if largest < LEAST_QUANTISED:
        return [head.fma(0.0, 0.0, y) for y in o]
    up = f32(MOST / largest)
    weights = {t: round(f32(x[t] * up)) for t in seen}
    sums = [f32(sum(weights[t] * int(head.v[t][d]) for t in seen)) for d in range(len(o))]
    return [head.fma(total, f32(largest / MOST), y) for total, y in zip(sums, o, strict=True)]


def _tree_sum(lanes: list[float]) -> float:
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [f32(lanes[i] + lanes[i + half]) for i in range(half)]
    return lanes[0]


def _merge(a: Partial, b: Partial, fma: Fma) -> Partial:
    m = _maximum(a.m, b.m)
    c_a, c_b = _weight(a.m, m, fma), _weight(b.m, m, fma)
    o = [f32(x * c_a) for x in a.o]
    if b.o:  # empty for a sink
        o = [fma(y, c_b, x) for x, y in zip(o, b.o, strict=True)]
    return Partial(m, f32(f32(a.l * c_a) + f32(b.l * c_b)), o)


def _maximum(*numbers: float) -> float:
    """Return the largest number, ignoring NaN."""
    return max([x for x in numbers if x == x], default=-inf)


def _weight(score: float, maximum: float, fma: Fma) -> float:
    return exp2(f32(score - maximum), fma)


# --------------------------------------------------------------------------- functions, in float32 operations


def rounding_once_or_twice(fused: bool) -> Fma:
    """Return the function a * b + c: rounded once, or twice as on a CPU without fma."""
    return fma if fused else _twice


def _twice(a: float, b: float, c: float) -> float:
    return f32(f32(a * b) + c)


def tile_dot(total: float, a: Sequence[float], b: Sequence[float]) -> float:
    """Return total + (chain of even products + chain of odd ones), as AMX's TDPBF16PS computes a number of a tile.

    Subnormal operands and results become zeros with the same sign. A result is subnormal if its value, rounded with an
    unbounded exponent, is below the smallest normal number.

    >>> tile_dot(1.0, [2.0**-24, 2.0**-24], [1.0, 1.0]), tile_dot(0.0, [2.0**-100, 0.0], [2.0**-30, 1.0])
    (1.0000001192092896, 0.0)
    """
    chains = [0.0, 0.0]
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        chains[i % 2] = _fma_flushed(x, y, chains[i % 2])
    return _fma_flushed(1.0, total, _fma_flushed(1.0, *chains))


def _fma_flushed(a: float, b: float, c: float) -> float:
    a, b, c = flushed(a), flushed(b), flushed(c)
    if abs(a * b + c) < SMALLEST - 2.0**-151:  # half a step below SMALLEST; the float64 sum is exact there
        return copysign(0.0, a * b + c)
    return fma(a, b, c)


def flushed(x: float) -> float:
    """Return x, or a zero with the sign of x if x is subnormal."""
    return copysign(0.0, x) if abs(x) < SMALLEST else x


def in_base_2(x: float) -> float:
    """Multiply a logit, or a factor of logits, by log2(e). A finite value that overflows becomes the largest float32.

    >>> in_base_2(1.0), in_base_2(-3e38) == -LARGEST
    (1.4426950216293335, True)
    """
    scaled = x * LOG2_E
    return copysign(LARGEST, x) if isfinite(x) and abs(scaled) > LARGEST else f32(scaled)


def exp2(x: float, fma: Fma) -> float:
    """Return 2^x for x <= 127, and 0 for x <= -127. x = n + r, n a multiple of 1/8: 2^n times a polynomial in r.

    >>> exp2(-1.0, fma), exp2(0.3, fma), exp2(-127.0, fma)
    (0.5, 1.2311444282531738, 0.0)
    """
    x = max(x, -127.0) if x == x else x
    n = f32(f32(x + EIGHTHS) - EIGHTHS)
    return _exp2_of_parts(n, f32(x - n), fma)


def _exp2_of_parts(n: float, r: float, fma: Fma) -> float:
    power = _power_of_2(n)
    return fma(f32(power * r), _horner(EXP2_COEFFICIENTS, r, fma), power)


def _power_of_2(n: float) -> float:
    """Return 2^n for a multiple of 1/8. Below -126 the exponent field is 0, so the implied leading 1 is missing."""
    if n != n:
        return n
    whole, eighths = divmod(n, 1.0)
    fraction = f32(2.0**eighths)
    return fraction * 2.0**whole if whole > -127.0 else (fraction - 1.0) * SMALLEST


def tanh(x: float, fma: Fma) -> float:
    """Return tanh(x): a polynomial in x * x (Cephes) below TANH_BORDER, else (1 - e) / (1 + e), e = 2^(-2 |x| / ln 2).

    >>> tanh(-0.5, fma), tanh(20.0, fma)
    (-0.46211716532707214, 1.0)
    """
    size = abs(x)
    if size < TANH_BORDER:
        z = f32(size * size)
        y = fma(f32(_horner(TANH_COEFFICIENTS, z, fma) * z), size, size)
    else:
        e = exp2(f32(size * f32(-2.0 * LOG2_E)), fma)
        y = f32(f32(1.0 - e) / f32(1.0 + e))
    return -y if x < 0.0 else y


def _horner(coefficients: list[float], x: float, fma: Fma) -> float:
    p, *others = map(f32, coefficients)
    for coefficient in others:
        p = fma(p, x, coefficient)
    return p
