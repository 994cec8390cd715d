"""The source process of the transfer tests and of bench/transfer.py, controlled through a pipe.

Between `reuse(True)` and `reuse(False)` it frees, allocates and fills blocks as fast as it can while readers read.
"""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from pagepool import KvCachePool
from pagepool.memory.generations import BlockGenerations
from pagepool.transfer import nixl, protocol
from pagepool.transfer.nixl import NixlTransfer, load_nixl


def need_nixl():
    """Skips a test if NIXL cannot be imported. The reason names the missing package or library."""
    try:
        load_nixl()
    except ImportError as error:
        pytest.skip(f"needs the environment of make test-transfer: {error}")


def content(block, generation):
    """Return the value of all 8-byte words of a page, unique for each block and generation."""
    return (int(block) << 32) + int(generation)


def words_of(pool):
    """Return the pages of a pool as 8-byte words (num_blocks, words per page)."""
    return np.frombuffer(memoryview(pool), np.uint64).reshape(pool.max_blocks, -1)


class Source:
    """The source. Each public method is called by a request through the pipe, and its result is the answer."""

    def __init__(self, layout, num_blocks, name):
        self.pool = KvCachePool.from_layout(layout, num_blocks)
        self.generations = BlockGenerations(self.pool.allocator)
        self.transfer = NixlTransfer(name)
        self.transfer.register(self.pool)
        self.words = words_of(self.pool)
        self.held = []
        for _ in range(num_blocks):
            self.take()
        self.choose = random.Random(1)

    def take(self):
        block = self.pool.allocator.allocate()
        self.words[block] = content(block, self.generations.of(block)[0])
        self.held.append(block)

    def describe(self):
        return self.transfer.describe()

    def offer(self, blocks, seconds):
        ticket = self.transfer.offer(blocks, seconds=seconds).ticket
        self.transfer.poll()
        return ticket

    def free(self, blocks):
        self.pool.allocator.free(blocks)

    def reuse(self, pipe):
        """Free and allocate blocks until the pipe has a request; return the number of reused blocks."""
        times = 0
        while not pipe.poll():
            at = self.choose.randrange(len(self.held))
            self.held[at], self.held[-1] = self.held[-1], self.held[at]
            self.pool.allocator.free(self.held.pop())
            self.take()
            times += 1
        return times

    def later(self, seconds):
        """Advance the clock of this process's transfer."""
        protocol.monotonic = lambda: time.monotonic() + seconds

    def begin_to_read(self, peer, ticket):
        """Read from another source, once to the end and once without waiting; return the first read's error."""
        self.transfer.meet(peer)
        self.transfer.read(ticket, self.held[: len(ticket.blocks)])
        (result,) = self.transfer.poll(60)
        self.transfer.read(ticket, self.held[: len(ticket.blocks)])
        return result.error

    def check(self):
        self.transfer.poll()
        self.pool.allocator.check()
        return self.transfer.references()

    def close(self):
        self.transfer.close()


def serve(pipe, pause, *arguments):
    if pause is not None:
        nixl.IDLE_PAUSE = pause
    source = Source(*arguments)
    reused = 0
    reuses = False
    while True:
        if reuses:
            reused += source.reuse(pipe)
        request, *rest = pipe.recv()
        if request == "end":
            return
        if request == "reuse":
            reuses = rest[0]
            pipe.send(reused)
        else:
            pipe.send(getattr(source, request)(*rest))


class SourceProcess:
    """Starts the process. Each method of `Source` sends a request and waits for the answer.

    `pause` replaces the microseconds that NIXL's thread sleeps while it is idle.
    """

    def __init__(self, layout, num_blocks, name="source", pause=None):
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, pause, layout, num_blocks, name), daemon=True)
        self.process.start()
        other.close()

    def __getattr__(self, request):
        def ask(*arguments):
            self.pipe.send((request, *arguments))
            if not self.pipe.poll(60):
                raise TimeoutError(f"the source did not answer {request} within 60 s")
            return self.pipe.recv()

        return ask

    def stop(self):
        """Send SIGSTOP to the process and wait until all of its threads are stopped."""
        os.kill(self.process.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        while any((task / "stat").read_text().rpartition(") ")[2][0] != "T" for task in tasks.iterdir()):
            time.sleep(0.001)

    def go_on(self):
        """Continue a stopped process."""
        os.kill(self.process.pid, signal.SIGCONT)

    def end(self):
        """Kill the process, which may be stopped or dead already."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def race(source, reader, pool, reads, pages_per_read, seed=2):
    """Read while the source reuses its blocks as fast as it can; return counts of pages, and of reused blocks.

    accepted        pages reported as loaded
    wrong           accepted pages with other contents than on the ticket: must be 0
    refused         pages reported as failed
    would_be_wrong  arrived pages with other contents than on the ticket, which a reader without the check would use
    """
    choose = random.Random(seed)
    words = words_of(pool)
    peer = reader.meet(source.describe())
    source.reuse(True)
    counts = dict.fromkeys(("accepted", "wrong", "refused", "would_be_wrong"), 0)
    for _ in range(reads):
        ticket = source.offer(choose.sample(range(pool.max_blocks), pages_per_read), 0)
        blocks = pool.allocator.allocate_n(pages_per_read).tolist()
        reader.read(ticket, blocks)
        (result,) = reader.poll(60)
        assert not result.error or "do not match the ticket" in result.error, result.error
        pairs = zip(blocks, ticket.blocks, strict=True)
        right = {block for block, pair in pairs if (words[block] == content(*pair)).all()}
        counts["accepted"] += len(result.loaded)
        counts["refused"] += len(result.failed)
        counts["wrong"] += len(set(result.loaded) - right)
        counts["would_be_wrong"] += len(set(blocks) - right)
        pool.allocator.free(blocks)
    reused = source.reuse(False)
    reader.forget(peer)
    return counts, reused
