"""All decoder layers in one call, against the same operations one by one, bit by bit."""

import numpy as np
import pytest
from test_linear_quantised import FORMATS, Weight, bfloat16

from pagepool import BlockTables, KvCachePool, KvLayout, PagedSeqState, decode
from pagepool.errors import InvalidBlock, InvalidSlot
from pagepool.integrations.transformers.elementwise import (
    DecoderLayers,
    QuantisedWeights,
    lookup_mul,
    rms_norm,
    rotate,
)

HIDDEN, MIDDLE, HEADS, KV_HEADS, DIM, LAYERS = 64, 96, 4, 2, 16, 3
WIDTH = (HEADS + 2 * KV_HEADS) * DIM
SIZES = [(WIDTH, HIDDEN), (HIDDEN, HEADS * DIM), (2 * MIDDLE, HIDDEN), (HIDDEN, MIDDLE)]
EPS, SCALE = 1e-5, 0.25
BFLOAT16 = 2


def random(shape, seed):
    return bfloat16(np.random.default_rng(seed).standard_normal(shape, np.float32))


def values_of(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def address(array):
    return array.ctypes.data


class Tensor:
    """A result of the function that computes other linear layers."""

    def __init__(self, array):
        self.array = array

    def data_ptr(self):
        return address(self.array)


class Model:
    """Random layers."""

    def __init__(self, form, has_head_norms):
        self.weights = [
            [Weight(form, *size, seed=8 * layer + place) for place, size in enumerate(SIZES)] for layer in range(LAYERS)
        ]
        self.linears = [
            [
                QuantisedWeights(inputs, [(w.form, w.outputs, address(w.data), 0)])
                for w, (_, inputs) in zip(weights, SIZES, strict=True)
            ]
            for weights in self.weights
        ]
        norms = [HIDDEN, HIDDEN, DIM, DIM]
        self.norms = [[random(n, 100 * layer + i) for i, n in enumerate(norms)] for layer in range(LAYERS)]
        self.last_norm, self.table = random(HIDDEN, 7), random(1 << 16, 8)
        self.has_head_norms = has_head_norms

    def layers(self, others=False):
        """Return the layers. With `others`, the function of `run` computes their linear layers."""
        rows = []
        for layer, (linears, norms) in enumerate(zip(self.linears, self.norms, strict=True)):
            norm, mlp_norm, query_norm, key_norm = ((address(weight), EPS) for weight in norms)
            of_heads = (query_norm, key_norm) if self.has_head_norms else (None, None)
            own = [(size, 0, 0, 0) for size, _ in SIZES] if others else linears
            rows.append((*own, norm, mlp_norm, *of_heads, address(self.table), SCALE, 0, layer))
        return DecoderLayers(HIDDEN, HEADS, KV_HEADS, DIM, rows, (address(self.last_norm), EPS))

    def product(self, layer, place, x, threads):
        out = np.zeros((len(x), SIZES[place][0]), np.uint16)
        self.linears[layer][place].run(address(x), BFLOAT16, len(x), address(out), threads)
        return out

    def norm(self, x, weight, added=None, threads=1):
        total, out = x.copy(), np.zeros_like(x)
        delta = 0 if added is None else address(added)
        rows, n = x.size // weight.size, weight.size
        rms_norm(address(x), delta, address(weight), EPS, rows, n, address(total), address(out), threads)
        return total, out

    def one_by_one(self, x, cos, sin, pool, tables):
        """Compute the layers operation by operation."""
        added = None
        for layer, norms in enumerate(self.norms):
            x, normed = self.norm(x, norms[0], added)
            qkv = self.product(layer, 0, normed, 1).reshape(len(x), -1, DIM)
            if self.has_head_norms:
                for weight, heads in ((norms[2], slice(HEADS)), (norms[3], slice(HEADS, HEADS + KV_HEADS))):
                    qkv[:, heads] = self.norm(np.ascontiguousarray(qkv[:, heads]), weight)[1]
            rotate(address(qkv), WIDTH, address(cos), address(sin), len(x), HEADS + KV_HEADS, DIM, 1)
            q, k, v = np.split(qkv, [HEADS, HEADS + KV_HEADS], 1)
            pool.append(layer, tables.slot_mapping, values_of(k), values_of(v))
            out = np.zeros((len(x), HEADS, DIM), np.uint16)
            decode(q, pool, layer, tables, sm_scale=SCALE, out=out, num_threads=1)
            x, normed = self.norm(x, norms[1], self.product(layer, 1, out.reshape(len(x), -1), 1))
            both, active = self.product(layer, 2, normed, 1), np.zeros((len(x), MIDDLE), np.uint16)
            gate, up = address(both), address(both) + 2 * MIDDLE
            lookup_mul(gate, up, 2 * MIDDLE, address(self.table), len(x), MIDDLE, address(active), 1)
            added = self.product(layer, 3, active, 1)
        return self.norm(x, self.last_norm, added)[1]


class World:
    """A pool with two sequences of which the last tokens are computed."""

    def __init__(self, dtype="bfloat16", counts=(5, 1), checked=False):
        self.pool = KvCachePool.from_layout(
            KvLayout(LAYERS, KV_HEADS, DIM, dtype=dtype), num_blocks=16, checked=checked
        )
        self.sequences = [PagedSeqState(self.pool.allocator) for _ in counts]
        for sequence, earlier, count in zip(self.sequences, (20, 3), counts, strict=True):
            slots = sequence.append(earlier + count)[:earlier]
            for layer in range(LAYERS):
                k, v = np.random.default_rng(layer).standard_normal((2, earlier, KV_HEADS, DIM), np.float32)
                self.pool.append(layer, slots, k, v)
        self.tables = BlockTables(2, 8).fill(self.sequences, counts)
        self.rows = sum(counts)
        self.x, self.cos, self.sin = (random((self.rows, n), seed) for seed, n in enumerate((HIDDEN, DIM, DIM)))

    def close(self):
        for sequence in self.sequences:
            sequence.release()
        self.pool.close()

    def run(self, layers, threads=1, product=None, rows=None, pools=None):
        """Return the results of `layers`, with a function for the products of its linear layers."""
        rows = self.rows if rows is None else rows
        sizes = (HIDDEN, HIDDEN, HEADS * DIM, MIDDLE, WIDTH, HIDDEN, 2 * MIDDLE)
        memory = [np.full((self.rows, size), 0x1234, np.uint16) for size in sizes]
        memory[0][:] = self.x
        inputs = memory[1], memory[2], memory[1], memory[3]
        t = self.tables
        layers.run(
            rows,
            [*map(address, memory)],
            address(self.cos),
            address(self.sin),
            [self.pool] if pools is None else pools,
            [(t.block_tables, t.seq_lens, t.slot_mapping, t.query_start_loc)],
            [None],
            "exact",
            threads,
            product and (lambda layer, place: Tensor(product(layer, place, inputs[place]))),
        )
        return memory[1]


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("has_head_norms", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_bits_are_those_of_the_operations_one_by_one(form, has_head_norms, others):
    model = Model(form, has_head_norms)
    world, same = World(), World()
    expected = model.one_by_one(world.x, world.cos, world.sin, world.pool, world.tables)
    for threads in (1, 3):
        product = (lambda *args: model.product(*args, threads)) if others else None  # noqa: B023
        found = same.run(model.layers(others), threads, product)
        assert np.array_equal(found, expected)
        assert bytes(memoryview(same.pool)) == bytes(memoryview(world.pool))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_keys_and_values_are_stored_in_the_dtype_of_the_pages(dtype):
    model, world, same = Model(1, False), World(dtype), World(dtype)
    expected = model.one_by_one(world.x, world.cos, world.sin, world.pool, world.tables)
    assert np.array_equal(same.run(model.layers()), expected)
    assert bytes(memoryview(same.pool)) == bytes(memoryview(world.pool))


def test_a_row_does_not_depend_on_the_other_rows():
    model, together = Model(1, True), World()
    found = together.run(model.layers(), 2)
    alone = World(counts=(5, 1))
    alone.tables.fill(alone.sequences[1:], [1])
    alone.x, alone.cos, alone.sin = (rows[5:].copy() for rows in (alone.x, alone.cos, alone.sin))
    alone.rows = 1
    assert np.array_equal(alone.run(model.layers()), found[5:])


def test_the_exception_of_a_product_is_raised():
    def fail(layer, place, x):
        if (layer, place) == (1, 2):
            raise OSError(f"no product {layer} {place}")
        return model.product(layer, place, x, 1)

    model, world = Model(0, False), World()
    with pytest.raises(OSError, match="no product 1 2"):
        world.run(model.layers(others=True), 1, fail)
    world.close()


def test_wrong_tables_and_pools_are_refused():
    model, world = Model(0, False), World()
    layers = model.layers()
    with pytest.raises(ValueError, match=r"6 slots for 5 rows"):
        world.run(layers, rows=5)
    with pytest.raises(ValueError, match=r"in 1 groups, not 0"):
        world.run(layers, pools=[])
    other = KvCachePool.from_layout(KvLayout(LAYERS, KV_HEADS, 2 * DIM), num_blocks=16)
    with pytest.raises(ValueError, match=r"2 heads of 16 dims, not 2 of 32"):
        world.run(layers, pools=[other])
    with pytest.raises(TypeError, match="KvCachePool"):
        world.run(layers, pools=[None])
    few = KvCachePool.from_layout(KvLayout(LAYERS - 1, KV_HEADS, DIM), num_blocks=16)
    with pytest.raises(ValueError, match="status"):
        world.run(layers, pools=[few])
    world.close()
    with pytest.raises(ValueError, match="closed"):
        world.run(layers)


def test_checked_mode_refuses_free_blocks_and_shared_slots():
    model, world = Model(0, False), World(checked=True)
    layers = model.layers()
    world.run(layers)
    fork = world.sequences[1].fork()
    with pytest.raises(InvalidSlot, match="references"):
        world.run(layers)
    fork.release()
    block = world.sequences[0].blocks[0]
    world.pool.allocator.free(block)
    with pytest.raises(InvalidBlock, match="which is free"):
        world.run(layers)
    assert world.pool.allocator.allocate() == block
    world.close()
