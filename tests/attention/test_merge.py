"""merge_state and merge_states: merged parts equal attention over the whole sequence; empty parts have no effect."""

from itertools import pairwise

import numpy as np
import pytest
from paged_cases import assert_close, assert_same_bits, make_case
from refusals import refuses

from pagepool import KvLayout, decode, merge_states
from pagepool.attention.merge import merge_state

SIZE = 16


def parts_of(case, borders):
    """Decode over [borders[i], borders[i + 1]) of each sequence, in blocks; return (v, s) with an axis of states."""
    results = []
    for begin, end in pairwise(borders):
        lens = np.clip(case.seq_lens - begin * SIZE, 0, (end - begin) * SIZE).astype(np.int32)
        tables = np.ascontiguousarray(case.block_tables[:, begin:end])
        results.append(decode(case.q, case.pool, 0, tables, lens, return_lse=True))
    return np.stack([v for v, _ in results], axis=1), np.stack([s for _, s in results], axis=1)


@pytest.fixture(scope="module")
def case():
    return make_case(KvLayout(1, 2, 72, SIZE, "bfloat16"), 3, [1, 16, 17, 300, 1000])


@pytest.mark.parametrize("borders", [[0, 63], [0, 1, 63], [0, 5, 6, 40, 63], [0, 0, 63]])
def test_parts_put_together_are_the_whole(case, borders):
    merged = merge_states(*parts_of(case, borders))
    whole = case.decode(return_lse=True)
    assert_close(merged, [part.astype(np.float64) for part in whole])


def test_two_states_are_the_list_of_two(case):
    v, s = parts_of(case, [0, 7, 63])
    assert_same_bits(merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1]), merge_states(v, s))


def test_one_state_is_itself():
    rng = np.random.default_rng(0)
    v, s = rng.standard_normal((3, 1, 2, 40), np.float32), rng.standard_normal((3, 1, 2), np.float32)
    out, lse = merge_states(v, s)
    assert_same_bits([out, lse], [v[:, 0], s[:, 0]])


def test_a_row_does_not_depend_on_the_others():
    rng = np.random.default_rng(1)
    v, s = rng.standard_normal((6, 4, 3, 24), np.float32), 20 * rng.standard_normal((6, 4, 3)).astype(np.float32)
    out, lse = merge_states(v, s)
    for row in range(6):
        assert_same_bits(merge_states(v[row : row + 1], s[row : row + 1]), [out[row : row + 1], lse[row : row + 1]])


@pytest.mark.parametrize("head_dim", [1, 7, 16, 33, 128])
def test_against_float64(head_dim):
    rng = np.random.default_rng(head_dim)
    v = rng.standard_normal((5, 6, 2, head_dim), np.float32)
    s = (30 * rng.standard_normal((5, 6, 2))).astype(np.float32)
    s[0, 2] = -np.inf
    weights = np.exp(s.astype(np.float64) - s.max(axis=1, keepdims=True))
    right = (weights[..., None] * v).sum(axis=1) / weights.sum(axis=1)[..., None]
    assert_close(merge_states(v, s), (right, s.max(axis=1) + np.log(weights.sum(axis=1))))


def test_parts_without_tokens_have_no_effect_for_any_contents():
    v = np.full((1, 3, 1, 8), np.nan, np.float32)
    v[:, 1] = 4.0
    s = np.array([[[-np.inf], [2.0], [-np.inf]]], np.float32)
    out, lse = merge_states(v, s)
    assert (out == 4.0).all()
    assert lse[0, 0] == np.float32(2.0)


@pytest.mark.parametrize("num_states", [0, 1, 3])
def test_nothing_at_all_is_zeros(num_states):
    v = np.full((2, num_states, 1, 8), np.nan, np.float32)
    out, lse = merge_states(v, np.full((2, num_states, 1), -np.inf, np.float32))
    assert (out == 0.0).all()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("sums", [(np.nan, 0.0), (0.0, np.nan), (np.inf, 0.0), (np.inf, np.inf), (-np.inf, np.nan)])
def test_a_sum_of_nan_or_infinity_makes_its_row_nan(sums):
    v = np.ones((1, 2, 1, 8), np.float32)
    out, lse = merge_states(v, np.array(sums, np.float32).reshape(1, 2, 1))
    assert np.isnan(out).all()
    assert np.isnan(lse).all()


def test_empty_shapes():
    for shape in [(0, 2, 3, 8), (2, 2, 0, 8), (2, 2, 3, 0)]:
        out, lse = merge_states(np.zeros(shape, np.float32), np.zeros(shape[:3], np.float32))
        assert out.shape == (shape[0], *shape[2:])
        assert lse.shape == (shape[0], shape[2])


def test_bad_input_is_refused():
    v, s = np.zeros((2, 2, 1, 8), np.float32), np.zeros((2, 2, 1), np.float32)
    with refuses(TypeError, "v", "float32", "float64"):
        merge_states(v.astype(float), s)
    with refuses(ValueError, "s", 3, 2):
        merge_states(v, s[0])
    with refuses(ValueError, "last", "axis"):
        merge_states(v, s[:, :1])
    with refuses(ValueError, "shapes"):
        merge_state(v[:, 0], s[:, 0], v[:1, 1], s[:, 1])


def test_more_dims_than_are_merged_are_refused_and_no_array_comes_back_unwritten():
    v = np.broadcast_to(np.float32(0), (1, 1, 1, (1 << 24) + 1))
    with refuses(ValueError, "v", "head_dim", 16777217, 16777216):
        merge_states(v, np.zeros((1, 1, 1), np.float32))


def test_sums_of_another_shape_than_the_values_are_named():
    v, s = np.zeros((2, 4, 8), np.float32), np.zeros((2, 3), np.float32)
    with refuses(ValueError, "s_a", "v_a", (2, 4), (2, 3)):
        merge_state(v, s, v, s)
