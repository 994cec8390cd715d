"""Refused calls of a prefix cache: type, names and numbers of the error; a refused call changes nothing."""

import pytest
from refusals import refuses

from pagepool import BlockAllocator, InvalidBlock, PrefixCache
from pagepool.prefix.events import check_snapshot

HUGE = 10**30


class World:
    """A cache of two blocks for tokens 0 to 7, with a third block that is not cached."""

    def __init__(self):
        self.allocator = BlockAllocator(8)
        self.cache = PrefixCache(self.allocator, 4, max_events=8)
        self.blocks = self.allocator.allocate_n(3).tolist()
        self.cache.cache_blocks(range(8), self.blocks)

    def picture(self):
        self.cache.check()
        counts = [self.allocator.ref_count(block) for block in range(8)]
        return self.cache.stats(), counts, self.cache.snapshot()


NEW = range(50, 54)


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (lambda w: PrefixCache(w.allocator, 0), ValueError, ("block_size", 1, 1024, 0)),
        (lambda w: PrefixCache(w.allocator, max_events=-1), ValueError, ("max_events", 0, -1)),
        (lambda w: PrefixCache(w.allocator, max_events=HUGE), ValueError, ("max_events", 2147483647, HUGE)),
        (lambda w: PrefixCache(w.allocator, max_events="x"), TypeError, ("max_events", "str", "x")),
        (lambda w: w.cache.match_prefix([[1, 2]]), ValueError, ("tokens", 1, 2)),
        (lambda w: w.cache.match_prefix([1.5]), TypeError, ("tokens", "float64")),
        (lambda w: w.cache.match_tokens([1], extra_keys=5), TypeError, ("extra_keys", "int")),
        (lambda w: w.cache.cache_blocks(range(8, 20), w.blocks[:2]), ValueError, (12, 3, 2)),
        (lambda w: w.cache.cache_blocks(NEW, [7]), InvalidBlock, ("block", 7)),
        (lambda w: w.cache.cache_blocks(NEW, [8]), InvalidBlock, ("block", 8)),
        (lambda w: w.cache.cache_blocks(NEW, [1]), InvalidBlock, ("block", 1, 0)),
        (lambda w: w.cache.cache_blocks(range(8), w.blocks, start=3), ValueError, ("start", 0, 2, 3)),
        (lambda w: w.cache.cache_blocks(range(8), w.blocks, start=HUGE), ValueError, ("start", 0, 2, HUGE)),
        (lambda w: w.cache.cache_blocks(range(8), w.blocks, start="1"), TypeError, ("start", "str", "1")),
        (lambda w: w.cache.cache_blocks(range(8), w.blocks, epoch=-1), ValueError, ("epoch", 0, -1)),
        (lambda w: w.cache.cache_blocks(range(8), w.blocks, epoch="1"), TypeError, ("epoch", "str", "1")),
        (lambda w: w.cache.evict(-1), ValueError, (-1,)),
        (lambda w: w.cache.evict(1.0), TypeError, ("n", "float", "1.0")),
        (lambda w: w.cache.discard(["0"]), TypeError, ("str",)),
        (lambda w: check_snapshot([]), TypeError, ("snapshot", "PrefixSnapshot", "list")),
    ],
)
def test_a_refused_call_says_why_and_changes_nothing(use, error, words):
    world = World()
    with refuses(error, *words, unchanged=world.picture):
        use(world)
