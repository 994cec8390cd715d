"""What only MooncakeTransfer has: its window of copies, its log, and errors of Mooncake's engine.

Half of the tests have a stand-in for Mooncake's engine, whose copies end when a test says so.
"""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from ctypes import memmove
from dataclasses import replace
from types import SimpleNamespace

import pytest
from transfer_source import SourceProcess, need

from pagepool import KvCachePool, KvLayout
from pagepool.integrations.transfer import TransferError, mooncake

WHERE = ("pagepool.integrations.transfer.mooncake", "MooncakeTransfer")
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32")  # pages of 1 KiB
NOT_POSTED = [0, 2**64 - 1]


class Engine:
    """Mooncake's `TransferEngine` within this process. Class attributes say what goes wrong."""

    starts, registers, posts, copies, state = 0, 0, None, True, 0

    def initialize(self, *arguments):
        self.batches = {}
        self.most = 0
        return self.starts

    def get_rpc_port(self):
        return 15000 + id(self) % 1000

    def batch_register_memory(self, addresses, sizes):
        return self.registers

    def batch_transfer_async_read(self, address, buffers, peers, lengths):
        if self.posts is not None:
            return self.posts
        number = 1 + len(self.batches)
        self.batches[number] = buffers[0], peers[0], lengths[0]
        self.most = max(self.most, self.under_way())
        return number

    def transfer_check_status(self, batch):
        if self.state == 1 and self.copies:
            memmove(*self.batches[batch])
        if self.state:
            self.batches[batch] = None
        return self.state

    def under_way(self):
        return sum(copy is not None for copy in self.batches.values())


@pytest.fixture
def engine(monkeypatch):
    """The stand-in, instead of Mooncake's."""
    stand_in = type("Engine", (Engine,), {})
    monkeypatch.setenv("MC_LOG_LEVEL", "ERROR")
    monkeypatch.setitem(sys.modules, "mooncake.engine", SimpleNamespace(TransferEngine=stand_in))
    return stand_in


@pytest.fixture
def pair(engine):
    """A source and a reader that have met, of 200 blocks, all of the source's in use."""
    pools = [KvCachePool.from_layout(LAYOUT, 200) for _ in range(2)]
    source, reader = (mooncake.MooncakeTransfer(name, timeout=0.05) for name in ("source", "reader"))
    source.register(pools[0])
    reader.register(pools[1])
    for block in pools[0].allocator.allocate_n(200).tolist():
        pools[0].page(block)[:] = 1 + block
    engine.state = 1
    reader.meet(source.describe())
    engine.state = 0
    yield source, reader, pools[1]
    for transfer in (reader, source):
        transfer.close()
    pools[1].allocator.check(others=0)


def test_a_read_of_many_pages_has_at_most_64_copies_under_way(engine, pair):
    source, reader, pool = pair
    blocks = [pool.allocator.allocate_n(100).tolist() for _ in range(2)]
    numbers = [reader.read(source.offer(range(100)).ticket, ids) for ids in blocks]
    assert reader._engine.under_way() == 64 and reader.poll() == []
    engine.state = 1
    results = reader.poll(10) + reader.poll(10)
    assert [result[:3] for result in results] == [(numbers[0], blocks[0], []), (numbers[1], blocks[1], [])]
    assert reader._engine.most == 64
    assert [pool.page(block)[0] for block in blocks[1]] == list(range(1, 101))
    pool.allocator.free(blocks[0] + blocks[1])


def test_a_copy_that_fails_fails_the_read_and_no_further_one_is_posted(engine, pair):
    source, reader, pool = pair
    blocks = pool.allocator.allocate_n(100).tolist()
    reader.read(source.offer(range(100)).ticket, blocks)
    posted, engine.state = len(reader._engine.batches), -1
    (result,) = reader.poll()
    assert result.failed == blocks
    assert result.error == "Mooncake has lost peer 'source', or the peer refuses these addresses"
    assert len(reader._engine.batches) == posted and reader.references() == []
    pool.allocator.free(blocks)


