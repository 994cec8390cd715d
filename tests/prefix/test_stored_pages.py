"""Pages read from a file into blocks: the bytes and sums of the file, in pools of any size, or an errno."""

import errno
import os

import numpy as np
import pytest
from refusals import refuses

from pagepool import InvalidBlock, KvCachePool, KvLayout
from pagepool.prefix.stored_pages import SUM_KEY_BYTES, block_bytes, load_pages, page_sums, read_block

KEY = bytes(range(256)) * 17


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "pages"
    path.write_bytes(np.random.default_rng(1).bytes(3_000_000))
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def pools(*heads, dims=64):
    """Return pools over one allocator, with pages of `heads * dims * 128` bytes."""
    made = []
    for each in heads:
        layout = KvLayout(num_layers=1, num_kv_heads=each, head_dim=dims, dtype="float32")
        made.append(KvCachePool.from_layout(layout, 8, made[0].allocator if made else None))
    return made


@pytest.mark.parametrize("threads", ["1", "3"])
@pytest.mark.parametrize("heads", [(1,), (8,), (19,), (3, 4), (9, 1, 20), (16, 16)])
def test_pages_and_sums_are_those_of_the_file(monkeypatch, file, heads, threads):
    monkeypatch.setenv("PAGEPOOL_NUM_THREADS", threads)
    made, key = pools(*heads), KEY[:SUM_KEY_BYTES]
    allocator = made[0].allocator
    size = block_bytes(allocator)
    blocks = allocator.allocate_n(8).astype(np.int32)[[5, 0, 7, 2, 3]]
    offsets = np.array([0, 4096, 999_424, 12_288, 2_000_001])
    page = bytearray(size)
    for block, offset, sums in zip(
        blocks, offsets, load_pages(allocator, file, offsets, blocks, key, size), strict=True
    ):
        wanted = os.pread(file, size, offset)
        read_block(allocator, block, page)
        assert page == wanted and sums == page_sums(key, wanted)
    for block in (1, 4, 6):
        read_block(allocator, block, page)
        assert not any(page), "other blocks stay as they were"


def test_a_read_that_fails_gives_an_errno(file):
    made, key = pools(19), KEY[:SUM_KEY_BYTES]
    allocator = made[0].allocator
    size, blocks = block_bytes(allocator), made[0].allocator.allocate_n(3).astype(np.int32)
    found = load_pages(allocator, file, np.array([0, 2_999_000, 1 << 62]), blocks, key, size)
    assert found == [page_sums(key, os.pread(file, size, 0)), errno.EIO, errno.EIO]
    assert load_pages(allocator, 1 << 30, np.zeros(3, np.int64), blocks, key, size) == [errno.EBADF] * 3
    assert load_pages(allocator, file, np.zeros(3, np.int64), blocks, key, size + 1) == [errno.EINVAL] * 3
    made[0].close()
    assert load_pages(allocator, file, np.zeros(3, np.int64), blocks, key, size) == [errno.EINVAL] * 3


def test_wrong_arguments_are_refused(file):
    made, key = pools(1), KEY[:SUM_KEY_BYTES]
    allocator, one = made[0].allocator, np.zeros(1, np.int64)
    for block in (0, -1, 8):
        with refuses(InvalidBlock, str(block)):
            load_pages(allocator, file, one, np.array([block], np.int32), key, block_bytes(allocator))
    allocator.allocate()
    with refuses(ValueError, "2", "1"):
        load_pages(allocator, file, np.zeros(2, np.int64), np.zeros(1, np.int32), key, block_bytes(allocator))
    with refuses(ValueError, str(SUM_KEY_BYTES), "3"):
        load_pages(allocator, file, one, np.zeros(1, np.int32), b"abc", block_bytes(allocator))
    assert load_pages(allocator, file, one[:0], np.zeros(0, np.int32), key, block_bytes(allocator)) == []
