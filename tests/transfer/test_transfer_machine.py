"""A source that reuses blocks at any moment, even between two halves of a page: no wrong page is ever accepted.

The content of a page is a function of block and generation, so that a wrong, old or torn page is detected. The reader
fills blocks that it has freed and allocated again with its own numbers, so that a late byte is detected.
"""

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)
from share import examples
from stepped import LAYOUT, SteppedTransfer

from pagepool import KvCachePool
from pagepool.memory.generations import BlockGenerations
from pagepool.transfer import TransferError, protocol

HALF = LAYOUT.page_size // 2
NUMBER = st.integers(0, 99)
SETTINGS = examples(120, stateful_step_count=60)


def content(block, generation):
    return 1 + block + 1000 * generation


class TransferMachine(RuleBasedStateMachine):
    """One source, one reader, pools of 5 blocks each."""

    reader_class = SteppedTransfer

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.clock, self.sleep = protocol.monotonic, protocol.sleep
        protocol.monotonic, protocol.sleep = lambda: self.now, self.wait
        self.pools = [KvCachePool.from_layout(LAYOUT, 5) for _ in range(2)]
        self.generations = BlockGenerations(self.pools[0].allocator)
        self.held, self.half_written = [], []  # blocks of the source: fully written, half written
        self.leases, self.tickets = [], []
        self.reads = {}  # number: (ticket, blocks)
        self.accepted = self.would_be_wrong = 0
        self.mine = {}  # contents of the blocks that the reader has filled itself

    def wait(self, seconds):
        self.now += 1

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
            protocol.monotonic, protocol.sleep = self.clock, self.sleep

    @rule(n=NUMBER)
    def source_takes(self, n):
        if not self.pools[0].allocator.available:
            return
        block = self.pools[0].allocator.allocate()
        self.pools[0].page(block)[:HALF] = content(block, self.generations.of(block)[0])
        self.half_written.append(block)

    @rule(n=NUMBER)
    def source_finishes_a_page(self, n):
        if not self.half_written:
            return
        block = self.half_written.pop(n % len(self.half_written))
        self.pools[0].page(block)[HALF:] = content(block, self.generations.of(block)[0])
        self.held.append(block)

    @rule(n=NUMBER)
    def source_frees(self, n):
        if not self.held:
            return
        self.pools[0].allocator.free(self.held.pop(n % len(self.held)))

    @rule(n=NUMBER)
    def source_reuses(self, n):
        if not self.held:
            return
        self.source.poll()
        self.source_frees(n)
        if self.pools[0].allocator.available:  # false while leases hold all blocks
            self.source_takes(n)
            self.source_finishes_a_page(-1)

    @rule(n=NUMBER)
    def source_offers(self, n):
        if not self.held:
            return
        lease = self.source.offer(self.held[: 1 + n % 3], seconds=n % 2 * 3)
        self.leases.append(lease)
        self.tickets.append(lease.ticket)

    @rule(n=NUMBER)
    def source_withdraws(self, n):
        if not self.leases:
            return
        self.source.withdraw(self.leases.pop(n % len(self.leases)))

    @rule(n=NUMBER)
    def time_passes(self, n):
        self.now += n % 5
        self.source.poll()

    @rule(n=NUMBER)
    def source_begins_anew(self, n):
        self.source.close()
        self.source = SteppedTransfer("source")
        self.source.register(self.pools[0])
        self.leases.clear()
        if n % 2:
            self.reader_meets_again(n)

    @rule(n=NUMBER)
    def reader_reads(self, n):
        if not self.tickets:
            return
        ticket, allocator = self.tickets[-1 - n % min(9, len(self.tickets))], self.pools[1].allocator
        if allocator.available < len(ticket.blocks):
            return
        blocks = allocator.allocate_n(len(ticket.blocks)).tolist()
        try:
            self.reads[self.reader.read(ticket, blocks)] = ticket, blocks
        except TransferError:
            assert "source" not in self.reader._peers or self.reader._peers["source"].epoch != ticket.epoch
            allocator.free(blocks)

    @rule(n=NUMBER)
    def reader_polls(self, n):
        for result in self.reader.poll():
            ticket, blocks = self.reads.pop(result.read)
            pairs = zip(blocks, ticket.blocks, strict=True)
            right = {block for block, pair in pairs if (self.pools[1].page(block) == content(*pair)).all()}
            self.pools[1].allocator.free(blocks)
            assert sorted(result.loaded + result.failed) == sorted(blocks) and bool(result.failed) == bool(result.error)
            self.accepted += len(result.loaded)
            self.would_be_wrong += len(set(blocks) - right)
            assert right.issuperset(result.loaded), "a page that is not the ticket's was accepted"

    @rule(n=NUMBER)
    def reader_polls_often(self, n):
        for _ in range(n % 8):
            self.reader_polls(n)

    @rule(n=NUMBER)
    def reader_cancels(self, n):
        if not self.reads:
            return
        self.reader.cancel([*self.reads][n % len(self.reads)])

    @rule(n=NUMBER)
    def source_is_stopped(self, n):
        self.reader.stopped = n % 4 == 0

    @rule(n=NUMBER)
    def connection_is_lost(self, n):
        self.reader.gone = True
        self.reader_polls(n)
        self.reader.gone = False

    @rule(n=NUMBER)
    def reader_meets_again(self, n):
        if "source" in self.reader._peers:
            self.reader.forget("source")
        if "source" in self.reader._leaving:
            with pytest.raises(TransferError, match="was forgotten"):
                self.reader.meet(self.source.describe())
        else:
            self.reader.meet(self.source.describe())

    @rule(n=NUMBER)
    def reader_fills_a_block_itself(self, n):
        if len(self.mine) > 1 or not self.pools[1].allocator.available:
            return
        block = self.pools[1].allocator.allocate()
        self.pools[1].page(block)[:] = self.mine[block] = -n

    @rule(n=NUMBER)
    def reader_frees_a_block(self, n):
        if not self.mine:
            return
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
            assert (self.pools[1].page(block) == number).all(), "a byte arrived in a block of another owner"


