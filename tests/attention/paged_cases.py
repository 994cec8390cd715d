"""Helpers of the attention tests: paged sequences with known K and V, and attention over them in float64."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pagepool import KvCachePool, decode
from pagepool.reference.canonical import Quantised
from pagepool.reference.views import views

DTYPES = ["float32", "float16", "bfloat16"]
MOST = {"int8": 127, "int4": 7}  # largest integer of each quantised dtype
BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
LIMIT = 1e-5  # max abs error / max abs reference, per query head
TINY = 1e-37  # weights below the smallest normal float32 are 0


@dataclass
class Case:
    """Sequences in a pool of `num_blocks` blocks, and the arguments of `decode`."""

    pool: KvCachePool
    num_blocks: int
    layer: int
    block_tables: np.ndarray
    seq_lens: np.ndarray
    q: np.ndarray

    @property
    def args(self):
        return self.q, self.pool, self.layer, self.block_tables, self.seq_lens

    def decode(self, **options):
        return decode(*self.args, **options)

    def rows(self, order):
        """Return the same sequences in another order, or some of them."""
        return replace(self, block_tables=self.block_tables[order], seq_lens=self.seq_lens[order], q=self.q[order])

    def with_queries(self, counts, seed=0):
        """Return the same sequences with counts[i] query tokens for sequence i, and the query_start_loc."""
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        q = np.random.default_rng([seed, 7]).standard_normal((starts[-1], *self.q.shape[1:]), np.float32)
        return replace(self, q=q), starts

    def heads(self, chosen):
        """Return the same sequences with some of the query heads."""
        return replace(self, q=np.ascontiguousarray(self.q[:, chosen]))


def random_kv(layout, lengths, seed=0):
    """Return K and, unless V is part of K, V of each sequence, float32 `(length, num_kv_heads, dim)`."""
    made = normal_kv(layout.num_kv_heads, tuple(stored_dims(layout)), tuple(lengths), seed)
    return [tuple(x.copy() for x in both) for both in made]


@lru_cache(maxsize=32)
def normal_kv(num_kv_heads, dims, lengths, seed):
    """Return normal random K and V, cached for all dtypes and block sizes."""
    rng = np.random.default_rng([seed, 1])
    return [tuple(rng.standard_normal((length, num_kv_heads, dim), np.float32) for dim in dims) for length in lengths]


def stored_dims(layout):
    return [layout.head_dim] if layout.v_in_k else [layout.head_dim, layout.v_head_dim]


def garbage(layout, count):
    """Return K and V of `count` tokens: NaN and infinities of both signs."""
    return [special((count, layout.num_kv_heads, dim)) for dim in stored_dims(layout)]


@lru_cache(maxsize=32)
def special(shape):
    values = np.array([np.nan, np.inf, -np.inf], np.float32)
    found = np.tile(values, np.prod(shape) // 3 + 1)[: np.prod(shape)].reshape(shape)
    found.flags.writeable = False
    return found


def slots_of(row, length, block_size):
    """Return the slots of tokens 0 to length - 1 of a row of a block table."""
    tokens = np.arange(length, dtype=np.int64)
    return row[tokens // block_size].astype(np.int64) * block_size + tokens % block_size


def make_case(layout, group, lengths, *, kv=None, layer=0, seed=0, k_channel_scale=None):
    """Return sequences of the given lengths on shuffled blocks, with K and V in one layer.

    Every slot without a token contains NaN or infinities: the rest of last blocks, one unused block, and all other
    layers. Table entries past a sequence's length are ids out of range.
    """
    rng = np.random.default_rng([seed, 0])
    size = layout.block_size
    kv = random_kv(layout, lengths, seed) if kv is None else kv
    needed = [-(-length // size) for length in lengths]
    num_blocks = sum(needed) + 1
    pool = KvCachePool.from_layout(layout, num_blocks, k_channel_scale=k_channel_scale)
    every = np.arange(num_blocks * size, dtype=np.int64)
    junk = garbage(layout, len(every))
    for each in range(layout.num_layers):
        pool.append(each, every, *junk)
    blocks = rng.permutation(num_blocks).astype(np.int32)
    tables = np.empty((len(lengths), max(needed, default=0) + 2), np.int32)
    tables[:] = np.resize(np.array([-1, num_blocks, 2**31 - 1, -(2**31)], np.int32), tables.shape)
    for row, (count, length, both) in enumerate(zip(needed, lengths, kv, strict=True)):
        tables[row, :count], blocks = blocks[:count], blocks[count:]
        pool.append(layer, slots_of(tables[row], length, size), *both)
    q = rng.standard_normal((len(lengths), group * layout.num_kv_heads, layout.head_dim), np.float32)
    return Case(pool, num_blocks, layer, tables, np.array(lengths, np.int32), q)


def channels(layout, seed=0):
    """Return channel scales from 1/2 to 2 for quantised K, otherwise None."""
    if layout.dtype not in MOST:
        return None
    shape = layout.num_layers, layout.num_kv_heads, layout.head_dim
    return np.exp2(np.random.default_rng([seed, 9]).uniform(-1, 1, shape)).astype(np.float32)


def integers(page, dtype, dims, *, is_v):
    """Return the integers (tokens of a group, dims) and scales of a head's K or V, in the layout of layout.h."""
    elements = page[: 16 * dims * BITS[dtype] // 8]
    scales = page[len(elements) :][:64].view(np.float32)
    found = np.empty((16, dims), int)
    for d in range(dims):
        for t in range(16):
            if is_v:
                run, column = divmod(d, 64)
                width = min(64, dims - 64 * run)
                if dtype == "int8":
                    found[t, d] = elements.view(np.int8)[1024 * run + (t // 4 * width + column) * 4 + t % 4]
                else:
                    half, column = divmod(column, width // 2)
                    byte = elements[512 * run + (t // 4 * (width // 2) + column) * 4 + t % 4]
                    found[t, d] = (int(byte) >> 4 * half & 15) - 8
            elif dtype == "int8":
                found[t, d] = int(elements[d // 4 * 64 + t * 4 + d % 4]) - 128
            else:
                found[t, d] = (int(elements[d // 8 * 64 + t * 4 + d % 4]) >> d % 8 // 4 * 4 & 15) - 8
    return found, scales


def stored(case, row, head=0):
    """Return K and V of one KV head of a sequence for the canonical order: numbers, or integers and scales."""
    layout, length, table = case.pool.layout, int(case.seq_lens[row]), case.block_tables[row]
    kinds = [(layout.dtype, layout.head_dim), (layout.v_dtype or layout.dtype, layout.v_head_dim)]
    sizes = [16 * dims * BITS[dtype] // 8 + (64 if dtype in MOST else 0) for dtype, dims in kinds]
    found = []
    for is_v, (dtype, dims) in enumerate(kinds):
        if dtype not in MOST:
            found.append(case.pool.gather(case.layer, table, length)[is_v][:, head].tolist())
            continue
        rows, scales = [], []
        for group in range(-(-length // 16)):
            block, place = divmod(group, layout.block_size // 16)
            place += case.layer * layout.block_size // 16
            begin = (place * layout.num_kv_heads + head) * sum(sizes) + (sizes[0] if is_v else 0)
            got = integers(case.pool.page(int(table[block]))[begin:], dtype, dims, is_v=bool(is_v))
            rows += got[0].tolist()
            scales += got[1].tolist()
        own = case.pool.k_channel_scale
        own = None if is_v or own is None else own[case.layer, head].tolist()
        found.append(Quantised(rows[:length], scales[:length], own))
    return found


def attention_f64(case, sm_scale=None, **options):
    """Return out and lse in float64 for the stored values. Takes the options of decode."""
    num_tokens, heads, _ = case.q.shape
    out = np.zeros((num_tokens, heads, case.pool.layout.v_head_dim))
    lse = np.full((num_tokens, heads), -np.inf)
    for seen in weigh_f64(case, sm_scale, **options):
        out[seen.row] = flat(seen.weights @ seen.v)
        lse[seen.row] = seen.lse.ravel()
    return out, lse


def rounding_bounds(case, **options):
    """Return the documented error bounds of bf16 arithmetic for each output and each lse.

    They depend on sum_t weight[t] |V[t]| and on the largest sm_scale sum_d |q[d] K[t][d]| of the attended tokens.
    """
    num_tokens, heads, _ = case.q.shape
    sizes = np.zeros((num_tokens, heads, case.pool.layout.v_head_dim))
    score_sizes = np.zeros((num_tokens, heads))
    for seen in weigh_f64(case, **options):
        sizes[seen.row] = flat(seen.weights @ np.abs(seen.v))
        products = np.abs(seen.q) @ np.abs(seen.k).transpose(0, 2, 1)
        score_sizes[seen.row] = products.max(axis=2).ravel() * abs(seen.scale)
    unit = 2.0**-8
    off = unit * score_sizes
    relative = np.exp(2 * off) * (1 + 2 * unit) - 1
    return relative[:, :, None] * sizes, off + unit


def flat(per_group):
    """Reshape (kv head, query head of its group, ...) to (query head, ...)."""
    return per_group.reshape(-1, *per_group.shape[2:])


class Seen(NamedTuple):
    """The attended tokens of one query token, in float64.

    The first axis of q, k, v, weights and lse is the KV head. The second axis is the query head of its group, or, for k
    and v, the token in `tokens`.
    """

    row: int
    tokens: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    weights: np.ndarray
    lse: np.ndarray
    scale: float


def weigh_f64(
    case,
    sm_scale=None,
    *,
    query_start_loc=None,
    custom_mask=None,
    window_left=-1,
    logits_soft_cap=0.0,
    alibi_slopes=None,
    sinks=None,
):
    """Yield the attended tokens and their weights for each query token that attends to any."""
    kv_heads = case.pool.layout.num_kv_heads
    _, heads, dim = case.q.shape
    scale = 1 / np.sqrt(dim) if sm_scale is None else sm_scale
    grouped = (kv_heads, heads // kv_heads, 1)
    slopes = np.zeros(grouped) if alibi_slopes is None else alibi_slopes.astype(np.float64).reshape(grouped)
    sink = np.full(grouped, -np.inf) if sinks is None else sinks.astype(np.float64).reshape(grouped)
    stored = [
        [x.transpose(1, 0, 2).astype(np.float64, order="C") for x in case.pool.gather(case.layer, table, int(length))]
        for table, length in zip(case.block_tables, case.seq_lens, strict=True)
    ]
    for row, view in enumerate(views(query_start_loc, case.seq_lens.tolist(), window_left, custom_mask)):
        if not view.seen:
            continue
        tokens = np.array(view.seen)
        every = len(tokens) == view.end - view.first
        k, v = (x[:, view.first : view.end] if every else x[:, tokens] for x in stored[view.sequence])
        q = case.q[row].astype(np.float64).reshape(kv_heads, -1, dim)
        scores = q @ k.transpose(0, 2, 1) * scale
        if logits_soft_cap:
            scores = logits_soft_cap * np.tanh(scores / logits_soft_cap)
        scores += slopes * (tokens - view.position)
        top = np.maximum(scores.max(axis=2, keepdims=True), sink)
        weights = np.exp(scores - top)
        total = weights.sum(axis=2, keepdims=True) + np.exp(sink - top)
        yield Seen(row, tokens, q, k, v, weights / total, np.log(total) + top, scale)


def assert_close(got, expected, limit=LIMIT):
    """Check the error of attention as defined by the architecture, and the error of lse relative to max(1, |lse|)."""
    (out, lse), (right, right_lse) = got, expected
    assert out.dtype == lse.dtype == np.float32
    assert (out.shape, lse.shape) == (right.shape, right_lse.shape)
    error, size = np.abs(out - right).max(axis=2), np.abs(right).max(axis=2)
    worst = np.max(error / np.maximum(size, TINY), initial=0.0)
    assert (error <= limit * size + TINY).all(), f"error {worst} of the largest output"
    empty = np.isneginf(right_lse)
    np.testing.assert_array_equal(np.isneginf(lse), empty)
    error = np.abs(lse[~empty] - right_lse[~empty]) / np.maximum(1, np.abs(right_lse[~empty]))
    assert (error <= limit).all(), f"lse: error {error.max()}"


def assert_same_bits(got, expected):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


def assert_same(got, expected):
    """Check for equal bits; any NaN equals any NaN."""
    assert_same_bits(*([np.where(np.isnan(x), np.float32(np.nan), x) for x in each] for each in (got, expected)))
