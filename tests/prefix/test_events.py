"""Events let another process mirror the content of a cache, and tell when the mirror is incomplete."""

import pickle
import subprocess
import sys
from itertools import takewhile
from unittest.mock import patch

import numpy as np
import pytest
from refusals import refuses

from pagepool import BlockAllocator, PoolError, PrefixCache
from pagepool.prefix.events import check_snapshot, prefix_names
from pagepool.prefix.keys import root_key, root_name

SALTS = (None, "a", b"a", 0)


def traffic(cache, random, steps):
    """Serve prompts with common prefixes from a small cache, with some evictions and rare resets."""
    for _ in range(steps):
        tokens = random.integers(0, 2, random.integers(0, 24)).tolist()
        salt = SALTS[random.integers(len(SALTS))]
        if random.random() < 0.5:
            cache.touch(tokens, cache_salt=salt)
        else:
            blocks = cache.match_prefix(tokens, cache_salt=salt).tolist()
            missing = len(tokens) // cache.block_size - len(blocks)
            cache.evict(max(0, missing - cache.allocator.free_count))
            if missing <= cache.allocator.free_count:
                blocks += cache.allocator.allocate_n(missing).tolist()
                known = len(blocks) - missing if random.random() < 0.5 else 0
                cache.cache_blocks(tokens, blocks, cache_salt=salt, start=known)
            cache.allocator.free(blocks)
        if random.random() < 0.05:
            cache.discard(random.integers(0, cache.allocator.capacity, 3).tolist())
        if random.random() < 0.01:
            cache.reset_prefix_cache()


def content(event):
    return event.block, event.parent, event.tokens


def follow(known, events):
    """Apply events to {name: content}, like a process that follows a cache."""
    for event in events:
        if event.kind == "stored":
            known[event.name] = content(event)
        elif event.kind == "removed":
            del known[event.name]
        else:
            known.clear()


def state_of(cache):
    return {event.name: content(event) for event in cache.snapshot().stored}


@pytest.mark.parametrize("policy", ["lru", "gittins"])
def test_events_replayed_give_the_same_state(policy):
    random = np.random.default_rng(1)
    with patch("os.urandom", bytes):  # a seed of 0: equal tokens have equal hashes after any prefix
        cache = PrefixCache(BlockAllocator(30), 2, policy, max_events=10_000)
    known, sequence = {}, 0
    for _ in range(60):
        traffic(cache, random, 10)
        events = pickle.loads(pickle.dumps(cache.drain_events()))
        assert [event.sequence for event in events] == list(range(sequence + 1, sequence + 1 + len(events)))
        sequence += len(events)
        follow(known, events)
        assert known == state_of(cache) and len(known) == cache.num_cached
        tokens = random.integers(0, 2, 20).tolist()
        blocks = cache.match_prefix(tokens)
        names = takewhile(known.__contains__, prefix_names(tokens, 2, root_name(root_key(None, ()))))
        assert [known[name][0] for name in names] == blocks.tolist()
        cache.allocator.free(blocks)
    cache.check()


def test_events_are_numbered_and_complete():
    cache = PrefixCache(BlockAllocator(4), 2, "lru", max_events=16)
    cache.touch([1, 2, 3, 4])
    cache.evict(1)
    cache.reset_prefix_cache()
    events = cache.drain_events()
    assert [event.sequence for event in events] == [1, 2, 3, 4]
    assert [(event.kind, event.block) for event in events] == [
        ("stored", 0),
        ("stored", 1),
        ("removed", 0),
        ("cleared", -1),
    ]
    assert events[1].parent == events[0].name == events[2].name and len(events[0].name) == 16
    assert np.frombuffer(events[1].tokens, np.int32).tolist() == [3, 4]
    assert cache.drain_events() == []


def test_a_replaced_block_is_removed_before_the_new_one_is_stored():
    cache = PrefixCache(BlockAllocator(4), 2, max_events=16)
    cache.touch([1, 2, 3, 4])
    cache.cache_blocks([1, 2, 3, 4], cache.allocator.allocate_n(2))
    events = cache.drain_events()
    assert [(event.kind, event.block) for event in events[2:]] == [
        ("removed", 0),
        ("stored", 2),
        ("removed", 1),
        ("stored", 3),
    ]
    assert [event.name for event in events[2:]] == [events[at].name for at in (0, 0, 1, 1)]
    known = {}
    follow(known, events)
    assert known == state_of(cache)


def test_lost_events_are_noticed_and_a_snapshot_helps():
    random = np.random.default_rng(2)
    cache = PrefixCache(BlockAllocator(20), 1, max_events=5)
    traffic(cache, random, 30)
    events = cache.drain_events()
    assert len(events) == 5 and events[0].sequence > 1
    cache.touch([1, 0, 1])
    snapshot, known = cache.snapshot(), state_of(cache)
    cache.evict(2)
    events = cache.drain_events()
    follow(known, [event for event in events if event.sequence >= snapshot.next_sequence])
    assert known == state_of(cache) and events[-1].sequence == cache.snapshot().next_sequence - 1
    whole, names = cache.snapshot(), cache.name_snapshot()
    assert names == (whole.next_sequence, b"".join(event.name for event in whole.stored), whole.num_blocks)


def test_a_snapshot_that_was_cut_short_is_refused():
    cache = PrefixCache(BlockAllocator(4), 1, max_events=4)
    cache.touch([5, 6])
    snapshot = cache.snapshot()
    check_snapshot(snapshot)
    with refuses(PoolError, 2, 1):
        check_snapshot(snapshot._replace(stored=snapshot.stored[:1]))


def test_names_are_the_same_in_every_process():
    script = (
        "from pagepool import *; c = PrefixCache(BlockAllocator(4), 2, max_events=4);"
        "c.touch([1, 2, 3, 4], cache_salt='s'); print([e.name.hex() for e in c.drain_events()])"
    )
    runs = [subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout for _ in range(2)]
    assert runs[0] == runs[1] and len(runs[0]) > 60


# From `openssl mac -macopt hexkey:000102030405060708090a0b0c0d0e0f -macopt size:16 SIPHASH`, of the bytes 0, 1, 2, ...
@pytest.mark.parametrize(
    ("num_tokens", "name"),
    [
        (1, "f88164c12d9c8faf7d0f6e7c7bcd5579"),
        (2, "3b62a9ba6258f5610f83e264f31497b4"),
        (16, "1eaf077dc0d4cd3f8cad4d383658a74b"),
        (17, "2e7cf5f15d22b176b7c56c3c55ecc420"),
    ],
)
def test_a_name_is_the_siphash_of_the_tokens_under_the_name_before(num_tokens, name):
    tokens = np.frombuffer(bytes(range(4 * num_tokens)), np.int32)
    assert prefix_names(tokens, num_tokens, bytes(range(16))) == [bytes.fromhex(name)]
    following = prefix_names([*tokens, *tokens], num_tokens, bytes(range(16)))[1]
    assert following == prefix_names(tokens, num_tokens, bytes.fromhex(name))[0]


def test_a_root_name_depends_on_key_and_secret():
    names = {root_name(root_key(salt, ()), secret) for salt in SALTS for secret in (bytes(16), bytes(range(16)))}
    assert len(names) == 2 * len(SALTS)


def test_without_max_events_there_are_none():
    cache = PrefixCache(BlockAllocator(4), 1)
    for call in (cache.drain_events, cache.snapshot):
        with refuses(ValueError, "max_events", 0):
            call()
    with refuses(ValueError, -1):
        PrefixCache(BlockAllocator(4), 1, max_events=-1)
