"""exp, tanh and dot as the kernels compute them: every step is a float32 operation, `fma` one or, without it, two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import copysign

from pagepool.reference.rounding import f32, fma

__all__ = ["TANH_BORDER", "Fma", "dot", "exp", "flushed", "rounding_once_or_twice", "tanh"]

SMALLEST = 2.0**-126  # of the normal float32
EXP_COEFFICIENTS = [8.290272206e-3, 4.189816117e-2, 1.666763872e-1, 4.999914765e-1, 9.999997019e-1, 1.0]
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


def exp(x: float, fma: Fma) -> float:
    """exp(x) for x <= SLACK: x = n ln 2 + r with n whole, a polynomial in r, times 2**n; 0 where n is -127 or below.

    >>> exp(-1.0, fma), exp(-87.7, fma)
    (0.3678794801235199, 0.0)
    """
    magic = 12583039.0  # 1.5 * 2**23 + 127: adding it leaves no room for a fraction, and its last bits are an exponent
    x = max(x, -88.0) if x == x else x
    n = f32(fma(x, f32(1.44269504), magic) - magic)
    p = _horner(EXP_COEFFICIENTS, fma(n, f32(-0.69314718), x), fma)
    return 0.0 if n <= -127.0 else f32(p * 2.0**n)


def tanh(x: float, fma: Fma) -> float:
    """tanh(x): a polynomial in x * x (Cephes) below TANH_BORDER, (1 - e) / (1 + e) with e = exp(-2 |x|) from there on.

    >>> tanh(-0.5, fma), tanh(20.0, fma)
    (-0.46211716532707214, 1.0)
    """
    size = abs(x)
    if size < TANH_BORDER:
        z = f32(size * size)
        y = fma(f32(_horner(TANH_COEFFICIENTS, z, fma) * z), size, size)
    else:
        e = exp(f32(-2.0 * size), fma)
        y = f32(f32(1.0 - e) / f32(1.0 + e))
    return -y if x < 0.0 else y


def _horner(coefficients: list[float], x: float, fma: Fma) -> float:
    p, *others = map(f32, coefficients)
    for coefficient in others:
        p = fma(p, x, coefficient)
    return p
