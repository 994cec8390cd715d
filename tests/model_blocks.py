"""Operations of the random program on allocators and sequences."""

from collections import Counter

import numpy as np
from model_world import Core, Divergence, Sequence

from pagepool import StaleHandle, reference
from pagepool.memory import block_tables

# Each must raise StaleHandle on a closed object.
USES_OF_SEQUENCE = (
    lambda state: state.append(1),
    lambda state: state.ensure_capacity(3),
    lambda state: state.truncate(0),
    lambda state: state.drop_before(0),
    lambda state: state.adopt([], 0),
    lambda state: state.fork(),
    lambda state: state.release(),
)
USES_OF_HYBRID = (
    lambda hybrid: hybrid.append(1),
    lambda hybrid: hybrid.adopt([[]] * len(hybrid.kv), 0),
    lambda hybrid: hybrid.trim(),
    lambda hybrid: hybrid.fork(),
    lambda hybrid: hybrid.checkpoint(),
    lambda hybrid: hybrid.rollback(0),
    lambda hybrid: hybrid.truncate(0),
    lambda hybrid: hybrid.kv[0].append(1),
)

OPERATIONS = {
    "append": 10, "append_batch": 3, "add": 3, "adopt": 2, "fork": 4, "truncate": 5, "drop_before": 2, "reserve": 2,
    "release": 2, "release_batch": 1, "close": 5, "fill": 1, "allocate": 2, "share": 2, "free": 3, "free_too_much": 1,
    "grow": 1, "shrink": 2, "use_stale": 3,
}  # fmt: skip


