"""Common behaviour of all transports, with one that copies in this process: tickets, leases, generations, failures."""

import copy
import pickle
from collections import Counter
from random import Random

import numpy as np
import pytest
from refusals import refuses
from stepped import LAYOUT, SteppedTransfer

from pagepool import BlockAllocator, InvalidBlock, KvCachePool, KvLayout
from pagepool.transfer import LocalTransfer, PeerDescription, Ticket, Transfer, TransferError, fingerprint, protocol


@pytest.fixture
def clock(monkeypatch):
    """Return a list with the time of all transfers. It changes only if a test sets it or a call waits."""
    now = [1000.0]

    def wait(seconds):
        now[0] += 1

    monkeypatch.setattr(protocol, "monotonic", lambda: now[0])
    monkeypatch.setattr(protocol, "sleep", wait)
    return now


def stamp(pool, block, number):
    pool.page(block)[:] = number


@pytest.fixture
def pair():
    """Yield a source with 8 blocks, 6 of them in use and stamped 100 to 105, and a reader with 8 blocks."""
    pools = [KvCachePool.from_layout(LAYOUT, 8) for _ in range(2)]
    source, reader = SteppedTransfer("source", timeout=10), SteppedTransfer("reader", timeout=10)
    for transfer, pool in zip((source, reader), pools, strict=True):
        transfer.register(pool, "model")
        transfer.pool = pool
    for block in pools[0].allocator.allocate_n(6).tolist():
        stamp(pools[0], block, 100 + block)
    reader.meet(source.describe())
    yield source, reader
    for transfer in (source, reader):
        transfer.close()
        assert transfer.references() == []
        transfer.pool.allocator.check()


def ended(reader):
    """Poll until all reads have ended; return their results."""
    results = []
    for _ in range(1000):
        results += reader.poll()
        if not reader._reads:
            return results
    raise AssertionError("a read never ended")


def test_pages_arrive_in_the_blocks_that_the_reader_has_taken(pair):
    source, reader = pair
    lease = source.offer([4, 1], names=[b"a", b"b"])
    assert lease.ticket == Ticket("source", source.describe().epoch, ((4, 1), (1, 1)), (b"a", b"b"))
    blocks = reader.pool.allocator.allocate_n(2)
    number = reader.read(pickle.loads(pickle.dumps(lease.ticket)), blocks)
    assert reader.poll() == [] and reader.pool.allocator.ref_count(blocks[0]) == 2
    assert reader.pool.allocator.owners(int(blocks[0]))[0][:3] == ("transfer", "reader", 1)
    assert source.pool.allocator.owners(4)[0][:3] == ("transfer", "source", 1)
    assert ended(reader) == [(number, blocks.tolist(), [], "")]
    assert [reader.pool.page(block).tolist() for block in blocks] == [[104.0] * 256, [101.0] * 256]
    assert reader.references() == [] and reader.pool.allocator.ref_count(blocks[0]) == 1
    source.withdraw(lease)
    source.withdraw(lease)
    assert source.references() == []


def test_poll_waits_for_the_first_read_and_not_without_reads(pair):
    source, reader = pair
    ticket = source.offer([0, 1, 2]).ticket
    assert reader.poll(1e9) == []
    first = reader.read(ticket, reader.pool.allocator.allocate_n(3))
    second = reader.read(ticket, reader.pool.allocator.allocate_n(3))
    assert [result.read for result in reader.poll(60.0)] == [first, second]


@pytest.mark.parametrize("when", ["before", "between pages and words"])
def test_a_page_of_another_generation_fails_and_the_other_pages_load(pair, when):
    source, reader = pair
    allocator = source.pool.allocator
    ticket = source.offer([0, 1, 2], seconds=0).ticket
    source.poll()
    blocks = reader.pool.allocator.allocate_n(3).tolist()
    number = reader.read(ticket, blocks)
    if when != "before":
        while not reader._reads[number].wants_words:
            reader.poll()
    allocator.free([1])
    assert allocator.allocate() == 1
    stamp(source.pool, 1, 999)
    error = "1 of 3 pages do not match the ticket: block 1 has generation 2, not 1"
    assert ended(reader) == [(number, [blocks[0], blocks[2]], [blocks[1]], error)]
    assert reader.pool.page(blocks[2])[0] == 102.0


