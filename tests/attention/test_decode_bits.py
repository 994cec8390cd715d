"""The same bits, always: whatever the threads, the batch, its order, the block size and what lies beside the tokens."""

import numpy as np
import pytest
from paged_cases import DTYPES, assert_same_bits, garbage, make_case, random_kv, slots_of

from pagepool import KvLayout

LENGTHS = [1, 16, 512, 0, 513, 33, 2600, 1024]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(2, 4, 64), (1, 7, 128), (3, 1, 40)])
def test_threads_do_not_change_the_bits(dtype, kv_heads, group, head_dim):
    case = make_case(KvLayout(1, kv_heads, head_dim, dtype=dtype), group, LENGTHS)
    expected = case.decode(num_threads=1, return_lse=True)
    for num_threads in (*range(2, 9), None):
        assert_same_bits(case.decode(num_threads=num_threads, return_lse=True), expected)


@pytest.mark.parametrize("kv_heads", [1, 8])
def test_a_long_sequence_that_threads_share_keeps_its_bits(kv_heads):
    case = make_case(KvLayout(1, kv_heads, 64), 2, [9000])
    expected = case.decode(num_threads=1, return_lse=True)
    for num_threads in range(2, 9):
        assert_same_bits(case.decode(num_threads=num_threads, return_lse=True), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_batch_does_not_change_the_bits(dtype):
    case = make_case(KvLayout(1, 2, 64, dtype=dtype), 4, LENGTHS)
    out, lse = case.decode(return_lse=True)
    shuffled = np.random.default_rng(0).permutation(len(LENGTHS))
    alone = np.arange(len(LENGTHS)).reshape(-1, 1)
    for order in [np.arange(len(LENGTHS))[::-1], shuffled, np.array([6, 6, 1]), *alone]:
        for num_threads in (1, 2, 5):
            got = case.rows(order).decode(num_threads=num_threads, return_lse=True)
            assert_same_bits(got, (out[order], lse[order]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_block_size_does_not_change_the_bits(dtype):
    lengths = [1, 47, 512, 1300]
    kv = random_kv(KvLayout(1, 2, 72), lengths)
    q = np.random.default_rng(4).standard_normal((4, 6, 72), np.float32)
    expected = None
    for block_size in (16, 1, 3, 17, 32, 48, 128, 500, 1024):
        case = make_case(KvLayout(1, 2, 72, block_size=block_size, dtype=dtype), 3, lengths, kv=kv)
        case.q = q
        got = case.decode(num_threads=2, return_lse=True)
        expected = expected or got
        assert_same_bits(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 7])
def test_other_heads_do_not_change_the_bits(dtype, block_size):
    """A head's bits follow from its own q, K and V, not from how many heads share a K/V head."""
    case = make_case(KvLayout(1, 2, 64, block_size=block_size, dtype=dtype), 9, [700, 45])
    out, lse = case.decode(return_lse=True)
    for count in range(1, 9):
        chosen = [*range(9 - count, 9), *range(18 - count, 18)]
        assert_same_bits(case.heads(chosen).decode(return_lse=True), (out[:, chosen], lse[:, chosen]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 48, 5])
def test_what_lies_beside_the_tokens_does_not_matter(dtype, block_size):
    layout = KvLayout(2, 2, 24, block_size=block_size, dtype=dtype)
    case = make_case(layout, 3, [1, 15, 17, 530])
    expected = case.decode(return_lse=True)
    assert np.isfinite(expected[0]).all()
    rows = zip(case.block_tables, case.seq_lens, strict=True)
    used = np.concatenate([slots_of(row, length, block_size) for row, length in rows])
    unused = np.setdiff1d(np.arange(case.num_blocks * block_size), used)
    assert len(unused) >= block_size
    junk = garbage(layout, len(unused))
    for values in (np.zeros_like(junk), np.full_like(junk, 3e38), -junk):
        case.pool.append(0, unused, values, values)
        for row, length in enumerate(case.seq_lens):
            case.block_tables[row, -(-length // block_size) :] += 12345
        assert_same_bits(case.decode(return_lse=True), expected)


def test_a_second_run_gives_the_same_bits():
    case = make_case(KvLayout(1, 2, 64), 4, LENGTHS)
    first = case.decode(return_lse=True)
    for _ in range(20):
        assert_same_bits(case.decode(return_lse=True), first)
