"""Transports between processes: pages, races with a source that reuses blocks, peers that stop, die or are replaced.

Every test runs with a reader that also serves and with one that only reads. `make test-transfer` creates an
environment.
"""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import refuses
from transfer_source import SourceProcess, content, need_nixl, race, words_of

from pagepool import KvCachePool, KvLayout
from pagepool.transfer import TransferError
from pagepool.transfer.nixl import NixlTransfer

READERS = {"nixl": {}, "nixl that only reads": {"serves": False}}  # options of the reader
LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=64)  # pages of 32 KiB
NUM_BLOCKS = 64
READS = 10_000


@pytest.fixture(params=READERS)
def options(request):
    """Return the options of the reader."""
    need_nixl()
    return READERS[request.param]


@pytest.fixture
def source(options):
    process = SourceProcess(LAYOUT, NUM_BLOCKS)
    yield process
    process.end()


@pytest.fixture
def pool():
    pool = KvCachePool.from_layout(LAYOUT, NUM_BLOCKS)
    yield pool
    pool.allocator.check(others=0)
    assert pool.allocator.in_use == 0, "nothing is leaked"


@pytest.fixture
def reader(options, pool):
    with NixlTransfer("reader", **options) as transfer:
        transfer.register(pool)
        yield transfer


def read(reader, pool, ticket, seconds=60):
    """Do one read to its end, free the blocks and return (loaded, failed, error)."""
    blocks = pool.allocator.allocate_n(len(ticket.blocks)).tolist()
    reader.read(ticket, blocks)
    (result,) = reader.poll(seconds)
    words = words_of(pool)
    for block, pair in zip(blocks, ticket.blocks, strict=True):
        assert block in result.failed or (words[block] == content(*pair)).all()
    pool.allocator.free(blocks[::-1])  # so that the next read gets the same blocks
    return result[1:]


def test_pages_of_another_process_arrive(source, reader, pool):
    reader.meet(source.describe())
    ticket = source.offer([9, 3, 60], 60)
    assert read(reader, pool, ticket) == ([0, 1, 2], [], "")
    assert source.check() == [9, 3, 60]
    assert read(reader, pool, source.offer(list(range(NUM_BLOCKS)), 60))[2] == ""


def test_every_accepted_page_is_right_while_the_source_reuses_its_blocks(source, reader, pool):
    counts, reused = race(source, reader, pool, READS, pages_per_read=4)
    print(f"{READS} reads of 4 pages, {reused} blocks reused: {counts}")
    assert counts["wrong"] == 0 < counts["would_be_wrong"] <= counts["refused"]
    assert counts["accepted"] > READS / 10
    assert source.check() == []


def test_a_ticket_of_free_or_reallocated_blocks_fails(source, reader, pool):
    reader.meet(source.describe())
    old = source.offer([5, 6], 0)
    source.free([6])
    assert read(reader, pool, old) == ([0], [1], "1 of 2 pages do not match the ticket: block 6 is free")


def test_an_old_ticket_is_valid_until_its_blocks_are_reallocated(source, reader, pool):
    reader.meet(source.describe())
    ticket = source.offer([5, 6], 60)
    source.later(86400)
    assert source.check() == [], "the lease has expired"
    assert read(reader, pool, ticket) == ([0, 1], [], "")
    source.free([6])
    source.take()
    error = "1 of 2 pages do not match the ticket: block 6 has generation 2, not 1"
    assert read(reader, pool, ticket) == ([0], [1], error)


def test_a_source_that_is_killed_fails_its_reads_with_one_error(source, reader, pool):
    reader.meet(source.describe())
    ticket = source.offer([1, 2], 60)
    assert read(reader, pool, ticket)[2] == ""
    source.end()
    loaded, failed, error = read(reader, pool, ticket)
    assert loaded == [] and failed == [0, 1] and "NIXL" in error
    reader.forget("source")
    with refuses(TransferError, 0):
        reader.read(ticket, [])


def test_a_source_that_has_closed_fails_its_reads(source, reader, pool):
    reader.meet(source.describe())
    ticket = source.offer([1, 2], 60)
    source.close()
    loaded, failed, error = read(reader, pool, ticket)
    assert loaded == [] and failed == [0, 1] and error


def test_a_source_that_is_stopped_is_read_by_the_kernel_or_fails_in_time(source, reader, pool):
    reader.meet(source.describe())
    ticket = source.offer([1, 2], 60)
    assert read(reader, pool, ticket)[2] == ""
    source.stop()
    reader.timeout = 2.0
    began = time.monotonic()
    loaded, _failed, error = read(reader, pool, ticket)
    assert loaded or "has not answered for 2 s" in error
    assert time.monotonic() - began < 30
    source.go_on()
    while reader.references():
        reader.poll(0.1)


def test_a_source_that_is_stopped_when_it_is_met_is_read_later(source, reader, pool):
    met, ticket = source.describe(), source.offer([1, 2], 60)
    source.stop()
    reader.timeout = 2.0
    began = time.monotonic()
    reader.meet(met)
    loaded, _failed, error = read(reader, pool, ticket)
    assert loaded or "has not answered for 2 s" in error
    assert time.monotonic() - began < 30
    source.go_on()
    while reader.references():
        reader.poll(0.1)
    reader.timeout = 30.0
    assert reader.meet(met) == "source"
    assert read(reader, pool, ticket) == ([0, 1], [], "")


def test_leases_of_a_killed_reader_expire_and_the_source_continues(source, reader, pool):
    other = SourceProcess(LAYOUT, NUM_BLOCKS, "other")
    try:
        ticket = source.offer(list(range(NUM_BLOCKS)), 60)
        assert other.begin_to_read(source.describe(), ticket) == ""
    finally:
        other.end()
    assert source.check() == list(range(NUM_BLOCKS))
    reader.meet(source.describe())
    assert read(reader, pool, ticket)[2] == ""
    source.later(86400)
    assert source.check() == []