def test_a_free_block_fails_even_with_an_unchanged_generation(pair):
    source, reader = pair
    ticket = source.offer([3], seconds=0).ticket
    source.poll()
    source.pool.allocator.free([3])  # its memory may be returned to the system and read as zeros
    number = reader.read(ticket, reader.pool.allocator.allocate_n(1))
    assert ended(reader) == [(number, [], [0], "1 of 1 pages do not match the ticket: block 3 is free")]


def test_an_old_ticket_is_valid_while_its_blocks_are_held(pair, clock):
    source, reader = pair
    ticket = source.offer([2, 3], seconds=60).ticket
    clock[0] += 86400
    source.poll()
    assert source.references() == []
    assert ended_after(reader, ticket) == ([0, 1], [], "")
    source.pool.allocator.free([2, 3])
    source.pool.allocator.allocate_n(2)
    error = "2 of 2 pages do not match the ticket: block 2 has generation 2, not 1"
    assert ended_after(reader, ticket) == ([], [2, 3], error)


def ended_after(reader, ticket):
    reader.read(ticket, reader.pool.allocator.allocate_n(len(ticket.blocks)))
    (result,) = ended(reader)
    return result[1:]


def test_a_lease_holds_its_blocks_until_it_expires(pair, clock):
    source, _ = pair
    allocator = source.pool.allocator
    lease = source.offer([5, 4], seconds=30)
    other = source.offer([4])
    allocator.free([4, 5])
    assert [allocator.ref_count(block) for block in (4, 5)] == [2, 1]
    clock[0] += 29.9
    source.poll()
    assert sorted(source.references()) == [4, 4, 5]
    clock[0] += 0.1
    source.poll()
    assert source.references() == [4] and allocator.ref_count(5) == 0
    source.withdraw(lease)
    source.withdraw(other)
    assert allocator.in_use == 4
    allocator.check(others=4)
    allocator.allocate_n(2)


def test_a_silent_peer_fails_and_blocks_stay_held_until_no_byte_can_arrive(pair, clock):
    source, reader = pair
    allocator = reader.pool.allocator
    ticket = source.offer([0, 1]).ticket
    blocks = allocator.allocate_n(2)
    number = reader.read(ticket, blocks)
    reader.poll()
    reader.stopped = True
    clock[0] += 9.9
    assert reader.poll() == []
    clock[0] += 0.1
    assert reader.poll() == [(number, [], [0, 1], "peer 'source' has not answered for 10 s")]
    with refuses(ValueError, "read", 1):
        reader.cancel(number)
    allocator.free(blocks)
    assert allocator.in_use == 2 and reader.poll(1e9) == [], "poll waited"
    others = allocator.allocate_n(6)
    assert not set(others.tolist()) & {0, 1}
    reader.stopped = False
    for _ in range(8):
        assert reader.poll() == []
    assert allocator.in_use == 6 and not reader._reads


def test_a_cancelled_read_ends_failed(pair):
    source, reader = pair
    number = reader.read(source.offer([0]).ticket, reader.pool.allocator.allocate_n(1))
    reader.cancel(number)
    assert reader.poll() == [(number, [], [0], "the read was cancelled")]
    ended(reader)
    assert reader.references() == []
    with refuses(ValueError, "read", 7, 1):
        reader.cancel(7)


def test_a_peer_that_is_lost_fails_at_once(pair):
    source, reader = pair
    number = reader.read(source.offer([0]).ticket, reader.pool.allocator.allocate_n(1))
    reader.gone = True
    assert reader.poll() == [(number, [], [0], "the connection is lost")]
    assert reader.references() == []


