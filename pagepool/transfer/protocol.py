"""Transfer: copies pages from one engine's pool to another. This module is independent of the transport.

    source                                   reader
    lease = offer(blocks)                    blocks = allocator.allocate_n(n)
    lease.ticket  ────────────────────────▶  read(ticket, blocks)
    pages         ◀───── 1st request ──────  into blocks with no other reference
    epoch, words  ◀───── 2nd request ──────  only after all pages have arrived
    withdraw(lease)                          poll(): each block is loaded or failed

Allocating a block increments its generation before the new owner writes the first byte. The reader reads the block's
word after the page. If the word has the ticket's generation and a reference count above 0, the page matches the ticket.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pagepool._arguments import integer, real, wrong
from pagepool.errors import InvalidBlock, TransferError, refuse_copy
from pagepool.memory.allocator import BlockAllocator
from pagepool.memory.block_refs import BlockRefs
from pagepool.memory.generations import BlockGenerations
from pagepool.memory.kv_pool import KvCachePool
from pagepool.transfer.tickets import Lease, PeerDescription, ReadResult, Ticket, fingerprint

__all__ = ["Transfer"]

# A loop without a pause occupies the core that the peer's thread needs. On two cores, reading 13 pages of 128 KiB then
# took 20 ms instead of 0.25 ms.
PAUSE = 20e-6
WORD = 8  # size of a word and of an epoch, in bytes


@dataclass
class Memory:
    """The memory of a registered pool, as arrays with fixed addresses.

    Attributes
    ----------
    pages
        uint8 (bytes,): the pages of the pool.
    words
        uint64 (num_blocks,): the words of `BlockGenerations`.
    epoch_word
        uint64 (1,): the epoch of the pool.
    landing
        uint64 (2, num_blocks): receives the epoch (row 0) and the words (row 1) of a read. Columns are the reader's
        block ids.
    block_bytes
        Bytes per page.
    """

    pages: NDArray[np.uint8]
    words: NDArray[np.uint64]
    epoch_word: NDArray[np.uint64]
    landing: NDArray[np.uint64]
    block_bytes: int


@dataclass
class _Registered:
    pool: KvCachePool
    generations: BlockGenerations
    memory: Memory
    description: PeerDescription


@dataclass
class _Read:
    """A read, kept until none of its bytes can arrive later. It holds its own reference to each destination block."""

    number: int
    ticket: Ticket
    blocks: NDArray[np.int64]
    refs: BlockRefs
    deadline: float
    request: Any = None
    wants_words: bool = False
    error: str = ""
    is_reported: bool = False


class Transfer(ABC):
    """Reads pages from pools of other engines into blocks of one pool, and lets peers read pages of this pool.

    This is a base class: `NixlTransfer` and `LocalTransfer` copy the bytes. The object is not thread-safe. Close it
    with `close`, or use it as a context manager. `BlockAllocator.owners` lists its references.

    Equation: references == sum(blocks of leases) + sum(blocks of reads that may still be written to).

    Parameters
    ----------
    name : str or None
        Name of this engine, unique among its peers. None: a random name.
    timeout : float
        Seconds until a read fails because its peer has not answered.
    """

    __reduce__ = refuse_copy
    transport: ClassVar[str]
    kind = "transfer"

    def __init__(self, name: str | None = None, timeout: float = 30.0) -> None:
        self.name = f"engine-{secrets.token_hex(8)}" if name is None else name
        if not isinstance(self.name, str) or not self.name:
            raise wrong("name", "a name or None", name)
        self.timeout = real("timeout", timeout, 0.0)
        self._registered: _Registered | None = None
        self._peers: dict[str, PeerDescription] = {}
        self._lost: set[str] = set()  # names of peers, see `is_lost`
        self._leaving: dict[str, PeerDescription] = {}  # forgotten peers with unfinished reads
        self._leases: list[Lease] = []
        self._reads: dict[int, _Read] = {}
        self._last_read = 0
        self._is_closed = False

    @property
    def label(self) -> str:
        """The name that `BlockAllocator.owners` shows."""
        return self.name

    def references(self) -> list[int]:
        """Return the ids of the blocks that this object holds, one entry for each reference."""
        leased = [block for lease in self._leases if len(lease.refs) for block, _ in lease.ticket.blocks]
        return leased + [block for read in self._reads.values() if len(read.refs) for block in read.blocks.tolist()]

    def register(self, pool: KvCachePool, model: str = "") -> None:
        """Make the pages of a pool and the generations of its blocks readable by peers.

        May be called once for each object. The pool cannot be closed before this object. It must not be trimmed if
        RDMA pins its memory.

        Parameters
        ----------
        pool : KvCachePool
            The pool.
        model : str
            Name of the model and its weights. Peers with a different name are refused.

        Raises
        ------
        ValueError
            A pool is already registered, or the pool has no blocks. Nothing has changed.
        TransferError
            The transport cannot register the memory. Nothing has changed.
        """
        self._check_open()
        if not isinstance(pool, KvCachePool):
            raise wrong("pool", "a KvCachePool", pool)
        if self._registered is not None:
            raise ValueError(f"transfer {self.name!r} already has a pool: {self._registered.pool!r}")
        num_blocks = pool.allocator.max_capacity
        if not num_blocks:
            raise ValueError("a pool of 0 blocks has no pages to transfer")
        generations = BlockGenerations(pool.allocator)
        memory = Memory(
            pages=np.frombuffer(memoryview(pool), np.uint8),
            words=np.frombuffer(generations.words, np.uint64),
            epoch_word=np.array([1 + secrets.randbits(62)], np.uint64),
            landing=np.zeros((2, num_blocks), np.uint64),
            block_bytes=pool.nbytes // pool.max_blocks,
        )
        connection = self._attach(memory)
        description = PeerDescription(
            name=self.name,
            transport=self.transport,
            epoch=int(memory.epoch_word[0]),
            fingerprint=fingerprint(pool, model),
            num_blocks=num_blocks,
            pages=memory.pages.ctypes.data,
            words=memory.words.ctypes.data,
            epoch_word=memory.epoch_word.ctypes.data,
            connection=connection,
        )
        self._registered = _Registered(pool, generations, memory, description)
        pool.allocator.add_owner(self)

    def describe(self) -> PeerDescription:
        """Return the description that a peer passes to `meet`. Raises `ValueError` before `register`."""
        return self._own().description

    def meet(self, peer: PeerDescription) -> str:
        """Connect to a peer. A second call with the same description changes nothing.

        Parameters
        ----------
        peer : PeerDescription
            The result of the peer's `describe`.

        Returns
        -------
        str
            Name of the peer.

        Raises
        ------
        TransferError
            The peer's page layout differs from this pool's, the peer cannot be reached, or the peer was forgotten and
            its last reads have not ended. Nothing has changed.
        ValueError
            The peer has a different transport or this engine's own name, or it has registered a new pool since the last
            `meet`. In the last case call `forget` first. Nothing has changed.
        """
        own = self._own().description
        if not isinstance(peer, PeerDescription):
            raise wrong("peer", "a PeerDescription", peer)
        if peer.transport != self.transport:
            raise ValueError(f"peer {peer.name!r} has transport {peer.transport!r}, not {self.transport!r}")
        if peer.fingerprint != own.fingerprint:
            raise TransferError(f"peer {peer.name!r} has {peer.fingerprint}; this pool has {own.fingerprint}")
        if peer.name == self.name:
            raise ValueError(f"peer {peer.name!r} has the name of this engine")
        if peer.name in self._leaving:
            raise TransferError(
                f"peer {peer.name!r} was forgotten while reads ran: {self._in_flight(peer.name)} have not ended"
            )
        known = self._peers.get(peer.name)
        if known is not None and known.epoch != peer.epoch:
            raise ValueError(f"peer {peer.name!r} was met in epoch {known.epoch}, not {peer.epoch}: forget it first")
        if known is None:
            self._connect(peer)
            self._peers[peer.name] = peer
        return peer.name

    def offer(self, blocks: Iterable[int], names: Iterable[bytes] = (), seconds: float = 60.0) -> Lease:
        """Take a reference to each block and return a lease. Its ticket lets readers find the pages.

        The pages must be final. If the owner rewrites a page in place after the lease has ended, the page changes but
        its generation does not, so a reader cannot detect it.

        Parameters
        ----------
        blocks : iterable of int
            Ids of blocks in use, in the order of their tokens.
        names : iterable of bytes
            The engine's names of the blocks: one name per block, or empty.
        seconds : float
            Seconds until `poll` withdraws the lease.

        Returns
        -------
        Lease
            Holds the blocks. Its `ticket` is sent to the reader.

        Raises
        ------
        InvalidBlock
            A block is not in use. Nothing has changed.
        ValueError
            `blocks` is empty. Nothing has changed.
        """
        own, lasts = self._own(), real("seconds", seconds, 0.0)
        ids = [integer("a block", block) for block in blocks]
        refs = BlockRefs(own.pool.allocator)
        refs.share(ids)
        try:
            pairs = tuple(zip(ids, own.generations.of(ids).tolist(), strict=True))
            lease = Lease(Ticket(self.name, own.description.epoch, pairs, tuple(names)), monotonic() + lasts, refs)
        except BaseException as error:
            refs.give_back()
            if isinstance(error, TransferError):  # raised by `Ticket` for wrong arguments
                raise ValueError(str(error)) from None
            raise
        self._leases.append(lease)
        return lease

    def withdraw(self, lease: Lease) -> None:
        """Drop the references of a lease before it expires. The ticket stays valid until its blocks are reallocated.

        Does nothing if the lease was withdrawn or has expired.
        """
        if lease in self._leases:
            self._leases.remove(lease)
            lease.refs.give_back()

    def read(self, ticket: Ticket, blocks: Iterable[int]) -> int:
        """Start to read the pages of a ticket into blocks of this pool. `poll` reports the result and later errors.

        The read holds one more reference to each block until none of its bytes can arrive later. The blocks must not be
        read, shared or freed until `poll` returns them.

        Parameters
        ----------
        ticket : Ticket
            A ticket from a peer that was met.
        blocks : iterable of int
            Ids of allocated blocks, one for each block of the ticket. Only the caller may hold references to them.

        Returns
        -------
        int
            Number of the read, which is `ReadResult.read` in the result of `poll`.

        Raises
        ------
        TransferError
            The peer was not met, or was met in a different epoch of its pool. Nothing has changed.
        InvalidBlock
            A block is free or has other references. Nothing has changed.
        ValueError
            The number of blocks differs from the ticket. Nothing has changed.
        """
        allocator = self._own().pool.allocator
        peer = self._peer_of(ticket)
        ids = [integer("a block", block) for block in blocks]
        _check_alone(allocator, ticket, ids)
        read = _Read(
            number=self._last_read + 1,
            ticket=ticket,
            blocks=np.array(ids, np.int64),
            refs=BlockRefs(allocator),
            deadline=monotonic() + self.timeout,
        )
        read.refs.share(ids)
        self._last_read = read.number
        self._reads[read.number] = read
        self._post_read(read, peer)
        return read.number

    def poll(self, seconds: float = 0.0) -> list[ReadResult]:
        """Advance all reads, return the reads that have ended since the last call, and withdraw expired leases.

        A block is loaded if its page matches the ticket. A block has failed if the source block is free or has a
        different generation, the source pool is in a different epoch, the peer cannot be reached or has not answered in
        time, or the read was cancelled. Late bytes may still be written to failed blocks. The read holds references to
        them until that is impossible, so the allocator does not hand them out meanwhile.

        Parameters
        ----------
        seconds : float
            Longest time to wait for a result, with pauses of 20 us. With 0, or without running reads, the call returns
            at once.

        Returns
        -------
        list of ReadResult
            One entry for each read that has ended.
        """
        self._check_open()
        end = monotonic() + real("seconds", seconds, 0.0)
        while True:
            now = monotonic()
            for lease in [lease for lease in self._leases if lease.expires <= now]:
                self.withdraw(lease)
            results = [result for read in [*self._reads.values()] if (result := self._advance_alone(read, now))]
            self._disconnect_idle()
            if results or now >= end or all(read.is_reported for read in self._reads.values()):
                return results
            sleep(PAUSE)

    def cancel(self, read: int) -> None:
        """Cancel a read; the next `poll` returns its blocks as failed. Raises `ValueError` if the read has ended."""
        found = self._reads.get(read)
        if found is None or found.is_reported:
            raise ValueError(
                f"read {read} is not running: it has ended or was never started (last read: {self._last_read})"
            )
        found.error = found.error or "the read was cancelled"

    def is_lost(self, peer: str) -> bool:
        """Return whether a read found that a peer does not answer in time, cannot be reached or is in another epoch.

        The answer stays true until `forget`. A live peer that has reallocated the blocks of a ticket is not lost.
        """
        return peer in self._lost

    def forget(self, peer: str) -> None:
        """End all reads from a peer, then close the connection. `poll` returns their blocks as failed.

        Raises `ValueError` if the peer was not met.
        """
        if peer not in self._peers:
            raise ValueError(f"peer {peer!r} was not met: {len(self._peers)} other peers are connected")
        self._leaving[peer] = self._peers.pop(peer)
        self._lost.discard(peer)
        for read in self._reads.values():
            if read.ticket.peer == peer:
                read.error = read.error or f"peer {peer!r} was forgotten"
        self._disconnect_idle()

    def close(self) -> None:
        """End all reads without results, all leases and all connections. A second call does nothing.

        Waits for running requests, at most until the deadlines of their reads, because disconnecting in the middle of a
        request can break the peer.
        """
        if self._is_closed:
            return
        while any(
            read.request is not None and not self._has_arrived(read) and monotonic() < read.deadline
            for read in self._reads.values()
        ):
            sleep(PAUSE)
        for peer in [*self._peers]:
            self.forget(peer)
        if self._registered is not None:
            self._registered.memory.epoch_word[0] = 0  # later reads do not find their ticket's epoch
            self._detach([read.request for read in self._reads.values() if read.request is not None])
        for read in self._reads.values():
            read.refs.give_back()
        self._reads.clear()
        for lease in [*self._leases]:
            self.withdraw(lease)
        self._registered = None
        self._is_closed = True

    def __enter__(self) -> Transfer:
        """Return the object itself. The end of the `with` block closes it."""
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError(f"transfer {self.name!r} is closed")

    def _own(self) -> _Registered:
        self._check_open()
        if self._registered is None:
            raise ValueError(f"transfer {self.name!r} has no pool: call register first")
        return self._registered

    def _in_flight(self, peer: str) -> int:
        return sum(read.ticket.peer == peer and read.request is not None for read in self._reads.values())

    def _disconnect_idle(self) -> None:
        """Disconnect forgotten peers that have no running request. Until then their bytes can still arrive."""
        for name in [name for name in self._leaving if not self._in_flight(name)]:
            self._disconnect(self._leaving.pop(name))

    def _peer_of(self, ticket: Ticket) -> PeerDescription:
        """Return the peer that made a ticket. Checks the ticket's epoch and block ids against the peer."""
        if not isinstance(ticket, Ticket):
            raise wrong("ticket", "a Ticket", ticket)
        peer = self._peers.get(ticket.peer)
        if peer is None:
            raise TransferError(
                f"peer {ticket.peer!r} of the ticket was not met: {len(self._peers)} other peers are connected"
            )
        if peer.epoch != ticket.epoch:
            raise TransferError(
                f"the ticket has epoch {ticket.epoch}, but peer {peer.name!r} was met in epoch {peer.epoch}"
            )
        highest = max(block for block, _ in ticket.blocks)
        if highest >= peer.num_blocks:
            raise TransferError(
                f"block {highest} of the ticket is not one of the {peer.num_blocks} blocks of {peer.name!r}"
            )
        return peer

    def _post_read(self, read: _Read, peer: PeerDescription) -> None:
        """Post the next request of a read: first for the pages, then for the epoch and the words."""
        memory = self._own().memory
        theirs = np.array([block for block, _ in read.ticket.blocks], np.int64)
        copies = np.empty((len(theirs) + read.wants_words, 3), np.int64)  # to, from, bytes
        if read.wants_words:
            memory.landing[:, read.blocks] = 0
            epochs, words = (row.ctypes.data for row in memory.landing)
            copies[0] = epochs + WORD * read.blocks[0], peer.epoch_word, WORD
            copies[1:, 0] = words + WORD * read.blocks
            copies[1:, 1] = peer.words + WORD * theirs
            copies[1:, 2] = WORD
        else:
            copies[:, 0] = memory.pages.ctypes.data + memory.block_bytes * read.blocks
            copies[:, 1] = peer.pages + memory.block_bytes * theirs
            copies[:, 2] = memory.block_bytes
        try:
            read.request = self._post(peer, copies)
        except TransferError as error:
            read.error = str(error)
            self._lost.add(peer.name)

    def _advance_alone(self, read: _Read, now: float) -> ReadResult | None:
        """Call `_advance`; if it raises, only this read fails and other reads continue."""
        try:
            return self._advance(read, now)
        except Exception as error:
            read.error = read.error or f"the read failed: {type(error).__name__}: {error}"
            return None if read.is_reported else self._report(read, np.zeros(len(read.blocks), bool))

    def _advance(self, read: _Read, now: float) -> ReadResult | None:
        """Advance a read without waiting. Returns its result once, and None before and after that."""
        while not read.error and self._has_arrived(read):
            if read.error:
                break
            if read.wants_words:
                return self._report(read, self._good_ones(read))
            read.wants_words = True
            self._post_read(read, self._peers[read.ticket.peer])
        if not read.error and now >= read.deadline:
            read.error = f"peer {read.ticket.peer!r} has not answered for {self.timeout:g} s"
            self._lost.add(read.ticket.peer)
        if read.error and (read.request is None or self._has_arrived(read)):
            self._drop(read)
        if read.error and not read.is_reported:
            return self._report(read, np.zeros(len(read.blocks), bool))
        return None

    def _has_arrived(self, read: _Read) -> bool:
        """Return whether the request of a read has ended. If it has failed, `error` holds the reason."""
        try:
            if not self._check(read.request):
                return False
        except TransferError as error:
            if not read.error:
                read.error = str(error)
                self._lost.add(read.ticket.peer)
        read.request = None
        return True

    def _good_ones(self, read: _Read) -> NDArray[np.bool_]:
        """Return bool (blocks,): whether each page matches the ticket. Sets `error` if a page does not match."""
        landing = self._own().memory.landing
        epoch, words = int(landing[0, read.blocks[0]]), landing[1, read.blocks]
        wanted = np.array([times for _, times in read.ticket.blocks], np.uint64)
        if epoch != read.ticket.epoch:
            read.error = f"peer {read.ticket.peer!r} is in epoch {epoch}, but the ticket has epoch {read.ticket.epoch}"
            self._lost.add(read.ticket.peer)
            return np.zeros(len(wanted), bool)
        same = words >> np.uint64(32) == wanted
        good: NDArray[np.bool_] = same & (words & np.uint64(0xFFFFFFFF) != 0)
        if not good.all():
            first = int(np.argmin(good))
            block, times = read.ticket.blocks[first]
            found = f"has generation {int(words[first]) >> 32}, not {times}" if not same[first] else "is free"
            read.error = f"{int((~good).sum())} of {len(good)} pages do not match the ticket: block {block} {found}"
        return good

    def _report(self, read: _Read, good: NDArray[np.bool_]) -> ReadResult:
        read.is_reported = True
        if read.request is None:
            self._drop(read)
        return ReadResult(read.number, read.blocks[good].tolist(), read.blocks[~good].tolist(), read.error)

    def _drop(self, read: _Read) -> None:
        """Release the blocks of a read. None of its bytes can arrive later."""
        read.refs.give_back()
        if read.is_reported:
            self._reads.pop(read.number, None)

    @abstractmethod
    def _attach(self, memory: Memory) -> bytes:
        """Register all arrays with the transport. Returns the bytes that peers need to connect."""

    @abstractmethod
    def _detach(self, requests: list[Any]) -> None:
        """Undo `_attach` and end all requests. No bytes arrive after this returns."""

    @abstractmethod
    def _connect(self, peer: PeerDescription) -> None:
        """Connect to a peer. Raises `TransferError` if it cannot be reached."""

    @abstractmethod
    def _disconnect(self, peer: PeerDescription) -> None:
        """Close the connection. Requires that no request to the peer is running."""

    @abstractmethod
    def _post(self, peer: PeerDescription, copies: NDArray[np.int64]) -> Any:
        """Start to copy and return the request. Raises `TransferError` if the copy cannot start; no bytes arrive then.

        Parameters
        ----------
        peer : PeerDescription
            The source of the bytes.
        copies : ndarray
            int64 (n, 3): destination address, source address at the peer, number of bytes.
        """

    @abstractmethod
    def _check(self, request: Any) -> bool:
        """Return whether all bytes of a request have arrived. If true, the request is released.

        Raises `TransferError` if the request has failed and none of its bytes can arrive later. The request is released
        in this case also.
        """


def _check_alone(allocator: BlockAllocator, ticket: Ticket, ids: list[int]) -> None:
    """Check that only the caller holds references to the destination blocks, and that their number is right."""
    if len(ids) != len(ticket.blocks):
        raise ValueError(
            f"blocks must have one entry for each of the {len(ticket.blocks)} blocks of the ticket, not {len(ids)}"
        )
    if len(set(ids)) != len(ids):
        raise ValueError(f"blocks must be different, but only {len(set(ids))} of {len(ids)} are")
    for block in ids:
        count = allocator.ref_count(block)
        if count != 1:
            raise InvalidBlock(
                f"block {block} has {count} references; the destination of a read must have 1, the caller's"
            )
