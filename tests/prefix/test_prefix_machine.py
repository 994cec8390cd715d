"""The compiled cache against the reference, step by step: equal results, equal evictions, valid invariants."""

import os
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from share import examples

from pagepool import BlockAllocator, PoolExhausted, PrefixCache
from pagepool.reference import BlockAllocator as PlainAllocator
from pagepool.reference import PrefixCache as PlainCache

SALTS = st.sampled_from([None, "a", b"a", "", 0, False])
KEYS = st.sampled_from([(), ("a",), ("a", "b"), ("ab",), (1,), ("1",), (True,)])
# Few token values, so that prompts share prefixes, and some blocks have equal tokens after different prefixes.
TOKENS = st.lists(st.integers(0, 1), max_size=24)
NAMES = ("num_cached", "evictable", "inserted")
# `bytes` gives a hash seed of 0: equal tokens then have equal hashes after any prefix.
URANDOM = st.sampled_from([bytes, os.urandom])
PROMPTS = [[number >> bit & 1 for bit in range(4)] * 3 for number in range(16)]


class PrefixMachine(RuleBasedStateMachine):
    @initialize(
        capacity=st.integers(0, 12),
        block_size=st.integers(1, 3),
        policy=st.sampled_from(["lru", "gittins"]),
        urandom=URANDOM,
    )
    def begin(self, capacity, block_size, policy, urandom):
        self.inserted, self.found = None, []
        self.block_size = block_size
        with patch("os.urandom", urandom):
            self.ours = PrefixCache(BlockAllocator(capacity), block_size, policy)
        self.plain = PlainCache(PlainAllocator(capacity), block_size, policy)
        self.running = []  # blocks of each sequence, equal on both sides

    def both(self, method, *arguments, **names):
        got = getattr(self.ours, method)(*arguments, **names)
        assert np.array_equal(got, getattr(self.plain, method)(*arguments, **names))
        return got

    @rule(
        tokens=TOKENS,
        salt=SALTS,
        keys=KEYS,
        publish=st.booleans(),
        start=st.sampled_from([0, 1, -1]),
    )
    def prompt(self, tokens, salt, keys, publish, start):
        """Serve a prompt like an engine: match, evict, allocate the missing blocks, cache them; keep all blocks."""
        names = {"cache_salt": salt, "extra_keys": keys}
        blocks = self.both("match_prefix", tokens, **names).tolist()
        missing = -(-len(tokens) // self.block_size) - len(blocks)
        self.both("evict", max(0, missing - self.ours.allocator.free_count))
        try:
            fresh = self.ours.allocator.allocate_n(missing).tolist()
        except PoolExhausted:
            self.release_all(blocks)
            return
        assert self.plain.allocator.allocate_n(missing).tolist() == fresh
        blocks += fresh
        if publish:
            full = len(tokens) // self.block_size
            names["start"] = min(full, len(blocks) - missing) if start >= 0 else full
            if start == 0:
                del names["start"]
            self.both("cache_blocks", tokens, blocks, **names)
        self.running.append(blocks)

    @rule(tokens=TOKENS, salt=SALTS, keys=KEYS)
    def touch(self, tokens, salt, keys):
        self.both("touch", tokens, cache_salt=salt, extra_keys=keys)

    @rule(tokens=TOKENS, salt=SALTS, keys=KEYS)
    def match_tokens(self, tokens, salt, keys):
        names = {"cache_salt": salt, "extra_keys": keys}
        blocks, num_tokens = self.ours.match_tokens(tokens, **names)
        expected, expected_tokens = self.plain.match_tokens(tokens, **names)
        assert np.array_equal(blocks, expected) and num_tokens == expected_tokens
        self.running.append(blocks.tolist())

    @rule(tokens=TOKENS, salt=SALTS, keys=KEYS)
    def explain(self, tokens, salt, keys):
        """The parts cover the prompt. While nothing was forgotten, they are those of the reference, which forgets
        nothing; later the reference has at least as many evicted tokens."""
        names = {"cache_salt": salt, "extra_keys": keys}
        ours, (found, missed, position) = self.ours.explain(tokens, **names), self.plain.explain(tokens, **names)
        assert ours.found == found == self.ours.cached_tokens(tokens, **names)
        assert ours.found + sum(ours.counts().values()) == ours.num_tokens == len(tokens)
        ends = [ours.found, *(part.end for part in ours.parts)]
        assert [part.begin for part in ours.parts] == ends[:-1] and ends[-1] == len(tokens)
        assert (ours.evicted_ago is None) == ("evicted" not in ours.counts())
        assert ours.counts().get("short", 0) == missed.get("short", 0)
        there = ours.divergence
        if ours.remembers is None:
            assert ours.counts() == missed and (None if there is None else there.position) == position
        else:
            assert ours.counts().get("evicted", 0) <= missed.get("evicted", 0)
        if there is not None:
            assert there.token == tokens[there.position] != there.cached_token
            self.was_cached(tokens, there, names)

    def was_cached(self, tokens, there, names):
        """The shown tokens of the other prompt were cached under this salt and these keys."""
        other = [*tokens[: there.position], *there.cached_around[min(6, there.position) :]]
        other = other[: len(other) // self.block_size * self.block_size]
        found, missed, _ = self.plain.explain(other, **names)
        assert found + missed.get("evicted", 0) == len(other) > there.position

    @rule(blocks=st.lists(st.integers(-1, 13), max_size=3))
    def discard(self, blocks):
        self.both("discard", blocks)

    @rule(data=st.data())
    def finish(self, data):
        if self.running:
            self.release_all(self.running.pop(data.draw(st.integers(0, len(self.running) - 1))))

    @rule(n=st.integers(0, 5))
    def evict(self, n):
        self.both("evict", n)

    @rule()
    def reset(self):
        self.both("reset_prefix_cache")
        assert self.ours.stats()["nodes"] == 0

    def release_all(self, blocks):
        for side in (self.ours, self.plain):
            side.allocator.free(blocks)

    @invariant()
    def agree(self):
        if not hasattr(self, "ours"):
            return
        self.ours.check()
        self.plain.check()
        self.ours.allocator.check()
        for name in NAMES:
            assert getattr(self.ours, name) == getattr(self.plain, name)
        stats = self.ours.stats()
        for name in ("evicted", "cleared", "looked_up", "hits"):
            assert stats[name] == getattr(self.plain, name)
        self.no_more_is_found_while_nothing_is_cached()
        assert stats["used"] + stats["evictable"] + stats["free"] == self.ours.allocator.capacity
        for block in range(self.ours.allocator.capacity):
            assert self.ours.allocator.ref_count(block) == self.plain.allocator.ref_count(block)

    def no_more_is_found_while_nothing_is_cached(self):
        found = [self.ours.cached_tokens(prompt) for prompt in PROMPTS]
        if self.ours.inserted == self.inserted:
            assert all(now <= before for now, before in zip(found, self.found, strict=True))
        self.inserted, self.found = self.ours.inserted, found

    def teardown(self):
        if hasattr(self, "ours"):
            for blocks in self.running:
                self.release_all(blocks)
            self.reset()
            assert self.ours.allocator.in_use == self.plain.allocator.in_use == 0


class TestPrefixMachine(PrefixMachine.TestCase):
    settings = examples(60, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("policy", ["lru", "gittins"])
def test_a_long_pass_agrees_with_the_reference(policy):
    random = np.random.default_rng(5)
    with patch("os.urandom", bytes):
        ours = PrefixCache(BlockAllocator(60), 2, policy)
    plain = PlainCache(PlainAllocator(60), 2, policy)
    for _ in range(1500):
        shared = random.integers(0, 12)
        tokens = [int(shared), 7] * int(random.integers(1, 20)) + random.integers(0, 3, 8).tolist()
        assert ours.touch(tokens) == plain.touch(tokens)
    ours.check()
    assert ours.stats()["evicted"] == plain.evicted > 1000
    assert ours.stats()["collisions"] > 0


@pytest.mark.parametrize("policy", ["lru", "gittins"])
@pytest.mark.parametrize("urandom", [bytes, os.urandom], ids=["collisions", "seed"])
def test_long_runs_that_part_agree_with_the_reference(policy, urandom):
    """Prompts that extend, diverge from or truncate others, some held while blocks are evicted or discarded."""
    random = np.random.default_rng(11)
    with patch("os.urandom", urandom):
        ours = PrefixCache(BlockAllocator(90), 2, policy)
    plain = PlainCache(PlainAllocator(90), 2, policy)
    prompts, running = [[1, 2, 3]], []
    longest = 0
    for _ in range(700):
        prompt = prompts[random.integers(len(prompts))]
        prompt = prompt[: random.integers(len(prompt) + 1)] + random.integers(0, 2, random.integers(40)).tolist()
        prompts = [*prompts[-30:], prompt]
        blocks = ours.match_prefix(prompt).tolist()
        assert plain.match_prefix(prompt).tolist() == blocks
        longest = max(longest, len(blocks))
        missing = len(prompt) // 2 - len(blocks)
        for side in (ours, plain):
            side.evict(max(0, missing - side.allocator.free_count))
        if missing <= ours.allocator.free_count:
            blocks += ours.allocator.allocate_n(missing).tolist()
            plain.allocator.allocate_n(missing)
            start = len(prompt) // 2 - missing if random.integers(2) else 0
            assert ours.cache_blocks(prompt, blocks, start=start) == plain.cache_blocks(prompt, blocks, start=start)
        running.append(blocks)
        forgotten = random.integers(0, 90, random.integers(3)).tolist() if random.integers(9) == 0 else []
        ended = running.pop(random.integers(len(running))) if len(running) > 3 else []
        for side in (ours, plain):
            side.discard(forgotten)
            side.allocator.free(ended)
        assert (ours.num_cached, ours.evictable) == (plain.num_cached, plain.evictable)
    assert sorted(ours.references()) == sorted(plain.references())
    ours.check()
    assert ours.stats()["evicted"] == plain.evicted > 500
    assert longest > 20


@pytest.mark.one_in(2)
@pytest.mark.parametrize("policy", ["lru", "gittins"])
def test_sessions_that_grow_by_turns_agree_with_the_reference(policy):
    """A loop longer than the cache, with branches: many groups are learnt and dropped, and found blocks stay in use."""
    random = np.random.default_rng(3)
    ours, plain = PrefixCache(BlockAllocator(400), 1, policy), PlainCache(PlainAllocator(400), 1, policy)
    sessions = [random.integers(0, 1000, random.integers(20, 180)) for _ in range(12)]
    found_in_all = 0
    for turn in range(900):
        number = turn % 12 if random.integers(8) else random.integers(12)
        shared = sessions[number][: random.integers(len(sessions[number])) if random.integers(12) == 0 else None]
        prompt = np.concatenate([shared, random.integers(0, 1000, random.integers(1, 12))])
        sessions[number] = prompt[:190] if random.integers(40) else prompt[:20]
        found = ours.match_prefix(prompt)
        assert found.tolist() == plain.match_prefix(prompt).tolist()
        missing = len(prompt) - len(found)
        want = max(0, missing - ours.allocator.free_count)
        assert ours.evict(want) == plain.evict(want)
        blocks = np.concatenate([found, ours.allocator.allocate_n(missing)])
        plain.allocator.allocate_n(missing)
        for side in (ours, plain):
            side.cache_blocks(prompt, blocks, start=len(found))
            side.allocator.free(blocks)
        found_in_all += len(found)
    ours.check()
    assert found_in_all > (10_000 if policy == "gittins" else 100)
    assert ours.stats()["evicted"] == plain.evicted > 10_000