@pytest.mark.parametrize("wants_words", [False, True])
def test_a_failed_read_sends_no_further_request(pair, wants_words):
    source, reader = pair
    number = reader.read(source.offer([0]).ticket, reader.pool.allocator.allocate_n(1))
    while reader._reads[number].wants_words != wants_words:
        reader.poll()
    posted = []
    reader._post = lambda peer, copies: posted.append(copies)
    reader.gone = True
    assert reader.poll() == [(number, [], [0], "the connection is lost")]
    assert posted == [] and reader.references() == []


def test_a_forgotten_peer_is_met_again_when_its_reads_have_ended(pair):
    source, reader = pair
    ticket = source.offer([0, 1]).ticket
    number = reader.read(ticket, reader.pool.allocator.allocate_n(2))
    reader.stopped = True
    reader.forget("source")
    with refuses(TransferError, "peer", "source", 1):
        reader.meet(source.describe())
    assert reader.poll() == [(number, [], [0, 1], "peer 'source' was forgotten")]
    assert reader.references() == [0, 1]
    reader.stopped = False
    ended(reader)
    with refuses(TransferError, "peer", "source", 0):
        reader.read(ticket, reader.pool.allocator.allocate_n(2))
    assert reader.meet(source.describe()) == "source" == reader.meet(source.describe())
    with refuses(ValueError, "peer", "x", 1):
        reader.forget("x")


def test_a_restarted_source_has_a_new_epoch(pair):
    source, reader = pair
    old, met = source.offer([0]).ticket, source.describe()
    number = reader.read(old, reader.pool.allocator.allocate_n(1))
    source.close()
    again = SteppedTransfer("source")
    again.register(source.pool, "model")
    (result,) = ended(reader)
    assert result.read == number and result.failed == [0]
    assert f"no local transfer of this process has the name 'source' and epoch {met.epoch}" == result.error
    with refuses(ValueError, "peer", "source", met.epoch):
        reader.meet(again.describe())
    with refuses(TransferError, "source"):
        stranger = LocalTransfer()
        stranger.register(KvCachePool.from_layout(LAYOUT, 1), "model")
        stranger.meet(met)
    reader.forget("source")
    reader.meet(again.describe())
    with refuses(TransferError, met.epoch, "source"):
        reader.read(old, reader.pool.allocator.allocate_n(1))
    again.close()


def test_the_epoch_is_read_with_the_words(pair):
    source, reader = pair
    ticket = source.offer([0, 1]).ticket
    source._registered.memory.epoch_word[0] = 5  # another process now uses this address
    error = f"peer 'source' is in epoch 5, but the ticket has epoch {ticket.epoch}"
    assert ended_after(reader, ticket) == ([], [0, 1], error)


def test_a_transport_that_writes_nothing_is_not_believed(pair):
    source, reader = pair
    ticket = source.offer([0]).ticket
    assert ended_after(reader, ticket) == ([0], [], "")
    reader.pool.allocator.free([0])
    reader._check = lambda request: True
    error = f"peer 'source' is in epoch 0, but the ticket has epoch {ticket.epoch}"
    assert ended_after(reader, ticket) == ([], [0], error)


@pytest.mark.parametrize(
    ("other", "model"),
    [
        (KvLayout(1, 1, 8, dtype="bfloat16"), "model"),
        (KvLayout(2, 1, 8, dtype="float32"), "model"),
        (LAYOUT, "another model"),
        (KvLayout(1, 1, 8, dtype="int8"), "model"),
    ],
)
def test_a_peer_with_other_pages_is_refused(pair, other, model):
    _, reader = pair
    transfer = LocalTransfer("other")
    transfer.register(KvCachePool.from_layout(other, 2), model)
    with pytest.raises(TransferError) as caught:
        reader.meet(transfer.describe())
    assert transfer.describe().fingerprint in str(caught.value) and reader.describe().fingerprint in str(caught.value)
    with refuses(TransferError, "ticket", 1):
        reader.read(Ticket("other", 1, [(0, 1)]), [0])
    transfer.close()


