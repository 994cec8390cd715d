"""What the random program works on: both sides, and what is known without them. The operations are in `model_*`."""

from types import SimpleNamespace

import numpy as np

import pagepool
from pagepool import KvGroup, KvLayout, PoolError, StateCheckpoints, StateLayout, Transaction, reference
from pagepool.prefix.eviction import POLICIES
from pagepool.reference.checkpoints import StateCheckpoints as ReferenceCheckpoints

STATES = StateLayout(layers=[{"h": ((2,), "float32")}])
SLOTS = 12
KEYS = np.repeat(np.arange(2, dtype=np.float32), 8).reshape(-1, 1, 8)  # a token's key and value say which it is
# Groups of layers, as allocator, whether its block size is the windows', and window: a model has some of them.
GROUPS = ((0, False, None), (1, True, 3), (0, True, 5), (1, True, 0))
MODELS = ((0,), (0, 1), (1,), (0, 2), (0, 1, 2), (3, 1))


class Divergence(AssertionError):
    """The two sides, or what is known and one of them, differ."""


class Sequence:
    """A sequence on both sides, and the tokens that it holds."""

    def __init__(self, pair):
        self.pair = pair
        self.tokens = []


class Core:
    """Both sides, and what is known without them."""

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
                KvGroup(allocators[place], self.window_size if small else self.block_size, window, 24)
                for place, small, window in GROUPS
            ]
            checkpoints = ReferenceCheckpoints if api is reference else StateCheckpoints
            self.sides.append(
                SimpleNamespace(
                    api=api,
                    allocators=allocators,
                    allocator=allocators[0],
                    cache=cache,
                    states=states,
                    models=[[groups[i] for i in model] for model in MODELS],
                    checkpoints=checkpoints(STATES, states, budget, grid=8, spacing=2),
                    transactions=[],
                )
            )
        ours = self.sides[0]
        self.pages = self.pool(self.block_size, ours.allocators[0])
        small = [self.pool(self.window_size, allocator) for allocator in ours.allocators]
        self.pools = [small[place] if is_small else self.pages for place, is_small, _ in GROUPS]
        self.sequences = []
        self.hybrids = []
        self.handles = []  # pairs
        self.held = []  # references of our own
        self.pending = []  # given up, dropped by the commit
        self.stale = []  # what was closed, released or given up
        self.now = 0.0
        self.taking_part = []  # per open transaction, the ids of what takes part
        self.before = []  # per open transaction, all that was there
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
        """`call(side, index)` on both: the same result, or errors of the same type, which is then the result."""
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
        """What `call(side, index)` makes on both sides, as a pair, or None when it raises."""
        pair = [None, None]

        def keep(side, i):
            pair[i] = call(side, i)

        return pair if self.both(keep) is None else None

    def mine(self, things):
        """Those that may be changed now: in a transaction, those that take part or were made in it."""
        if not self.taking_part:
            return things
        return [thing for thing in things if id(thing) in self.taking_part[-1]]

    def pick(self, things):
        mine = self.mine(things)
        return self.one_of(mine) if mine else None

    def count(self):
        return 1 + self.below(2 * self.block_size + 1)

    def prompt(self):
        """Tokens of a request; one in two begins like a sequence that is there."""
        known = self.one_of(self.sequences + self.hybrids).tokens if self.sequences or self.hybrids else []
        begin = known[: self.below(len(known) + 1)] if self.below(2) else []
        return begin[: 4 * self.block_size] + [self.below(2) for _ in range(self.below(2 * self.block_size + 2))]

    def write(self, pool, slots, tokens):
        if slots:
            k = KEYS.take(tokens, axis=0)
            pool.append(0, np.array(slots, np.int64), k, k)

    def join(self, thing, things):
        """Makes something new known, within the open transaction if there is one."""
        things.append(thing)
        for index, side in enumerate(self.sides):
            if side.transactions:
                side.transactions[-1].close_on_abort(thing.pair[index])
        if self.taking_part:
            self.taking_part[-1].add(id(thing))

    def retire(self, kind, pair):
        """Remembers what may not be used any more, to try it later."""
        if len(self.stale) >= 8:
            self.stale.pop(self.below(8))
        self.stale.append((kind, pair))

    def through(self, side, method, owner):
        """A method of an allocator or cache, or that of the open transaction in its place."""
        if side.transactions:
            return lambda *given, **names: getattr(side.transactions[-1], method)(owner, *given, **names)
        return getattr(owner, method)

    def begin(self):
        if len(self.taking_part) >= 3:
            return
        before = self.picture()
        chosen = self.some_of(self.mine(self.sequences)) + self.some_of(self.mine(self.hybrids))
        pair = self.pick(self.handles) if self.below(2) else None

        def call(side, i):
            around = side.transactions[-1] if side.transactions else None
            transaction = around.nested() if around else Transaction()
            try:
                transaction.enlist(*[thing.pair[i] for thing in chosen], *([pair[i]] if pair else []))
            except PoolError:
                transaction.abort()
                raise
            side.transactions.append(transaction)

        if self.both(call) is None:
            self.taking_part.append({id(thing) for thing in (*chosen, pair)})
            self.before.append(before)

    def end(self):
        if not self.taking_part:
            return
        way = self.below(6)
        if way < 3 and self.both(lambda side, i: side.transactions[-1].commit()) is None:
            made = self.taking_part.pop()
            self.before.pop()
            if self.taking_part:
                self.taking_part[-1] |= made
            else:
                self.pending.clear()
            for side in self.sides:
                side.transactions.pop()
            return
        for side in self.sides:
            if way == 4:  # an exception leaves the block
                error = RuntimeError("an engine fails")
                side.transactions[-1].__exit__(RuntimeError, error, None)
            elif way != 5:  # one that is dropped aborts
                side.transactions[-1].abort()
            side.transactions.pop()
        self.taking_part.pop()
        self.restore(self.before.pop())

    def picture(self):
        """All that can be seen of our side, and what is known."""
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
            handles=list(self.handles),
            held=list(self.held),
            pending=list(self.pending),
            counts=[counts(allocator, 48) for allocator in ours.allocators],
            cached=sorted(ours.cache.references()),
            states=[view[pair[0].index].tolist() for pair in self.handles],
            lent=None if self.taking_part else ours.states.used_count,  # copies for the transactions around stay
        )

    def restore(self, before):
        """What is known is again what it was; so must be what can be seen."""
        self.sequences = [entry[0] for entry in before.sequences]
        self.hybrids = [entry[0] for entry in before.hybrids]
        for thing, tokens, *_ in before.sequences + before.hybrids:
            thing.tokens = list(tokens)
        self.handles, self.held, self.pending = list(before.handles), list(before.held), list(before.pending)
        self.same_picture(before, "after an abort")

    def same_picture(self, before, when):
        now = self.picture()
        for name in vars(before):
            if getattr(now, name) != getattr(before, name):
                raise Divergence(f"{name} {when}: {getattr(now, name)}, not {getattr(before, name)}")

    def compare(self):
        """All state of both sides, and the tokens in the pages."""
        ours, theirs = self.sides
        for side in self.sides:
            side.allocators[0].check(others=len(self.held) + len(self.pending))
            side.allocators[1].check(others=0)
            for each in (side.cache, side.states):
                each.check()
        ours.checkpoints.check()
        self.both(lambda side, i: [counts(allocator, 48) for allocator in side.allocators])
        self.both(lambda side, i: [(one.capacity, one.available) for one in side.allocators])
        self.both(lambda side, i: (side.cache.num_cached, side.cache.evictable))
        self.both(lambda side, i: sorted(side.cache.references()))
        self.both(lambda side, i: (side.checkpoints.index.num_states, side.checkpoints.index.used_bytes))
        self.both(lambda side, i: [side.states.slot(k).position for k in range(SLOTS)])
        if self.failing is None:  # a slot that was taken for what then failed has been released once more
            self.both(lambda side, i: [side.states.generation(k) for k in range(SLOTS)])
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
            raise Divergence(f"the pages hold {keys}, written were {tokens[start:]}")

    def finish(self):
        """Ends everything: nothing is left."""
        while self.taking_part:
            self.end()
        self.compare()
        for thing in self.sequences + self.hybrids:
            self.both(lambda side, i, thing=thing: thing.pair[i].close())
        for pair in self.handles:
            self.both(lambda side, i, pair=pair: pair[i].close())
        self.both(lambda side, i: side.allocator.free(self.held))
        self.both(lambda side, i: side.cache.reset_prefix_cache())
        left = self.both(lambda side, i: [one.in_use for one in side.allocators] + [side.states.used_count])
        if any(left):
            raise Divergence(f"blocks and slots are left: {left}")


def counts(allocator, most):
    """The references of all blocks, as many as there may ever be."""
    found = [allocator.ref_count(block) for block in range(allocator.capacity)]
    return found + [0] * (most - len(found))
