"""What the tests of attention share: paged sequences with known K and V, and attention over them in float64."""

from dataclasses import dataclass, replace

import numpy as np

from pagepool import KvCachePool, decode

DTYPES = ["float32", "float16", "bfloat16"]
LIMIT = 1e-5  # max abs error / max abs reference, per query head


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
        """The same sequences in another order, or some of them."""
        return replace(self, block_tables=self.block_tables[order], seq_lens=self.seq_lens[order], q=self.q[order])

    def heads(self, chosen):
        """The same sequences with some of the query heads."""
        return replace(self, q=np.ascontiguousarray(self.q[:, chosen]))


def random_kv(layout, lengths, seed=0):
    """What `append` takes of each sequence: K and, unless it is within K, V, float32 `(length, num_kv_heads, dim)`."""
    rng = np.random.default_rng([seed, 1])
    return [
        tuple(rng.standard_normal((length, layout.num_kv_heads, dim), np.float32) for dim in stored_dims(layout))
        for length in lengths
    ]


def stored_dims(layout):
    return [layout.head_dim] if layout.v_in_k else [layout.head_dim, layout.v_head_dim]


def garbage(layout, count):
    """K and V of `count` tokens: NaN and infinities of both signs."""
    values = np.array([np.nan, np.inf, -np.inf], np.float32)
    return [np.resize(values, (count, layout.num_kv_heads, dim)) for dim in stored_dims(layout)]


def slots_of(row, length, block_size):
    """The slots of the tokens 0 .. length - 1 of a row of a block table."""
    tokens = np.arange(length, dtype=np.int64)
    return row[tokens // block_size].astype(np.int64) * block_size + tokens % block_size


def make_case(layout, group, lengths, *, kv=None, layer=0, seed=0):
    """Sequences of these lengths on shuffled blocks, K and V in one layer.

    Every slot that holds no token has NaN or infinities: the rest of last blocks, a block that nobody owns, and all of
    the other layers. Table entries past a sequence's length are ids out of range.
    """
    rng = np.random.default_rng([seed, 0])
    size = layout.block_size
    kv = random_kv(layout, lengths, seed) if kv is None else kv
    needed = [-(-length // size) for length in lengths]
    num_blocks = sum(needed) + 1
    pool = KvCachePool.from_layout(layout, num_blocks)
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


def attention_f64(case, sm_scale=None, *, window_left=-1, logits_soft_cap=0.0, alibi_slopes=None, sinks=None):
    """out and lse in float64 on the values that the pool stores."""
    num_seqs, heads, dim = case.q.shape
    scale = 1 / np.sqrt(dim) if sm_scale is None else sm_scale
    v_dim = case.pool.layout.v_head_dim
    out, lse = np.zeros((num_seqs, heads, v_dim)), np.full((num_seqs, heads), -np.inf)
    for row, length in enumerate(case.seq_lens):
        if not length:
            continue
        k, v = (x.astype(np.float64) for x in case.pool.gather(case.layer, case.block_tables[row], int(length)))
        q = case.q[row].astype(np.float64).reshape(k.shape[1], -1, dim)
        scores = np.matmul(q, k.transpose(1, 2, 0)) * scale
        if logits_soft_cap:
            scores = logits_soft_cap * np.tanh(scores / logits_soft_cap)
        back = np.arange(length) - (length - 1)
        if alibi_slopes is not None:
            scores = scores + alibi_slopes.astype(np.float64).reshape(k.shape[1], -1, 1) * back
        if window_left >= 0:
            scores, v = scores[:, :, -window_left - 1 :], v[-window_left - 1 :]
        sink = np.full(heads, -np.inf) if sinks is None else sinks.astype(np.float64)
        sink = sink.reshape(k.shape[1], -1, 1)
        top = np.maximum(scores.max(axis=2, keepdims=True), sink)
        weights = np.exp(scores - top)
        total = weights.sum(axis=2, keepdims=True) + np.exp(sink - top)
        out[row] = (np.matmul(weights, v.transpose(1, 0, 2)) / total).reshape(heads, v_dim)
        lse[row] = (np.log(total) + top).reshape(heads)
    return out, lse


def assert_close(got, expected, limit=LIMIT):
    """The error of attention as the architecture defines it, and that of the lse relative to max(1, |lse|)."""
    (out, lse), (right, right_lse) = got, expected
    assert out.dtype == lse.dtype == np.float32
    assert (out.shape, lse.shape) == (right.shape, right_lse.shape)
    error, size = np.abs(out - right).max(axis=2), np.abs(right).max(axis=2)
    assert (error <= limit * size).all(), f"error {np.max(error[size > 0] / size[size > 0])} of the largest output"
    empty = np.isneginf(right_lse)
    np.testing.assert_array_equal(np.isneginf(lse), empty)
    error = np.abs(lse[~empty] - right_lse[~empty]) / np.maximum(1, np.abs(right_lse[~empty]))
    assert (error <= limit).all(), f"lse: error {error.max()}"


def assert_same_bits(got, expected):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))
