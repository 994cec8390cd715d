"""Operations of models in bfloat16 against their definition in NumPy, bit by bit."""

import numpy as np
import pytest

from pagepool.integrations.transformers.elementwise import (
    has_linear_few,
    linear_few,
    lookup_mul,
    rms_norm,
    rotate,
)

EPS = 1e-6


def rounded(x):
    """Round to bfloat16, ties to even, and return float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).view(np.float32)


def bits_of(x):
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def values_of(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def address(array):
    return array.ctypes.data


def random(shape, seed=0):
    return bits_of(rounded(np.random.default_rng(seed).standard_normal(shape, np.float32) * 2))


def sum_as_torch(row):
    """Sum in the order of torch: 4 vectors of 8 lanes, in up to four levels of at least 16 additions."""
    vectors = len(row) // 8
    blocks = vectors // 4
    power = max(4, max(1, (blocks - 1).bit_length()) // 4)
    levels = np.zeros((4, 32), np.float32)
    for block in range(blocks):
        levels[0] += row[32 * block : 32 * block + 32]
        for level in range(1, 4):
            if (block + 1) % (1 << level * power) or (block + 1) // (1 << power) * (1 << power) > blocks:
                break
            levels[level] += levels[level - 1]
            levels[level - 1] = 0
    sums = levels[0]
    for level in levels[1:]:
        sums = sums + level
    parts = sums.reshape(4, 8)
    total = parts[0].copy()
    for vector in range(4 * blocks, vectors):
        total += row[8 * vector : 8 * vector + 8]
    for part in parts[1:]:
        total += part
    result = np.float32(0)
    for value in [*row[8 * vectors :], *total]:
        result += value
    return result


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("n", [3, 8, 40, 100, 768, 2048, 2056, 5000, 20000])
def test_norms_round_as_torch_and_add_in_its_order(n, threads):
    x, delta, weight = random((5, n)), random((5, n), 1), random(n, 2)
    total, out, alone = (np.zeros((5, n), np.uint16) for _ in range(3))
    rms_norm(address(x), address(delta), address(weight), EPS, 5, n, address(total), address(out), threads)
    rms_norm(address(total), 0, address(weight), EPS, 5, n, 0, address(alone), threads)
    added = rounded(values_of(x) + values_of(delta))
    assert np.array_equal(total, bits_of(added))
    means = np.array([sum_as_torch(row * row) for row in added], np.float32) / np.float32(n)
    scaled = rounded(added * (np.float32(1) / np.sqrt(means + np.float32(EPS)))[:, None])
    assert np.array_equal(out, bits_of(rounded(values_of(weight) * scaled)))
    assert np.array_equal(alone, out)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dim", [2, 16, 80, 128])
def test_rotary_embeddings_round_each_product_and_leave_other_heads(dim, threads):
    x, cos, sin = random((7, 5, dim)), random((7, dim), 1), random((7, dim), 2)
    before, (a, b) = x.copy(), np.split(values_of(x), 2, -1)
    rotate(address(x), 5 * dim, address(cos), address(sin), 7, 3, dim, threads)
    turned = np.concatenate([-b, a], -1)
    product = rounded(values_of(before) * values_of(cos)[:, None])
    expected = bits_of(rounded(product + rounded(turned * values_of(sin)[:, None])))
    assert np.array_equal(x[:, :3], expected[:, :3])
    assert np.array_equal(x[:, 3:], before[:, 3:])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("n", [1, 127, 128, 300])
def test_a_function_is_looked_up_and_multiplied(n, threads):
    both, table = random((200, 2 * n)), random(1 << 16, 1)
    out = np.zeros((200, n), np.uint16)
    gate, up = address(both), address(both) + 2 * n
    lookup_mul(gate, up, 2 * n, address(table), 200, n, address(out), threads)
    assert np.array_equal(out, bits_of(rounded(values_of(table[both[:, :n]]) * values_of(both[:, n:]))))


def test_a_nan_stays_a_nan():
    x, weight, out = random((1, 64)), random(64), np.zeros(64, np.uint16)
    x[0, 5] = 0x7FC0
    rms_norm(address(x), 0, address(weight), EPS, 1, 64, 0, address(out), 1)
    assert np.isnan(values_of(out)).all()
    table = np.full(1 << 16, 0xFFC0, np.uint16)
    lookup_mul(address(x), address(x), 64, address(table), 1, 64, address(out), 1)
    assert np.isnan(values_of(out)).all()


def packed(weight):
    """Pack (outputs, inputs) as oneDNN does for AMX: [outputs / 32][inputs / 2][32][2], padded with zeros."""
    outputs, inputs = weight.shape
    blocks = np.zeros((-(-outputs // 32) * 32, inputs), np.uint16)
    blocks[:outputs] = weight
    return np.ascontiguousarray(blocks.reshape(-1, 32, inputs // 2, 2).swapaxes(1, 2))


def products(x, weight, bias):
    """Multiply as AMX does: for each 32 inputs, the sum over the even ones, then that over the odd ones."""
    total = np.zeros((len(x), len(weight)), np.float32)
    for step in range(0, x.shape[1], 32):
        sums = np.zeros((2, *total.shape), np.float32)
        for place in range(32):
            a, b = x[:, step + place], weight[:, step + place]
            sums[place % 2] += values_of(a)[:, None] * values_of(b)  # the product of two bfloat16 is exact
        total += sums[0] + sums[1]
    return bits_of(rounded(total if bias is None else total + values_of(bias)))


@pytest.mark.skipif(not has_linear_few(), reason="the kernels in use are not those of AMX")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32, 33, 64, 100])
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 1), (64, 31), (96, 32), (768, 33), (320, 200)])
def test_linear_layers_round_once_and_add_in_the_order_of_the_inputs(inputs, outputs, rows, threads):
    x, weight, bias = random((rows, inputs)), random((outputs, inputs), 1), random(outputs, 2)
    memory = packed(weight)
    for used in (None, bias):
        out = np.full((rows + 1, outputs), 0x1234, np.uint16)  # one more row shows writes beyond the end
        at = 0 if used is None else address(used)
        linear_few(address(x), rows, inputs, address(memory), at, outputs, address(out), threads)
        assert np.array_equal(out[:rows], products(x, weight, used))
        assert (out[rows] == 0x1234).all()


@pytest.mark.skipif(not has_linear_few(), reason="the kernels in use are not those of AMX")
def test_linear_layers_without_memory_write_nothing():
    x, out = random((1, 32)), np.full(8, 0x1234, np.uint16)
    with pytest.raises(MemoryError, match=r"1125899906842624 rows of 32 inputs"):
        linear_few(address(x), 1 << 50, 32, address(x), 0, 8, address(out), 1)
    assert (out == 0x1234).all()
