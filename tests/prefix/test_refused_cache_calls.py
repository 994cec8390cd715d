"""Calls of a prefix cache that are refused: the error, its sentence, and that nothing has changed."""

import re

import pytest

from pagepool import BlockAllocator, InvalidBlock, PagedSeqState, PrefixCache
from pagepool.prefix.events import check_snapshot

HUGE = 10**30


class World:
    """A cache of two blocks for tokens 0 to 7, with a third block that is not cached."""

    def __init__(self):
        self.allocator = BlockAllocator(8)
        self.cache = PrefixCache(self.allocator, 4, max_events=8)
        self.blocks = self.allocator.allocate_n(3).tolist()
        self.cache.cache_blocks(range(8), self.blocks)
        self.cache.reservations.set(1, 2)
        self.other = PagedSeqState(BlockAllocator(1), 4)

    def picture(self):
        self.cache.check()
        counts = [self.allocator.ref_count(block) for block in range(8)]
        return self.cache.stats(), counts, self.cache.reservations.get(1), self.cache.snapshot()


NEW = range(50, 54)


@pytest.mark.parametrize(
    ("use", "error", "sentence"),
    [
        (lambda w: PrefixCache(w.allocator, 0), ValueError, "block_size must be from 1 to 1024, not 0"),
        (lambda w: PrefixCache(w.allocator, max_events=-1), ValueError, "max_events must be at least 0, not -1"),
        (lambda w: PrefixCache(w.allocator, max_events="x"), TypeError, "max_events must be an integer, not str: 'x'"),
        (lambda w: w.cache.match_prefix([[1, 2]]), ValueError, "tokens must have 1 dimension, not 2"),
        (lambda w: w.cache.match_prefix([1.5]), TypeError, "tokens must be integers, not float64"),
        (
            lambda w: w.cache.match_tokens([1], extra_keys=5),
            TypeError,
            "extra_keys must be a sequence of keys, not int",
        ),
        (lambda w: w.cache.cache_blocks(range(8, 20), w.blocks[:2]), ValueError, "12 tokens fill 3 blocks, got 2"),
        (lambda w: w.cache.cache_blocks(NEW, [7]), InvalidBlock, "block 7 cannot be cached: it is free"),
        (lambda w: w.cache.cache_blocks(NEW, [8]), InvalidBlock, "block 8 is out of range: there are 8 blocks"),
        (
            lambda w: w.cache.cache_blocks(NEW, [1]),
            InvalidBlock,
            "block 1, given at 0, is cached already, for other tokens",
        ),
        (
            lambda w: w.cache.cache_blocks(range(8), w.blocks, start=3),
            ValueError,
            "start must be from 0 to 2, the number of full blocks, not 3",
        ),
        (
            lambda w: w.cache.cache_blocks(range(8), w.blocks, start=HUGE),
            ValueError,
            f"start must be from 0 to 2, the number of full blocks, not {HUGE}",
        ),
        (
            lambda w: w.cache.cache_blocks(range(8), w.blocks, start="1"),
            TypeError,
            "start must be an integer, not str: '1'",
        ),
        (
            lambda w: w.cache.cache_blocks(NEW, [2], group=255),
            ValueError,
            "a group must be from 0 to 254, not 255",
        ),
        (
            lambda w: w.cache.cache_blocks(NEW, [2], group=None),
            TypeError,
            "a group must be an integer, not None",
        ),
        (
            lambda w: w.cache.cache_blocks(NEW, [2], priority=3),
            ValueError,
            "policy gittins takes no priority but 0, not 3",
        ),
        (lambda w: w.cache.evict(-1), ValueError, "cannot evict -1 blocks"),
        (lambda w: w.cache.evict(1.0), TypeError, "n must be an integer, not float: 1.0"),
        (lambda w: w.cache.evict(1, group=HUGE), ValueError, f"a group must be from 0 to 254, not {HUGE}"),
        (lambda w: w.cache.expire("x"), TypeError, "now must be a number, not str: 'x'"),
        (lambda w: w.cache.expire(float("nan")), ValueError, "now must be a number, not nan"),
        (lambda w: w.cache.discard(["0"]), TypeError, "a block id must be an integer, not str"),
        (
            lambda w: w.cache.holds(2**31),
            InvalidBlock,
            "block 2147483648 is out of range: ids have 32 bits, 2147483647 is the largest",
        ),
        (lambda w: w.cache.count_outside([5]), TypeError, "a state must be a PagedSeqState, not int"),
        (
            lambda w: w.cache.count_outside([w.other]),
            ValueError,
            "the sequence and the cache have different allocators",
        ),
        (lambda w: w.cache.reservations.set(255, 1), ValueError, "a group must be from 0 to 254, not 255"),
        (lambda w: w.cache.reservations.set(1, -1), ValueError, "a reservation must be 0 blocks or more, not -1"),
        (lambda w: w.cache.reservations.set(1, 1.5), TypeError, "blocks must be an integer, not float: 1.5"),
        (lambda w: w.cache.reservations.get("x"), TypeError, "a group must be an integer, not str: 'x'"),
        (lambda w: check_snapshot([]), TypeError, "snapshot must be a PrefixSnapshot, not list: []"),
    ],
)
def test_a_refused_call_says_why_and_changes_nothing(use, error, sentence):
    world = World()
    before = world.picture()
    with pytest.raises(error, match=f"^{re.escape(sentence)}$") as caught:
        use(world)
    assert caught.type is error
    assert world.picture() == before