def test_a_copy_that_takes_long_keeps_its_blocks(engine, pair):
    source, reader, pool = pair
    blocks = pool.allocator.allocate_n(2).tolist()
    reader.read(source.offer([0, 1]).ticket, blocks)
    engine.state = -2
    assert reader.poll(1)[0].error == "peer 'source' has not answered for 0.05 s"
    pool.allocator.free(blocks)
    assert reader.references() == blocks == sorted(set(range(200)) - set(pool.allocator.allocate_n(198).tolist()))
    engine.state = -1
    assert reader.poll() == [] == reader.references()
    pool.allocator.free(list(range(2, 200)))


@pytest.mark.parametrize("answer", NOT_POSTED)
def test_a_read_that_cannot_be_posted_fails(engine, pair, answer):
    source, reader, pool = pair
    engine.posts = answer
    blocks = pool.allocator.allocate_n(2).tolist()
    number = reader.read(source.offer([0, 1]).ticket, blocks)
    assert reader.poll() == [(number, [], blocks, "Mooncake cannot read from peer 'source'")]
    assert reader.references() == []
    pool.allocator.free(blocks)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"posts": 0}, "Mooncake cannot connect to peer 'source'"),
        ({"state": -1}, "Mooncake cannot read from peer 'source'"),
        ({"state": 0}, "peer 'source' has not answered for 0.05 s"),
        ({"state": 1, "copies": False}, "peer 'source' is in epoch 0, not [0-9]+"),
    ],
)
def test_a_peer_that_cannot_be_reached_is_not_met(engine, pair, wrong, error):
    source, reader, _ = pair
    reader.forget("source")
    for name, value in wrong.items():
        setattr(engine, name, value)
    with pytest.raises(TransferError, match=error):
        reader.meet(source.describe())
    with pytest.raises(TransferError, match="is none of the 0 that were met"):
        reader.read(source.offer([0]).ticket, [0])


def test_a_peer_that_answers_late_does_not_hold_up_meet(engine, pair):
    source, reader, _ = pair
    reader.forget("source")
    reader._engine.batch_transfer_async_read = lambda *arguments: time.sleep(0.5) or 0
    began = time.monotonic()
    with pytest.raises(TransferError, match=r"peer 'source' has not answered for 0.05 s"):
        reader.meet(source.describe())
    assert time.monotonic() - began < 0.4
    reader.close()
    assert time.monotonic() - began >= 0.5, "who still connects has the engine"


def test_close_waits_for_no_meeting_that_has_not_begun(engine, pair):
    source, reader, _ = pair
    reader.forget("source")
    reader._threads, reader.timeout = ThreadPoolExecutor(2), 0.01
    go_on, calls = threading.Event(), []
    reader._engine.batch_transfer_async_read = lambda *arguments: calls.append(go_on.wait(60)) or 0
    for _ in range(5):
        with pytest.raises(TransferError, match="has not answered"):
            reader.meet(source.describe())
    go_on.set()
    reader.close()
    assert calls == [True, True]


def test_an_engine_that_does_not_start_or_register_is_an_error_that_changes_nothing(engine):
    pool = KvCachePool.from_layout(LAYOUT, 4)
    transfer = mooncake.MooncakeTransfer()
    engine.registers = -1
    with pytest.raises(TransferError, match="Mooncake cannot register 4096 bytes of pages"):
        transfer.register(pool)
    with pytest.raises(ValueError, match="has no pool yet: register one"):
        transfer.describe()
    engine.registers = 0
    transfer.register(pool)
    transfer.close()
    engine.starts = -1
    with pytest.raises(TransferError, match="Mooncake's engine does not start for host 'here'"):
        mooncake.MooncakeTransfer(host="here")


@pytest.mark.parametrize("host", [None, "", 7])
def test_a_host_that_is_no_name_is_refused(engine, host):
    with pytest.raises(TypeError, match="host must be a name or an address"):
        mooncake.MooncakeTransfer(host=host)


