"""prefill: each row has the bits that decode gives a single query token, for every method of computing rows."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from paged_cases import (
    DTYPES,
    assert_close,
    assert_same,
    assert_same_bits,
    attention_f64,
    garbage,
    make_case,
    random_kv,
    rounding_bounds,
    slots_of,
)
from test_several_queries import OPTIONS, options_of, random_masks, trees

from pagepool import KvLayout, decode, prefill
from pagepool.reference.views import views

pytestmark = pytest.mark.one_in(3)

# A sequence with at least 24 rows per KV head uses the prefill kernel, with at most 240 rows per unit. With a group of
# 3 that is 8 and 80 query tokens. The batch has prompts below and above these, decodes and empty sequences.
LENGTHS = [0, 1, 40, 130, 600, 530, 20, 77, 0, 33]
COUNTS = [30, 1, 40, 130, 100, 1, 45, 7, 0, 8]
WAYS = [*((dtype, "exact") for dtype in DTYPES), ("bfloat16", "bf16")]
WAYS += [(dtype, "bf16x2") for dtype in ("bfloat16", "float16")]
every_way = pytest.mark.parametrize(("dtype", "arithmetic"), WAYS)


def batch(layout, group, lengths=LENGTHS, counts=COUNTS, **options):
    return make_case(layout, group, lengths, **options).with_queries(counts)


def by_prefill(case, starts, **options):
    """out and lse."""
    return prefill(*case.args, starts, return_lse=True, **options)


def by_lone_decodes(case, starts, **options):
    """Decode each query token alone, in a sequence that ends with it."""
    seen = list(views(starts, case.seq_lens.tolist(), -1, None))
    lens = np.array([max(0, view.position + 1) for view in seen], np.int32)
    tables = case.block_tables[[view.sequence for view in seen]]
    return decode(case.q, case.pool, case.layer, tables, lens, return_lse=True, **options)


def by_records(case, starts, **options):
    """Return out and lse, with each query head of a group in a call of its own.

    Fewer than 24 query tokens are then computed by decode, which stores partial results per row and chunk.
    """
    group = case.q.shape[1] // case.pool.layout.num_kv_heads
    out = np.empty((*case.q.shape[:2], case.pool.layout.v_head_dim), np.float32)
    lse = np.empty(case.q.shape[:2], np.float32)
    for head in range(group):
        own = {name: x[head::group] if name in ("alibi_slopes", "sinks") else x for name, x in options.items()}
        part = replace(case, q=np.ascontiguousarray(case.q[:, head::group]))
        out[:, head::group], lse[:, head::group] = part.decode(query_start_loc=starts, return_lse=True, **own)
    return out, lse


def assert_as_lone(case, starts, **options):
    got = by_prefill(case, starts, **options)
    assert_same_bits(got, by_lone_decodes(case, starts, **options))
    return got


@every_way
@pytest.mark.parametrize("name", OPTIONS)
def test_a_mixed_batch_has_the_bits_of_lone_decodes(name, dtype, arithmetic):
    case, starts = batch(KvLayout(1, 2, 40, dtype=dtype), 3)
    options = {**options_of(case, name), "arithmetic": arithmetic}
    expected = assert_as_lone(case, starts, **options)
    for num_threads in (1, 2, 3, 8):
        assert_same_bits(by_prefill(case, starts, num_threads=num_threads, **options), expected)


@every_way
@pytest.mark.parametrize("group", range(1, 13))
def test_every_group_size(group, dtype, arithmetic):
    assert_as_lone(*batch(KvLayout(1, 2, 24, dtype=dtype), group), arithmetic=arithmetic)


@every_way
@pytest.mark.parametrize("v_head_dim", ["same", "other"])
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 88, 96, 112, 128, 256])
def test_every_head_dim(head_dim, v_head_dim, dtype, arithmetic):
    other = {8: 128, 24: 8, 64: 80, 80: 64, 88: 24, 96: 40, 112: 96, 128: 112, 256: 72}[head_dim]
    layout = KvLayout(1, 1, head_dim, dtype=dtype, v_head_dim=head_dim if v_head_dim == "same" else other)
    assert_as_lone(*batch(layout, 5, [0, 530, 40], [3, 60, 40]), arithmetic=arithmetic)


@every_way
@pytest.mark.parametrize("block_size", [1, 7, 15, 16, 48, 256])
def test_every_block_size(block_size, dtype, arithmetic):
    assert_as_lone(*batch(KvLayout(1, 2, 40, block_size, dtype), 3), arithmetic=arithmetic)


@every_way
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(72, 64), (96, 96), (576, 512)])
@pytest.mark.parametrize("block_size", [16, 5])
def test_latent_layouts(block_size, head_dim, v_head_dim, dtype, arithmetic):
    layout = KvLayout(1, 1, head_dim, block_size, dtype, v_head_dim=v_head_dim, v_in_k=True)
    assert_as_lone(*batch(layout, 16, [530, 1, 20], [4, 1, 9]), arithmetic=arithmetic)


@pytest.mark.parametrize("window_left", [0, 1, 15, 31, 40, 511, 512, 530])
@pytest.mark.parametrize("dtype", DTYPES)
def test_windows_of_every_size(dtype, window_left):
    case, starts = batch(KvLayout(1, 1, 16, dtype=dtype), 2, [1300, 90, 600], [700, 90, 1])
    assert_as_lone(case, starts, window_left=window_left)


@every_way
def test_a_prompt_in_chunks_of_any_size(dtype, arithmetic):
    """Tokens are appended chunk by chunk. Slots after them contain NaN and infinities."""
    length = 1100 if arithmetic == "exact" else 600
    layout = KvLayout(1, 1, 24, dtype=dtype)
    case, starts = batch(layout, 3, [length], [length])
    [(k, v)] = random_kv(layout, [length])
    expected = by_lone_decodes(case, starts, arithmetic=arithmetic)
    slots = slots_of(case.block_tables[0], length, layout.block_size)
    for size in (7, 64, 512, length):
        case.pool.append(0, slots, *garbage(layout, length))
        for begin in range(0, length, size):
            end = min(begin + size, length)
            case.pool.append(0, slots[begin:end], k[begin:end], v[begin:end])
            part = replace(case, q=case.q[begin:end], seq_lens=np.array([end], np.int32))
            got = by_prefill(part, np.array([0, end - begin], np.int32), arithmetic=arithmetic)
            assert_same_bits(got, [x[begin:end] for x in expected])


@every_way
def test_a_chunk_of_one_token(dtype, arithmetic):
    case, starts = batch(KvLayout(1, 1, 24, dtype=dtype), 3, [70], [70])
    expected = by_prefill(case, starts, arithmetic=arithmetic)
    for row in range(70):
        part = replace(case, q=case.q[[row]], seq_lens=np.array([row + 1], np.int32))
        got = by_prefill(part, np.array([0, 1], np.int32), arithmetic=arithmetic)
        assert_same_bits(got, [x[[row]] for x in expected])


@pytest.mark.parametrize("dtype", DTYPES)
def test_prompts_that_share_a_cached_prefix(dtype):
    case, starts = batch(KvLayout(1, 2, 40, dtype=dtype), 3, [608, 640, 700], [32, 64, 124])
    case.block_tables[1:, : 576 // 16] = case.block_tables[0, : 576 // 16]
    expected = assert_as_lone(case, starts)
    for seq in range(3):
        rows = slice(starts[seq], starts[seq + 1])
        part = replace(case.rows([seq]), q=case.q[rows])
        got = by_prefill(part, np.array([0, starts[seq + 1] - starts[seq]], np.int32))
        assert_same_bits(got, [x[rows] for x in expected])


@every_way
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", ["tree", "random", "sparse", "dense"])
def test_masks(kind, name, dtype, arithmetic):
    lengths, counts = LENGTHS[2:], COUNTS[2:]
    case, starts = batch(KvLayout(1, 1, 24, dtype=dtype), 3, lengths, counts)
    shares = {"random": 0.6, "sparse": 0.01, "dense": 0.99}
    masks = trees(counts) if kind == "tree" else random_masks(counts, lengths, share=shares[kind])
    masks[3] = None
    options = {**options_of(case, name), "arithmetic": arithmetic, "custom_mask": masks}
    expected = by_records(case, starts, **options)
    for num_threads in (1, 3):
        assert_same_bits(by_prefill(case, starts, num_threads=num_threads, **options), expected)


@every_way
def test_a_mask_that_says_causal(dtype, arithmetic):
    case, starts = batch(KvLayout(1, 1, 24, dtype=dtype), 3)
    expected = by_lone_decodes(case, starts, arithmetic=arithmetic)
    below = [np.tri(count, dtype=bool) for count in COUNTS]
    whole = [np.tri(count, length, length - count, dtype=bool) for count, length in zip(COUNTS, LENGTHS, strict=True)]
    for masks in (below, whole):
        assert_same_bits(by_prefill(case, starts, custom_mask=masks, arithmetic=arithmetic), expected)


@every_way
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_special_values_reach_the_rows_that_see_them_alone(value, dtype, arithmetic):
    """K, V or both of a single token get special values."""
    length, count = 540, 20
    case, starts = batch(KvLayout(1, 1, 24, dtype=dtype), 3, [length], [count])
    masks = random_masks([count], [length], share=0.5)
    k, v = case.pool.gather(0, case.block_tables[0], length)
    slots = slots_of(case.block_tables[0], length, 16)
    for mask in (None, masks):
        options = {"custom_mask": mask, "arithmetic": arithmetic}
        clean = by_prefill(case, starts, **options)
        seen = [set(view.seen) for view in views(starts, [length], -1, mask)]
        for token, parts in ((0, "k"), (100, "kv"), (485, "v"), (511, "k"), (512, "v"), (513, "k"), (539, "kv")):
            bad_k, bad_v = k[[token]].copy(), v[[token]].copy()
            if "k" in parts:
                bad_k[..., 3] = value
            if "v" in parts:
                bad_v[..., 20] = value
            case.pool.append(0, slots[[token]], bad_k, bad_v)
            got = by_prefill(case, starts, **options)
            assert_same(got, by_records(case, starts, **options))
            if mask is None:
                assert_same(got, by_lone_decodes(case, starts, arithmetic=arithmetic))
            blind = [row for row in range(count) if token not in seen[row]]
            assert_same_bits([x[blind] for x in got], [x[blind] for x in clean])
            case.pool.append(0, slots[[token]], k[[token]], v[[token]])


@every_way
@pytest.mark.parametrize("first", [1, 32, 40, 512, 513])
@pytest.mark.parametrize("sinks", [None, np.array([1.5, -np.inf, np.inf], np.float32)], ids=["no sinks", "sinks"])
def test_rows_whose_scores_are_all_minus_infinity(sinks, first, dtype, arithmetic):
    """All scores up to token `first` are -inf. Later rows give these tokens no weight."""
    length = 600
    layout = KvLayout(1, 1, 8, dtype=dtype)
    [(k, v)] = random_kv(layout, [length])
    k[:first] = -np.inf
    case, starts = batch(layout, 3, [length], [length], kv=[(k, v)])
    case.q[:] = np.abs(case.q)
    if arithmetic == "bf16x2":  # as one part: infinities of two parts add up to NaN
        case = replace(case, q=case.q.astype(ml_dtypes.bfloat16))
    options = {"sinks": sinks, "arithmetic": arithmetic}
    out, lse = by_prefill(case, starts, **options)
    assert_same((out, lse), by_lone_decodes(case, starts, **options))
    if sinks is None:
        assert np.isnan(out[:first]).all() and np.isneginf(lse[:first]).all() and np.isfinite(out[first:]).all()
    else:
        assert not out[:first, 0].any() and np.isnan(out[:first, 1]).all() and np.isnan(out[:, 2]).all()
        np.testing.assert_allclose(lse[:first, 0], 1.5, rtol=1e-6)


def test_special_queries_poison_their_own_rows_alone():
    case, starts = batch(KvLayout(1, 1, 24, dtype="float32"), 3, [70], [70])
    clean = by_prefill(case, starts)
    for value, (row, head) in ((np.nan, (0, 0)), (np.inf, (33, 2)), (-np.inf, (69, 1))):
        q = case.q.copy()
        q[row, head, 5] = value
        got = by_prefill(replace(case, q=q), starts)
        others = np.ones((70, 3), bool)
        others[row, head] = False
        assert_same_bits([x[others] for x in got], [x[others] for x in clean])
        assert np.isnan(got[0][row, head]).all()


@every_way
def test_every_form_of_q(dtype, arithmetic):
    """16-bit queries are widened exactly. Heads and tokens may have any strides and odd addresses."""
    case, starts = batch(KvLayout(1, 2, 24, dtype=dtype), 3, [1, 40, 130, 20], [1, 40, 50, 7])
    for narrow in (np.float16, ml_dtypes.bfloat16):
        q = case.q.astype(narrow)
        expected = by_lone_decodes(replace(case, q=q.astype(np.float32)), starts, arithmetic=arithmetic)
        wide = np.full((2 * len(q), 9, 40), np.nan, narrow)
        wide[::2, 2:8, 8:32] = q
        unaligned = np.zeros(q.nbytes + 1, np.uint8)[1:].view(narrow).reshape(q.shape)
        unaligned[:] = q
        forms = [q, wide[::2, 2:8, 8:32], np.ascontiguousarray(q[::-1, ::-1])[::-1, ::-1], unaligned]
        forms += [q.view(np.uint16)] * (narrow is ml_dtypes.bfloat16)
        for form in forms:
            assert_same_bits(by_prefill(replace(case, q=form), starts, arithmetic=arithmetic), expected)
    wide = np.full((2 * len(case.q), 9, 40), np.nan, np.float32)
    wide[::2, 2:8, 8:32] = case.q
    expected = by_lone_decodes(case, starts, arithmetic=arithmetic)
    for form in (wide[::2, 2:8, 8:32], np.ascontiguousarray(case.q[::-1, ::-1])[::-1, ::-1]):
        assert_same_bits(by_prefill(replace(case, q=form), starts, arithmetic=arithmetic), expected)


def test_one_query_token_for_all_rows():
    """An axis with stride 0."""
    case, starts = batch(KvLayout(1, 1, 24), 3, [70], [70])
    case.q[:] = case.q[5]
    expected = by_lone_decodes(case, starts)
    assert_same_bits(by_prefill(replace(case, q=np.broadcast_to(case.q[:1], case.q.shape)), starts), expected)


def results_of_any_size(head_dim):
    """Return a batch with results of every size and both signs.

    Zeros, subnormals, ordinary numbers, overflows of float16 and of bfloat16, infinities and NaN; many are midpoints
    of two 16-bit numbers.
    """
    layout = KvLayout(1, 1, head_dim, dtype="float32")
    rng = np.random.default_rng(3)
    k, v = np.zeros((300, 1, head_dim), np.float32), np.empty((300, 1, head_dim), np.float32)
    exponents = rng.integers(-149, 128, v.shape)
    exponents[:150] = rng.integers(-26, 17, v[:150].shape)
    v[:] = np.ldexp(rng.choice([-1, 1], v.shape) * (1 + rng.integers(0, 1 << 12, v.shape) / (1 << 12)), exponents)
    v[280:, 0, 5] = np.resize(np.array([np.inf, -np.inf, np.nan], np.float32), 20)
    # The scores of all other tokens are at least 3000 lower, so the query token's own gets all of the weight.
    case, starts = batch(layout, 3, [300], [300], kv=[(k, v)])
    return case, starts, {"alibi_slopes": np.array([3000.0, 3000.0, 0.0], np.float32)}


@pytest.mark.parametrize("head_dim", [8, 24, 64, 72])
@pytest.mark.parametrize("narrow", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_results_of_16_bit_are_rounded_to_nearest_even(narrow, head_dim):
    case, starts, options = results_of_any_size(head_dim)
    out, lse = by_prefill(case, starts, **options)
    with np.errstate(over="ignore"):
        expected = np.where(np.isnan(out), np.float32(np.nan), out).astype(narrow)
    assert len(np.unique(expected.view(np.uint16))) > 500
    whole = np.full((len(out) + 2, *out.shape[1:]), 7, narrow)
    calls = [lambda to: by_prefill(case, starts, out=to, **options)]
    calls += [lambda to: case.decode(query_start_loc=starts, out=to, return_lse=True, **options)]
    calls += [lambda to: by_lone_decodes(case, starts, out=to, **options)]
    for call in calls:
        for bits in (False, True):
            if bits and narrow is np.float16:
                continue
            whole[:] = 7
            to = whole.view(np.uint16)[1:-1] if bits else whole[1:-1]
            got, got_lse = call(to)
            assert got is to
            np.testing.assert_array_equal(np.isnan(whole[1:-1]), np.isnan(expected))
            numbers = ~np.isnan(expected)
            np.testing.assert_array_equal(whole[1:-1].view(np.uint16)[numbers], expected.view(np.uint16)[numbers])
            assert_same_bits([got_lse], [lse])
            assert (whole[[0, -1]] == 7).all()


@every_way
@pytest.mark.parametrize("narrow", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_a_mixed_batch_in_16_bit(narrow, dtype, arithmetic):
    case, starts = batch(KvLayout(1, 2, 40, dtype=dtype), 3)
    out, lse = by_prefill(case, starts, arithmetic=arithmetic)
    to = np.full(out.shape, np.nan, narrow)
    _, got_lse = by_prefill(case, starts, arithmetic=arithmetic, out=to)
    np.testing.assert_array_equal(to.view(np.uint16), out.astype(narrow).view(np.uint16))
    assert_same_bits([got_lse], [lse])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_against_float64(dtype):
    case, starts = batch(KvLayout(1, 2, 128, dtype=dtype), 3, [700, 90], [200, 90])
    assert_close(by_prefill(case, starts), attention_f64(case, query_start_loc=starts))


def test_the_error_of_arithmetic_bf16_is_within_its_bound():
    case, starts = batch(KvLayout(1, 2, 128, dtype="bfloat16"), 3, [700, 90], [200, 90])
    out, lse = by_prefill(case, starts, arithmetic="bf16")
    right, right_lse = attention_f64(case, query_start_loc=starts)
    bound, lse_bound = rounding_bounds(case, query_start_loc=starts)
    assert (np.abs(out - right) <= bound + 1e-5 * np.abs(right).max(axis=2, keepdims=True)).all()
    assert (np.abs(lse - right_lse) <= lse_bound + 1e-5 * np.maximum(1, np.abs(right_lse))).all()


@every_way
def test_shifts_are_raised_by_rises_beyond_the_slack_alone(dtype, arithmetic):
    """Scores rise from tile to tile by less than the slack, by more, and fall, differently for each head."""
    heights = [0, 5, 5.4, 11, 4, 11.2, 40, 45, 46, -30, 90, 90, 95.4, 95.6, 200, 0, 7, 1, 12.6, 12.6, 18]
    tokens = 32 * len(heights) - 9
    layout = KvLayout(1, 1, 64, dtype=dtype)
    [(k, v)] = random_kv(layout, [tokens])
    k[..., 0] = np.repeat(heights, 32)[:tokens, None]
    case, starts = batch(layout, 4, [tokens], [tokens], kv=[(k, v)])
    case.q[:, :, 0] = np.array([8.0, 4.0, 0.0, -8.0])
    case.q[::3, :, 0] *= -1
    assert_as_lone(case, starts, arithmetic=arithmetic)


def test_layers_of_a_pool():
    layout = KvLayout(3, 2, 16, dtype="float32")
    for layer in range(3):
        case, starts = batch(layout, 2, [90, 20], [90, 20], layer=layer)
        assert np.isfinite(assert_as_lone(case, starts)[0]).all()


def test_a_second_run_gives_the_same_bits():
    case, starts = batch(KvLayout(1, 2, 64), 3)
    first = by_prefill(case, starts, num_threads=3)
    for _ in range(10):
        assert_same_bits(by_prefill(case, starts, num_threads=3), first)


def test_the_batch_and_its_order_do_not_change_the_bits():
    case, starts = batch(KvLayout(1, 2, 40), 3)
    out, lse = by_prefill(case, starts)
    for order in ([9, 4, 0, 3, 3, 5], [4], list(range(len(COUNTS)))[::-1]):
        rows = np.concatenate([np.arange(starts[seq], starts[seq + 1]) for seq in order])
        counts = [COUNTS[seq] for seq in order]
        part = replace(case.rows(order), q=case.q[rows])
        got = by_prefill(part, np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
        assert_same_bits(got, (out[rows], lse[rows]))


def test_no_query_token_and_no_sequence():
    case, starts = batch(KvLayout(1, 1, 16), 2, [50, 0], [0, 0])
    assert by_prefill(case, starts)[0].shape == (0, 2, 16)
    case, starts = batch(KvLayout(1, 1, 16), 2, [], [])
    assert by_prefill(case, starts)[0].shape == (0, 2, 16)
    case, starts = batch(KvLayout(1, 1, 16), 12, [0, 0], [30, 2])
    out, lse = by_prefill(case, starts)
    assert not out.any() and np.isneginf(lse).all()
