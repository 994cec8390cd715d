"""`EvictionPolicy`: the order of a prefix cache, by opaque keys."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from refusals import refuses
from share import examples

from pagepool import BlockAllocator, EvictionPolicy, PoolExhausted, PrefixCache
from pagepool.prefix.eviction import POLICIES


def prompts(seed, count=800):
    """Loops, conversations that grow, and prompts that come once; all fit 120 blocks."""
    random = np.random.default_rng(seed)
    for number in range(count):
        topic, length = random.zipf(1.3) % 50, random.integers(1, 30)
        step = 1 if random.random() < 0.8 else number % 9
        yield ((np.arange(length) * 7 + topic * step) % 200).astype(np.int32)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_the_same_calls_keep_the_same_blocks_as_in_a_prefix_cache(policy, seed):
    allocator = BlockAllocator(120)
    cache, order = PrefixCache(allocator, 1, policy), EvictionPolicy(policy, 120)
    hits = evicted = 0
    for row in prompts(seed):
        keys = [row[: end + 1].tobytes() for end in range(len(row))]
        blocks = cache.match_prefix(row).tolist()
        found = len(blocks)
        assert [key in order for key in keys[: found + 1]] == [True] * found + [False] * (found < len(keys))
        for key in keys[:found]:
            order.touch(key)
            order.hold(key)
        short = max(0, len(row) - found - allocator.free_count)
        assert cache.evict(short) == short == len(order.evict(short))
        blocks += allocator.allocate_n(len(row) - found).tolist()
        cache.cache_blocks(row, blocks)
        for end in range(found, len(row)):
            order.insert(keys[end], keys[end - 1] if end else None)
        for key in keys[:found]:
            order.release(key)
        allocator.free(blocks)
        hits, evicted = hits + found, evicted + short
    assert len(order) == cache.num_cached == 120 and hits > 1000 < evicted
    order.check()


class PolicyMachine(RuleBasedStateMachine):
    """Which keys are cached and held is known; which of them is evicted is the policy's choice."""

    KEYS = st.integers(0, 30).map(lambda number: b"%d" % number)

    @initialize(policy=st.sampled_from(list(POLICIES)), capacity=st.integers(1, 12))
    def begin(self, policy, capacity):
        self.order, self.holds = EvictionPolicy(policy, capacity), {}

    @rule(key=KEYS, parent=st.none() | KEYS)
    def insert(self, key, parent):
        if key == parent or key in self.holds:
            with pytest.raises(ValueError):
                self.order.insert(key, parent)
        elif len(self.holds) == self.order.capacity:
            with pytest.raises(PoolExhausted):
                self.order.insert(key, parent)
        else:
            self.order.insert(key, parent)
            self.holds[key] = 0

    @rule(key=KEYS, name=st.sampled_from(["touch", "hold", "release", "remove"]))
    def call(self, key, name):
        if key not in self.holds:
            with pytest.raises(KeyError):
                getattr(self.order, name)(key)
        elif name == "release" and not self.holds[key]:
            with pytest.raises(ValueError):
                self.order.release(key)
        else:
            getattr(self.order, name)(key)
            self.holds[key] += {"hold": 1, "release": -1}.get(name, 0)
            if name == "remove":
                del self.holds[key]

    @rule(n=st.integers(0, 14), protected=st.sets(KEYS, max_size=6))
    def evict(self, n, protected):
        idle = {key for key, holds in self.holds.items() if not holds} - protected
        chosen = self.order.evict(n, protected)
        assert (chosen is None) == (n > len(idle))
        if chosen is not None:
            assert len(set(chosen)) == n and set(chosen) <= idle
            for key in chosen:
                del self.holds[key]

    @precondition(lambda self: len(self.holds) > 3)
    @rule()
    def clear(self):
        self.order.clear()
        self.holds = {}

    @invariant()
    def is_sound(self):
        self.order.check()
        assert len(self.order) == len(self.holds) and all(key in self.order for key in self.holds)


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = examples(30, stateful_step_count=40)


@pytest.mark.parametrize("policy", POLICIES)
def test_keys_that_are_forgotten_need_no_memory(policy):
    order = EvictionPolicy(policy, 10)
    for number in range(5_000):
        if len(order) == 10:
            order.evict(1)
        order.insert(b"%d" % number, b"%d" % (number - 1) if number % 4 else None)
    order.check()
    assert repr(order) == f"<EvictionPolicy {policy}: 10 of 10 keys>"


def test_a_block_is_evicted_after_the_blocks_behind_it():
    order = EvictionPolicy("gittins", 4)
    for end in range(4):
        order.insert(b"abcd"[: end + 1], b"abcd"[:end] or None)
    order.hold(b"ab")
    assert order.evict(1) == [b"abcd"] and order.evict(3) is None and order.evict(2) == [b"abc", b"a"]
    order.release(b"ab")
    assert order.evict(1) == [b"ab"]


def test_threads_may_call_at_once():
    order = EvictionPolicy("gittins", 64)

    def work(thread):
        taken = 0
        for number in range(300):
            key = b"%d:%d" % (thread, number)
            while True:
                try:
                    order.insert(key, b"%d:%d" % (thread, number - 1))
                    break
                except PoolExhausted:
                    taken += len(order.evict(8) or ())
        return taken

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(4))) == 1200 - len(order)
    order.check()


def test_bad_arguments_are_refused():
    with refuses(ValueError, "policy", "lru", "gittins", "arc"):
        EvictionPolicy("arc", 4)
    with refuses(ValueError, "capacity", "0"):
        EvictionPolicy("lru", 0)
    order = EvictionPolicy("lru", 1)
    order.insert(b"a")
    with refuses(ValueError, "cached already", "b'a'"):
        order.insert(b"a")
    with refuses(ValueError, "its own parent"):
        order.insert(b"b", b"b")
    with refuses(PoolExhausted, "all 1 keys"):
        order.insert(b"b")
    with refuses(TypeError):
        order.insert("b")
    with refuses(TypeError):
        order.evict(1, protected=["b"])
    with refuses(ValueError, "n must be at least 0", "-1"):
        order.evict(-1)
    order.check()
    assert order.evict(2) is None and len(order) == 1