@pytest.fixture
def real():
    need("mooncake.engine")


@pytest.fixture
def reader(real):
    pool = KvCachePool.from_layout(LAYOUT, 3000)
    with mooncake.MooncakeTransfer("reader", timeout=30.0) as transfer:
        transfer.register(pool)
        transfer.pool = pool
        yield transfer
    pool.allocator.check(others=0)


@pytest.fixture
def start(real):
    """Starts sources, and ends them with the test."""
    sources = []

    def start(*arguments):
        sources.append(SourceProcess(*WHERE, LAYOUT, *arguments))
        return sources[-1]

    yield start
    for source in sources:
        source.end()


def test_a_read_of_more_pages_than_mooncake_has_places_for_is_complete(reader, start):
    source = start(3000)
    reader.meet(source.describe())
    ticket = source.offer(list(range(3000)), 60)
    blocks = reader.pool.allocator.allocate_n(3000)
    reader.read(ticket, blocks)
    (result,) = reader.poll(60)
    assert result.error == "" and result.loaded == blocks.tolist()
    reader.pool.allocator.free(blocks)


def test_a_peer_that_is_stopped_does_not_hold_up_another(reader, start):
    stopped, other = start(200, "stopped"), start(200, "other")
    tickets = []
    for source in (stopped, other):
        reader.meet(source.describe())
        tickets.append(source.offer(list(range(200)), 60))
    stopped.stop()
    blocks = [reader.pool.allocator.allocate_n(200).tolist() for _ in range(2)]
    late, _ = (reader.read(ticket, ids) for ticket, ids in zip(tickets, blocks, strict=True))
    (result,) = reader.poll(20)
    assert result.loaded == blocks[1]
    stopped.go_on()
    assert reader.poll(20) == [(late, blocks[0], [], "")]
    reader.pool.allocator.free(blocks[0] + blocks[1])


def test_addresses_that_are_not_the_peers_are_refused_and_the_next_read_is_right(reader, start):
    source = start(8)
    met = source.describe()
    reader.meet(replace(met, pages=met.pages + (1 << 40)))
    ticket = source.offer([1, 2], 60)
    blocks = reader.pool.allocator.allocate_n(2).tolist()
    reader.read(ticket, blocks)
    assert "the peer refuses these addresses" in reader.poll(60)[0].error
    reader.forget("source")
    reader.meet(met)
    reader.read(ticket, blocks)
    assert reader.poll(60)[0].loaded == blocks
    reader.pool.allocator.free(blocks)


def test_another_process_at_the_same_address_is_not_met(reader, start):
    met = start(8).describe()
    with pytest.raises(TransferError, match=f"peer 'source' is in epoch {met.epoch}, not 7"):
        reader.meet(replace(met, epoch=7))


QUIET = """
from pagepool import KvCachePool, KvLayout
from pagepool.integrations.transfer import TransferError
from pagepool.integrations.transfer.mooncake import MooncakeTransfer
from dataclasses import replace

pools = [KvCachePool.from_layout(KvLayout(num_layers=1, num_kv_heads=1, head_dim=8), 4) for _ in range(2)]
with MooncakeTransfer("source") as source, MooncakeTransfer("reader") as reader:
    source.register(pools[0])
    reader.register(pools[1])
    reader.meet(source.describe())
    reader.forget("source")
    try:
        reader.meet(replace(source.describe(), connection=b"127.0.0.1:9"))
    except TransferError:
        print("refused")
"""


@pytest.mark.parametrize("level", [None, "INFO"])
def test_mooncakes_log_is_silent_unless_it_is_asked_for(real, level):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("MC_LOG_LEVEL", None)
    if level:
        environment["MC_LOG_LEVEL"] = level
    found = subprocess.run([sys.executable, "-c", QUIET], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == "refused\n"
    assert ("Connection refused" in found.stderr) if level else found.stderr == ""
