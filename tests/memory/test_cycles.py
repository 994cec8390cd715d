"""Reference cycles of pagepool objects are collected once and free their resources. Sequences are not tracked."""

import gc
import importlib
import pkgutil
import random
import weakref

import pytest

import pagepool.memory
from pagepool import (
    AttentionSequenceState,
    BlockAllocator,
    HybridSequence,
    KvCachePool,
    KvGroup,
    KvLayout,
    PagedSeqState,
    PrefixCache,
    SequencePool,
    SsmStatePool,
    StateCheckpoints,
    StateLayout,
)

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
STATES = StateLayout(layers=[{"h": ((2,), "float32")}])
HAVE_GC = 1 << 14
HEAP_TYPE = 1 << 9


def test_the_collector_tracks_only_classes_that_can_be_part_of_a_cycle():
    """The garbage collector clears an object's references before it frees the object.

    An object that needs these references to free its blocks must not be tracked. Only classes that can be part of a
    cycle are tracked: through a layout, a list of states, or a view of an array.
    """
    tracked = set()
    for found in pkgutil.iter_modules(pagepool.memory.__path__, "pagepool.memory."):
        module = importlib.import_module(found.name)
        for name, kind in vars(module).items():
            compiled = isinstance(kind, type) and kind.__module__ == found.name and not kind.__flags__ & HEAP_TYPE
            if compiled and kind.__flags__ & HAVE_GC:
                tracked.add(name)
    assert tracked == {"BlockTables", "KvCachePool", "SsmStatePool", "StateMemory"}


class Knot:
    """Refers to itself, so that only the garbage collector frees it."""

    def __init__(self):
        self.itself = self


def tie(allocator, rng):
    """Put one object of each kind into a cycle, in random order; return weak references to the main objects."""
    pool = KvCachePool.from_layout(LAYOUT, allocator.capacity, allocator)
    states = SsmStatePool.from_layout(STATES, 8)
    cache = PrefixCache(allocator, 4, rng.choice(["lru", "gittins"]))
    state = PagedSeqState(allocator, 4, label="knot")
    state.append(9)
    cache.cache_blocks(range(9), state.blocks)
    match = cache.match_tokens(range(9))
    checkpoints = StateCheckpoints(STATES, states, 1000)
    hybrid = HybridSequence([KvGroup(allocator, 4), KvGroup(allocator, 4, window=3)], states, label=7)
    hybrid.append(9)
    hybrid.checkpoint()
    state.truncate(2)
    hybrid.append(5)
    parts = [pool, states, cache, state, match, checkpoints, hybrid, hybrid.state, SequencePool(kv=pool)]
    parts += [state.fork(), hybrid.fork(), allocator.owners(), allocator.leaks()]
    rng.shuffle(parts)
    knot = Knot()
    knot.parts = parts
    return [weakref.ref(one) for one in (knot, pool, states, cache, hybrid)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(8))
def test_a_cycle_of_all_objects_is_collected_and_leaves_nothing(seed):
    rng = random.Random(seed)
    allocator = BlockAllocator(64)
    before = gc.get_threshold()
    gc.set_threshold(*rng.choice([(1, 1, 1), before, (5, 2, 1)]))
    try:
        for _ in range(5):
            gone = tie(allocator, rng)
            gc.collect()
            assert [one() for one in gone] == [None] * len(gone)
            allocator.check(others=0)
            assert allocator.in_use == 0
    finally:
        gc.set_threshold(*before)


def test_a_label_ties_no_knot():
    class Name(str):
        pass

    class Number(int):
        pass

    state = PagedSeqState(BlockAllocator(4), 4, label=Name("request 7"))
    assert (type(state.label), state.label) == (str, "request 7")
    state.label = Number(8)
    assert (type(state.label), state.label) == (int, 8)
    name = Name("request 9")
    name.of = state = PagedSeqState(BlockAllocator(4), 4, label=name)
    allocator = weakref.ref(state.allocator)
    del name, state
    gc.collect()
    assert allocator() is None


def test_states_and_layouts_may_refer_to_their_pool():
    class State(AttentionSequenceState):
        pass

    class Layout(KvLayout):
        pass

    states = SsmStatePool(2, lambda i: State(8))
    states.slot(0).state.pool = states
    layout = Layout(num_layers=1, num_kv_heads=1, head_dim=8)
    pool = KvCachePool.from_layout(layout, 4)
    object.__setattr__(layout, "pool", pool)
    gone = [weakref.ref(states), weakref.ref(pool), weakref.ref(pool.allocator)]
    del states, layout, pool
    gc.collect()
    assert [one() for one in gone] == [None] * 3
