"""KvCachePool.append and .gather: accepted arguments, refused arguments; a refused call writes nothing."""

import numpy as np
import pytest
from refusals import refuses

from pagepool import InvalidBlock, InvalidSlot, KvCachePool, KvLayout

DTYPES = ("float32", "float16", "bfloat16")
HEADS, DIM, BLOCKS = 3, 16, 6


def make(dtype="float32", block_size=4, layers=2):
    return KvCachePool.from_layout(KvLayout(layers, HEADS, DIM, block_size, dtype), BLOCKS)


def bits_of_bfloat16(values):
    """Round f32 to bfloat16, to nearest even, with integer arithmetic."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widened(values, dtype):
    """Return f32 values as a page of `dtype` stores them, widened to f32."""
    if dtype == "bfloat16":
        return (bits_of_bfloat16(values).astype(np.uint32) << 16).view(np.float32)
    return values.astype(dtype).astype(np.float32)


def stored(values, dtype):
    return bits_of_bfloat16(values) if dtype == "bfloat16" else values.astype(dtype)


def tokens(n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, n, HEADS, DIM), dtype=np.float32)


@pytest.mark.parametrize("block_size", [1, 4, 16, 48])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_returns_what_append_wrote(dtype, block_size):
    pool = make(dtype, block_size)
    n = 2 * block_size + max(1, block_size // 2)
    blocks = [4, 0, 5]
    slots = np.array([blocks[t // block_size] * block_size + t % block_size for t in range(n)])
    k, v = tokens(n)
    pool.append(1, slots, k, v)
    got_k, got_v = pool.gather(1, blocks, n)
    assert got_k.dtype == got_v.dtype == np.float32 and got_k.flags.c_contiguous and got_v.flags.c_contiguous
    np.testing.assert_array_equal(got_k, widened(k, dtype))
    np.testing.assert_array_equal(got_v, widened(v, dtype))
    assert not np.any(pool.gather(0, blocks, n)), "the other layer is untouched"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_pools_own_dtype_is_copied(dtype):
    pool = make(dtype)
    k, v = tokens(5)
    pool.append(0, np.arange(5), stored(k, dtype), stored(v, dtype))
    np.testing.assert_array_equal(pool.gather(0, [0, 1], 5), [widened(k, dtype), widened(v, dtype)])


def test_float16_is_rounded_into_pages_of_bfloat16():
    pool = make("bfloat16")
    every = np.arange(2**16, dtype=np.uint16)
    every = every[every & 0x7C00 != 0x7C00].view(np.float16)  # without infinities and NaN
    k = np.resize(every, (2, 12, HEADS, DIM))
    for first in range(0, every.size, k.size):
        k.reshape(-1)[:] = np.resize(every[first:], k.size)
        views = np.ascontiguousarray(k.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
        for rows in (k, views):
            pool.append(1, np.arange(12), *rows)
            np.testing.assert_array_equal(pool.gather(1, [0, 1, 2], 12), widened(k.astype(np.float32), "bfloat16"))
    special = np.full((12, HEADS, DIM), np.inf, np.float16)
    special[0] = np.nan
    pool.append(1, np.arange(12), special, -special)
    got = pool.gather(1, [0, 1, 2], 12)
    assert np.isnan(got[0][0]).all() and (got[0][1:] == np.inf).all() and (got[1][1:] == -np.inf).all()
    with refuses(TypeError, "k", "v", "dtype", "float16", "float32"):
        pool.append(1, np.arange(12), special, special.astype(np.float32))
    latent = KvCachePool.from_layout(KvLayout(1, 1, DIM, 4, v_head_dim=8, v_in_k=True), 1)
    latent.append(0, np.arange(4), special[:4, :1])
    assert (latent.gather(0, [0], 4)[1][1:] == np.inf).all()


def test_bfloat16_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="the test needs ml_dtypes")
    pool = make("bfloat16")
    k, v = (x.astype(ml_dtypes.bfloat16) for x in tokens(5))
    pool.append(0, np.arange(5), k, v)
    np.testing.assert_array_equal(pool.gather(0, [0, 1], 5), [k.astype(np.float32), v.astype(np.float32)])
    with refuses(TypeError, "float32", "bfloat16"):
        make("float32").append(0, np.arange(5), k, v)


def test_minus_one_skips_a_token():
    pool = make()
    k, v = tokens(3)
    pool.append(0, np.array([2, -1, 0]), k, v)
    got, _ = pool.gather(0, [0], 4)
    np.testing.assert_array_equal(got[[2, 0]], k[[0, 2]])
    assert not got[[1, 3]].any()


def views(k, v):
    """Return the same K and V with other strides."""
    n = k.shape[0]
    fused = np.zeros((n, 3 * HEADS, DIM), k.dtype)
    fused[:, HEADS : 2 * HEADS], fused[:, 2 * HEADS :] = k, v
    yield fused[:, HEADS : 2 * HEADS], fused[:, 2 * HEADS :]
    by_head = np.ascontiguousarray(np.stack([k, v]).transpose(0, 2, 1, 3))
    yield by_head[0].transpose(1, 0, 2), by_head[1].transpose(1, 0, 2)
    yield k, by_head[1].transpose(1, 0, 2)  # strides that differ
    every_other = np.zeros((2 * n, HEADS, DIM), k.dtype)
    every_other[::2] = k
    yield every_other[::2], v


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_strides(dtype, which):
    pool = make(dtype)
    k, v = tokens(6)
    pool.append(0, np.arange(6), *list(views(k, v))[which])
    np.testing.assert_array_equal(pool.gather(0, [0, 1], 6), [widened(k, dtype), widened(v, dtype)])


def test_strides_of_axes_without_steps_do_not_matter():
    pool = KvCachePool.from_layout(KvLayout(1, 1, 8, 4, "float32"), 2)
    k = np.lib.stride_tricks.as_strided(np.arange(8, dtype=np.float32), (1, 1, 8), (-3, 0, 4))
    pool.append(0, np.array([5]), k, k)
    assert pool.gather(0, [1], 2)[0][1, 0].tolist() == list(range(8))


def test_read_only_arguments():
    pool = make()
    k, v = tokens(1)
    slots = np.zeros(1, np.int64)
    for array in (k, v, slots):
        array.flags.writeable = False
    pool.append(0, slots, k, v)
    np.testing.assert_array_equal(pool.gather(0, [0], 1)[0], k)


K, V = tokens(4)
SLOTS = np.arange(4)


@pytest.mark.parametrize(
    "slots, k, v, error, words",
    [
        (SLOTS.astype(np.int16), K, V, TypeError, ("slot_mapping", "int64", "int32", "int16")),
        (SLOTS.astype(np.uint64), K, V, TypeError, ("slot_mapping", "uint64")),
        (SLOTS.astype(np.float64), K, V, TypeError, ("float64",)),
        (SLOTS.astype(">i8"), K, V, TypeError, ("slot_mapping",)),
        ([0, 1, 2, 3], K, V, TypeError, ("slot_mapping", "int64", "list")),
        (None, K, V, TypeError, ("NoneType",)),
        (SLOTS.reshape(2, 2), K, V, ValueError, (1, 2)),
        (np.arange(8)[::2], K, V, ValueError, ("slot_mapping",)),
        (SLOTS[:3], K, V, ValueError, ("k", "(3, 3, 16)", "(4, 3, 16)")),
        (SLOTS, K.astype(np.float64), V, TypeError, ("k", "float32", "float16", "bfloat16", "float64")),
        (SLOTS, K, V.astype(np.int16), TypeError, ("v", "int16")),
        (SLOTS, K.astype(">f4"), V, TypeError, ("k",)),
        (SLOTS, K.astype(np.float16), V.astype(np.float16), TypeError, ("k", "float32", "float16")),
        (SLOTS, K.astype(np.uint16), V.astype(np.uint16), TypeError, ("k", "float32", "uint16")),
        (SLOTS, None, V, TypeError, ("k",)),
        (SLOTS, K.tolist(), V, TypeError, ("list",)),
        (SLOTS, K, V[:3], ValueError, ("v",)),
        (SLOTS, K[:, :2], V, ValueError, ("k",)),
        (SLOTS, K, V[:, :, :8], ValueError, ("v",)),
        (SLOTS, K.reshape(4, HEADS * DIM), V, ValueError, ("k",)),
        (SLOTS, K.reshape(4, HEADS, DIM, 1), V, ValueError, ("k",)),
        (SLOTS, K.reshape(4, 1, HEADS, DIM, 1), V, ValueError, (4, 5)),
        (SLOTS, K, np.float32(1), ValueError, ("v",)),
        (SLOTS, np.repeat(K, 2, axis=2)[:, :, ::2], V, ValueError, ("k",)),
        (SLOTS, np.asfortranarray(K), V, ValueError, ("k",)),
        (SLOTS, K, V[:, :, ::-1], ValueError, ("v",)),
        (SLOTS, K[::-1], V, ValueError, ("axis", 0, "k")),
        (SLOTS, K, V[:, ::-1], ValueError, ("axis", 1, "v")),
        (SLOTS, np.broadcast_to(K[:1], K.shape), V, ValueError, ("axis", 0, "k")),
        (np.array([0, 1, 24, 2]), K, V, InvalidSlot, ("slot", 24, 2)),
        (np.array([0, 1, 2, -2]), K, V, InvalidSlot, ("slot", -2, 3)),
        (np.array([0, 1, 2, 2**62]), K, V, InvalidSlot, (4611686018427387904,)),
    ],
)
def test_bad_arguments_write_nothing(slots, k, v, error, words):
    pool = make()
    with refuses(error, *words):
        pool.append(0, slots, k, v)
    assert not np.asarray(pool).any()


def test_k_and_v_of_two_dtypes():
    pool = make("bfloat16")
    with refuses(TypeError, "k", "v", "dtype", "float32", "uint16"):
        pool.append(0, SLOTS, K, bits_of_bfloat16(V))
    assert not np.asarray(pool).any()


def test_arguments_that_are_not_aligned():
    raw = np.zeros(4 * HEADS * DIM * 4 + 1, np.uint8)[1:].view(np.float32).reshape(4, HEADS, DIM)
    pool = make()
    with refuses(ValueError, "k", 4, "bytes"):
        pool.append(0, SLOTS, raw, V)


@pytest.mark.parametrize("layer, error", [(-1, ValueError), (2, ValueError), (2**70, ValueError), (0.0, TypeError)])
def test_bad_layers(layer, error):
    pool = make()
    with pytest.raises(error):
        pool.append(layer, SLOTS, K, V)
    with pytest.raises(error):
        pool.gather(layer, [0], 1)
    assert not np.asarray(pool).any()


@pytest.mark.parametrize(
    "blocks, seq_len, error, words",
    [
        ([0, 6], 5, InvalidBlock, ("block", 6)),
        ([-1], 1, InvalidBlock, ("block", -1)),
        ([2**40], 1, InvalidBlock, (2**40,)),
        ([0], 5, ValueError, (5, 2, 1)),
        ([], 1, ValueError, (1, 0)),
        ([0], -1, ValueError, ("seq_len", -1)),
        ([0], 2**70, ValueError, ("blocks", 1)),
        ([0.0], 1, TypeError, ("float",)),
        ([0], 1.0, TypeError, ("float",)),
    ],
)
def test_bad_arguments_of_gather(blocks, seq_len, error, words):
    with refuses(error, *words):
        make().gather(0, blocks, seq_len)


def test_gather_reads_only_the_blocks_of_the_length():
    k, v = make().gather(0, [3, 99, -7], 4)
    assert k.shape == v.shape == (4, HEADS, DIM)


def test_gather_takes_a_block_table():
    from pagepool import PagedSeqState

    pool = make()
    state = PagedSeqState(pool.allocator, pool.block_size)
    k, v = tokens(6)
    pool.append(0, state.append(6), k, v)
    np.testing.assert_array_equal(pool.gather(0, state.block_table, state.len)[0], k)
    np.testing.assert_array_equal(pool.gather(0, np.asarray(state.blocks), state.len)[1], v)


def test_pages_of_two_sequences_do_not_touch():
    pool = make("float16")
    k, v = tokens(24)
    pool.append(0, np.arange(24), k, v)
    pool.append(0, np.arange(8, 12), -k[8:12], -v[8:12])
    for first, sign in ((0, 1), (8, -1), (12, 1)):
        got, _ = pool.gather(0, [first // 4], 4)
        np.testing.assert_array_equal(got, sign * widened(k[first : first + 4], "float16"))


def test_slots_that_are_not_aligned_are_refused():
    pool = KvCachePool.from_layout(KvLayout(1, 1, 8), 2)
    k = np.zeros((1, 1, 8), np.float32)
    slots = np.frombuffer(bytes(9), np.int64, offset=1)
    with refuses(ValueError, "slot_mapping", 8, "bytes"):
        pool.append(0, slots, k, k)


@pytest.mark.parametrize("name", ["k", "v", "slot_mapping"])
def test_inputs_in_written_pages_are_refused(name):
    pool = make()
    k, v = tokens(4)
    pool.append(0, np.arange(4), k, v)
    pages = pool.numpy().reshape(-1)
    before = pages.copy()
    inside = {"k": k, "v": v, "slot_mapping": np.arange(4)}
    own, n = inside[name], inside[name].nbytes // 4
    for begin in (0, pages.size - n):
        inside[name] = pages[begin : begin + n].view(own.dtype).reshape(own.shape)
        with refuses(ValueError, name):
            pool.append(0, inside["slot_mapping"], inside["k"], inside["v"])
    np.testing.assert_array_equal(pages, before)
    make().append(0, np.arange(4), pages[: k.size].reshape(k.shape), v)  # pages of another pool may be read
