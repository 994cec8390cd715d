"""Several query tokens per sequence: causal, trees and any mask; each row has the bits of a single query token."""

from dataclasses import replace

import canonical_answers as canonical
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paged_cases import DTYPES, assert_close, assert_same_bits, attention_f64, garbage, make_case, slots_of
from refusals import refuses
from share import examples
from test_decode_bits import VARIANTS, per_head
from test_decode_variants import variants

from pagepool import InvalidBlock, KvLayout, cpu_info, decode, reference
from pagepool.reference.views import views

LENGTHS = [0, 1, 15, 33, 512, 530, 1100]
COUNTS = [1, 1, 7, 33, 4, 0, 20]
# dtype, kv heads, group, head_dim, v_head_dim, V in K, block size
SHAPES = [
    ("float32", 2, 4, 40, 40, False, 16),
    ("float16", 1, 7, 64, 64, False, 32),
    ("bfloat16", 2, 1, 64, 64, False, 16),
    ("bfloat16", 1, 16, 72, 64, True, 16),
    ("float32", 2, 3, 24, 16, False, 5),
]


@pytest.fixture(params=SHAPES, ids=str)
def case(request):
    dtype, kv_heads, group, head_dim, v_head_dim, v_in_k, block_size = request.param
    layout = KvLayout(1, kv_heads, head_dim, block_size, dtype, v_head_dim=v_head_dim, v_in_k=v_in_k)
    return make_case(layout, group, LENGTHS)


def lone(case, row, view):
    """Decode the query token alone, in a sequence that ends with it."""
    length = max(0, view.position + 1)
    tables = case.block_tables[[view.sequence]]
    return replace(case, q=case.q[[row]], block_tables=tables, seq_lens=np.array([length], np.int32))


def random_masks(counts, lengths, seed=0, share=0.7):
    rng = np.random.default_rng(seed)
    return [rng.random((count, length)) < share for count, length in zip(counts, lengths, strict=True)]


def trees(counts, seed=0):
    """Each token attends to itself and its ancestors."""
    rng = np.random.default_rng(seed)
    masks = []
    for count in counts:
        mask = np.eye(count, dtype=bool)
        for node in range(1, count):
            mask[node] |= mask[rng.integers(node)]
        masks.append(mask)
    return masks


def options_of(case, name):
    slopes, sinks = variants(case.q.shape[1])
    return {
        "plain": {},
        "window": {"window_left": 20},
        "cap": {"logits_soft_cap": 5.0},
        "alibi": {"alibi_slopes": slopes},
        "sinks": {"sinks": sinks},
        "all": {"window_left": 519, "logits_soft_cap": 7.0, "alibi_slopes": slopes, "sinks": sinks},
    }[name]


OPTIONS = ["plain", "window", "cap", "alibi", "sinks", "all"]


@pytest.mark.parametrize("name", OPTIONS)
def test_causal_rows_are_exact_and_have_the_bits_of_a_lone_query(case, name):
    case, starts = case.with_queries(COUNTS)
    options = {**options_of(case, name), "return_lse": True}
    out, lse = case.decode(query_start_loc=starts, **options)
    del options["return_lse"]
    assert_close((out, lse), attention_f64(case, query_start_loc=starts, **options))
    for row, view in enumerate(views(starts, LENGTHS, -1, None)):
        assert_same_bits(lone(case, row, view).decode(return_lse=True, **options), (out[[row]], lse[[row]]))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", ["tree", "random", "sparse"])
def test_masked_rows_are_exact(case, kind, name):
    case, starts = case.with_queries(COUNTS)
    masks = {
        "tree": trees(COUNTS),
        "random": random_masks(COUNTS, LENGTHS),
        "sparse": random_masks(COUNTS, LENGTHS, share=0.01),
    }[kind]
    options = {**options_of(case, name), "query_start_loc": starts, "custom_mask": masks}
    assert_close(case.decode(return_lse=True, **options), attention_f64(case, **options))


def test_a_mask_that_says_causal_has_the_bits_of_causal(case):
    case, starts = case.with_queries(COUNTS)
    expected = case.decode(query_start_loc=starts, window_left=530, return_lse=True)
    below = [np.tri(count, dtype=bool) for count in COUNTS]
    whole = [np.tri(count, length, length - count, dtype=bool) for count, length in zip(COUNTS, LENGTHS, strict=True)]
    for mask in (below, whole, [None] * len(COUNTS)):
        got = case.decode(query_start_loc=starts, window_left=530, custom_mask=mask, return_lse=True)
        assert_same_bits(got, expected)