def test_channel_scales_and_elements_of_flat_pools_count_in_a_fingerprint():
    layout = KvLayout(1, 1, 8, dtype="int8")
    plain, ones, twos = (
        KvCachePool.from_layout(layout, 1, k_channel_scale=scale)
        for scale in (None, np.ones((1, 1, 8)), np.full((1, 1, 8), 2))
    )
    flat, wide = KvCachePool(256, 1), KvCachePool(256, 1, "float16")
    assert len({fingerprint(pool) for pool in (plain, ones, twos, flat, wide)}) == 5
    assert fingerprint(flat) == fingerprint(KvCachePool(256, 9)), "the size does not count"


def test_flat_pools_and_pools_that_grow_are_transferred_too():
    pools = [KvCachePool(16, 2), KvCachePool(16, 3)]
    layout = KvLayout(1, 1, 8)
    pools += [KvCachePool.from_layout(layout, 1, max_blocks=4) for _ in range(2)]
    for source_pool, reader_pool in (pools[:2], pools[2:]):
        with LocalTransfer() as source, LocalTransfer() as reader:
            source.register(source_pool)
            reader.register(reader_pool)
            reader.meet(source.describe())
            block = source_pool.allocator.allocate_n(2)[1]
            source_pool.page(block)[:] = 3
            reader.read(source.offer([block]).ticket, reader_pool.allocator.allocate_n(1))
            assert reader.poll()[0].loaded == [0] and reader_pool.page(0)[5] == 3


def test_calls_that_are_refused_change_nothing(pair):
    source, reader = pair
    allocator = reader.pool.allocator
    free, shared, mine = 7, *allocator.allocate_n(2).tolist()
    allocator.share(shared)
    ticket, one = source.offer([0, 1]).ticket, source.offer([0]).ticket
    before = allocator.stats(), source.pool.allocator.stats()
    for error, words, call in [
        (InvalidBlock, ("block", 0, 2, 1), lambda: reader.read(one, [shared])),
        (InvalidBlock, ("block", 7, 0, 1), lambda: reader.read(one, [free])),
        (InvalidBlock, (99,), lambda: reader.read(one, [99])),
        (ValueError, (2, 1), lambda: reader.read(ticket, [mine])),
        (ValueError, (2, 1), lambda: reader.read(ticket, [mine, mine])),
        (TypeError, ("ticket", "str", "x"), lambda: reader.read("x", [mine])),
        (TransferError, (8, "source"), lambda: reader.read(changed(one), [mine])),
        (InvalidBlock, ("block", 6), lambda: source.offer([0, 6])),
        (ValueError, (1, 0), lambda: source.offer([])),
        (ValueError, (2, 1), lambda: source.offer([0, 1], [b"a"])),
        (TypeError, ("block", "integer"), lambda: source.offer([0.5])),
        (ValueError, ("seconds", "0.0", -1), lambda: source.offer([0], seconds=-1)),
        (ValueError, ("transfer", "reader", "KvCachePool"), lambda: reader.register(reader.pool)),
        (TypeError, ("peer", "PeerDescription", "str"), lambda: reader.meet("source")),
        (ValueError, ("peer", "reader"), lambda: reader.meet(reader.describe())),
        (ValueError, ("peer", "x", "nixl", "local"), lambda: reader.meet(described(source, "nixl"))),
        (TypeError, ("pickled",), lambda: copy.copy(reader)),
    ]:
        with refuses(error, *words):
            call()
    assert (allocator.stats(), source.pool.allocator.stats()) == before and reader.poll() == []
    assert len(source.references()) == 3 and reader.references() == []


def changed(ticket):
    return Ticket(ticket.peer, ticket.epoch, [(8, 1)])


