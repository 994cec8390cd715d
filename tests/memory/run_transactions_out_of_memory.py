"""Started by test_no_memory.py under failing_malloc: transactions and hybrid sequences, as in run_out_of_memory.py."""

from failing import countdown, fail_all

from pagepool import (
    BlockAllocator,
    HybridSequence,
    KvGroup,
    PagedSeqState,
    PrefixCache,
    SsmStatePool,
    StateCheckpoints,
    StateLayout,
    Transaction,
)

MANY = 300  # numbers beyond the small integers are objects that have to be made
BLOCKS = 2400
PROMPT = list(range(1200))
STATES = StateLayout(layers=[{"a": ((4,), "float32")}, {"b": ((2, 3), "float32")}])


def pause():
    """For what a test does beside the operation that may fail; returns what `resume_countdown` wants."""
    left = countdown.value
    countdown.value = 0
    return left


def resume_countdown(left):
    countdown.value = left


class World:
    """Everything that takes part, with large ids, lengths and generations, and a transaction that is open."""

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
        self.handle, self.lent = self.pool.acquire(7), self.pool.acquire(8)
        self.groups = [KvGroup(self.allocator, 4), KvGroup(self.allocator, 4, window=9)]
        self.hybrid = HybridSequence(self.groups, self.pool, label="hybrid")
        self.marks = []
        for n in range(3):
            self.hybrid.append(400)
            self.hybrid.state.view(0, "a")[:] = n
            self.marks.append(self.hybrid.checkpoint())
        self.hybrid.append(6)
        self.match = self.cache.match_tokens(PROMPT[:1120])
        self.checkpoints = StateCheckpoints(STATES, self.pool, 100_000)
        self.lent.view(0, "a")[:] = 5
        self.checkpoints.save(self.lent.index, PROMPT, 500, "end")
        self.new = HybridSequence(self.groups, self.pool)
        self.transaction = Transaction()
        self.transaction.free(self.allocator, self.many[-99:])

    def picture(self):
        for one in (self.allocator, self.pool, self.cache, self.hybrid, self.new, self.checkpoints):
            one.check()
        return (
            [self.allocator.ref_count(block) for block in range(BLOCKS)],
            [
                self.pool.used_count,
                self.cache.num_cached,
                self.state.len,
                self.transaction.is_open,
            ],
            [self.hybrid.stats(), self.hybrid.closed, [mark.position for mark in self.hybrid.checkpoints]],
            [one.view(0, "a").tolist() for one in (self.handle, self.hybrid.state) if not one.is_stale],
            [one.open_transactions for one in (self.state, self.handle, self.hybrid, self.new)],
        )

    def settle(self):
        """The end of what was done before an operation that failed."""
        if self.transaction.is_open:
            self.transaction.commit()

    def change_everything(self, transaction):
        transaction.enlist(self.state, self.handle, self.hybrid)
        transaction.allocate_n(self.allocator, MANY)
        transaction.share(self.allocator, self.many)
        transaction.match_prefix(self.cache, PROMPT)
        self.state.append(MANY)
        transaction.cache_blocks(self.cache, PROMPT[::-1], self.state.blocks, cache_salt="reversed")
        transaction.free(self.allocator, self.many[5:9])
        transaction.alloc_state(self.pool, 9)
        transaction.release_state(self.lent)
        transaction.fork(self.state).append(70)
        transaction.fork(self.hybrid).append(70)
        self.hybrid.rollback(self.marks[1])
        self.hybrid.append(53)
        self.hybrid.retract(self.hybrid.len - 3)
        self.hybrid.checkpoint()
        self.hybrid.state.view(0, "a")[:] = 70
        self.handle.view(0, "a")[:] = 80
        self.state.truncate(900)


def whole(world, within=False):
    """From its beginning to its end, as engines write it."""
    with Transaction(world.new) as transaction:
        world.new.append(30)
        if within:
            with transaction.nested(world.new) as inner:
                world.change_everything(inner)
        else:
            world.change_everything(transaction)


def end(world, how):
    """Of one that has done everything: it takes place, or raises and leaves the transaction as it was."""
    left = pause()
    before = world.picture()
    transaction = Transaction(world.new)
    inner = transaction.nested(world.hybrid)
    world.new.append(30)
    world.change_everything(inner)
    ended = inner if how == "join" else transaction
    if how == "commit":
        inner.commit()
    open_one = world.picture()
    resume_countdown(left)
    failed = None
    try:
        ended.abort() if how == "abort" else ended.commit()
    except (MemoryError, SystemError) as error:
        failed = error
    left = pause()
    if failed:
        assert ended.is_open and world.picture() == open_one, "it changed something"
    if how == "commit" and not failed:
        assert world.cache.num_cached == 280 + 300
    else:
        transaction.abort()
        assert world.picture() == before, "an abort left something"
    resume_countdown(left)
    if failed:
        raise failed


