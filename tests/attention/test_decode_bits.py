"""decode gives the same bits for any threads, batch, order, block size and contents of unused slots.

The bits equal the results of `pagepool.reference.canonical`, with every variant.
"""

import canonical_answers as canonical
import numpy as np
import pytest
from paged_cases import DTYPES, assert_same, assert_same_bits, garbage, make_case, random_kv, slots_of

from pagepool import KvLayout, cpu_info
from pagepool.reference.canonical import TANH_BORDER, in_base_2, rounding_once_or_twice, tanh

LENGTHS = [1, 16, 512, 0, 513, 33, 2600, 1024]
VARIANTS = [
    *({"window_left": window} for window in (0, 15, 16, 31, 40, 511, 530)),
    *({"logits_soft_cap": cap} for cap in (0.7, 30.0)),
    {"alibi_slopes": True},
    {"sinks": True},
    {"window_left": 20, "logits_soft_cap": 3.3, "alibi_slopes": True, "sinks": True},
    {"window_left": 545, "logits_soft_cap": 0.9, "alibi_slopes": True, "sinks": True},
]


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
    """A head's bits depend on its own q, K and V, not on the number of query heads per KV head."""
    case = make_case(KvLayout(1, 2, 64, block_size=block_size, dtype=dtype), 9, [700, 45])
    out, lse = case.decode(return_lse=True)
    for count in range(1, 9):
        chosen = [*range(9 - count, 9), *range(18 - count, 18)]
        assert_same_bits(case.heads(chosen).decode(return_lse=True), (out[:, chosen], lse[:, chosen]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 48, 5])
