"""Allocator, sequences, tables and pages, compiled against reference, after every step of random programs.

Every appended token gets a stamp, which determines its K and V in every layer of two attached pools. The expected
content of a sequence is then a list of stamps, after any forks, shares, copies, truncations and rollbacks.
HYPOTHESIS_PROFILE=long runs more and longer programs.
"""

import os
from collections import Counter
from types import SimpleNamespace

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import pagepool
from pagepool import KvLayout, PoolError, reference
from pagepool.memory import block_tables

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
PROFILE = settings(
    max_examples=5000 if LONG else 100,
    stateful_step_count=100 if LONG else 40,
    derandomize=not LONG,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

NAMES = ("BlockAllocator", "PagedSeqState", "BlockTables", "KvCachePool")
OURS = SimpleNamespace(
    **{name: getattr(pagepool, name) for name in NAMES},
    append_batch=block_tables.append_batch,
    release_batch=block_tables.release_batch,
)
THEIRS = reference

MAX_SEQS = 6
STAMPS = 8192
# Integers of at most 8 bits are exact in every dtype.
PATTERN = np.random.default_rng(0).integers(-128, 128, (STAMPS, 2, 2, 2, 8)).astype(np.float32)


def kv_of(stamps, layer, layout):
    """Return K and V, (n, num_kv_heads, head_dim) each, of tokens with these stamps."""
    rows = PATTERN[np.asarray(stamps, dtype=int) % STAMPS, layer, :, : layout.num_kv_heads]
    return np.ascontiguousarray(rows[:, 0]), np.ascontiguousarray(rows[:, 1])


class Memory(RuleBasedStateMachine):
    """Run each step on both implementations. An outcome is a result or the type of an error."""

    @initialize(
        data=st.data(), block_size=st.sampled_from([3, 16, 32, 1]), num_blocks=st.sampled_from([12, 24, 6, 40, 1, 0])
    )
    def start(self, data, block_size, num_blocks):
        layouts = [
            KvLayout(1, 1, 8, block_size=block_size, dtype="float32"),
            KvLayout(2, 2, 8, block_size=block_size, dtype="bfloat16"),
        ]
        self.block_size, self.num_blocks, self.layouts = block_size, num_blocks, layouts
        self.sides = []
        for api in (OURS, THEIRS):
            allocator = api.BlockAllocator(num_blocks)
            pools = [api.KvCachePool.from_layout(layout, num_blocks, allocator) for layout in layouts]
            tables = api.BlockTables(MAX_SEQS, num_blocks)
            self.sides.append(SimpleNamespace(api=api, allocator=allocator, pools=pools, tables=tables, states=[]))
        self.stamps = []  # for each sequence, the stamps of its tokens
        self.held = []  # references outside of tables: raw allocations and shares
        self.next_stamp = 0
        for _ in range(3):
            self.create(data, None)

    def both(self, call):
        """Do `call(side)` on both sides and return their equal result, or None if both raise the same type."""
        outcomes = []
        for side in self.sides:
            try:
                outcomes.append((None, call(side)))
            except (PoolError, ValueError) as error:
                outcomes.append((type(error), None))
        (error, result), (expected_error, expected) = outcomes
        assert error is expected_error
        np.testing.assert_array_equal(result, expected)
        return None if error else expected

    def write(self, index, slots):
        """Append K and V of new stamps at the slots of sequence `index`."""
        fresh = range(self.next_stamp, self.next_stamp + len(slots))
        self.next_stamp += len(slots)
        self.stamps[index] += fresh
        for side in self.sides:
            for pool, layout in zip(side.pools, self.layouts, strict=True):
                for layer in range(layout.num_layers):
                    pool.append(layer, slots, *kv_of(fresh, layer, layout))

    def grow(self, index, n):
        slots = self.both(lambda side: np.asarray(side.states[index].append(n)))
        if slots is not None:
            self.write(index, slots)

    def some(self, data):
        return data.draw(st.integers(0, len(self.stamps) - 1), label="sequence")

    def tokens(self, data):
        few, many = st.integers(1, self.block_size), st.integers(0, 3 * self.block_size)
        return data.draw(st.one_of(few, few, many), label="tokens")

    @precondition(lambda self: len(self.stamps) < MAX_SEQS)
    @rule(data=st.data(), maximum=st.one_of(st.none(), st.integers(0, 4)))
    def add(self, data, maximum):
        self.create(data, maximum)

    def create(self, data, maximum):
        for side in self.sides:
            limit = None if maximum is None else min(maximum, self.num_blocks)
            side.states.append(side.api.PagedSeqState(side.allocator, self.block_size, limit))
        self.stamps.append([])
        self.grow(len(self.stamps) - 1, self.tokens(data))

    @precondition(lambda self: self.stamps and len(self.stamps) < MAX_SEQS)
    @rule(data=st.data())
    def fork(self, data):
        index = self.some(data)
        self.fork_of(index)
        self.grow(data.draw(st.sampled_from([index, len(self.stamps) - 1]), label="writer"), self.tokens(data))

    @precondition(lambda self: self.stamps and len(self.stamps) < MAX_SEQS)
    @rule(data=st.data(), mistake=st.integers(0, 9))
    def adopt(self, data, mistake):
        """A new sequence adopts tokens of another sequence; in one of ten cases with a wrong number of tokens."""
        index = self.some(data)
        if self.sides[0].states[index].first_block:
            return
        tokens = data.draw(st.integers(0, len(self.stamps[index])), label="tokens adopted")
        for side in self.sides:
            side.states.append(side.api.PagedSeqState(side.allocator, self.block_size))
        self.stamps.append([])
        held = -(-tokens // self.block_size)
        wanted = tokens + self.block_size if mistake == 0 else tokens
        adopted = self.both(lambda side: side.states[-1].adopt(side.states[index].blocks[:held], wanted) or True)
        if adopted:
            self.stamps[-1] += self.stamps[index][:tokens]
            self.grow(len(self.stamps) - 1, self.tokens(data))

    @precondition(lambda self: self.stamps)
    @rule(data=st.data())
    def append(self, data):
        for _ in range(data.draw(st.integers(1, 4), label="times")):
            self.grow(self.some(data), self.tokens(data))

    @precondition(lambda self: self.stamps)
    @rule(data=st.data())
    def append_batch(self, data):
        chosen = data.draw(st.permutations(range(len(self.stamps))), label="order")
        chosen = chosen[: data.draw(st.integers(0, len(chosen)), label="number")]
        counts = [self.tokens(data) for _ in chosen]
        error = self.both(lambda side: side.api.append_batch([side.states[i] for i in chosen], counts) or True)
        if error is None:
            return
        lens = {i: self.sides[0].states[i].len for i in chosen}
        for i, n in zip(chosen, counts, strict=True):
            tokens = np.arange(lens[i] - n, lens[i])
            blocks = np.array(self.sides[0].states[i].block_table, dtype=np.int64)
            self.write(i, blocks[tokens // self.block_size] * self.block_size + tokens % self.block_size)

    @precondition(lambda self: self.stamps)
    @rule(data=st.data(), then_fork=st.booleans())
    def ensure_capacity(self, data, then_fork):
        index, n = self.some(data), self.tokens(data)
        self.both(lambda side: side.states[index].ensure_capacity(len(self.stamps[index]) + n))
        if then_fork and len(self.stamps) < MAX_SEQS:
            self.fork_of(index)

    def fork_of(self, index):
        for side in self.sides:
            side.states.append(side.states[index].fork())
        self.stamps.append(list(self.stamps[index]))

    @precondition(lambda self: self.stamps)
    @rule(data=st.data())
    def truncate(self, data):
        index = self.some(data)
        length = data.draw(st.integers(0, len(self.stamps[index]) + 1), label="length")
        if self.both(lambda side: side.states[index].truncate(length) or True) is not None:
            del self.stamps[index][length:]

    @precondition(lambda self: self.stamps)
    @rule(data=st.data())
    def release(self, data):
        index = self.some(data)
        for side in self.sides:
            side.states[index].release()
        self.stamps[index].clear()

    @precondition(lambda self: self.stamps)
    @rule(data=st.data())
    def drop_before(self, data):
        """The window moves on: blocks before it are freed, and the table has -1 for them."""
        index = self.some(data)
        position = data.draw(st.integers(0, len(self.stamps[index]) + 1), label="position")
        self.both(lambda side: side.states[index].drop_before(position))

    @precondition(lambda self: self.stamps)
    @rule(data=st.data())
    def forget(self, data):
        """An unreferenced sequence frees its blocks."""
        index = self.some(data)
        for side in self.sides:
            del side.states[index]
        del self.stamps[index]

    @precondition(lambda self: self.stamps)
    @rule(data=st.data())
    def release_batch(self, data):
        chosen = data.draw(st.lists(st.integers(0, len(self.stamps) - 1), max_size=3), label="sequences")
        if self.both(lambda side: side.api.release_batch([side.states[i] for i in chosen]) or True) is not None:
            for i in chosen:
                self.stamps[i].clear()

    @rule(n=st.integers(0, 5))
    def allocate(self, n):
        blocks = self.both(lambda side: side.allocator.allocate_n(n))
        if blocks is not None:
            self.held += blocks.tolist()

    @rule(data=st.data())
    def share(self, data):
        blocks = data.draw(st.lists(st.integers(-1, self.num_blocks), max_size=4), label="blocks")
        if self.both(lambda side: side.allocator.share(blocks) or True) is not None:
            self.held += blocks

    @rule(data=st.data())
    def free(self, data):
        """Free references of the test itself in random order and number, not the references of tables."""
        blocks = data.draw(st.permutations(self.held), label="held")
        blocks = blocks[: data.draw(st.integers(0, len(blocks)), label="number")]
        self.both(lambda side: side.allocator.free(blocks))
        self.held = list((Counter(self.held) - Counter(blocks)).elements())

    @rule(data=st.data())
    def free_too_much(self, data):
        """Free a list that contains an id more often than it has references, or an id out of range."""
        block = data.draw(st.integers(-2, self.num_blocks + 1), label="block")
        in_range = 0 <= block < self.num_blocks
        times = self.sides[1].allocator.ref_count(block) + 1 if in_range else 1
        assert self.both(lambda side: side.allocator.free([*self.held, *[block] * times]) or True) is None

    @rule(data=st.data())
    def fill(self, data):
        counts = [data.draw(st.integers(0, len(stamps)), label="tokens") for stamps in self.stamps]
        for name in ("block_tables", "seq_lens", "slot_mapping", "query_start_loc"):
            self.both(lambda side, name=name: np.asarray(getattr(side.tables.fill(side.states, counts), name)))

    @invariant()
    def both_sides_agree(self):
        ours, theirs = self.sides
        for side in self.sides:
            side.allocator.check(others=len(self.held))
        for name in ("capacity", "free_count", "in_use"):
            assert getattr(ours.allocator, name) == getattr(theirs.allocator, name)
        # append_batch may briefly hold a block for each sharer, although the last sharer needs none.
        assert 0 <= ours.allocator.peak_in_use - theirs.allocator.peak_in_use <= MAX_SEQS
        for state, expected, stamps in zip(ours.states, theirs.states, self.stamps, strict=True):
            assert list(state.blocks) == expected.blocks
            assert state.len == state.context_len == expected.len == len(stamps)
            assert memoryview(state.block_table).tolist() == expected.block_table.tolist()

    @invariant()
    def owners_are_the_same_and_add_up(self):
        held = Counter(self.held)
        ours, theirs = self.sides
        mapped = ours.allocator.owners()
        for block in range(self.num_blocks):
            count = theirs.allocator.ref_count(block)
            assert ours.allocator.ref_count(block) == count
            owners = mapped.get(block, [])
            assert owners == ours.allocator.owners(block)
            assert sum(owner.references for owner in owners) == count
            by_kind = Counter({owner.kind: owner.references for owner in owners if owner.kind == "other"})
            assert by_kind["other"] == held[block]
            assert sorted(owner[:3] for owner in theirs.allocator.owners(block)) == sorted(o[:3] for o in owners)

    @invariant()
    def every_sequence_holds_its_own_bytes(self):
        ours, theirs = self.sides
        for number, layout in enumerate(self.layouts):
            for state, stamps in zip(ours.states, self.stamps, strict=True):
                blocks = np.array(state.blocks, dtype=np.int32)
                stamps = stamps[state.first_block * self.block_size :]
                for layer in range(layout.num_layers):
                    got = ours.pools[number].gather(layer, blocks, len(stamps))
                    np.testing.assert_array_equal(np.array(got), np.array(kv_of(stamps, layer, layout)))
            for block in range(self.num_blocks):  # also slots after a sequence's end, and free pages
                expected = theirs.pools[number].page(block)
                np.testing.assert_array_equal(ours.pools[number].page(block), expected)

    def teardown(self):
        for side in getattr(self, "sides", ()):
            for state in side.states:
                state.close()
            side.allocator.free(self.held)
            side.allocator.check()
            assert side.allocator.free_count == self.num_blocks


TestMemory = Memory.TestCase
TestMemory.settings = PROFILE