def test_every_form_of_a_mask_says_the_same(case):
    case, starts = case.with_queries(COUNTS)
    full = random_masks(COUNTS, LENGTHS)
    expected = case.decode(query_start_loc=starts, custom_mask=full, return_lse=True)
    flat = np.concatenate([mask.ravel() for mask in full])
    bits = np.concatenate([np.packbits(mask, bitorder="little") for mask in full])
    strided = [np.asfortranarray(mask) for mask in full]
    for form in (flat, bits, strided, tuple(full), np.repeat(bits, 2)[::2]):
        assert_same_bits(case.decode(query_start_loc=starts, custom_mask=form, return_lse=True), expected)
    tree = trees(COUNTS)
    expected = case.decode(query_start_loc=starts, custom_mask=tree, return_lse=True)
    flat = np.concatenate([mask.ravel() for mask in tree])
    assert_same_bits(case.decode(query_start_loc=starts, custom_mask=flat, return_lse=True), expected)


def test_one_tree_for_all_sequences(case):
    rows = np.array([2, 3, 4, 6])
    case, starts = case.rows(rows).with_queries([5] * 4)
    [tree] = trees([5])
    expected = case.decode(query_start_loc=starts, custom_mask=[tree] * 4, return_lse=True)
    for form in (tree, np.stack([tree] * 4)):
        assert_same_bits(case.decode(query_start_loc=starts, custom_mask=form, return_lse=True), expected)
    assert_close(expected, attention_f64(case, query_start_loc=starts, custom_mask=tree))


def test_a_mask_for_a_lone_query(case):
    masks = random_masks([1] * len(LENGTHS), LENGTHS)
    got = case.decode(custom_mask=masks, return_lse=True)
    assert_close(got, attention_f64(case, custom_mask=masks))


def test_neither_threads_nor_other_queries_change_a_row(case):
    case, starts = case.with_queries(COUNTS)
    tree = trees(COUNTS)
    for masks in (None, tree):
        options = {"query_start_loc": starts, "custom_mask": masks, "return_lse": True}
        whole = case.decode(num_threads=1, **options)
        for num_threads in range(2, 9):
            assert_same_bits(case.decode(num_threads=num_threads, **options), whole)
        for seq in range(len(COUNTS)):
            part = replace(case.rows([seq]), q=case.q[starts[seq] : starts[seq + 1]])
            options["query_start_loc"] = np.array([0, COUNTS[seq]], np.int32)
            options["custom_mask"] = masks and [masks[seq]]
            for num_threads in (1, 5):
                got = part.decode(num_threads=num_threads, **options)
                assert_same_bits(got, [x[starts[seq] : starts[seq + 1]] for x in whole])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 5])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_masked_tokens_do_not_affect_a_row(value, block_size, dtype):
    """Each token in turn gets special values; rows that do not attend to it keep their bits.

    A masked token has weight 0, but 0 * NaN is NaN: its V must not be multiplied at all.
    """
    length, count = 70, 6
    case = make_case(KvLayout(1, 1, 24, block_size, dtype), 3, [length])
    case, starts = case.with_queries([count])
    masks = random_masks([count], [length], share=0.5)
    options = {"query_start_loc": starts, "return_lse": True}
    for mask in (None, masks):
        clean = case.decode(custom_mask=mask, **options)
        seen = [set(view.seen) for view in views(starts, [length], -1, mask)]
        k, v = case.pool.gather(0, case.block_tables[0], length)
        for token in (0, 13, 31, 32, 63, 66, 69):
            slot = slots_of(case.block_tables[0], length, block_size)[[token]]
            case.pool.append(0, slot, np.full_like(k[[0]], value), np.full_like(v[[0]], value))
            got = case.decode(custom_mask=mask, **options)
            blind = [row for row in range(count) if token not in seen[row]]
            assert_same_bits([x[blind] for x in got], [x[blind] for x in clean])
            assert all(np.isnan(got[0][row]).any() for row in range(count) if token in seen[row])
            case.pool.append(0, slot, k[[token]], v[[token]])


def test_a_row_that_sees_nothing_gives_zeros_and_minus_infinity(case):
    counts = [3, 2, 4, 1, 5, 0, 2]
    case, starts = case.with_queries(counts)
    sinks = variants(case.q.shape[1])[1]
    blind = [np.ones((count, length), bool) for count, length in zip(counts, LENGTHS, strict=True)]
    for mask in blind:
        mask[::2] = False
    out, lse = case.decode(query_start_loc=starts, custom_mask=blind, sinks=sinks, return_lse=True)
    empty = np.array([not view.seen for view in views(starts, LENGTHS, -1, blind)])
    assert empty.sum() > 5
    assert not out[empty].any() and np.isneginf(lse[empty]).all()
    assert out[~empty].any(axis=(1, 2)).all() and np.isfinite(lse[~empty]).all()