def described(transfer, transport):
    own = transfer.describe()
    return PeerDescription("x", transport, 1, own.fingerprint, 8, own.pages, own.words, own.epoch_word, b"")


def test_invalid_registrations_are_refused():
    transfer = LocalTransfer("one")
    for call in (transfer.describe, lambda: transfer.offer([0]), lambda: transfer.read(None, [])):
        with refuses(ValueError, "transfer", "one"):
            call()
    with refuses(TypeError, "pool", "KvCachePool", "BlockAllocator"):
        transfer.register(BlockAllocator(3))
    with refuses(ValueError, 0):
        transfer.register(KvCachePool.from_layout(LAYOUT, 0))
    pool = KvCachePool.from_layout(LAYOUT, 1)
    transfer.register(pool)
    with refuses(TransferError, "one"):
        LocalTransfer("one").register(pool)
    with pytest.raises(BufferError):
        pool.close()
    for name in ("", 5):
        with refuses(TypeError, "name", "None"):
            LocalTransfer(name)
    with refuses(ValueError, "timeout", "0.0", -1):
        LocalTransfer(timeout=-1)
    with pytest.raises(TypeError):
        Transfer()
    transfer.close()
    pool.close()


def test_close_ends_everything_and_leaves_nothing(pair):
    source, reader = pair
    ticket = source.offer([0, 1]).ticket
    blocks = reader.pool.allocator.allocate_n(2)
    reader.read(ticket, blocks)
    reader.poll()
    for transfer in pair:
        transfer.close()
        transfer.close()
        assert transfer.references() == []
        with refuses(ValueError, "closed"):
            transfer.poll()
        with refuses(ValueError, "closed"):
            transfer.register(source.pool)
    reader.pool.allocator.check(others=2)
    source.pool.allocator.check(others=6)
    reader.pool.close()


@pytest.mark.parametrize("stopped", [False, True])
def test_close_waits_for_pending_reads_until_their_timeout(pair, clock, stopped):
    source, reader = pair
    reader.read(source.offer([0]).ticket, reader.pool.allocator.allocate_n(1))
    reader.stopped = stopped
    reader.close()
    assert reader.references() == [] and clock[0] == 1000 + (10 if stopped else 1)
    assert (reader.pool.page(0)[0] == 100) is not stopped


SPECIAL = (-1, 0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64, 2**200, None, "1", b"1", 1.0)
SPECIAL += (float("nan"), True, [], (1, 2), "", "\0", b"", np.int64(3), np.uint64(2**63))


def mutated(random, fields):
    """Return a copy of the fields of a ticket or description with one to three random changes."""
    fields = copy.deepcopy(fields)
    for _ in range(random.choice((1, 1, 2, 3))):
        name = random.choice(sorted(fields))
        if name == "blocks" and isinstance(fields["blocks"], list) and fields["blocks"] and random.random() < 0.8:
            random.choice(fields["blocks"])[random.randrange(2)] = random.choice((*SPECIAL, *range(8)))
        elif type(fields[name]) is int and random.random() < 0.5:
            fields[name] ^= 1 << random.randrange(70)
        else:
            fields[name] = random.choice(SPECIAL)
    return fields


def test_ten_thousand_mutated_tickets_are_refused_or_read_right_pages(pair):
    source, reader = pair
    random, counts = Random(1), Counter()
    allocator = reader.pool.allocator
    guard, mine = allocator.allocate_n(4).tolist(), allocator.allocate_n(2).tolist()
    for block in guard:
        reader.pool.page(block)[:] = -1
    blocks = [[block, times] for block, times in source.offer([4, 1]).ticket.blocks]
    held = {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1}  # block of the source -> its generation
    whole = {"peer": "source", "epoch": source.describe().epoch, "blocks": blocks, "names": [b"a", b"b"]}
    for _ in range(10_000):
        try:
            ticket = pickle.loads(pickle.dumps(Ticket(**mutated(random, whole))))
            reader.read(ticket, mine[: len(ticket.blocks)])
        except TransferError:
            counts["refused"] += 1
            continue
        [result] = ended(reader)
        for block, (theirs, times) in zip(mine, ticket.blocks, strict=False):
            if block in result.loaded:
                assert held[theirs] == times and reader.pool.page(block)[0] == 100 + theirs
        counts["loaded" if result.loaded else "failed"] += 1
    assert counts["failed"] and counts["loaded"] > 100 and counts.total() == 10_000, counts
    assert all((reader.pool.page(block) == -1).all() for block in guard)
    assert reader.references() == [] and [allocator.ref_count(block) for block in guard + mine] == [1] * 6


