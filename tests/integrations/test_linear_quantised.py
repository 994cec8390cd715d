"""Linear layers with quantised weights against their definition in NumPy, bit by bit, and against float64."""

import numpy as np
import pytest

from pagepool.integrations.transformers.elementwise import QuantisedWeights

EIGHT, FOUR, FOUR_LEAST = range(3)
FORMATS = (EIGHT, FOUR, FOUR_LEAST)
DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}


def bfloat16(x):
    """Round to bfloat16, ties to even, and return its bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def stored(x, dtype):
    """Return an array in a dtype, bfloat16 as its bits, and its values in float32."""
    if dtype == "bfloat16":
        bits = bfloat16(x)
        return bits, (bits.astype(np.uint32) << 16).view(np.float32)
    found = np.ascontiguousarray(x, dtype)
    return found, found.astype(np.float32)


def aligned(array):
    memory = np.zeros(array.nbytes + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    memory[begin : begin + array.nbytes] = array.ravel().view(np.uint8)
    return memory[begin : begin + array.nbytes]


class Weight:
    """A random weight, its definition and its packed bytes."""

    def __init__(self, form, outputs, inputs, seed=0):
        random = np.random.default_rng(seed)
        self.form, self.outputs = form, outputs
        groups, blocks = inputs // 32, -(-outputs // 32)
        low, high = (-128, 128) if form == EIGHT else (0, 16)
        self.q = random.integers(low, high, (outputs, groups, 32))
        self.scale = random.normal(0, 0.01, (outputs, groups)).astype(np.float16)
        self.least = random.normal(0, 0.1, (outputs, groups)).astype(np.float16)
        self.bias = random.normal(0, 1, outputs).astype(np.float32)
        full = np.zeros((blocks * 32, groups, 32), np.uint8)
        full[:outputs] = self.q.astype(np.uint8)
        if form != EIGHT:
            full = full[..., :16] | full[..., 16:] << 4
        quads = full.reshape(blocks, 32, groups, -1, 4).transpose(0, 2, 3, 1, 4).reshape(blocks, groups, -1)
        parts = [quads, self.by_block(self.scale, blocks)]
        if form == FOUR_LEAST:
            parts.append(self.by_block(self.least, blocks))
        self.data = aligned(np.concatenate(parts, -1))

    @staticmethod
    def by_block(halves, blocks):
        full = np.zeros((blocks * 32, halves.shape[1]), np.float16)
        full[: len(halves)] = halves
        return np.ascontiguousarray(full.reshape(blocks, 32, -1).transpose(0, 2, 1)).view(np.uint8)

    def in_float64(self):
        values = (self.q - (8 if self.form == FOUR else 0)) * self.scale.astype(np.float64)[..., None]
        if self.form == FOUR_LEAST:
            values += self.least.astype(np.float64)[..., None]
        return values.reshape(self.outputs, -1)

    def results(self, x):
        """Multiply in the order of linear_quantised.h. Products are exact in longdouble, so each sum is one fma."""
        q, scale, _ = rounded(x)
        dots = np.einsum("rgi,ogi->rog", q, self.q - (8 if self.form == FOUR else 0))
        sums = np.zeros((len(x), self.outputs), np.float32)
        for group in range(q.shape[1]):
            both = self.scale[:, group].astype(np.float32) * scale[:, group, None]
            sums = (both.astype(np.longdouble) * dots[..., group] + sums).astype(np.float32)
            if self.form == FOUR_LEAST:
                total = scale[:, group] * q[:, group].sum(-1).astype(np.float32)
                least = self.least[:, group].astype(np.longdouble)
                sums = (least * total[:, None] + sums).astype(np.float32)
        return sums


def rounded(x):
    """Return rows rounded to 8 bits (rows, groups, 32), with the scale of each group."""
    groups = x.reshape(len(x), -1, 32)
    most = np.abs(groups).max(-1)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(most < 2.0**-100, np.float32(0), np.float32(127) / most)
    scale = np.where(most < 2.0**-100, np.float32(0), most / np.float32(127))
    return np.rint(groups * inverse[..., None]).astype(np.int64), scale, groups


def product(x, dtype, weights, threads=1, bias=True):
    rows, inputs = x.shape
    total = sum(weight.outputs for weight in weights)
    addresses = [(w.form, w.outputs, w.data.ctypes.data, w.bias.ctypes.data if bias else 0) for w in weights]
    packed = QuantisedWeights(inputs, addresses)
    assert (packed.inputs, packed.outputs) == (inputs, total)
    out = np.full((rows + 1, total), 0x1234, x.dtype)  # one more row shows writes beyond the end
    packed.run(x.ctypes.data, DTYPES[dtype], rows, out.ctypes.data, threads)
    assert (out[rows] == 0x1234).all()
    return out[:rows]


def activations(rows, inputs, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, inputs), np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(1, 32, 1), (1, 96, 65), (3, 64, 33), (4, 576, 32), (19, 544, 70), (24, 1088, 40), (131, 96, 40)],
)
def test_sums_add_exact_products_group_after_group(form, dtype, rows, inputs, outputs):
    weight = Weight(form, outputs, inputs)
    x, values = stored(activations(rows, inputs), dtype)
    found = product(x, dtype, [weight], threads=3)
    assert np.array_equal(found, stored(weight.results(values) + weight.bias, dtype)[0])


@pytest.mark.parametrize("form", FORMATS)
def test_results_are_near_those_in_float64(form):
    weight = Weight(form, 50, 1024)
    x = activations(20, 1024)
    right = x.astype(np.float64) @ weight.in_float64().T
    off = product(x, "float32", [weight], bias=False) - right
    assert np.sqrt((off**2).mean() / (right**2).mean()) < 0.01


@pytest.mark.parametrize("form", FORMATS)
def test_a_row_does_not_depend_on_the_other_rows_and_threads(form):
    weight, x = Weight(form, 100, 160), activations(300, 160)
    whole = product(x, "float32", [weight])
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 24, 33, 128, 129, 136):
        for threads in (1, 4):
            assert np.array_equal(product(x[:rows], "float32", [weight], threads), whole[:rows])
    assert np.array_equal(product(x[200:], "float32", [weight], 2), whole[200:])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 5, 140])
def test_layers_with_the_same_input_follow_one_another(rows, threads):
    weights = [Weight(form, outputs, 96, form) for form, outputs in ((EIGHT, 33), (FOUR, 1), (FOUR_LEAST, 64))]
    x, _ = stored(activations(rows, 96), "bfloat16")
    alone = [product(x, "bfloat16", [weight]) for weight in weights]
    assert np.array_equal(product(x, "bfloat16", weights, threads), np.concatenate(alone, 1))


def test_the_largest_products_do_not_saturate():
    weight = Weight(EIGHT, 32, 64)
    weight.q = np.full((32, 2, 32), -128)
    weight.data.reshape(2, -1)[:, :1024] = 0x80
    for sign in (1, -1):
        x = np.full((4, 64), sign, np.float32)
        assert np.array_equal(product(x, "float32", [weight], bias=False), weight.results(x))


@pytest.mark.parametrize("form", FORMATS)
def test_rows_that_are_not_finite_give_nan_and_small_groups_are_zero(form):
    weight, x = Weight(form, 40, 96), activations(6, 96)
    x[1, 40], x[2, 3], x[3, 95] = np.nan, np.inf, -np.inf
    x[4, 32:64] = 1e-38
    found = product(x, "float32", [weight], bias=False)
    assert np.isnan(found[1:4]).all()
    assert np.array_equal(found[[0, 4, 5]], weight.results(x[[0, 4, 5]]))


def test_layers_without_memory_write_nothing():
    weight, out = Weight(EIGHT, 8, 32), np.full(8, 7, np.float32)
    packed = QuantisedWeights(32, [(EIGHT, 8, weight.data.ctypes.data, 0)])
    for rows in (1 << 50, 1 << 60):
        with pytest.raises(MemoryError, match=rf"{rows} rows of 32 inputs"):
            packed.run(weight.data.ctypes.data, 0, rows, out.ctypes.data, 1)
    assert (out == 7).all()
