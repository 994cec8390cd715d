"""A session file has one prefix. Loading it, also in another process or on another machine, gives correct pages or
none."""

import os
import stat

import numpy as np
import pytest
from refusals import refuses
from store_world import BLOCK, LAYOUT, content

from pagepool import KvCachePool, PrefixCache
from pagepool.prefix.fingerprint import fingerprint_of
from pagepool.prefix.session import load_session, save_session

TOKENS = list(range(22))


def begin(num_blocks=16, weights="a"):
    pool = KvCachePool.from_layout(LAYOUT, num_blocks)
    return pool, PrefixCache(pool.allocator), fingerprint_of(pool, weights)


def computed(tokens=TOKENS, **keys):
    pool, cache, fingerprint = begin()
    blocks = pool.allocator.allocate_n(len(tokens) // BLOCK)
    for number, block in enumerate(blocks):
        pool.page(block)[:] = content(tokens[: (number + 1) * BLOCK], {})
    cache.cache_blocks(tokens, blocks, **keys)
    pool.allocator.free(blocks)
    return pool, cache, fingerprint


def check_pages(pool, cache, tokens=TOKENS, **keys):
    """Return the number of cached blocks of a prompt, after checking their pages."""
    blocks = cache.match_prefix(tokens, **keys)
    for number, block in enumerate(blocks):
        assert (pool.page(block) == content(tokens[: (number + 1) * BLOCK], {})).all()
    pool.allocator.free(blocks)
    cache.check()
    return len(blocks)


def test_a_session_goes_on_in_another_engine(tmp_path):
    pool, cache, fingerprint = computed(cache_salt="a")
    path = tmp_path / "session"
    assert save_session(path, cache, fingerprint, TOKENS, note={"turns": [["ü"]]}, cache_salt="a") == 20
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and [each.name for each in tmp_path.iterdir()] == ["session"]
    pool, cache, fingerprint = begin()
    found = load_session(path, cache, fingerprint, cache_salt="b", extra_keys=iter(["x"]))
    assert (found.tokens.tolist(), found.num_cached, found.note) == (TOKENS, 20, {"turns": [["ü"]]})
    assert check_pages(pool, cache, cache_salt="b", extra_keys=["x"]) == 5 and check_pages(pool, cache) == 0
    assert load_session(path, cache, fingerprint, cache_salt="b", extra_keys=["x"]).num_cached == 20
    assert cache.num_cached == 5


def test_a_session_of_tokens_that_are_not_cached_has_the_tokens(tmp_path):
    _, cache, fingerprint = begin()
    for tokens in ([], [7], TOKENS):
        assert save_session(tmp_path / "session", cache, fingerprint, tokens) == 0
        found = load_session(tmp_path / "session", cache, fingerprint)
        assert (found.tokens.tolist(), found.num_cached, found.note) == (tokens, 0, None)


def test_a_pool_without_room_loads_a_part_and_evicts(tmp_path):
    _, cache, fingerprint = computed()
    save_session(tmp_path / "session", cache, fingerprint, TOKENS)
    pool, cache, fingerprint = begin(num_blocks=4)
    cache.cache_blocks(range(50, 58), blocks := pool.allocator.allocate_n(2))
    assert load_session(tmp_path / "session", cache, fingerprint).num_cached == 8
    assert check_pages(pool, cache) == 2
    pool.allocator.free(blocks)
    assert load_session(tmp_path / "session", cache, fingerprint).num_cached == 16
    assert check_pages(pool, cache) == 4
    pool.allocator.check(others=0)


def test_every_byte_may_be_wrong_or_missing(tmp_path):
    _, cache, fingerprint = computed()
    path = tmp_path / "session"
    save_session(path, cache, fingerprint, TOKENS)
    data, pages = path.read_bytes(), 5 * 256
    random, loaded = np.random.default_rng(4), 0
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= int(random.integers(1, 256))
        path.write_bytes(damaged if place % 2 else damaged[:place])
        pool, cache, fingerprint = begin()
        if place < len(data) - pages:
            with pytest.raises(ValueError, match="session"):
                load_session(path, cache, fingerprint)
            assert cache.num_cached == 0 and pool.allocator.in_use == 0
        else:
            number = (place - (len(data) - pages)) // 256
            assert load_session(path, cache, fingerprint).num_cached == number * BLOCK
            assert check_pages(pool, cache) == number
            loaded += number
    assert loaded == sum(range(5)) * 256


def test_what_cannot_be_is_refused_and_the_old_file_stays(tmp_path):
    _, cache, fingerprint = computed()
    path = tmp_path / "session"
    save_session(path, cache, fingerprint, TOKENS)
    before = path.read_bytes()
    _, other, fingerprint_of_other = begin(weights="b")
    with pytest.raises(ValueError, match="of another model"):
        load_session(path, other, fingerprint_of_other)
    with refuses(ValueError, "4 tokens", "16"):
        save_session(path, PrefixCache(KvCachePool(8, 4).allocator), fingerprint, TOKENS)
    with refuses(ValueError, "-1"):
        save_session(path, cache, fingerprint, [-1, 2, 3, 4])
    with pytest.raises(TypeError):
        save_session(path, cache, fingerprint, TOKENS, note=object())
    with pytest.raises(FileNotFoundError):
        load_session(tmp_path / "none", cache, fingerprint)
    with pytest.raises(OSError):
        save_session(tmp_path / "none" / "session", cache, fingerprint, TOKENS)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["session"]
    cache.allocator.check(others=0)