def test_contents_of_unused_slots_do_not_matter(dtype, block_size):
    layout = KvLayout(2, 2, 24, block_size=block_size, dtype=dtype)
    case = make_case(layout, 3, [1, 15, 17, 530])
    expected = case.decode(return_lse=True)
    assert np.isfinite(expected[0]).all()
    rows = zip(case.block_tables, case.seq_lens, strict=True)
    used = np.concatenate([slots_of(row, length, block_size) for row, length in rows])
    unused = np.setdiff1d(np.arange(case.num_blocks * block_size), used)
    assert len(unused) >= block_size
    junk = garbage(layout, len(unused))
    for change in (np.zeros_like, lambda x: np.full_like(x, 3e38), np.negative):
        case.pool.append(0, unused, *map(change, junk))
        for row, length in enumerate(case.seq_lens):
            case.block_tables[row, -(-length // block_size) :] += 12345
        assert_same_bits(case.decode(return_lse=True), expected)


def test_a_second_run_gives_the_same_bits():
    case = make_case(KvLayout(1, 2, 64), 4, LENGTHS)
    first = case.decode(return_lse=True)
    for _ in range(20):
        assert_same_bits(case.decode(return_lse=True), first)


def per_head(options, heads):
    """Replace True by a number per head: slopes of both signs, sinks from -inf to above all scores."""
    slopes = np.array([0.5, -0.031, 0.004, 0.0, -1.3], np.float32)
    sinks = np.array([1.7, 60.0, -np.inf, -3.0], np.float32)
    numbers = {"alibi_slopes": np.resize(slopes, heads), "sinks": np.resize(sinks, heads)}
    return {name: numbers[name] if value is True else value for name, value in options.items()}


def canonical_head(case, row, head, options):
    """Return out and lse of one query head of a sequence, computed in the canonical order."""
    _, heads, dim = case.q.shape
    kv_heads = case.pool.layout.num_kv_heads
    kv = case.pool.gather(0, case.block_tables[row], int(case.seq_lens[row]))
    k, v = (x[:, head * kv_heads // heads].astype(np.float32).tolist() for x in kv)
    names = {"alibi_slopes": "alibi_slope", "sinks": "sink"}
    own = {names.get(name, name): float(value[head]) if name in names else value for name, value in options.items()}
    fused = cpu_info()["isa"] != "baseline"
    own = {"sm_scale": 1 / np.sqrt(dim), "fused": fused, "page_dtype": case.pool.dtype, **own}
    return canonical.attend(case.q[row, head].tolist(), k, v, **own)


def assert_canonical(case, options):
    out, lse = case.decode(return_lse=True, **options)
    for row, head in np.ndindex(lse.shape):
        expected, expected_lse = canonical_head(case, row, head, options)
        assert_same([out[row, head]], [np.array(expected or [0.0] * out.shape[2], np.float32)])
        np.testing.assert_allclose(lse[row, head], expected_lse, rtol=3e-7, atol=1e-7)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "block_size", "kv_heads", "group", "head_dim", "lengths"),
    [
        ("float32", 16, 1, 5, 16, [561, 0, 1]),
        ("float16", 5, 2, 2, 8, [47, 1030]),
        ("bfloat16", 16, 1, 9, 24, [31, 32, 70]),
    ],
)
def test_variants_follow_the_canonical_order(dtype, block_size, kv_heads, group, head_dim, lengths, options):
    case = make_case(KvLayout(1, kv_heads, head_dim, block_size, dtype), group, lengths)
    assert_canonical(case, per_head(options, kv_heads * group))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shifts_are_raised_by_rises_beyond_the_slack_alone(dtype):
    """Scores rise from tile to tile by less than the slack (8 ln 2 = 5.545), by more, by more in total, and fall.

    Each head of the group scales the rises differently. At token 512 a new chunk begins.
    """
    heights = [0, 5, 5.4, 11, 4, 11.2, 40, 45, 46, -30, 90, 90, 95.4, 95.6, 200, 0, 7, 1, 12.6, 12.6, 18]
    tokens = 32 * len(heights) - 9
    (k, v), *_ = random_kv(KvLayout(1, 1, 64), [tokens])
    k[..., 0] = np.repeat(heights, 32)[:tokens, None]
    for block_size in (16, 24):
        case = make_case(KvLayout(1, 1, 64, block_size, dtype), 4, [tokens], kv=[(k, v)])
        case.q[:, :, 0] = np.array([8.0, 4.0, 0.0, -8.0])
        assert_canonical(case, {})


@pytest.mark.parametrize("cap", [0.01, 0.625, 1.0, 9.0])
def test_capped_scores_on_both_sides_of_the_border_of_tanh(cap):
    """The lse of a sequence with one token is its score, converted from base 2, because log(1) is 0."""
    border = cap * TANH_BORDER
    scores = np.array([0.0, 1e-6 * cap, *border * np.linspace(0.9999999, 1.0000001, 9), 2 * cap, 9 * cap, 1e4])
    scores = np.concatenate([scores, -scores]).astype(np.float32)
    k = np.zeros((len(scores), 1, 1, 8), np.float32)
    k[..., 0] = scores.reshape(-1, 1, 1)
    case = make_case(KvLayout(1, 1, 8, 16, "float32"), 1, [1] * len(scores), kv=[(x, x) for x in k])
    case.q[:] = 1.0
    lse = case.decode(logits_soft_cap=cap, sm_scale=1.0, return_lse=True)[1][:, 0]
    once, cap32 = rounding_once_or_twice(cpu_info()["isa"] != "baseline"), np.float32(cap)
    scale, most = np.float32(in_base_2(1.0)), np.float32(in_base_2(float(cap32)))
    inverse = np.float32(1.0) / most
    bent = [most * np.float32(tanh(float(x * scale * inverse), once)) for x in scores]
    expected = (np.array(bent, np.float64) * np.log(2.0)).astype(np.float32)
    assert_same_bits([lse + np.float32(0.0)], [expected + np.float32(0.0)])
    np.testing.assert_allclose(lse, cap * np.tanh(scores.astype(np.float64) / cap), rtol=3e-7)


def test_positions_that_float32_cannot_hold_are_rounded_one_by_one():
    """Far more tokens than pages: all table entries are the same block. The slope gives weight to the first tokens."""
    seq_len, size = 2**24 + 6, 1024
    case = make_case(KvLayout(1, 1, 8, size, "float32"), 1, [size])
    case.q[:] = 0.0
    case.block_tables = np.repeat(case.block_tables[:, :1], -(-seq_len // size), axis=1)
    case.seq_lens[:] = seq_len
    out = case.decode(alibi_slopes=np.array([-1.0], np.float32))
    positions = (np.arange(64) - (seq_len - 1)).astype(np.float32)
    scores = (np.float32(in_base_2(-1.0)) * positions).astype(np.float64)
    weights = np.exp2(scores - scores.max())
    values = case.pool.gather(0, case.block_tables[0], 64)[1][:, 0]
    np.testing.assert_allclose(out[0, 0], weights @ values / weights.sum(), rtol=1e-5, atol=1e-6)