TransferMachine.TestCase.settings = SETTINGS
TestTransferMachine = TransferMachine.TestCase


class Believing(SteppedTransfer):
    """Faulty reader: accepts every page that arrives."""

    def _good_ones(self, read):
        return super()._good_ones(read) | True


class WordsFirst(SteppedTransfer):
    """Faulty reader: checks the generations before it reads the pages."""

    def _post_read(self, read, peer):
        read.wants_words = not read.wants_words
        super()._post_read(read, peer)
        read.wants_words = not read.wants_words


class Forgetful(SteppedTransfer):
    """Faulty reader: frees the blocks of a read when it is reported, although bytes may still arrive."""

    def _report(self, read, good):
        read.refs.give_back()
        return super()._report(read, good)


def run_at_random(machine, steps, seed=1):
    """Run the same rules at random without hypothesis, which rarely reaches states that need many steps."""
    choose = random.Random(seed)
    names = [name for name in vars(TransferMachine) if name.startswith(("source_", "reader_", "time_", "connection_"))]
    names = [name for name in names if name != "reader_class"]
    usual = [
        "source_takes",
        "source_finishes_a_page",
        "source_offers",
        "reader_reads",
        "reader_polls_often",
        "source_reuses",
    ]
    machine.begin()
    try:
        for _ in range(steps):
            getattr(machine, choose.choice(names + 8 * usual))(choose.randrange(100))
            machine.pools_are_sound()
            machine.what_the_reader_computed_is_untouched()
    finally:
        machine.teardown()


def test_a_long_random_run_accepts_no_wrong_page():
    machine = TransferMachine()
    run_at_random(machine, 20_000)
    assert machine.accepted > 100 and machine.would_be_wrong > 100


@pytest.mark.parametrize("broken", [Believing, WordsFirst, Forgetful])
def test_the_machine_detects_faulty_readers(broken):
    machine = TransferMachine()
    machine.reader_class = broken
    with pytest.raises(AssertionError):
        run_at_random(machine, 20_000)
