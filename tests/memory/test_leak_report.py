"""Closing a pool reports blocks in use by label, number and allocation site. A pool without leaks does not warn."""

import gc
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import pagepool
from pagepool import (
    BlockAllocator,
    HybridSequence,
    KvCachePool,
    KvGroup,
    KvLayout,
    PagedSeqState,
    PrefixCache,
    SequencePool,
    SsmStatePool,
    StateLayout,
)

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
STATES = StateLayout(layers=[{"h": ((2,), "float32")}])


def sequence(allocator, tokens, label):
    state = PagedSeqState(allocator, 4, label=label)
    state.append(tokens)
    return state


def messages(found):
    return [str(warning.message) for warning in found]


def test_closing_a_pool_names_the_owners_of_blocks():
    pool = KvCachePool.from_layout(LAYOUT, 16)
    KvCachePool.from_layout(LAYOUT, 16, pool.allocator).close()  # one of two pools: the sequences continue in the other
    parent = sequence(pool.allocator, 9, "request 7")
    child = parent.fork()
    child.label = 8
    child.append(3)
    pool.allocator.share(child.blocks[-1])
    with pytest.warns(ResourceWarning) as found:
        pool.close()
    assert messages(found) == [
        "the pool is closed: sequence 'request 7' holds 3 blocks still, 1 of them alone",
        "the pool is closed: sequence 8 holds 3 blocks still, 0 of them alone",
    ]
    assert [warning.source for warning in found] == [parent, child]
    assert {warning.filename for warning in found} == {__file__}
    pool.close()
    pool.allocator.check(others=1)
    with pytest.warns(ResourceWarning) as found:
        pool.allocator.warn_of_leaks()
    assert messages(found)[2] == "blocks are in use: an unknown owner holds 1 block still, 0 of them alone"


def test_a_pool_of_both_kinds_names_states_as_well():
    pool = SequencePool(KvCachePool.from_layout(LAYOUT, 16), SsmStatePool.from_layout(STATES, 4))
    hybrid = HybridSequence([KvGroup(pool.kv.allocator, 4)], pool.ssm, label=7)
    hybrid.append(5)
    with pytest.warns(ResourceWarning) as found, pool as entered:
        assert entered is pool
    assert messages(found) == [
        "the pool is closed: sequence 7 holds 2 blocks still, 2 of them alone",
        "states are in use: request 7 has state 0 still",
    ]
    assert {warning.filename for warning in found} == {__file__}
    pool.close()
    hybrid.close()


def test_of_many_the_first_have_a_warning_of_their_own():
    allocator = BlockAllocator(400)
    held = [sequence(allocator, 4 * (1 + i % 2), i) for i in range(25)]
    with pytest.warns(ResourceWarning) as found:
        allocator.warn_of_leaks()
    assert len(found) == 21
    assert messages(found)[0] == "blocks are in use: sequence 1 holds 2 blocks still, 2 of them alone"
    assert messages(found)[-1] == "blocks are in use: 5 others hold 5 blocks or states still"
    assert len(held) == 25


@pytest.mark.filterwarnings("error")
def test_correct_use_does_not_warn():
    with KvCachePool.from_layout(LAYOUT, 16) as pool:
        cache = PrefixCache(pool.allocator, 4)
        state = sequence(pool.allocator, 9, 1)
        cache.cache_blocks(range(9), state.blocks)
        cache.match_tokens(range(9)).close()
        state.close()
    with pytest.raises(ValueError, match="the pool is closed"):
        pool.page(0)
    dropped = KvCachePool.from_layout(LAYOUT, 16)  # the sequence keeps the allocator alive: no leak
    state = sequence(dropped.allocator, 9, 1)
    del dropped
    gc.collect()
    state.release()
    state.allocator.warn_of_leaks()


def test_a_warning_that_is_an_error_comes_when_all_is_closed():
    pool = KvCachePool.from_layout(LAYOUT, 16)
    state = sequence(pool.allocator, 9, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ResourceWarning, match="sequence 1 holds 3 blocks"):
            pool.close()
    with pytest.raises(ValueError, match="the pool is closed"):
        pool.page(0)
    assert state.len == 9


PROGRAM = """
from pagepool import KvCachePool, KvLayout, PagedSeqState, PrefixCache, SsmStatePool, StateLayout
from pagepool import HybridSequence, KvGroup

pool = KvCachePool.from_layout(KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4), 16)
state = PagedSeqState(pool.allocator, 4, label="request 7")
state.append(9)
cache = PrefixCache(pool.allocator, 4)
cache.cache_blocks(range(9), state.blocks)
states = SsmStatePool.from_layout(StateLayout(layers=[{"h": ((2,), "float32")}]), 4)
hybrid = HybridSequence([KvGroup(pool.allocator, 4)], states, label=7)
hybrid.append(5)
"""


def run(program, *options):
    done = subprocess.run(
        [sys.executable, *options, "-c", program],
        capture_output=True,
        text=True,
        cwd=Path(pagepool.__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_an_interpreter_that_ends_with_everything_open_says_nothing():
    assert run(PROGRAM, "-X", "dev", "-W", "error::ResourceWarning") == ""


def test_where_a_holder_was_made_is_said_when_asked_for(tmp_path):
    script = tmp_path / "engine.py"
    script.write_text(PROGRAM + "hybrid.close()\npool.close()\n")
    program = f"import runpy; runpy.run_path({str(script)!r})"
    said = run(program, "-X", "tracemalloc=3", "-W", "always::ResourceWarning")
    assert "engine.py:14: ResourceWarning: the pool is closed: sequence 'request 7' holds 3 blocks still" in said
    assert 'engine.py", lineno 6' in said and "Object allocated at" in said