def test_more_queries_than_tokens_stand_before_the_sequence():
    case, starts = make_case(KvLayout(1, 1, 16), 2, [3]).with_queries([5])
    out, lse = case.decode(query_start_loc=starts, return_lse=True)
    assert not out[:2].any() and np.isneginf(lse[:2]).all()
    assert_close((out, lse), attention_f64(case, query_start_loc=starts))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["causal", "tree", "random"])
@pytest.mark.parametrize("options", [VARIANTS[0], VARIANTS[4], *VARIANTS[-4:]], ids=str)
@pytest.mark.parametrize(
    ("dtype", "block_size", "group", "head_dim", "v_head_dim"),
    [("float32", 16, 3, 16, 16), ("bfloat16", 5, 1, 24, 8), ("float16", 16, 9, 8, 24)],
)
def test_rows_follow_the_canonical_order(dtype, block_size, group, head_dim, v_head_dim, options, kind):
    lengths, counts = [40, 520], [4, 3]
    layout = KvLayout(1, 1, head_dim, block_size, dtype, v_head_dim=v_head_dim)
    case, starts = make_case(layout, group, lengths).with_queries(counts)
    masks = {"causal": None, "tree": trees(counts), "random": random_masks(counts, lengths)}[kind]
    whole = reference.views.masks_of(masks, counts, lengths)
    options = per_head(options, group)
    got = case.decode(query_start_loc=starts, custom_mask=masks, return_lse=True, **options)
    fused = cpu_info()["isa"] != "baseline"
    names = {"alibi_slopes": "alibi_slope", "sinks": "sink"}
    for row, view in enumerate(views(starts, lengths, -1, masks)):
        kv = case.pool.gather(0, case.block_tables[view.sequence], lengths[view.sequence])
        k, v = (x[:, 0].tolist() for x in kv)
        mask = whole[view.sequence]
        for head in range(group):
            own = {names.get(n, n): float(x[head]) if n in names else x for n, x in options.items()}
            out, lse = canonical.attend(
                case.q[row, head].tolist(),
                k,
                v,
                1 / np.sqrt(head_dim),
                position=view.position,
                mask=mask and mask[row - starts[view.sequence]],
                fused=fused,
                **own,
            )
            assert_same_bits([got[0][row, head]], [np.array(out, np.float32)])
            np.testing.assert_allclose(got[1][row, head], lse, rtol=3e-7, atol=1e-7)


@examples(60)
@given(st.data())
def test_the_reference_says_the_same_of_any_batch(data):
    block_size = data.draw(st.sampled_from([1, 3, 16, 32]))
    lengths = data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=4))
    counts = [data.draw(st.integers(0, 5)) for _ in lengths]
    v_in_k = data.draw(st.booleans())
    layout = KvLayout(1, 2, 16, block_size, data.draw(st.sampled_from(DTYPES)), v_head_dim=8, v_in_k=v_in_k)
    case = make_case(layout, data.draw(st.integers(1, 5)), lengths, seed=data.draw(st.integers(0, 99)))
    case, starts = case.with_queries(counts)
    masks = data.draw(st.sampled_from([None, trees(counts), random_masks(counts, lengths, share=0.3)]))
    options = {**options_of(case, data.draw(st.sampled_from(OPTIONS))), "query_start_loc": starts, "custom_mask": masks}
    options |= {"return_lse": True}
    got = case.decode(num_threads=data.draw(st.integers(1, 4)), **options)
    assert_close(got, reference.decode(*case.args, **options))


