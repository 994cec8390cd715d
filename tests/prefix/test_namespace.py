"""The prefix cache without the GIL: what its Python methods do, and a status for what they raise."""

from pathlib import Path

import numpy as np
import pytest

from pagepool import BlockAllocator, PrefixCache, PrefixNamespace

OK, EXHAUSTED, INVALID_BLOCK, INVALID_ARGUMENT = 0, 1, 2, 6


@pytest.fixture(scope="module")
def foreign(build_foreign):
    return build_foreign(Path(__file__).with_name("foreign_prefix.pyx"))


def row(*tokens):
    return np.array(tokens, np.int32)


@pytest.mark.parametrize("policy", ["lru", "gittins", "priority"])
def test_an_engine_without_the_gil_gets_what_the_python_api_gives(foreign, policy):
    random = np.random.default_rng(3)
    ours = PrefixCache(BlockAllocator(60), 2, policy, max_events=4096)
    twin = PrefixCache(BlockAllocator(60), 2, policy, max_events=4096)
    salts = ["a", "b", None]
    namespaces = [PrefixNamespace(ours, cache_salt=salt) for salt in salts]
    running, prompts = [], [row(1, 2, 3, 4)]
    for _ in range(600):
        which = random.integers(3)
        prompt = prompts[random.integers(len(prompts))]
        own = random.integers(0, 2, random.integers(20)).astype(np.int32)
        prompt = np.concatenate([prompt[: random.integers(len(prompt) + 1)], own])
        prompts = [*prompts[-20:], prompt]
        n = len(prompt) // 2
        priority = int(random.integers(3)) if policy == "priority" else 0
        table = np.zeros(max(1, n), np.int32)
        if len(prompt):
            known = twin.cached_tokens(prompt, cache_salt=salts[which])
            assert 2 * foreign.cached_blocks(namespaces[which], prompt) == known
        status, found, fresh, evicted = foreign.serve(namespaces[which], prompt, table, priority)
        expected = twin.match_prefix(prompt, cache_salt=salts[which])
        assert found == len(expected) and np.array_equal(table[:found], expected)
        missing = n - len(expected)
        assert evicted == twin.evict(max(0, missing - twin.allocator.free_count))
        if missing > twin.allocator.free_count:
            assert status == EXHAUSTED
            twin.allocator.free(expected)
        else:
            assert status == OK
            expected = np.concatenate([expected, twin.allocator.allocate_n(missing)])
            names = {"priority": priority, "cache_salt": salts[which]}
            assert fresh == twin.cache_blocks(prompt, expected, start=int(found), **names)
            assert np.array_equal(table[:n], expected)
            running.append(expected)
        while len(running) > random.integers(1, 5):
            ended = running.pop(random.integers(len(running)))
            for cache in (ours, twin):
                cache.allocator.free(ended)
        if random.integers(40) == 0:
            for cache in (ours, twin):
                cache.reset_prefix_cache()
    ours.check()
    assert ours.stats() == twin.stats()
    assert ours.stats()["evicted"] > 100 and ours.stats()["hits"] > 100
    assert ours.drain_events() == twin.drain_events()


def test_a_space_finds_what_is_cached_after_it_was_made_and_not_what_is_gone(foreign):
    cache = PrefixCache(BlockAllocator(8), 1)
    namespace = PrefixNamespace(cache, cache_salt="a")
    prompt = row(5, 6, 7)
    assert foreign.cached_blocks(namespace, prompt) == 0
    cache.touch(prompt, cache_salt="b")
    assert foreign.cached_blocks(namespace, prompt) == 0
    cache.touch(prompt, cache_salt="a")
    assert foreign.cached_blocks(namespace, prompt) == 3
    cache.evict(8)
    cache.touch(row(1, 2), cache_salt="c")  # takes the places of the nodes
    assert foreign.cached_blocks(namespace, row(1, 2)) == 0
    cache.touch(prompt, cache_salt="a")
    cache.reset_prefix_cache()
    assert foreign.cached_blocks(namespace, prompt) == 0


def test_what_is_wrong_is_a_status_and_changes_nothing(foreign):
    cache = PrefixCache(BlockAllocator(8), 1)
    namespace = PrefixNamespace(cache)
    blocks = cache.allocator.allocate_n(4)
    assert foreign.cache(namespace, row(1, 2), blocks, 0, 0) == (OK, 2)
    before = cache.stats()
    for status, tokens, ids, start, priority in [
        (INVALID_ARGUMENT, row(1, 2), blocks, 3, 0),
        (INVALID_ARGUMENT, row(1, 2), blocks, -1, 0),
        (INVALID_ARGUMENT, row(1, 2), blocks, 0, 1),
        (INVALID_ARGUMENT, row(1, 2), blocks, 0, 256),
        (INVALID_BLOCK, row(1, 2, 3), row(0, 1, 7), 0, 0),
        (INVALID_BLOCK, row(1, 2, 3), row(0, 1, 8), 2, 0),
        (INVALID_BLOCK, row(1, 2, 3), row(0, 1, 0), 0, 0),
        (INVALID_BLOCK, row(9, 8), row(2, 2), 0, 0),
    ]:
        assert foreign.cache(namespace, tokens, ids, start, priority) == (status, 0)
        assert cache.stats() == before
        cache.check()
    assert foreign.cache(namespace, row(1, 2), blocks, 2, 0) == (OK, 0)
    with pytest.raises(TypeError):
        PrefixNamespace(cache, cache_salt=1.5)


def test_events_without_the_gil_are_those_of_python(foreign):
    caches = [PrefixCache(BlockAllocator(6), 2, max_events=16) for _ in range(2)]
    for cache in caches:
        for prompt in ([1, 2, 3, 4, 5, 6], [1, 2, 9, 9], [7] * 12):
            cache.touch(prompt, cache_salt="s")
        cache.reset_prefix_cache()
    wanted = [tuple(event) for event in caches[0].drain_events()]
    assert {event[1] for event in wanted} == {"stored", "removed", "cleared"}
    assert foreign.next_events(caches[1], 3) == wanted[:3]
    assert foreign.next_events(caches[1], 100) == wanted[3:] and caches[1].drain_events() == []
    assert foreign.next_events(PrefixCache(BlockAllocator(4), 2), 1) == []
