"""The arithmetic of the reference, and the places of elements in its pages.

The random program and the tests of pages compare the rest with the compiled classes.
"""

import struct
from fractions import Fraction
from itertools import product

import ml_dtypes
import numpy as np
import pytest

from pagepool import KvLayout
from pagepool.reference.kv_pool import place
from pagepool.reference.rounding import bf16_bits, f16_bits, f32, float_of, fma

DTYPES = ["float32", "float16", "bfloat16"]
NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def samples():
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 4000, dtype=np.uint32)
    ties = np.arange(0, 2**32, 2**32 // 997, dtype=np.uint64).astype(np.uint32) & np.uint32(0xFFFFF000)
    edges = np.array([0, 65504, 65519.996, 65520, 6e-8, 2.98e-8, 2.99e-8, 6.1e-5, np.inf, 3.4e38], np.float32)
    every = np.concatenate([bits.view(np.float32), ties.view(np.float32), edges, -edges])
    return every[~np.isnan(every)]


@pytest.mark.parametrize(("dtype", "rounding"), [("float16", f16_bits), ("bfloat16", bf16_bits)])
def test_rounding_is_to_nearest_even(dtype, rounding):
    values = samples()
    with np.errstate(over="ignore"):
        expected = values.astype(NUMPY[dtype]).view(np.uint16)
    assert [rounding(float(value)) for value in values] == expected.tolist()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_widening_is_exact(dtype):
    bits = np.arange(65536, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        expected = bits.view(NUMPY[dtype]).astype(np.float64)
    np.testing.assert_array_equal([float_of(int(number), dtype) for number in bits], expected)


def test_nan_stays_nan_and_f32_overflows_to_infinity():
    for rounding, dtype in ((f16_bits, "float16"), (bf16_bits, "bfloat16")):
        for bits in (0x7F800001, 0xFFC00000, 0x7FFFFFFF):
            assert np.isnan(float_of(rounding(struct.unpack("<f", struct.pack("<I", bits))[0]), dtype))
    assert (f32(1e39), f32(0.1)) == (float("inf"), float(np.float32(0.1)))


def test_fma_rounds_once():
    rng = np.random.default_rng(7)
    # Sums close to the midpoint of two float32: the product is slightly more or less than half a ulp of c.
    c = np.float32(1) + rng.integers(0, 2**23, 3000).astype(np.float32) * np.float32(2**-23)
    a = (np.float32(1) + rng.integers(-4, 5, 3000).astype(np.float32) * np.float32(2**-23)) * np.float32(2**-12)
    b = (np.float32(1) + rng.integers(-4, 5, 3000).astype(np.float32) * np.float32(2**-23)) * np.float32(2**-12)
    twice = 0
    for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        low = float(np.nextafter(np.float32(z), np.float32(0)))
        near = [low, z, float(np.nextafter(np.float32(z), np.float32(4)))]
        distances = [abs(exact - Fraction(number)) for number in near]
        best = [number for number, far in zip(near, distances, strict=True) if far == min(distances)]
        got = fma(x, y, z)
        assert got in best
        assert len(best) == 1 or np.float32(got).view(np.uint32) % 2 == 0
        twice += got != f32(x * y + z)
    assert twice > 100  # for these, rounding through float64 gives a wrong result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "block_size"), [(8, 1), (24, 3), (72, 16), (128, 32), (64, 17)])
def test_every_element_of_a_page_has_one_place(dtype, head_dim, block_size):
    layout = KvLayout(2, 3, head_dim, block_size=block_size, dtype=dtype)
    every = product(range(2), range(3), range(block_size), range(head_dim), (False, True))
    assert sorted(place(layout, *which) for which in every) == list(range(layout.page_size))
