"""A foreign Cython module runs whole sequences without the GIL and gets the same bits as the Python API."""

import threading

import numpy as np
import pytest
from build_engine import load_engine

from pagepool import KvCachePool, KvLayout, PagedSeqState, decode

LAYERS, KV_HEADS, QO_HEADS, DIM, PROMPT, LENGTH = 2, 2, 6, 64, 21, 150


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return load_engine(tmp_path_factory.mktemp("engine"))


def inputs(seed):
    random = np.random.default_rng(seed)
    k, v = random.standard_normal((2, LAYERS, LENGTH, KV_HEADS, DIM), dtype=np.float32)
    return k, v, random.standard_normal((LAYERS, LENGTH, QO_HEADS, DIM), dtype=np.float32)


def make_pool(num_blocks, dtype="bfloat16"):
    return KvCachePool.from_layout(KvLayout(LAYERS, KV_HEADS, DIM, dtype=dtype), num_blocks)


def by_the_python_api(pool, k, v, q):
    state = PagedSeqState(pool.allocator)
    out = np.full(q.shape, np.nan, np.float32)
    for begin, end in [(0, PROMPT), *((t, t + 1) for t in range(PROMPT, LENGTH))]:
        slots = state.append(end - begin)
        table = np.asarray(state.block_table)[None, :]
        for layer in range(LAYERS):
            pool.append(layer, slots, k[layer, begin:end], v[layer, begin:end])
            if begin:
                out[layer, begin] = decode(q[layer, begin][None], pool, layer, table, np.array([end], np.int32))[0]
    state.release()
    return out


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("num_threads", [1, 4])
def test_threads_without_the_gil_get_the_bits_of_the_python_api(engine, num_threads, dtype):
    pool = make_pool(num_threads * -(-LENGTH // 16) + 1, dtype)
    workers = [engine.Worker(pool, *inputs(seed)) for seed in range(num_threads)]
    threads = [threading.Thread(target=worker.run, args=(PROMPT, LENGTH, 3)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.allocator.check()
    assert pool.allocator.in_use == 0
    for seed, worker in enumerate(workers):
        assert (worker.status, worker.tokens) == (engine.OK, 3 * LENGTH)
        expected = by_the_python_api(make_pool(16, dtype), *inputs(seed))
        assert np.array_equal(worker.out.view(np.uint32), expected.view(np.uint32))


def test_an_exhausted_pool_is_a_status_and_leaves_nothing_behind(engine):
    pool = make_pool(4)
    worker = engine.Worker(pool, *inputs(0))
    worker.run(PROMPT, LENGTH, 1)
    assert worker.status == engine.EXHAUSTED
    assert pool.allocator.in_use == 0
    pool.allocator.check()


@pytest.mark.parametrize("checked", [False, True])
def test_a_checked_pool_refuses_misuse_without_the_gil(engine, checked):
    pool = KvCachePool.from_layout(KvLayout(LAYERS, KV_HEADS, DIM, dtype="float32"), 2, checked=checked)
    row, out = np.ones((KV_HEADS, DIM), np.float32), np.ones((QO_HEADS, DIM), np.float32)
    block = pool.allocator.allocate()
    assert engine.append_one(pool, block * 16, row) == engine.OK
    assert (engine.decode_one(pool, block, 1, out), out.min(), out.max()) == (engine.OK, 1, 1)
    pool.allocator.share(block)
    refused_slot, refused_block = (engine.INVALID_SLOT, engine.INVALID_BLOCK) if checked else (engine.OK, engine.OK)
    assert engine.append_one(pool, block * 16, 2 * row) == refused_slot
    assert pool.gather(0, [block], 1)[0].max() == (1 if checked else 2)
    assert engine.decode_one(pool, block, 1, out) == engine.OK
    pool.allocator.free([block, block])
    before = out.copy()
    assert engine.append_one(pool, block * 16, row) == refused_slot
    assert engine.decode_one(pool, block, 1, out) == refused_block
    assert not checked or (out == before).all()
    assert engine.decode_one(pool, block, 0, out) == engine.OK  # blocks of an empty sequence are not read