def test_ten_thousand_mutated_descriptions_are_refused_or_describe_the_source(pair):
    source, _ = pair
    random, counts = Random(2), Counter()
    whole = vars(source.describe())
    with LocalTransfer("second") as reader:
        pool = KvCachePool.from_layout(LAYOUT, 4)
        reader.register(pool, "model")
        [block] = pool.allocator.allocate_n(1).tolist()
        ticket = source.offer([4]).ticket
        for _ in range(10_000):
            try:
                peer = pickle.loads(pickle.dumps(PeerDescription(**mutated(random, whole))))
                name = reader.meet(peer)
                reader.read(ticket, [block])
            except TransferError:
                counts["refused"] += 1
            except ValueError as error:  # the peer has another transport, or the reader's own name
                assert "transport" in str(error) or "name" in str(error)
                counts["refused"] += 1
            else:
                assert peer == source.describe() and reader.poll(1)[0].loaded == [block]
                counts["met"] += 1
                reader.forget(name)
    assert counts["met"] > 10 and counts.total() == 10_000, counts


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peer": ""}, ("peer", 1, 4096, 0)),
        ({"peer": 5}, ("peer", "str", "int")),
        ({"epoch": 2**63}, ("epoch", 2**63 - 1, 2**63)),
        ({"blocks": []}, (1, 0)),
        ({"blocks": [(0, 2**32)]}, ("generation", 2**32 - 1, 2**32)),
        ({"blocks": [(2**31, 1)]}, ("block", 2**31 - 1, 2**31)),
        ({"blocks": [(0, 1, 2)]}, ("block", 2, 3)),
        ({"blocks": [(0, 1)] * (2**20 + 1)}, ("blocks", 2**20 + 1, 2**20)),
        ({"blocks": "ab"}, ("blocks", "sequence", "str")),
        ({"names": (b"a", b"b")}, (1, 2)),
        ({"names": ("a",)}, ("name", "bytes", "str")),
    ],
)
def test_the_fields_of_a_ticket_are_bounded_also_when_it_is_unpickled(fields, words):
    whole = {"peer": "source", "epoch": 7, "blocks": ((0, 1),), "names": ()}
    with refuses(TransferError, *words):
        Ticket(**{**whole, **fields})
    ticket = Ticket(**whole)
    for name, value in fields.items():
        object.__setattr__(ticket, name, value)
    data = pickle.dumps(ticket)
    with refuses(TransferError, *words):
        pickle.loads(data)


def test_a_read_that_cannot_be_checked_fails_alone(pair):
    source, reader = pair
    bad, good = source.offer([0]).ticket, source.offer([1]).ticket
    object.__setattr__(bad, "blocks", ((0, 2**64),))  # bypasses the checks of the constructor
    blocks = reader.pool.allocator.allocate_n(2).tolist()
    numbers = [reader.read(bad, blocks[:1]), reader.read(good, blocks[1:])]
    results = {result.read: result for result in ended(reader)}
    assert results[numbers[0]].failed == blocks[:1] and "OverflowError" in results[numbers[0]].error
    assert results[numbers[1]].loaded == blocks[1:] and not reader.is_lost("source")
    assert reader.poll() == [] and reader.references() == []
