"""Rounding in plain Python: float32, float16 and bfloat16 as bits, to nearest, ties to even."""

from __future__ import annotations

import ctypes
import struct
from math import inf, isfinite, nextafter

__all__ = ["bf16_bits", "f16_bits", "f32", "f32_bits", "float_of", "fma", "rounded_to_bf16", "truncated_to_bf16"]


def f32(value: float) -> float:
    """Return `value` rounded to float32."""
    return ctypes.c_float(value).value


def fma(a: float, b: float, c: float) -> float:
    """Return a * b + c of three float32, rounded once to float32.

    The product is exact in float64. If the sum is not exact, it is rounded to odd: to the neighbour with an odd
    significand. This is never halfway between two float32, so rounding it to float32 gives the result of one rounding.
    """
    product = a * b
    total = product + c
    if isfinite(total):
        rest = total - product
        error = (product - (total - rest)) + (c - rest)
        if error and not int.from_bytes(struct.pack("<d", total), "little") & 1:
            total = nextafter(total, inf if error > 0 else -inf)
    return f32(total)


def f32_bits(value: float) -> int:
    """Return the bits of a float32."""
    return int.from_bytes(struct.pack("<f", value), "little")


def bf16_bits(value: float) -> int:
    """Return the bfloat16 nearest to a float32. A NaN keeps its sign and upper payload and becomes quiet."""
    bits = f32_bits(value)
    if bits & 0x7FFFFFFF > 0x7F800000:
        return bits >> 16 | 0x40
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16


def f16_bits(value: float) -> int:
    """Return the float16 nearest to a float32, infinity from 65,520 on. A NaN keeps its sign and upper payload."""
    bits = f32_bits(value)
    sign, magnitude = bits >> 16 & 0x8000, bits & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        return sign | 0x7E00 | (magnitude >> 13 & 0x3FF)
    if abs(value) >= 65520.0:
        return sign | 0x7C00
    return int.from_bytes(struct.pack("<e", value), "little")


def float_of(bits: int, dtype: str) -> float:
    """Return the exact value of 16 bits of dtype "float16" or "bfloat16"."""
    if dtype == "bfloat16":
        return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])
    return float(struct.unpack("<e", struct.pack("<H", bits))[0])


def rounded_to_bf16(value: float) -> float:
    """Return a float32 rounded to bfloat16."""
    return float_of(bf16_bits(value), "bfloat16")


def truncated_to_bf16(value: float) -> float:
    """Return a float32 rounded to bfloat16 towards 0."""
    return float_of(f32_bits(value) >> 16, "bfloat16")
