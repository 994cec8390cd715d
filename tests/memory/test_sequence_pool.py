"""SequencePool: pages, states, or both behind one interface."""

import pytest

from pagepool import (
    AttentionSequenceState,
    InvalidBlock,
    InvalidSlot,
    KvCachePool,
    PoolExhausted,
    SequencePool,
    SsmStatePool,
)


def kv():
    return KvCachePool(8, 1)


def ssm():
    return SsmStatePool(1, lambda i: AttentionSequenceState(4))


@pytest.mark.parametrize("has_kv, has_ssm", [(False, False), (True, False), (False, True), (True, True)])
def test_what_it_is(has_kv, has_ssm):
    pool = SequencePool(kv=kv() if has_kv else None, ssm=ssm() if has_ssm else None)
    assert (pool.is_kv_based, pool.is_ssm) == (has_kv, has_ssm)
    assert ((pool.kv is not None), (pool.ssm is not None)) == (has_kv, has_ssm)


def test_pages_pass_through():
    pages = kv()
    pool = SequencePool(pages)
    assert pool.kv is pages and pool.alloc_kv() == 0 and pages.used_pages == 1
    with pytest.raises(PoolExhausted):
        pool.alloc_kv()
    pool.free_kv(0)
    with pytest.raises(InvalidBlock):
        pool.free_kv(0)


def test_states_pass_through():
    states = ssm()
    pool = SequencePool(ssm=states)
    assert pool.alloc_ssm(7) == 0 and pool.ssm_slot(0).request_id == 7
    with pytest.raises(PoolExhausted):
        pool.alloc_ssm(8)
    pool.release_ssm(0)
    assert states.free_count == 1
    with pytest.raises(InvalidSlot):
        pool.release_ssm(0)


def test_the_kind_that_it_lacks():
    pool = SequencePool(ssm=ssm())
    for call in (pool.alloc_kv, lambda: pool.free_kv(0)):
        with pytest.raises(InvalidSlot, match="no key-value pages"):
            call()
    pool = SequencePool(kv=kv())
    for call in (lambda: pool.alloc_ssm(1), lambda: pool.release_ssm(0), lambda: pool.ssm_slot(0)):
        with pytest.raises(InvalidSlot, match="no recurrent states"):
            call()


def test_wrong_kinds():
    with pytest.raises(TypeError):
        SequencePool(kv=ssm())
    with pytest.raises(TypeError):
        SequencePool(ssm=kv())
