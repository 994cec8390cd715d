"""PrefixDirectory, the table of a router: same contents as a dict of sets, with the documented memory."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from share import examples

from pagepool.prefix.directory import PrefixDirectory
from pagepool.prefix.events import name_row, prefix_names

NAMES = [bytes([number, *[0] * 15]) for number in range(120)]  # the first name is all zeros
CACHES = st.integers(0, 69)
PART = st.lists(st.sampled_from(NAMES), max_size=30)
OPERATION = st.tuples(st.sampled_from(["add", "remove", "replace", "clear"]), CACHES, PART)


def lengths_of(held, names):
    found = []
    for cache in range(70):
        missing = (at for at, name in enumerate(names) if name not in held[cache])
        found.append(next(missing, len(names)))
    return found


@examples(150)
@given(st.lists(OPERATION, max_size=40), st.lists(PART, max_size=4))
def test_it_is_a_dict_of_sets(operations, prompts):
    directory, held = PrefixDirectory(70), [set() for _ in range(70)]
    for kind, cache, part in operations:
        if kind == "clear":
            directory.clear(cache)
            held[cache] = set()
        else:
            getattr(directory, kind)(cache, b"".join(part))
            before = set() if kind == "replace" else held[cache]
            held[cache] = before - set(part) if kind == "remove" else before | set(part)
        directory.check()
        assert directory.num_blocks(cache) == len(held[cache])
    assert len(directory) == len(set().union(*held))
    for part in prompts:
        found = directory.prefix_lengths(b"".join(part))
        assert found.dtype == np.int32 and found.tolist() == lengths_of(held, part)


def test_removal_closes_gaps_in_long_runs():
    """Three quarters of the rows are in use, and names are removed in random order."""
    random = np.random.default_rng(1)
    for _ in range(30):
        directory = PrefixDirectory(1)
        names = [random.bytes(16) for _ in range(48)]
        directory.add(0, b"".join(names))
        assert directory.nbytes == 64 * 24
        random.shuffle(names)
        for left in range(47, -1, -1):
            directory.remove(0, names[left])
            directory.check()
            assert directory.prefix_lengths(b"".join(names[:left])).tolist() == [left]


@pytest.mark.parametrize("count", [100, 49_153, 400_000, 1_000_000])
def test_a_block_takes_at_most_100_bytes(count):
    """This includes growth, when old and new table exist: 24 bytes per row each, and 3/8 of the new rows in use."""
    random, directory = np.random.default_rng(2), PrefixDirectory(64)
    for cache in range(64):
        directory.add(cache, random.bytes(16 * (count // 64)))
    blocks = len(directory)
    assert blocks == count // 64 * 64
    # The table doubles when 3/4 of its rows are in use.
    assert directory.nbytes <= 64 * blocks + 64 * 24 and 1.5 * directory.nbytes / blocks <= 96.1


def test_names_are_those_of_events():
    row = name_row(range(7), 2, bytes(16))
    assert prefix_names(range(7), 2, bytes(16)) == [row[:16], row[16:32], row[32:]]
    assert name_row([], 2, bytes(16)) == b""


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (lambda d: PrefixDirectory(0), ValueError, (1, 0)),
        (lambda d: d.add(2, b""), IndexError, ("cache", 2)),
        (lambda d: d.clear(-1), IndexError, ("cache", -1, 2)),
        (lambda d: d.num_blocks(2), IndexError, ("cache", 2)),
        (lambda d: d.add(0, bytes(17)), ValueError, ("names", 16, "bytes", 17)),
        (lambda d: d.remove(0, bytes(1)), ValueError, ("names", 16, "bytes", 1)),
        (lambda d: d.replace(0, bytes(1)), ValueError, ("names", 16, "bytes", 1)),
        (lambda d: d.prefix_lengths(bytes(1)), ValueError, ("names", 16, "bytes", 1)),
        (lambda d: d.reserve(1 << 58), MemoryError, (576460752303423488, 24, "bytes")),
        (lambda d: pickle.dumps(d), TypeError, ("PrefixDirectory",)),
    ],
)
def test_a_refused_call_says_why_and_changes_nothing(use, error, words):
    directory = PrefixDirectory(2)
    directory.add(1, NAMES[5])
    with refuses(error, *words):
        use(directory)
    directory.check()
    assert directory.prefix_lengths(NAMES[5]).tolist() == [0, 1] and len(directory) == 1
