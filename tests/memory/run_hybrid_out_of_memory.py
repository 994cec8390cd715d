"""Run by test_no_memory.py with failing_malloc: hybrid sequences and their states, as in run_out_of_memory.py."""

from failing import fail_all

from pagepool import (
    BlockAllocator,
    HybridSequence,
    KvGroup,
    PagedSeqState,
    PrefixCache,
    SsmStatePool,
    StateCheckpoints,
    StateLayout,
)

MANY = 300  # larger than CPython's cached small integers, so that each number allocates an object
BLOCKS = 2400
PROMPT = list(range(1200))
STATES = StateLayout(layers=[{"a": ((4,), "float32")}, {"b": ((2, 3), "float32")}])


class World:
    """The objects of all operations, with large ids and lengths."""

    once = True

    def __init__(self):
        self.allocator = BlockAllocator(BLOCKS)
        self.allocator.allocate_n(MANY)
        self.many = self.allocator.allocate_n(MANY).tolist()
        self.cache = PrefixCache(self.allocator, 4)
        self.cache.cache_blocks(PROMPT[:1120], self.many)
        self.state = PagedSeqState(self.allocator, 4)
        self.state.append(1101)
        self.pool = SsmStatePool.from_layout(STATES, 2 * MANY)
        for _ in range(MANY - 1):
            self.pool.alloc(1)
        for _ in range(MANY):
            self.pool.release(self.pool.alloc(1))
        self.slot, self.lent = self.pool.alloc(7), self.pool.alloc(8)
        self.groups = [KvGroup(self.allocator, 4), KvGroup(self.allocator, 4, window=9)]
        self.hybrid = HybridSequence(self.groups, self.pool, label="hybrid")
        self.marks = []
        for n in range(3):
            self.hybrid.append(400)
            self.hybrid.state.view(0, "a")[:] = n
            self.marks.append(self.hybrid.checkpoint())
        self.hybrid.append(6)
        self.match = self.cache.match_tokens(PROMPT[:1120])
        self.checkpoints = StateCheckpoints(STATES, self.pool, 100_000, align=4)
        self.pool.view(0, "a")[self.lent] = 5
        self.checkpoints.save(self.lent, PROMPT, 500, "end")
        self.new = HybridSequence(self.groups, self.pool)
        self.drafting = HybridSequence(self.groups, self.pool, label=MANY)
        self.drafting.append(MANY + 10)
        self.drafting.hold_drafts(6)

    def picture(self):
        for one in (self.allocator, self.pool, self.cache, self.hybrid, self.new, self.drafting, self.checkpoints):
            one.check()
        return (
            [self.allocator.ref_count(block) for block in range(BLOCKS)],
            [self.pool.used_count, self.cache.num_cached, self.state.len],
            [self.drafting.stats(), self.drafting.state.index],
            [self.hybrid.stats(), self.hybrid.closed, [mark.position for mark in self.hybrid.checkpoints]],
            self.pool.view(0, "a").tolist(),
        )


def save(world):
    """A failed save may drop states, but every kept state is correct."""
    try:
        world.checkpoints.save(world.slot, PROMPT, 900, "end")
    except (MemoryError, SystemError):
        kept = world.checkpoints.index.num_states
        assert world.checkpoints.resume(world.lent, PROMPT, 1000) == 500 * kept
        assert world.pool.view(0, "a")[world.lent].tolist() == [5] * 4
        raise


def resume(world):
    """After a failed resume the state is at position 0."""
    try:
        world.checkpoints.resume(world.slot, PROMPT, 1000)
    except (MemoryError, SystemError):
        assert world.pool.slot(world.slot).position == 0
        assert world.pool.view(0, "a")[world.slot].tolist() == [0] * 4
        raise


OPERATIONS = {
    "match_prefix": lambda world: world.cache.match_prefix(PROMPT),
    "match_tokens": lambda world: world.cache.match_tokens(PROMPT[:1118]),
    "allocate": lambda world: world.allocator.allocate(),
    "alloc": lambda world: world.pool.alloc(9),
    "hybrid": lambda world: HybridSequence(world.groups, world.pool),
    "append to a hybrid": lambda world: world.hybrid.append(700),
    "adopt": lambda world: world.new.adopt([world.many[:270], world.many[:270]], 1077),
    "trim": lambda world: world.hybrid.trim(),
    "fork of a hybrid": lambda world: world.hybrid.fork(),
    "checkpoint": lambda world: world.hybrid.checkpoint(),
    "discard": lambda world: world.hybrid.discard(world.marks[1]),
    "rollback": lambda world: world.hybrid.rollback(world.marks[1]),
    "rollback by tokens": lambda world: world.hybrid.rollback(500),
    "truncate": lambda world: world.hybrid.truncate(800),
    "hold_drafts": lambda world: world.hybrid.hold_drafts(5),
    "retract": lambda world: world.drafting.retract(MANY + 7),
    "close with drafts": lambda world: world.drafting.close(),
    "save a state": save,
    "resume a state": resume,
    "close of a hybrid": lambda world: world.hybrid.close(),
}

if __name__ == "__main__":
    fail_all(World, OPERATIONS, plain_python=OPERATIONS)