def end_of_hybrid(world, commits):
    """Of a hybrid sequence alone: neither may fail."""
    left = pause()
    before = world.picture()
    world.hybrid.begin()
    world.hybrid.begin()
    world.hybrid.rollback(world.marks[1])
    world.hybrid.append(50)
    world.hybrid.checkpoint()
    world.hybrid.discard(world.marks[0])
    resume_countdown(left)
    world.hybrid.commit() if commits else world.hybrid.abort()
    world.hybrid.commit() if commits else world.hybrid.abort()
    left = pause()
    if commits:
        assert [mark.position for mark in world.hybrid.checkpoints] == [800, 850]
        assert world.pool.used_count == MANY - 1 + 6, "those lent, of two sequences, and of the two checkpoints"
    else:
        assert world.picture() == before
    resume_countdown(left)


def save(world):
    """What it forgets is right; what it keeps has to be."""
    try:
        world.checkpoints.save(world.handle.index, PROMPT, 900, "end")
    except (MemoryError, SystemError):
        left = pause()
        kept = world.checkpoints.index.num_states
        assert world.checkpoints.resume(world.lent.index, PROMPT, 1000) == 500 * kept
        assert world.lent.view(0, "a").tolist() == [5] * 4
        resume_countdown(left)
        raise


def resume(world):
    """All of a state or its beginning."""
    try:
        world.checkpoints.resume(world.handle.index, PROMPT, 1000)
    except (MemoryError, SystemError):
        left = pause()
        assert world.handle.slot.position == 0 and world.handle.view(0, "a").tolist() == [0] * 4
        resume_countdown(left)
        raise


OPERATIONS = {
    "begin": lambda world: Transaction(world.state, world.handle, world.hybrid),
    "enlist": lambda world: world.transaction.enlist(world.hybrid),
    "allocate_n in a transaction": lambda world: world.transaction.allocate_n(world.allocator, MANY),
    "share in a transaction": lambda world: world.transaction.share(world.allocator, world.many),
    "free in a transaction": lambda world: world.transaction.free(world.allocator, world.many),
    "match_prefix in a transaction": lambda world: world.transaction.match_prefix(world.cache, PROMPT),
    "cache_blocks in a transaction": lambda world: world.transaction.cache_blocks(
        world.cache, PROMPT[1100::-1], world.state.blocks, cache_salt="reversed"
    ),
    "alloc_state": lambda world: world.transaction.alloc_state(world.pool, 9),
    "release_state": lambda world: world.transaction.release_state(world.lent),
    "fork in a transaction": lambda world: world.transaction.fork(world.state),
    "fork of a hybrid in a transaction": lambda world: world.transaction.fork(world.hybrid),
    "nested": lambda world: world.transaction.nested(),
    "whole": whole,
    "whole, with one within": lambda world: whole(world, within=True),
    "commit": lambda world: end(world, "commit"),
    "commit of one within": lambda world: end(world, "join"),
    "abort": lambda world: end(world, "abort"),
    "match_prefix": lambda world: world.cache.match_prefix(PROMPT),
    "match_tokens": lambda world: world.cache.match_tokens(PROMPT[:1118]),
    "allocate": lambda world: world.allocator.allocate(),
    "lend": lambda world: world.pool.acquire(9),
    "alloc": lambda world: world.pool.alloc(9),
    "begin of a handle": lambda world: world.handle.begin(),
    "fork of a handle": lambda world: world.handle.fork(),
    "hybrid": lambda world: HybridSequence(world.groups, world.pool),
    "hybrid of a handle": lambda world: HybridSequence(world.groups, world.lent),
    "append to a hybrid": lambda world: world.hybrid.append(700),
    "adopt": lambda world: world.new.adopt([world.many[:270], world.many[:270]], 1077),
    "trim": lambda world: world.hybrid.trim(),
    "fork of a hybrid": lambda world: world.hybrid.fork(),
    "checkpoint": lambda world: world.hybrid.checkpoint(),
    "discard": lambda world: world.hybrid.discard(world.marks[1]),
    "rollback": lambda world: world.hybrid.rollback(world.marks[1]),
    "rollback by tokens": lambda world: world.hybrid.rollback(500),
    "truncate": lambda world: world.hybrid.truncate(800),
    "begin of a hybrid": lambda world: world.hybrid.begin(),
    "commit of a hybrid": lambda world: end_of_hybrid(world, True),
    "save a state": save,
    "resume a state": resume,
    "abort of a hybrid": lambda world: end_of_hybrid(world, False),
    "release of a hybrid": lambda world: world.hybrid.release(),
}

# Of the long ones not every allocation fails.
STRIDES = {"whole": 31, "whole, with one within": 29, "commit": 7, "cache_blocks in a transaction": 3}

if __name__ == "__main__":
    fail_all(World, OPERATIONS, plain_python=OPERATIONS, strides=STRIDES)
