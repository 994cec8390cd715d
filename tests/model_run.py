"""A long random program on the compiled memory and on reference: every answer, and again and again all state, compared.

python tests/model_run.py --ops 10000000 --seed 1. The seed is printed first; the same seed runs the same program.

One step is one operation on allocator, sequences, prefix cache, recurrent states or transactions, on both sides. Keys
in the pages say which token was written, so that what a sequence reads after forks, copies, cuts, hits in the cache and
aborts is known without any implementation. After an abort all that can be seen is as it was when the transaction began.
"""

import argparse
import random
import sys
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np

import pagepool
from pagepool import KvLayout, PoolError, StateLayout, Transaction, reference
from pagepool.memory import block_tables

LAYOUT = StateLayout(layers=[{"h": ((2,), "float32")}])
POLICIES = ("lru", "lfu", "s3fifo", "arc", "gittins")
STEPS_PER_WORLD = 4000
STEPS_PER_COMPARISON = 50
MAX_SEQUENCES = 7
SLOTS = 9


class Sequence:
    """A sequence on both sides, and the tokens that it holds."""

    def __init__(self, pair):
        self.pair = pair
        self.tokens = []


class Divergence(AssertionError):
    """The two sides, or what is known and one of them, differ."""


class World:
    """Both sides, and what is known without them. `step` does one operation."""

    def __init__(self, rng):
        self.rng = rng
        self.block_size = rng.choice((1, 2, 3, 4, 16))
        self.capacity = rng.choice((5, 12, 20, 32))
        policy = rng.choice(POLICIES)
        self.sides = []
        for api in (pagepool, reference):
            allocator = api.BlockAllocator(self.capacity)
            self.sides.append(
                SimpleNamespace(
                    api=api,
                    allocator=allocator,
                    cache=api.PrefixCache(allocator, self.block_size, policy),
                    states=api.SsmStatePool.from_layout(LAYOUT, SLOTS),
                    transactions=[],
                )
            )
        layout = KvLayout(1, 1, 8, block_size=self.block_size, dtype="float32")
        self.pages = pagepool.KvCachePool.from_layout(layout, self.capacity, self.sides[0].allocator)
        self.sequences = []
        self.handles = []  # pairs
        self.held = []  # references of our own
        self.pending = []  # given up, dropped by the commit
        self.taking_part = []  # per open transaction, the ids of what takes part
        self.before = []  # per open transaction, all that was there
        self.operations = [getattr(self, name) for name in OPERATIONS for _ in range(OPERATIONS[name])]

    def step(self):
        self.rng.choice(self.operations)()

    def both(self, call):
        """`call(side, index)` on both: the same result, or errors of the same type, which is then the result."""
        results = []
        for index, side in enumerate(self.sides):
            try:
                result = call(side, index)
            except (PoolError, ValueError) as error:
                result = type(error)
            results.append(result.tolist() if isinstance(result, np.ndarray) else result)
        ours, theirs = results
        if ours != theirs:
            raise Divergence(f"{ours} and {theirs}")
        return ours

    def mine(self):
        """Sequences that may be changed now: in a transaction, those that take part or were made in it."""
        if not self.taking_part:
            return self.sequences
        return [sequence for sequence in self.sequences if id(sequence) in self.taking_part[-1]]

    def pick(self):
        mine = self.mine()
        return self.rng.choice(mine) if mine else None

    def count(self):
        return self.rng.randrange(1, 2 * self.block_size + 2)

    def write(self, sequence, n):
        """Appends n tokens on both sides, and their keys on ours."""
        slots = self.both(lambda side, i: sequence.pair[i].append(n))
        if isinstance(slots, list):
            self.store(sequence, slots)

    def store(self, sequence, slots):
        fresh = [self.rng.randrange(2) for _ in slots]
        sequence.tokens += fresh
        k = np.repeat(np.array(fresh, np.float32), 8).reshape(-1, 1, 8)
        self.pages.append(0, np.array(slots, np.int64), k, k)

    def join(self, sequence):
        """Makes a new sequence known, within the open transaction if there is one."""
        self.sequences.append(sequence)
        for index, side in enumerate(self.sides):
            if side.transactions:
                side.transactions[-1].close_on_abort(sequence.pair[index])
        if self.taking_part:
            self.taking_part[-1].add(id(sequence))

    def add(self):
        if len(self.sequences) < MAX_SEQUENCES:
            pair = [side.api.PagedSeqState(side.allocator, self.block_size, label=1) for side in self.sides]
            sequence = Sequence(pair)
            self.join(sequence)
            self.write(sequence, self.count())

    def fork(self):
        sequence = self.pick()
        if sequence and len(self.sequences) < MAX_SEQUENCES:
            child = Sequence([state.fork() for state in sequence.pair])
            child.tokens = list(sequence.tokens)
            self.join(child)

    def append(self):
        sequence = self.pick()
        if sequence:
            self.write(sequence, self.count())

    def append_batch(self):
        mine = self.mine()
        chosen = self.rng.sample(mine, self.rng.randrange(len(mine) + 1))
        counts = [self.count() for _ in chosen]
        drive = (block_tables.append_batch, reference.append_batch)
        if self.both(lambda side, i: drive[i]([sequence.pair[i] for sequence in chosen], counts)) is None:
            size = self.block_size
            for sequence, n in zip(chosen, counts, strict=True):
                table, end = sequence.pair[0].block_table, len(sequence.tokens) + n
                self.store(sequence, [table[t // size] * size + t % size for t in range(end - n, end)])

    def reserve(self):
        sequence = self.pick()
        if sequence:
            length = len(sequence.tokens) + self.count()
            self.both(lambda side, i: sequence.pair[i].ensure_capacity(length))

    def truncate(self):
        sequence = self.pick()
        if sequence:
            length = self.rng.randrange(len(sequence.tokens) + 2)
            if self.both(lambda side, i: sequence.pair[i].truncate(length)) is None:
                del sequence.tokens[length:]

    def drop_before(self):
        sequence = self.pick()
        if sequence:
            position = self.rng.randrange(len(sequence.tokens) + 1)
            self.both(lambda side, i: sequence.pair[i].drop_before(position))

    def release(self):
        sequence = self.pick()
        if sequence:
            self.both(lambda side, i: sequence.pair[i].release())
            sequence.tokens.clear()

    def close(self):
        sequence = self.pick()
        if sequence:
            self.both(lambda side, i: sequence.pair[i].close())
            self.sequences.remove(sequence)

    def allocate(self):
        n = self.rng.randrange(4)
        blocks = self.both(lambda side, i: self.through(side, "allocate_n", side.allocator)(n))
        if isinstance(blocks, list):
            self.held += blocks

    def share(self):
        blocks = [self.rng.randrange(-1, self.capacity + 1) for _ in range(self.rng.randrange(3))]
        if self.both(lambda side, i: self.through(side, "share", side.allocator)(blocks)) is None:
            self.held += blocks

    def free(self):
        blocks = self.rng.sample(self.held, self.rng.randrange(len(self.held) + 1))
        self.both(lambda side, i: self.through(side, "free", side.allocator)(blocks))
        self.held = list((Counter(self.held) - Counter(blocks)).elements())
        if self.taking_part:
            self.pending += blocks

    def free_too_much(self):
        if not self.taking_part:
            block = self.rng.randrange(self.capacity)
            times = self.sides[1].allocator.ref_count(block) + 1
            if self.both(lambda side, i: side.allocator.free([*self.held, *[block] * times])) is None:
                raise Divergence(f"block {block} was freed {times} times")

    def through(self, side, method, owner):
        """A method of an allocator or cache, or that of the open transaction in its place."""
        if side.transactions:
            return lambda *given: getattr(side.transactions[-1], method)(owner, *given)
        return getattr(owner, method)

    def hit(self):
        """A request begins with what is cached of its prompt."""
        if len(self.sequences) >= MAX_SEQUENCES:
            return
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randrange(4 * self.block_size))]
        blocks = self.both(lambda side, i: self.through(side, "match_prefix", side.cache)(tokens))
        sequence = Sequence([side.api.PagedSeqState(side.allocator, self.block_size) for side in self.sides])
        self.both(lambda side, i: sequence.pair[i].adopt(blocks))
        sequence.tokens = tokens[: len(blocks) * self.block_size]
        self.both(lambda side, i: self.through(side, "free", side.allocator)(blocks))
        if self.taking_part:
            self.pending += blocks
        self.join(sequence)

    def publish(self):
        sequence = self.pick()
        if sequence and sequence.pair[0].first_block == 0:
            blocks, tokens = sequence.pair[1].blocks, list(sequence.tokens)
            result = self.both(lambda side, i: self.through(side, "cache_blocks", side.cache)(tokens, blocks))
            if self.taking_part and result is None:
                self.pending += blocks[: len(tokens) // self.block_size]

    def evict(self):
        if not self.taking_part:
            n = self.rng.randrange(4)
            self.both(lambda side, i: side.cache.evict(n))

    def discard(self):
        if not self.taking_part:
            blocks = [self.rng.randrange(self.capacity) for _ in range(2)]
            self.both(lambda side, i: side.cache.discard(blocks))

    def lend(self):
        request = self.rng.randrange(1, 9)
        handles = []

        def call(side, i):
            if side.transactions:
                handles.append(side.transactions[-1].alloc_state(side.states, request))
            else:
                handles.append(side.states.handle(side.states.alloc(request)))
            return handles[-1].index

        if isinstance(self.both(call), int):
            self.handles.append(tuple(handles))
            if self.taking_part:
                self.taking_part[-1].add(id(self.handles[-1]))

    def pick_state(self):
        mine = [pair for pair in self.handles if not self.taking_part or id(pair) in self.taking_part[-1]]
        return self.rng.choice(mine) if mine else None

    def advance(self):
        pair = self.pick_state()
        if pair:
            value = self.rng.randrange(100)
            for handle in pair:
                handle.pool.view(0, "h")[handle.index] = value
                handle.slot.step()

    def copy(self):
        to, source = self.pick_state(), self.pick_state()
        if to:
            self.both(lambda side, i: side.states.copy(to[i].index, source[i].index))

    def give_back(self):
        pair = self.pick_state()
        if pair and not self.taking_part:
            self.both(lambda side, i: pair[i].release())
            self.both(lambda side, i: pair[i].release())  # stale by now
            self.handles.remove(pair)

    def begin(self):
        if len(self.taking_part) >= 3:
            return
        mine, before = self.mine(), self.picture()
        chosen = self.rng.sample(mine, self.rng.randrange(len(mine) + 1))
        pair = self.pick_state() if self.rng.randrange(2) else None

        def call(side, i):
            around = side.transactions[-1] if side.transactions else None
            transaction = around.nested() if around else Transaction()
            try:
                transaction.enlist(*[sequence.pair[i] for sequence in chosen], *([pair[i]] if pair else []))
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
        commit = self.rng.randrange(2)
        if commit and self.both(lambda side, i: side.transactions[-1].commit()) is None:
            made = self.taking_part.pop()
            self.before.pop()
            if self.taking_part:
                self.taking_part[-1] |= made
            else:
                self.pending.clear()
        else:
            self.both(lambda side, i: side.transactions[-1].abort())
            self.taking_part.pop()
            self.restore(self.before.pop())
        for side in self.sides:
            side.transactions.pop()

    def picture(self):
        """All that can be seen of our side, and what is known."""
        ours = self.sides[0]
        return SimpleNamespace(
            sequences=[(s, list(s.tokens), s.pair[0].blocks, s.pair[0].first_block) for s in self.sequences],
            handles=list(self.handles),
            held=list(self.held),
            pending=list(self.pending),
            counts=[ours.allocator.ref_count(block) for block in range(self.capacity)],
            cached=sorted(ours.cache.references()),
            states=[ours.states.view(0, "h")[pair[0].index].tolist() for pair in self.handles],
            lent=None if self.taking_part else ours.states.used_count,  # copies for the transactions around stay
        )

    def restore(self, before):
        """What is known is again what it was; so must be what can be seen."""
        self.sequences = [entry[0] for entry in before.sequences]
        for sequence, tokens, _, _ in before.sequences:
            sequence.tokens = list(tokens)
        self.handles, self.held, self.pending = list(before.handles), list(before.held), list(before.pending)
        now = self.picture()
        for name in vars(before):
            if getattr(now, name) != getattr(before, name):
                raise Divergence(f"{name} after an abort: {getattr(now, name)}, not {getattr(before, name)}")

    def compare(self):
        """All state of both sides, and the tokens in the pages."""
        ours, theirs = self.sides
        for side in self.sides:
            side.allocator.check(others=len(self.held) + len(self.pending))
            side.cache.check()
            side.states.check()
        self.both(lambda side, i: [side.allocator.ref_count(block) for block in range(self.capacity)])
        self.both(lambda side, i: (side.allocator.free_count, side.cache.num_cached, side.cache.evictable))
        self.both(lambda side, i: sorted(side.cache.references()))
        self.both(lambda side, i: [side.states.generation(k) for k in range(SLOTS)])
        self.both(lambda side, i: [side.states.slot(k).position for k in range(SLOTS)])
        if not np.array_equal(ours.states.view(0, "h"), theirs.states.view(0, "h")):
            raise Divergence("recurrent states differ")
        for sequence in self.sequences:
            state = sequence.pair[0]
            self.both(lambda side, i, s=sequence: (s.pair[i].len, s.pair[i].first_block, list(s.pair[i].block_table)))
            start = state.first_block * self.block_size
            keys = self.pages.gather(0, np.array(state.blocks, np.int32), state.len - start)[0][:, 0, 0].tolist()
            if state.len != len(sequence.tokens) or keys != sequence.tokens[start:]:
                raise Divergence(f"the pages hold {keys}, written were {sequence.tokens[start:]}")

    def finish(self):
        """Ends everything: nothing is left."""
        while self.taking_part:
            self.end()
        self.compare()
        for sequence in list(self.sequences):
            self.both(lambda side, i, s=sequence: s.pair[i].close())
        self.both(lambda side, i: side.allocator.free(self.held))
        self.both(lambda side, i: side.cache.reset_prefix_cache())
        if self.both(lambda side, i: side.allocator.in_use):
            raise Divergence(f"{self.sides[0].allocator.in_use} blocks are left")


# How often each is drawn.
OPERATIONS = {
    "append": 10, "append_batch": 3, "add": 3, "fork": 4, "truncate": 5, "drop_before": 2, "reserve": 2, "release": 1,
    "close": 4, "allocate": 2, "share": 2, "free": 3, "free_too_much": 1, "hit": 4, "publish": 5, "evict": 3,
    "discard": 1, "lend": 2, "advance": 3, "copy": 2, "give_back": 2, "begin": 4, "end": 6,
}  # fmt: skip


def run(seed, ops, report=None):
    """Runs `ops` operations; raises `Divergence` that says where. Calls `report(done)` now and then."""
    done = 0
    while done < ops:
        rng = random.Random(f"{seed}/{done}")
        world = World(rng)
        for number in range(min(STEPS_PER_WORLD, ops - done)):
            try:
                world.step()
                if number % STEPS_PER_COMPARISON == 0:
                    world.compare()
            except Exception as error:
                raise Divergence(f"seed {seed}, operation {done + number}: {type(error).__name__}: {error}") from error
        world.finish()
        done += min(STEPS_PER_WORLD, ops - done)
        if report is not None:
            report(done)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", type=int, default=10**7)
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**9) if arguments.seed is None else arguments.seed
    print(f"seed {seed}, {arguments.ops} operations", flush=True)
    start = time.monotonic()

    def report(done):
        if done % (STEPS_PER_WORLD * 50) == 0:
            print(f"{done} operations, {time.monotonic() - start:.0f} s", flush=True)

    try:
        run(seed, arguments.ops, report)
    except Divergence as error:
        sys.exit(str(error))
    print(f"no divergence in {arguments.ops} operations, seed {seed}, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