def test_pages_that_no_query_sees_are_not_read(case):
    case, starts = case.with_queries(COUNTS)
    expected = case.decode(query_start_loc=starts, window_left=30, return_lse=True)
    size, tables = case.pool.layout.block_size, case.block_tables.copy()
    for row, (length, count) in enumerate(zip(LENGTHS, COUNTS, strict=True)):
        tables[row, : max(0, length - count - 30) // size] = -7
    blind = replace(case, block_tables=tables)
    assert_same_bits(blind.decode(query_start_loc=starts, window_left=30, return_lse=True), expected)
    tables[6, (LENGTHS[6] - COUNTS[6] - 30) // size] = case.num_blocks
    with refuses(InvalidBlock, case.num_blocks):
        blind.decode(query_start_loc=starts, window_left=30)


class Shown:
    """An array that calls `act` when it is read."""

    def __init__(self, array, act):
        self.array, self.act = array, act

    def __dlpack__(self, **options):
        self.act()
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_counts_changed_after_the_check_cause_no_access_outside_of_q_and_out():
    case, starts = make_case(KvLayout(1, 1, 16), 2, [64, 20]).with_queries([2, 3])
    expected = case.decode(query_start_loc=starts, sinks=np.ones(2, np.float32))
    memory = np.full((9, 2, 16), 12345.0, np.float32)
    changing = starts.copy()
    sinks = Shown(np.ones(2, np.float32), lambda: changing.__setitem__(2, 9))
    case.decode(query_start_loc=changing, sinks=sinks, out=memory[:5])
    assert changing[2] == 9
    assert_same_bits([memory[:5]], [expected])
    assert (memory[5:] == 12345.0).all()


def test_ids_of_blocks_that_only_a_mask_hides_are_checked():
    case, starts = make_case(KvLayout(1, 1, 16), 2, [64]).with_queries([2])
    case.block_tables[0, 1] = case.num_blocks
    mask = np.ones((2, 64), bool)
    mask[:, :32] = False
    with refuses(InvalidBlock, "block_tables[0, 1]"):
        case.decode(query_start_loc=starts, custom_mask=[mask])
    case.decode(query_start_loc=starts, custom_mask=[mask], window_left=30)


def test_a_chunk_of_a_prompt_is_several_queries():
    """200 query tokens; most of them do not attend to the last chunk."""
    case, starts = make_case(KvLayout(1, 1, 16, dtype="float32"), 2, [600]).with_queries([200])
    assert_close(case.decode(query_start_loc=starts, return_lse=True), attention_f64(case, query_start_loc=starts))


def test_no_query_at_all():
    case, starts = make_case(KvLayout(1, 1, 16), 2, [5, 0]).with_queries([0, 0])
    out, lse = case.decode(query_start_loc=starts, return_lse=True)
    assert (out.shape, lse.shape) == ((0, 2, 16), (0, 2))


STARTS = np.array([0, 2, 5], np.int32)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"query_start_loc": STARTS.astype(np.uint32)}, TypeError, ("int32", "int64")),
        ({"query_start_loc": STARTS[:2]}, ValueError, (3, 2)),
        ({"query_start_loc": np.array([0, 2, 4], np.int32)}, ValueError, (5, "q", 0, 4)),
        ({"query_start_loc": np.array([1, 2, 5], np.int32)}, ValueError, (1, 5)),
        ({"query_start_loc": np.array([0, 6, 5], np.int32)}, ValueError, (6, 5, 2)),
        ({"query_start_loc": None}, ValueError, ("q", 5, "block_tables", 2)),
        ({"custom_mask": np.ones(28, np.int8)}, TypeError, ("bool", "uint8", "int8")),
        ({"custom_mask": np.ones((2, 3, 3), np.uint8)}, TypeError, ("uint8",)),
        ({"custom_mask": np.ones(28, bool)}, ValueError, (28, 140, 13)),
        ({"custom_mask": np.ones(3, np.uint8)}, ValueError, (3, "bytes", 18)),
        ({"custom_mask": [None]}, ValueError, ("masks", 1, 2)),
        ({"custom_mask": [None, np.ones((2, 3), bool)]}, ValueError, ("sequence", 1, 3, (2, 3))),
        ({"custom_mask": [np.ones((2, 41), bool), None]}, ValueError, (40, (2, 41))),
        ({"custom_mask": [None, np.ones((3, 3))]}, TypeError, ("sequence", 1, "bool", "float64")),
        ({"custom_mask": np.ones((3, 3), bool)}, ValueError, ("sequence", 0, 2)),
        ({"seq_lens": np.array([40, -2], np.int32), "custom_mask": [None, None]}, ValueError, (-2, 0)),
    ],
)
def test_bad_input_is_refused_and_nothing_written(changed, error, words):
    case, _ = make_case(KvLayout(1, 1, 16), 2, [40, 20]).with_queries([2, 3])
    out = np.full(case.q.shape, 12345.0, np.float32)
    options = {"query_start_loc": STARTS, "seq_lens": case.seq_lens, **changed}
    lens = options.pop("seq_lens")
    with refuses(error, *words):
        decode(case.q, case.pool, 0, case.block_tables, lens, out=out, **options)
    assert (out == 12345.0).all()


def test_an_out_that_overlaps_query_start_loc():
    case, _ = make_case(KvLayout(1, 1, 8), 1, [4]).with_queries([2])
    memory = np.zeros(40, np.float32)
    starts = memory.view(np.int32)[4:6]
    starts[1] = 2
    with refuses(ValueError, "out", "query_start_loc"):
        case.decode(query_start_loc=starts, out=memory[:16].reshape(2, 1, 8))


def test_tokens_past_the_length_do_not_matter_to_a_mask():
    case, starts = make_case(KvLayout(1, 1, 16, 16, "float32"), 2, [20]).with_queries([3])
    masks = random_masks([3], [20])
    expected = case.decode(query_start_loc=starts, custom_mask=masks)
    behind = np.arange(20, 32)
    slots = case.block_tables[0, behind // 16].astype(np.int64) * 16 + behind % 16
    case.pool.append(0, slots, *garbage(case.pool.layout, len(slots)))
    assert_same_bits([case.decode(query_start_loc=starts, custom_mask=masks)], [expected])