class Blocks(Core):
    MOST = 7

    def extend(self, sequence, n):
        """Appends n tokens on both sides, and their keys on ours."""
        slots = self.both(lambda side, i: sequence.pair[i].append(n))
        if isinstance(slots, list):
            self.store(sequence, slots)

    def store(self, sequence, slots):
        fresh = [self.below(2) for _ in slots]
        sequence.tokens += fresh
        self.write(self.pages, slots, fresh)

    def add(self):
        if len(self.sequences) < self.MOST:
            pair = self.make(lambda side, i: side.api.PagedSeqState(side.allocator, self.block_size, label=1))
            sequence = Sequence(pair)
            self.sequences.append(sequence)
            self.extend(sequence, self.count())

    def fork(self):
        sequence = self.pick(self.sequences)
        if sequence and len(self.sequences) < self.MOST:
            child = Sequence(self.make(lambda side, i: sequence.pair[i].fork()))
            child.tokens = list(sequence.tokens)
            self.sequences.append(child)

    def append(self):
        sequence = self.pick(self.sequences)
        if sequence:
            self.extend(sequence, self.count())

    def append_batch(self):
        chosen = self.some_of(self.sequences)
        counts = [self.count() for _ in chosen]
        drive = (block_tables.append_batch, reference.append_batch)
        if self.both(lambda side, i: drive[i]([sequence.pair[i] for sequence in chosen], counts)) is None:
            size = self.block_size
            for sequence, n in zip(chosen, counts, strict=True):
                table, end = sequence.pair[0].block_table, len(sequence.tokens) + n
                self.store(sequence, [table[t // size] * size + t % size for t in range(end - n, end)])

    def reserve(self):
        sequence = self.pick(self.sequences)
        if sequence:
            length = len(sequence.tokens) + self.count()
            self.both(lambda side, i: sequence.pair[i].ensure_capacity(length))

    def truncate(self):
        sequence = self.pick(self.sequences)
        if sequence:
            length = self.below(len(sequence.tokens) + 2)
            if self.both(lambda side, i: sequence.pair[i].truncate(length)) is None:
                del sequence.tokens[length:]

    def drop_before(self):
        sequence = self.pick(self.sequences)
        if sequence:
            position = self.below(len(sequence.tokens) + 1)
            self.both(lambda side, i: sequence.pair[i].drop_before(position))

    def release(self):
        sequence = self.pick(self.sequences)
        if sequence:
            self.both(lambda side, i: sequence.pair[i].release())
            sequence.tokens.clear()

    def release_batch(self):
        chosen = self.some_of(self.sequences)
        drive = (block_tables.release_batch, reference.release_batch)
        self.both(lambda side, i: drive[i]([sequence.pair[i] for sequence in chosen]))
        for sequence in chosen:
            sequence.tokens.clear()

    def adopt(self):
        """A new sequence adopts tokens of another one; in one of eight cases a wrong number of them."""
        sequence = self.pick(self.sequences)
        if sequence and len(self.sequences) < self.MOST and not sequence.pair[1].first_block:
            child = Sequence(self.make(lambda side, i: side.api.PagedSeqState(side.allocator, self.block_size)))
            n = self.below(len(sequence.tokens) + 1)
            blocks = sequence.pair[1].blocks[: -(-n // self.block_size)]
            wrong = 0 if self.below(8) else self.block_size
            if self.both(lambda side, i: child.pair[i].adopt(blocks, n + wrong)) is None:
                child.tokens = sequence.tokens[:n]
            self.sequences.append(child)

    def fill(self):
        """The arrays of a batch of some sequences, which may be too many or too long for them."""
        chosen = self.some_of(self.sequences)
        counts = [self.below(len(sequence.tokens) + 1) for sequence in chosen]

        def call(side, i):
            tables = side.api.BlockTables(self.MOST - 1, self.most)
            tables.fill([sequence.pair[i] for sequence in chosen], counts)
            names = ("block_tables", "seq_lens", "slot_mapping", "query_start_loc")
            return [np.asarray(getattr(tables, name)).tolist() for name in names]

        self.both(call)

    def close(self):
        sequence = self.pick(self.sequences)
        if sequence:
            self.both(lambda side, i: sequence.pair[i].close())
            self.sequences.remove(sequence)
            self.retire("sequence", sequence.pair)

    def allocate(self):
        n = self.below(4)
        blocks = self.both(lambda side, i: side.allocator.allocate_n(n))
        if isinstance(blocks, list):
            self.held += blocks

    def share(self):
        blocks = [self.below(self.most + 2) - 1 for _ in range(self.below(3))]
        if self.both(lambda side, i: side.allocator.share(blocks)) is None:
            self.held += blocks

    def free(self):
        blocks = self.some_of(self.held)
        self.both(lambda side, i: side.allocator.free(blocks))
        self.held = list((Counter(self.held) - Counter(blocks)).elements())

    def free_too_much(self):
        allocator = self.sides[1].allocator
        block = self.below(self.most)
        times = allocator.ref_count(block) + 1 if block < allocator.capacity else 1
        if self.both(lambda side, i: side.allocator.free([*self.held, *[block] * times])) is None:
            raise Divergence(f"block {block} was freed {times} times")

    def grow(self):
        which = self.below(2)
        n = self.sides[1].allocators[which].capacity + self.below(6) - 1
        self.both(lambda side, i: side.allocators[which].grow(n))

    def shrink(self):
        """Our side may also decommit the memory of free pages, which must not change the pages in use."""
        which, with_pages = self.below(2), self.below(2)
        n = self.below(self.sides[1].allocators[which].capacity + 2)
        pool = self.pages if which == 0 else self.pools[1]

        def call(side, i):
            return pool.shrink(n) if with_pages and i == 0 else side.allocators[which].shrink(n)

        self.both(call)

    def use_stale(self):
        """A closed object or dropped checkpoint raises StaleHandle."""
        if not self.stale:
            return
        kind, pair = self.one_of(self.stale)
        if kind == "checkpoint":
            hybrid, marks = pair
            if self.both(lambda side, i: marks[i] not in hybrid[i].checkpoints):
                method = self.one_of(("rollback", "discard"))
                self.refused(lambda side, i: getattr(hybrid[i], method)(marks[i]))
        elif self.both(lambda side, i: pair[i].closed):
            use = self.one_of(USES_OF_SEQUENCE if kind == "sequence" else USES_OF_HYBRID)
            self.refused(lambda side, i: use(pair[i]))

    def refused(self, call):
        if self.both(call) is not StaleHandle:
            raise Divergence("a closed object was used")
