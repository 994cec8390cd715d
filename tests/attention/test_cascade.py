"""Cascade: the common first chunks of sequences are read once, with the same bits as each sequence alone."""

from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paged_cases import DTYPES
from share import examples

from pagepool import KvCachePool, KvLayout, decode, prefill

HEADS = 8


class Tree:
    """Sequences in one pool. `paths` names the shared pieces at the start of each, `pieces` their numbers of tokens."""

    def __init__(self, layout, paths, own, pieces, seed=0):
        rng = np.random.default_rng(seed)
        size = layout.block_size
        blocks = {name: -(-tokens // size) for name, tokens in pieces.items()}
        num_blocks = sum(blocks.values()) + sum(-(-tokens // size) for tokens in own) + 3
        ids = list(rng.permutation(num_blocks).astype(np.int32))
        shared = {name: [ids.pop() for _ in range(count)] for name, count in blocks.items()}
        rows = [
            [block for name in path for block in shared[name]] + [ids.pop() for _ in range(-(-tokens // size))]
            for path, tokens in zip(paths, own, strict=True)
        ]
        self.pool = KvCachePool.from_layout(layout, num_blocks)
        dims = layout.head_dim, layout.v_head_dim
        k, v = (rng.standard_normal((num_blocks * size, layout.num_kv_heads, dim), np.float32) for dim in dims)
        self.pool.append(0, np.arange(num_blocks * size), k, v)
        self.seq_lens = np.array(
            [sum(blocks[name] * size for name in path) + tokens for path, tokens in zip(paths, own, strict=True)],
            np.int32,
        )
        self.block_tables = np.full((len(rows), max(map(len, rows))), -1, np.int32)
        for row, table in zip(rows, self.block_tables, strict=True):
            table[: len(row)] = row
        self.rng = rng

    def attend(self, counts=None, order=None, **options):
        """Return out and lse with `counts` query tokens for each sequence, by default one."""
        order = list(range(len(self.seq_lens))) if order is None else order
        counts = [1] * len(self.seq_lens) if counts is None else counts
        starts = np.array([0, *accumulate(counts)], np.int32)
        q = np.random.default_rng(5).standard_normal((starts[-1], HEADS, self.pool.layout.head_dim), np.float32)
        q = np.concatenate([q[:0], *[q[starts[i] : starts[i + 1]] for i in order]])
        chosen = np.array([0, *accumulate(counts[i] for i in order)], np.int32)
        tables = np.ascontiguousarray(self.block_tables[order])
        out, lse = decode(
            q, self.pool, 0, tables, self.seq_lens[order], query_start_loc=chosen, return_lse=True, **options
        )
        return [(out[a:b].tobytes(), lse[a:b].tobytes()) for a, b in pairwise(chosen)]


PIECES = {"system": 1024, "tools": 600, "few shots": 1536}
PATHS = [
    ("system",),
    ("system", "tools"),
    ("few shots",),
    ("system", "few shots"),
    ("system", "tools"),
    ("few shots", "tools"),
    ("system", "few shots"),
    (),
    ("system",),
    ("few shots",),
]
OWN = [40, 500, 3, 700, 0, 16, 0, 20, 1, 530]


@pytest.mark.parametrize("arithmetic", ["exact", "bf16", "bf16x2"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 48, 15])
def test_a_tree_of_prefixes_has_the_bits_of_lone_sequences(dtype, arithmetic, block_size):
    if arithmetic != "exact" and dtype == "float32":
        pytest.skip("products of tiles are for pages of 16 bits")
    tree = Tree(KvLayout(1, 2, 64, block_size, dtype, v_head_dim=72), PATHS, OWN, PIECES)
    lone = [tree.attend(order=[i], arithmetic=arithmetic)[0] for i in range(len(PATHS))]
    assert tree.attend(arithmetic=arithmetic) == lone
    assert tree.attend(arithmetic=arithmetic, cascade=False) == lone


@pytest.mark.parametrize("window_left", [511, 512, 700, 1500, 1535, 2047])
@pytest.mark.parametrize("block_size", [16, 48, 15])
def test_windows_that_begin_in_one_block_share_later_blocks(block_size, window_left):
    """Nine of the sequences have similar lengths, the others have not."""
    own = [40, 40, 45, 35, 40, 33, 47, 40, 500, 8]
    paths = [("system", "few shots")] * 9 + [("system",)]
    tree = Tree(KvLayout(1, 2, 64, block_size, "float32"), paths, own, PIECES)
    for counts in (None, [1, 2, 1, 3, 1, 1, 2, 1, 1, 1]):
        alone = {"counts": counts, "window_left": window_left, "cascade": False, "num_threads": 1}
        expected = tree.attend(**alone)
        for num_threads in (1, 2, 8):
            got = tree.attend(**alone | {"cascade": True, "num_threads": num_threads})
            assert got == expected


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 64])
def test_no_bit_depends_on_threads_or_the_order_of_sequences(threads):
    tree = Tree(KvLayout(1, 2, 64, 16, "bfloat16"), PATHS, OWN, PIECES)
    one = tree.attend(num_threads=1, cascade=False)
    assert tree.attend(num_threads=threads) == one
    order = [6, 1, 0, 9, 4, 2, 5, 3, 8, 7]
    assert tree.attend(order=order, num_threads=threads) == [one[i] for i in order]


@pytest.mark.parametrize("name", ["logits_soft_cap", "alibi_slopes", "sinks", "window_left", "custom_mask"])
@pytest.mark.parametrize("counts", [None, [1, 2, 3, 4, 5, 1, 0, 2, 5, 4], [1, 2, 40, 4, 5, 30, 0, 2, 5, 4]])
def test_every_variant(name, counts):
    tree = Tree(KvLayout(1, 2, 64, 16, "float32"), PATHS, OWN, PIECES)
    numbers = np.linspace(-0.2, 0.3, HEADS, dtype=np.float32)
    masks = [
        np.random.default_rng(i).random((count, length)) < 0.7
        for i, (count, length) in enumerate(zip(counts or [1] * len(OWN), tree.seq_lens, strict=True))
    ]
    options = {
        "logits_soft_cap": {"logits_soft_cap": 3.0},
        "alibi_slopes": {"alibi_slopes": numbers},
        "sinks": {"sinks": numbers},
        "window_left": {"window_left": 700},
        "custom_mask": {"custom_mask": masks},
    }[name]
    assert tree.attend(counts, **options) == tree.attend(counts, cascade=False, **options)


def test_a_nan_in_a_shared_chunk_reaches_every_sequence_and_no_other():
    layout = KvLayout(1, 2, 64, 16, "float32")
    tree = Tree(layout, PATHS, OWN, PIECES)
    before = tree.attend()
    nan = np.full((1, 2, 64), np.nan, np.float32)
    tree.pool.append(0, np.array([int(tree.block_tables[0, 3]) * 16], np.int64), nan, nan)  # of "system"
    after = tree.attend()
    for path, old, new in zip(PATHS, before, after, strict=True):
        assert (old == new) == ("system" not in path[:1])
    assert after == tree.attend(cascade=False)


def test_forks_of_one_prompt_share_all_of_it():
    layout = KvLayout(1, 1, 64, 16, "bfloat16")
    tree = Tree(layout, [("prompt",)] * 12, [0] * 12, {"prompt": 2048})
    assert tree.attend() == tree.attend(cascade=False)


def test_prefill_of_sequences_with_a_common_prefix():
    tree = Tree(KvLayout(1, 2, 64, 16, "float32"), PATHS, OWN, PIECES)
    counts = [min(length, 20) for length in tree.seq_lens]
    starts = np.array([0, *accumulate(counts)], np.int32)
    q = np.random.default_rng(0).standard_normal((starts[-1], HEADS, 64), np.float32)
    both = [
        prefill(q, tree.pool, 0, tree.block_tables, tree.seq_lens, starts, cascade=cascade) for cascade in (True, False)
    ]
    assert both[0].tobytes() == both[1].tobytes()


@examples(40)
@given(data=st.data())
def test_any_forest(data):
    layout = KvLayout(1, 2, 24, data.draw(st.sampled_from([5, 16, 100, 512, 1024])), "bfloat16")
    pieces = {name: data.draw(st.sampled_from([16, 500, 512, 600, 1024])) for name in "abcd"}
    paths = data.draw(st.lists(st.lists(st.sampled_from("abcd"), max_size=3, unique=True), min_size=1, max_size=9))
    own = [data.draw(st.sampled_from([1, 15, 513])) for _ in paths]
    counts = [data.draw(st.integers(0, 4)) for _ in paths]
    tree = Tree(layout, paths, own, pieces)
    threads = data.draw(st.integers(1, 4))
    assert tree.attend(counts, num_threads=threads) == tree.attend(counts, cascade=False, num_threads=1)
