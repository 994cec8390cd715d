"""decode and prefill with a BlockTables in place of the three arrays: the same bits; refuses tables of other pools."""

import numpy as np
import pytest

import pagepool
from pagepool import BlockTables, KvCachePool, KvLayout, PagedSeqState, decode, prefill, reference

LAYOUT = KvLayout(1, 1, 8, dtype="float32")


def filled(package=pagepool, lengths=(5, 0, 20), num_tokens=None):
    """Return a pool, sequences of the given lengths, and tables filled with them."""
    random = np.random.default_rng(0)
    pool = package.KvCachePool.from_layout(LAYOUT, 8)
    states = [package.PagedSeqState(pool.allocator) for _ in lengths]
    for state, length in zip(states, lengths, strict=True):
        k, v = random.standard_normal((2, length, 1, 8), np.float32)
        pool.append(0, state.append(length), k, v)
    return pool, states, package.BlockTables(4, 4).fill(states, num_tokens)


def queries(tables):
    return np.random.default_rng(1).standard_normal((len(tables.slot_mapping), 2, 8), np.float32)


@pytest.mark.parametrize("num_tokens", [None, [2, 0, 7]])
@pytest.mark.parametrize("call", [decode, prefill])
def test_filled_tables_give_the_bits_of_the_arrays(call, num_tokens):
    pool, _, tables = filled(num_tokens=num_tokens)
    q = queries(tables)
    arrays = tables.block_tables, tables.seq_lens
    out, lse = call(q, pool, 0, tables, return_lse=True)
    expected, expected_lse = call(q, pool, 0, *arrays, query_start_loc=tables.query_start_loc, return_lse=True)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)


@pytest.mark.parametrize("package", [pagepool, reference], ids=["compiled", "reference"])
def test_the_reference_takes_them_too(package):
    pool, _, tables = filled(package)
    q = queries(tables)
    out = reference.decode(q, pool, 0, tables)
    arrays = tables.block_tables, tables.seq_lens
    np.testing.assert_array_equal(out, reference.decode(q, pool, 0, *arrays, query_start_loc=tables.query_start_loc))


@pytest.mark.parametrize("call", [decode, prefill, reference.decode], ids=["decode", "prefill", "reference"])
def test_tables_of_another_allocator_are_refused(call):
    package = reference if call is reference.decode else pagepool
    _, _, tables = filled(package)
    other, states, _ = filled(package)
    q, out = queries(tables), np.full((2, 2, 8), 7, np.float32)
    with pytest.raises(ValueError, match=r"block_tables.*allocator"):
        call(q, other, 0, tables, out=out)
    assert (out == 7).all()
    call(q, other, 0, tables.fill(states), out=out)
    assert (out != 7).all()
    assert call(q[:0], other, 0, tables.fill([])).shape == (0, 2, 8)


def test_pools_that_share_an_allocator_share_tables():
    pool, _, tables = filled()
    second = KvCachePool.from_layout(LAYOUT, 8, pool.allocator)
    assert not decode(queries(tables), second, 0, tables).any()


@pytest.mark.parametrize("name", ["seq_lens", "query_start_loc"])
@pytest.mark.parametrize("call", [decode, prefill, reference.decode], ids=["decode", "prefill", "reference"])
def test_an_array_next_to_filled_tables_is_refused(call, name):
    pool, _, tables = filled(reference if call is reference.decode else pagepool)
    with pytest.raises(TypeError, match=name):
        call(queries(tables), pool, 0, tables, **{name: getattr(tables, name)})


@pytest.mark.parametrize("call, name", [(decode, "seq_lens"), (prefill, "query_start_loc")])
def test_arrays_come_together(call, name):
    pool, _, tables = filled()
    with pytest.raises(TypeError, match=name):
        call(queries(tables), pool, 0, tables.block_tables)


def test_out_must_not_overlap_the_tables():
    pool = KvCachePool.from_layout(LAYOUT, 8)
    state = PagedSeqState(pool.allocator)
    pool.append(0, state.append(1), *np.ones((2, 1, 1, 8), np.float32))
    tables = BlockTables(1, 8).fill([state])
    out = tables.block_tables.view(np.float32).reshape(1, 1, 8)
    with pytest.raises(ValueError, match="out overlaps block_tables"):
        decode(np.ones((1, 1, 8), np.float32), pool, 0, tables, out=out)
