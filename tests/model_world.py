"""The state of the random program: both implementations, and the expected tokens. `model_*` has the operations."""

from types import SimpleNamespace

import numpy as np
from plain_checkpoints import StateCheckpoints as PlainCheckpoints

import pagepool
from pagepool import KvGroup, KvLayout, PoolError, StateCheckpoints, StateLayout, reference
from pagepool.prefix.eviction import POLICIES

STATES = StateLayout(layers=[{"h": ((2,), "float32")}])
SLOTS = 12
KEYS = np.repeat(np.arange(2, dtype=np.float32), 8).reshape(-1, 1, 8)  # keys and values encode the token id
# Groups of layers: number of the allocator, window. MODELS lists the groups of each model.
GROUPS = ((0, None), (1, 3), (0, 5), (1, 0))
MODELS = ((0,), (0, 1), (1,), (0, 2), (0, 1, 2), (3, 1))


class Divergence(AssertionError):
    """The two implementations differ, or one of them differs from the expected tokens."""


class Sequence:
    """A sequence on both sides, and its tokens."""

    def __init__(self, pair):
        self.pair = pair
        self.tokens = []


class Core:
    """Both implementations, and the expected tokens."""

    def __init__(self, rng, failing=None):
        self.rng = rng
        self.failing = failing  # a context in which allocations of our side fail, or None
        self.block_size = self.one_of((1, 2, 3, 4, 16))
        self.window_size = self.one_of((1, 2, 4))
        begin, most = self.one_of(((6, 6), (12, 12), (12, 24), (32, 32), (24, 48), (48, 48)))
        self.most = most
        self.policy = policy = self.one_of(tuple(POLICIES))
        budget, few = self.one_of((60, 200, 600)), self.one_of((8, 12))
        self.sides = []
        for api in (pagepool, reference):
            allocators = [api.BlockAllocator(begin, most), api.BlockAllocator(8, few)]
            cache, states = api.PrefixCache(allocators[0], self.block_size, policy), api.SsmStatePool
            states = states.from_layout(STATES, SLOTS)
            groups = [
                KvGroup(allocators[place], (self.block_size, self.window_size)[place], window, 24)
                for place, window in GROUPS
            ]
            checkpoints = PlainCheckpoints if api is reference else StateCheckpoints
            self.sides.append(
                SimpleNamespace(
                    api=api,
                    allocators=allocators,
                    allocator=allocators[0],
                    cache=cache,
                    states=states,
                    models=[[groups[i] for i in model] for model in MODELS],
                    checkpoints=checkpoints(STATES, states, budget, grid=8, spacing=2, align=1),
                )
            )
        ours = self.sides[0]
        self.pages = self.pool(self.block_size, ours.allocators[0])
        small = self.pool(self.window_size, ours.allocators[1])
        self.pools = [(self.pages, small)[place] for place, _ in GROUPS]
        self.sequences = []
        self.hybrids = []
        self.slots = []  # slots of recurrent states, allocated directly
        self.held = []  # references of our own
        self.stale = []  # what was closed, released or given up
        self.calls = self.errors = 0

    def pool(self, block_size, allocator):
        layout = KvLayout(1, 1, 8, block_size=block_size, dtype="float32")
        most = allocator.max_capacity
        return pagepool.KvCachePool.from_layout(layout, allocator.capacity, allocator, most)

    def below(self, n):
        return int(self.rng.random() * n)

    def one_of(self, things):
        return things[int(self.rng.random() * len(things))]

    def some_of(self, things):
        return self.rng.sample(things, self.below(len(things) + 1))

    def both(self, call):
        """Do `call(side, index)` on both sides and return their equal result, or the common type of their errors."""
        self.calls += 1
        results = []
        for index, side in enumerate(self.sides):
            try:
                if index == 0 and self.failing is not None:
                    result = self.failing.attempt(self, lambda: call(self.sides[0], 0))
                else:
                    result = call(side, index)
            except (PoolError, ValueError, KeyError) as error:
                result = type(error)
                self.errors += 1
            results.append(result.tolist() if isinstance(result, np.ndarray) else result)
        ours, theirs = results
        if ours != theirs:
            raise Divergence(f"{ours} and {theirs}")
        return ours

    def make(self, call):
        """Return the results of `call(side, index)` on both sides as a pair, or None if both raise."""
        pair = [None, None]

        def keep(side, i):
            pair[i] = call(side, i)

        return pair if self.both(keep) is None else None

    def pick(self, things):
        return self.one_of(things) if things else None

    def count(self):
        return 1 + self.below(2 * self.block_size + 1)

    def prompt(self):
        """Return the tokens of a request. Every second request has the prefix of an existing sequence."""
        known = self.one_of(self.sequences + self.hybrids).tokens if self.sequences or self.hybrids else []
        begin = known[: self.below(len(known) + 1)] if self.below(2) else []
        return begin[: 4 * self.block_size] + [self.below(2) for _ in range(self.below(2 * self.block_size + 2))]

    def write(self, pool, slots, tokens):
        if slots:
            k = KEYS.take(tokens, axis=0)
            pool.append(0, np.array(slots, np.int64), k, k)

    def retire(self, kind, pair):
        """Store a closed object: later calls check that it refuses every use."""
        if len(self.stale) >= 8:
            self.stale.pop(self.below(8))
        self.stale.append((kind, pair))

    def picture(self):
        """The visible state of our side, and the expected tokens."""
        ours = self.sides[0]
        view = ours.states.view(0, "h")
        return SimpleNamespace(
            sequences=[(s, list(s.tokens), s.pair[0].blocks, s.pair[0].first_block) for s in self.sequences],
            hybrids=[
                (
                    h,
                    list(h.tokens),
                    h.pair[0].checkpoints,
                    [(kv.blocks, kv.first_block) for kv in h.pair[0].kv],
                    h.pair[0].state is not None and view[h.pair[0].state.index].tolist(),
                )
                for h in self.hybrids
            ],
            slots=list(self.slots),
            held=list(self.held),
            counts=[counts(allocator, 48) for allocator in ours.allocators],
            cached=sorted(ours.cache.references()),
            states=[view[slot].tolist() for slot in self.slots],
            lent=ours.states.used_count,
        )

    def same_picture(self, before, when):
        now = self.picture()
        for name in vars(before):
            if getattr(now, name) != getattr(before, name):
                raise Divergence(f"{name} {when}: {getattr(now, name)}, not {getattr(before, name)}")

    def compare(self):
        """All state of both sides, and the tokens in the pages."""
        ours, theirs = self.sides
        for side in self.sides:
            side.allocators[0].check(others=len(self.held))
            side.allocators[1].check(others=0)
            for each in (side.cache, side.states):
                each.check()
        ours.checkpoints.check()
        self.both(lambda side, i: [counts(allocator, 48) for allocator in side.allocators])
        for name in ("capacity", "available", "free_count", "in_use"):
            self.both(lambda side, i, name=name: [getattr(one, name) for one in side.allocators])
        self.both(lambda side, i: [owners(side.allocator, block) for block in range(side.allocator.capacity)])
        self.both(lambda side, i: (side.cache.num_cached, side.cache.evictable))
        self.both(lambda side, i: sorted(side.cache.references()))
        self.both(lambda side, i: (side.checkpoints.index.num_states, side.checkpoints.index.used_bytes))
        self.both(lambda side, i: [side.states.slot(k).position for k in range(SLOTS)])
        if not np.array_equal(ours.states.view(0, "h"), theirs.states.view(0, "h")):
            raise Divergence("recurrent states differ")
        for sequence in self.sequences:
            self.compare_table(sequence.pair, sequence.tokens, self.pages)

    def compare_table(self, pair, tokens, pool):
        self.both(lambda side, i: (pair[i].len, pair[i].first_block, pair[i].blocks, list(pair[i].block_table)))
        state = pair[0]
        start = state.first_block * state.block_size
        keys = pool.gather(0, np.array(state.blocks, np.int32), state.len - start)[0][:, 0, 0].tolist()
        if state.len != len(tokens) or keys != tokens[start:]:
            raise Divergence(f"the pages hold {keys}, expected {tokens[start:]}")

    def finish(self):
        """Free everything and check that no block or slot is in use."""
        self.compare()
        for thing in self.sequences + self.hybrids:
            self.both(lambda side, i, thing=thing: thing.pair[i].close())
        for slot in self.slots:
            self.both(lambda side, i, slot=slot: side.states.release(slot))
        self.both(lambda side, i: side.allocator.free(self.held))
        self.both(lambda side, i: side.cache.reset_prefix_cache())
        left = self.both(lambda side, i: [one.in_use for one in side.allocators] + [side.states.used_count])
        if any(left):
            raise Divergence(f"blocks and slots are still in use: {left}")


def owners(allocator, block):
    """Return kind and references of each owner of a block."""
    return sorted((kind, references) for kind, _, references, *_ in allocator.owners(block))


def counts(allocator, most):
    """Return the reference counts of all blocks up to the maximum capacity."""
    found = [allocator.ref_count(block) for block in range(allocator.capacity)]
    return found + [0] * (most - len(found))
