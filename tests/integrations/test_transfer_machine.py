"""A source that reuses blocks at any moment, also between two halves of a page: no wrong page is ever accepted.

Contents follow from block and generation, so a page that is wrong, old or torn is seen. What the reader has given back
and taken again holds numbers of its own, so a byte that comes too late is seen, too.
"""

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from stepped import LAYOUT, SteppedTransfer

from pagepool import BlockGenerations, KvCachePool
from pagepool.integrations.transfer import TransferError, protocol

HALF = LAYOUT.page_size // 2
NUMBER = st.integers(0, 99)
SETTINGS = settings(max_examples=120, stateful_step_count=60, deadline=None)


def content(block, generation):
    return 1 + block + 1000 * generation


class TransferMachine(RuleBasedStateMachine):
    """One source, one reader, pools of 5 blocks each."""

    reader_class = SteppedTransfer

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.clock, protocol.monotonic = protocol.monotonic, lambda: self.now
        self.pools = [KvCachePool.from_layout(LAYOUT, 5) for _ in range(2)]
        self.generations = BlockGenerations(self.pools[0].allocator)
        self.held, self.half_written = [], []  # blocks of the source; of the latter only half a page is written
        self.leases, self.tickets = [], []
        self.reads = {}  # number: (ticket, blocks)
        self.mine = {}  # blocks that the reader has filled itself: what is in them

    @initialize()
    def begin(self):
        self.source = SteppedTransfer("source")
        self.reader = self.reader_class("reader", timeout=5)
        self.source.register(self.pools[0])
        self.reader.register(self.pools[1])
        self.reader.meet(self.source.describe())

    def teardown(self):
        try:
            self.reader.close()
            self.source.close()
            for _, blocks in self.reads.values():
                self.pools[1].allocator.free(blocks)
            self.reads.clear()
            self.pools_are_sound()
        finally:
            protocol.monotonic = self.clock

    @precondition(lambda self: self.pools[0].allocator.available)
    @rule()
    def source_takes(self):
        block = self.pools[0].allocator.allocate()
        self.pools[0].page(block)[:HALF] = content(block, self.generations.of(block)[0])
        self.half_written.append(block)

    @precondition(lambda self: self.half_written)
    @rule(n=NUMBER)
    def source_finishes_a_page(self, n):
        block = self.half_written.pop(n % len(self.half_written))
        self.pools[0].page(block)[HALF:] = content(block, self.generations.of(block)[0])
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(n=NUMBER)
    def source_frees(self, n):
        self.pools[0].allocator.free(self.held.pop(n % len(self.held)))

    @precondition(lambda self: self.held)
    @rule(n=NUMBER, seconds=st.sampled_from([0, 3]))
    def source_offers(self, n, seconds):
        lease = self.source.offer(self.held[: 1 + n % 3], seconds=seconds)
        self.leases.append(lease)
        self.tickets.append(lease.ticket)

    @precondition(lambda self: self.leases)
    @rule(n=NUMBER)
    def source_withdraws(self, n):
        self.source.withdraw(self.leases.pop(n % len(self.leases)))

    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds):
        self.now += seconds
        self.source.poll()

    @rule()
    def source_begins_anew(self):
        self.source.close()
        self.source = SteppedTransfer("source")
        self.source.register(self.pools[0])
        self.leases.clear()

    @precondition(lambda self: self.tickets)
    @rule(n=NUMBER)
    def reader_reads(self, n):
        ticket, allocator = self.tickets[n % len(self.tickets)], self.pools[1].allocator
        if allocator.available < len(ticket.blocks):
            return
        blocks = allocator.allocate_n(len(ticket.blocks)).tolist()
        try:
            self.reads[self.reader.read(ticket, blocks)] = ticket, blocks
        except TransferError:
            assert "source" not in self.reader._peers or self.reader._peers["source"].epoch != ticket.epoch
            allocator.free(blocks)

    @rule()
    def reader_polls(self):
        for result in self.reader.poll():
            ticket, blocks = self.reads.pop(result.read)
            pairs = zip(blocks, ticket.blocks, strict=True)
            right = {block for block, pair in pairs if (self.pools[1].page(block) == content(*pair)).all()}
            self.pools[1].allocator.free(blocks)
            assert sorted(result.loaded + result.failed) == sorted(blocks) and bool(result.failed) == bool(result.error)
            assert right.issuperset(result.loaded), "a page that is not the ticket's was accepted"

    @rule()
    def reader_polls_often(self):
        for _ in range(8):
            self.reader_polls()

    @precondition(lambda self: self.reads)
    @rule(n=NUMBER)
    def reader_cancels(self, n):
        self.reader.cancel([*self.reads][n % len(self.reads)])

    @rule(stopped=st.booleans())
    def source_is_stopped(self, stopped):
        self.reader.stopped = stopped

    @rule(gone=st.booleans())
    def connection_is_lost(self, gone):
        self.reader.gone = gone

    @rule()
    def reader_meets_again(self):
        if "source" in self.reader._peers:
            self.reader.forget("source")
        if "source" in self.reader._leaving:
            with pytest.raises(TransferError, match="was forgotten"):
                self.reader.meet(self.source.describe())
        else:
            self.reader.meet(self.source.describe())

    @precondition(lambda self: self.pools[1].allocator.available)
    @rule(n=NUMBER)
    def reader_fills_a_block_itself(self, n):
        block = self.pools[1].allocator.allocate()
        self.pools[1].page(block)[:] = self.mine[block] = -n

    @precondition(lambda self: self.mine)
    @rule(n=NUMBER)
    def reader_frees_a_block(self, n):
        block = [*self.mine][n % len(self.mine)]
        del self.mine[block]
        self.pools[1].allocator.free(block)

    @invariant()
    def pools_are_sound(self):
        source, reader = (pool.allocator for pool in self.pools)
        source.check(others=len(self.held) + len(self.half_written))
        reader.check(others=len(self.mine) + sum(len(blocks) for _, blocks in self.reads.values()))

    @invariant()
    def what_the_reader_computed_is_untouched(self):
        for block, number in self.mine.items():
            assert (self.pools[1].page(block) == number).all(), "a byte came into a block of another owner"


TransferMachine.TestCase.settings = SETTINGS
TestTransferMachine = TransferMachine.TestCase


class Believing(SteppedTransfer):
    """Takes every page that arrives for the right one."""

    def _good_ones(self, read):
        return super()._good_ones(read) | True


class WordsFirst(SteppedTransfer):
    """Looks at the generations before it reads the pages."""

    def _post_read(self, read, peer):
        read.wants_words = not read.wants_words
        super()._post_read(read, peer)
        read.wants_words = not read.wants_words


class Forgetful(SteppedTransfer):
    """Lets go of the blocks of a read when it is reported, though bytes may come still."""

    def _report(self, read, good):
        read.refs.give_back()
        return super()._report(read, good)


@pytest.mark.parametrize("broken", [Believing, WordsFirst, Forgetful])
def test_the_machine_finds_what_is_built_wrong(broken):
    class Machine(TransferMachine):
        reader_class = broken

    found = settings(SETTINGS, max_examples=3000, database=None, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Machine, settings=found)
