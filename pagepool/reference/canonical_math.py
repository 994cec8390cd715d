"""2^x, exp, tanh and dot as the kernels compute them: each step is a float32 operation, fma one or, without it, two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import copysign, isfinite

from pagepool.reference.rounding import f32, fma

__all__ = [
    "LARGEST",
    "TANH_BORDER",
    "Fma",
    "dot",
    "exp",
    "exp2",
    "flushed",
    "in_base_2",
    "rounding_once_or_twice",
    "tanh",
]

SMALLEST = 2.0**-126  # of the normal float32
LARGEST = 2.0**128 - 2.0**104
LOG2_E = 1.4426950408889634
EXP2_COEFFICIENTS = [5.549622327e-2, 2.402576357e-1, 6.931472421e-1]
EIGHTHS = 1.5 * 2**20  # adding it leaves no room for less than an eighth
TANH_BORDER = 0.625
TANH_COEFFICIENTS = [
    -5.70498872745e-3,
    2.06390887954e-2,
    -5.37397155531e-2,
    1.33314422036e-1,
    -3.33332819422e-1,
]

Fma = Callable[[float, float, float], float]


def rounding_once_or_twice(fused: bool) -> Fma:
    """a * b + c with one rounding, or, as where there is no such instruction, a product and a sum."""
    return fma if fused else _twice


def _twice(a: float, b: float, c: float) -> float:
    return f32(f32(a * b) + c)


def dot(total: float, a: Sequence[float], b: Sequence[float]) -> float:
    """total + a[1] * b[1] + a[0] * b[0], rounded after each step, as AVX512_BF16's vdpbf16ps does.

    Whatever is subnormal becomes a zero of its sign: operands, and results that are so even after rounding, for which
    an exponent below the smallest is thought of.

    >>> dot(1.0, [2.0**-24, 2.0**-24], [1.0, 1.0]), dot(0.0, [2.0**-100, 0.0], [2.0**-30, 1.0])
    (1.0, 0.0)
    """
    total, a0, a1, b0, b1 = map(flushed, (total, *a, *b))
    return _fma_flushed(a0, b0, _fma_flushed(a1, b1, total))


def _fma_flushed(a: float, b: float, c: float) -> float:
    if abs(a * b + c) < SMALLEST - 2.0**-151:  # half a step below it; the sum is exact there
        return copysign(0.0, a * b + c)
    return fma(a, b, c)


def flushed(x: float) -> float:
    """x, or a zero of its sign if it is subnormal."""
    return copysign(0.0, x) if abs(x) < SMALLEST else x


def in_base_2(x: float) -> float:
    """A logit, or what multiplies logits, in base 2; what would be too large is the largest float32.

    >>> in_base_2(1.0), in_base_2(-3e38) == -LARGEST
    (1.4426950216293335, True)
    """
    scaled = x * LOG2_E
    return copysign(LARGEST, x) if isfinite(x) and abs(scaled) > LARGEST else f32(scaled)


def exp2(x: float, fma: Fma) -> float:
    """2^x for x <= 127: x = n + r with n a multiple of 1/8, 2^n, and a polynomial in r; 0 from -127 down.

    >>> exp2(-1.0, fma), exp2(0.3, fma), exp2(-127.0, fma)
    (0.5, 1.2311444282531738, 0.0)
    """
    x = max(x, -127.0) if x == x else x
    n = f32(f32(x + EIGHTHS) - EIGHTHS)
    return _exp2_of_parts(n, f32(x - n), fma)


def exp(x: float, fma: Fma) -> float:
    """exp(x) for x <= 88: 2^(x / ln 2); 0 from about -88.03 down.

    >>> exp(-1.0, fma), exp(-88.03, fma)
    (0.3678794205188751, 0.0)
    """
    x = max(x, f32(-88.03)) if x == x else x
    n = f32(fma(x, f32(LOG2_E), EIGHTHS) - EIGHTHS)
    r = fma(x, f32(LOG2_E - f32(LOG2_E)), fma(x, f32(LOG2_E), -n))
    return _exp2_of_parts(n, r, fma)


def _exp2_of_parts(n: float, r: float, fma: Fma) -> float:
    power = _power_of_2(n)
    return fma(f32(power * r), _horner(EXP2_COEFFICIENTS, r, fma), power)


def _power_of_2(n: float) -> float:
    """2^n for a multiple of 1/8; where n is below -126, as an exponent of 0 says: without the implied 1."""
    if n != n:
        return n
    whole, eighths = divmod(n, 1.0)
    fraction = f32(2.0**eighths)
    return fraction * 2.0**whole if whole > -127.0 else (fraction - 1.0) * SMALLEST


def tanh(x: float, fma: Fma) -> float:
    """tanh(x): a polynomial in x * x (Cephes) below TANH_BORDER, then (1 - e) / (1 + e), e = 2^(-2 |x| / ln 2).

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