@pytest.fixture
def tcp(monkeypatch):
    """The case of two machines without RDMA: the source's process must answer requests itself."""
    monkeypatch.setenv("UCX_TLS", "tcp")


def test_late_bytes_over_tcp_reach_only_blocks_still_held_for_them(tcp, source, reader, pool):
    met = source.describe()
    reader.meet(met)
    ticket = source.offer([1, 2], 60)
    assert read(reader, pool, ticket)[2] == ""
    words_of(pool)[:] = 0
    source.stop()
    reader.timeout = 2.0
    assert read(reader, pool, ticket) == ([], [0, 1], "peer 'source' has not answered for 2 s")
    assert pool.allocator.in_use == 2 == len(reader.references())
    others = pool.allocator.allocate_n(NUM_BLOCKS - 2)
    reader.forget("source")
    with refuses(TransferError, "peer", "source", 1):
        reader.meet(met)
    source.go_on()
    end = time.monotonic() + 30
    while reader.references() and time.monotonic() < end:
        assert reader.poll(0.01) == []
    assert reader.references() == [] and not words_of(pool)[others].any()
    pool.allocator.free(others)


def test_a_source_that_is_killed_while_it_is_read_fails_the_read_and_leaves_no_block(tcp, source, reader, pool):
    reader.meet(source.describe())
    ticket = source.offer([1, 2], 60)
    assert read(reader, pool, ticket)[2] == ""
    source.stop()
    blocks = pool.allocator.allocate_n(2).tolist()
    reader.read(ticket, blocks)
    assert reader.poll(0.1) == []
    source.end()
    (result,) = reader.poll(30)
    assert result.loaded == [] and result.failed == blocks and "NIXL" in result.error
    assert reader.references() == []
    pool.allocator.free(blocks)


def test_after_close_no_byte_comes_even_over_tcp(tcp, options, source, pool):
    with NixlTransfer("reader", **options) as reader:
        reader.register(pool)
        reader.meet(source.describe())
        ticket = source.offer([1, 2], 60)
        assert read(reader, pool, ticket)[2] == ""
        words_of(pool)[:] = 0
        source.stop()
        reader.timeout = 0.5
        assert read(reader, pool, ticket)[2] == "peer 'source' has not answered for 0.5 s"
    assert pool.allocator.in_use == 0
    source.go_on()
    time.sleep(1)  # a late byte would arrive now; UCX may end the source meanwhile, see docs/guide/transfer.md
    assert not words_of(pool).any()


def test_a_peer_of_another_layout_is_refused(options, source):
    with NixlTransfer("reader", **options) as reader:
        reader.register(KvCachePool.from_layout(KvLayout(4, 2, 128), 4))
        with refuses(TransferError, "peer", "source", "KvLayout", "head_dim", 64, 128):
            reader.meet(source.describe())


def test_a_description_without_a_right_connection_is_refused(source, reader):
    with refuses(TransferError, "source"):
        reader.meet(replace(source.describe(), connection=b"nonsense"))
    assert reader.meet(source.describe()) == "source"


def test_a_read_only_peer_offers_nothing(options, pool, reader):
    block = pool.allocator.allocate()
    if options:
        with pytest.raises(ValueError, match="serves=False"):
            reader.offer([block])
    else:
        reader.withdraw(reader.offer([block]))
    assert pool.allocator.ref_count(block) == 1
    pool.allocator.free([block])


# A log handler as in Ray Serve: it buffers in memory and flushes to a file.
LOGGED = """
import logging.handlers, sys
target = logging.FileHandler(sys.argv[1])
handler = logging.handlers.MemoryHandler(1, target=target)
logging.getLogger("serve").addHandler(handler)
from pagepool.transfer.nixl import NixlTransfer
with NixlTransfer("one"):
    for number in range(100):
        logging.getLogger("serve").warning("record %d", number)
    assert handler.target is target and not handler.buffer, (handler.target, len(handler.buffer))
"""


def test_the_handlers_of_the_process_stay_when_nixl_is_imported(tmp_path):
    need_nixl()
    log = tmp_path / "log"
    subprocess.run([sys.executable, "-c", LOGGED, str(log)], check=True)
    assert len(log.read_text().splitlines()) == 100


def voluntary_switches():
    """Return how often each thread of this process has slept."""
    found = {}
    for place in Path("/proc/self/task").iterdir():
        lines = (place / "status").read_text().splitlines()
        found[place.name] = int(next(line for line in lines if line.startswith("voluntary")).split()[1])
    return found


def test_the_thread_that_serves_sleeps_while_nothing_comes(pool):
    need_nixl()
    before = voluntary_switches()
    with NixlTransfer("idle") as transfer:
        transfer.register(pool)
        begun = voluntary_switches()
        time.sleep(1)
        slept = {thread: count - begun[thread] for thread, count in voluntary_switches().items() if thread in begun}
    new = [count for thread, count in slept.items() if thread not in before]
    assert new and max(new) >= 20, f"threads of NIXL slept so often in a second: {new}"


def test_a_request_wakes_the_thread_that_serves(tcp, pool, reader):
    """Over TCP the source's thread answers. Here its pause is longer than the time that the read may take."""
    source = SourceProcess(LAYOUT, NUM_BLOCKS, pause=600_000_000)
    try:
        reader.meet(source.describe())
        for _ in range(3):
            assert read(reader, pool, source.offer([3, 5], 600.0), seconds=60) == ([0, 1], [], "")
            time.sleep(0.05)  # the thread sleeps again
    finally:
        source.end()
