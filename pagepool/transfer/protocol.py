"""Transfer: pages from one engine's pool into another's. Here is all that does not depend on how bytes move.

    source                                   reader
    lease = offer(blocks)                    blocks = allocator.allocate_n(n)
    lease.ticket  ────────────────────────▶  read(ticket, blocks)
    pages         ◀───── 1st request ──────  into blocks that nobody else has
    epoch, words  ◀───── 2nd request ──────  only when all pages are there
    withdraw(lease)                          poll(): each block is loaded or failed

The generation of a block rises before its next owner writes the first byte. So a page is the one of the ticket if its
word, read after the page, has the ticket's generation and says that the block is held.
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

# A loop without a pause takes the core that the peer's own thread needs: with two cores 13 pages of 128 KiB took 20 ms
# instead of 0.25.
PAUSE = 20e-6
WORD = 8  # bytes of a word and of an epoch


@dataclass
class Memory:
    """The memory of a registered pool, as arrays of bytes and words whose addresses stay.

    landing  uint64 (2, num_blocks): where epoch and words of a read arrive, in the columns of the reader's blocks
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
    """A read until no byte of it can come any more. It holds a reference to each block, whatever the reader does."""

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
    """Reads pages of other engines' pools into blocks of one pool, and lets others read its own.

    A base class: `NixlTransfer` and `LocalTransfer` move the bytes. One thread at a time may use an
    object; `close` it, or use it as a context manager. Its references show in `BlockAllocator.owners`.

    Equation: references == sum(blocks of leases) + sum(blocks of reads that may still be written to).

    Parameters
    ----------
    name
        Of this engine among its peers; by default a random one.
    timeout
        Seconds after which a read whose peer does not answer has failed.
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
        self._lost: set[str] = set()  # names of peers for `is_lost`
        self._leaving: dict[str, PeerDescription] = {}  # forgotten, but reads of theirs have not ended
        self._leases: list[Lease] = []
        self._reads: dict[int, _Read] = {}
        self._last_read = 0
        self._is_closed = False

    @property
    def label(self) -> str:
        """The name, for `BlockAllocator.owners`."""
        return self.name

    def references(self) -> list[int]:
        """The blocks that are held now, one entry for each reference."""
        leased = [block for lease in self._leases if len(lease.refs) for block, _ in lease.ticket.blocks]
        return leased + [block for read in self._reads.values() if len(read.refs) for block in read.blocks.tolist()]

    def register(self, pool: KvCachePool, model: str = "") -> None:
        """Makes the pages of a pool and the generations of its blocks readable by peers; once for each object.

        Raises `ValueError` when a pool is registered already or has no blocks, `TransferError` when the transport
        cannot have the memory; then nothing has changed.

        Parameters
        ----------
        pool
            The `KvCachePool`; it cannot be closed before this object, and must not be trimmed where RDMA pins
            memory.
        model
            A name of the model and its weights; peers with another one are refused.
        """
        self._check_open()
        if not isinstance(pool, KvCachePool):
            raise wrong("pool", "a KvCachePool", pool)
        if self._registered is not None:
            raise ValueError(f"transfer {self.name!r} has {self._registered.pool!r} already")
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
        """Returns what a peer needs to `meet` this engine. Raises `ValueError` before `register`."""
        return self._own().description

    def meet(self, peer: PeerDescription) -> str:
        """Connects to a peer; returns its name. Meeting one again that is the same changes nothing.

        Raises `TransferError` when its pages are not laid out as those of this pool, it cannot be reached, or it was
        forgotten and its last reads have not ended; `ValueError` for another transport, this engine's own name, or a
        peer that has another pool since it was met: `forget` it first. Then nothing has changed.
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
                f"peer {peer.name!r} was forgotten, and {self._in_flight(peer.name)} reads have not ended"
            )
        known = self._peers.get(peer.name)
        if known is not None and known.epoch != peer.epoch:
            raise ValueError(f"peer {peer.name!r} was met in epoch {known.epoch}, not {peer.epoch}: forget it first")
        if known is None:
            self._connect(peer)
            self._peers[peer.name] = peer
        return peer.name

    def offer(self, blocks: Iterable[int], names: Iterable[bytes] = (), seconds: float = 60.0) -> Lease:
        """Holds blocks for readers; returns the `Lease` with the `Ticket` to send them.

        Raises `InvalidBlock` for a block that is not in use, `ValueError` for none; then nothing has changed.

        Parameters
        ----------
        blocks
            Ids of blocks in use, in the order of their tokens, whose pages are final: an owner that truncates a
            sequence and writes its own block anew when the lease has ended changes the page, not the generation.
        names
            What the engine calls them, one for each or none.
        seconds
            After which `poll` withdraws the lease.
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
            if isinstance(error, TransferError):  # of the ticket: the arguments are at fault
                raise ValueError(str(error)) from None
            raise
        self._leases.append(lease)
        return lease

    def withdraw(self, lease: Lease) -> None:
        """Gives up a lease before it expires; the ticket stays good for as long as its blocks are not taken anew.

        Does nothing for one that was withdrawn or has expired.
        """
        if lease in self._leases:
            self._leases.remove(lease)
            lease.refs.give_back()

    def read(self, ticket: Ticket, blocks: Iterable[int]) -> int:
        """Begins to read the pages of a ticket; returns the number of the read, which `poll` names when it has ended.

        Raises `TransferError` when the peer was not met, or in another epoch of its pool; `InvalidBlock` for a block
        that is free or that others have, too, `ValueError` for another number of blocks. Then nothing has changed. All
        that goes wrong later is told by `poll`.

        Parameters
        ----------
        ticket
            Of a peer that was met.
        blocks
            As many blocks of this pool, which the caller has taken and nobody else has; one more reference to each
            is held until no byte can come any more. Until `poll` returns them, nobody may read, share or free them.
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
        """Returns the reads that have ended since the last call, and withdraws the leases that have expired.

        A block is loaded if its page is that of the ticket. It has failed if it has another generation, is free, its
        pool is in another epoch, the peer cannot be reached or has not answered in time, or the read was cancelled.
        Failed blocks may still be written to; they are not handed out again before that has ended.

        Parameters
        ----------
        seconds
            How long to wait for one, in pauses of 20 us; 0 does not wait, and without reads nobody waits.
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
        """Gives a read up; the next `poll` returns its blocks as failed. Raises `ValueError` for one that has ended."""
        found = self._reads.get(read)
        if found is None or found.is_reported:
            raise ValueError(f"read {read} has ended or never began; the last one was {self._last_read}")
        found.error = found.error or "the read was cancelled"

    def is_lost(self, peer: str) -> bool:
        """Return whether a read found that a peer does not answer in time, cannot be reached or is in another epoch.

        Until `forget`. False for a peer that is well and has taken the pages of a ticket anew.
        """
        return peer in self._lost

    def forget(self, peer: str) -> None:
        """Ends all reads from a peer, whose blocks `poll` returns as failed, and the connection when they have ended.

        Raises `ValueError` for a peer that was not met.
        """
        if peer not in self._peers:
            raise ValueError(f"peer {peer!r} is none of the {len(self._peers)} that were met")
        self._leaving[peer] = self._peers.pop(peer)
        self._lost.discard(peer)
        for read in self._reads.values():
            if read.ticket.peer == peer:
                read.error = read.error or f"peer {peer!r} was forgotten"
        self._disconnect_idle()

    def close(self) -> None:
        """Ends all reads, without results, all leases and all connections. A second call does nothing.

        Waits for what is under way, as long as that has time: a peer may not bear to be left in the middle of it.
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
            self._registered.memory.epoch_word[0] = 0  # who reads it after this does not find the epoch of its ticket
            self._detach([read.request for read in self._reads.values() if read.request is not None])
        for read in self._reads.values():
            read.refs.give_back()
        self._reads.clear()
        for lease in [*self._leases]:
            self.withdraw(lease)
        self._registered = None
        self._is_closed = True

    def __enter__(self) -> Transfer:
        """The object itself; the end of the block closes it."""
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError(f"transfer {self.name!r} is closed")

    def _own(self) -> _Registered:
        self._check_open()
        if self._registered is None:
            raise ValueError(f"transfer {self.name!r} has no pool yet: register one")
        return self._registered

    def _in_flight(self, peer: str) -> int:
        return sum(read.ticket.peer == peer and read.request is not None for read in self._reads.values())

    def _disconnect_idle(self) -> None:
        """Bytes of a peer may come until its last request has ended, connected or not."""
        for name in [name for name in self._leaving if not self._in_flight(name)]:
            self._disconnect(self._leaving.pop(name))

    def _peer_of(self, ticket: Ticket) -> PeerDescription:
        """The peer that made a ticket, checked: its epoch, and that it has these blocks."""
        if not isinstance(ticket, Ticket):
            raise wrong("ticket", "a Ticket", ticket)
        peer = self._peers.get(ticket.peer)
        if peer is None:
            raise TransferError(f"peer {ticket.peer!r} of the ticket is none of the {len(self._peers)} that were met")
        if peer.epoch != ticket.epoch:
            raise TransferError(f"the ticket is of epoch {ticket.epoch} of peer {peer.name!r}, met in {peer.epoch}")
        highest = max(block for block, _ in ticket.blocks)
        if highest >= peer.num_blocks:
            raise TransferError(f"the ticket has block {highest}, and peer {peer.name!r} has {peer.num_blocks} blocks")
        return peer

    def _post_read(self, read: _Read, peer: PeerDescription) -> None:
        """Sends a read's next request, that for its pages or that for epoch and words."""
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
        """As `_advance`. A read that cannot be advanced fails and never stops other reads."""
        try:
            return self._advance(read, now)
        except Exception as error:
            read.error = read.error or f"the read failed: {type(error).__name__}: {error}"
            return None if read.is_reported else self._report(read, np.zeros(len(read.blocks), bool))

    def _advance(self, read: _Read, now: float) -> ReadResult | None:
        """Takes a read as far as it goes now; returns its result, once."""
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
        """Whether the request of a read has ended: its bytes are there, or none come any more and `error` says why."""
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
        """For each block whether the page is that of the ticket; `error` says what is not."""
        landing = self._own().memory.landing
        epoch, words = int(landing[0, read.blocks[0]]), landing[1, read.blocks]
        wanted = np.array([times for _, times in read.ticket.blocks], np.uint64)
        if epoch != read.ticket.epoch:
            read.error = f"peer {read.ticket.peer!r} is in epoch {epoch}, the ticket of {read.ticket.epoch}"
            self._lost.add(read.ticket.peer)
            return np.zeros(len(wanted), bool)
        same = words >> np.uint64(32) == wanted
        good: NDArray[np.bool_] = same & (words & np.uint64(0xFFFFFFFF) != 0)
        if not good.all():
            first = int(np.argmin(good))
            block, times = read.ticket.blocks[first]
            found = f"has generation {int(words[first]) >> 32}, not {times}" if not same[first] else "is free"
            read.error = f"{int((~good).sum())} of {len(good)} pages are not those of the ticket: block {block} {found}"
        return good

    def _report(self, read: _Read, good: NDArray[np.bool_]) -> ReadResult:
        read.is_reported = True
        if read.request is None:
            self._drop(read)
        return ReadResult(read.number, read.blocks[good].tolist(), read.blocks[~good].tolist(), read.error)

    def _drop(self, read: _Read) -> None:
        """Nothing writes into the blocks of a read any more."""
        read.refs.give_back()
        if read.is_reported:
            self._reads.pop(read.number, None)

    @abstractmethod
    def _attach(self, memory: Memory) -> bytes:
        """Makes all arrays known to the transport; returns what peers need to connect."""

    @abstractmethod
    def _detach(self, requests: list[Any]) -> None:
        """Gives back what `_attach` has taken, and ends requests: when it returns, no byte comes any more."""

    @abstractmethod
    def _connect(self, peer: PeerDescription) -> None:
        """Raises `TransferError` when the peer cannot be reached."""

    @abstractmethod
    def _disconnect(self, peer: PeerDescription) -> None:
        """Ends the connection. No request of the peer is under way."""

    @abstractmethod
    def _post(self, peer: PeerDescription, copies: NDArray[np.int64]) -> Any:
        """Begins to copy and returns the request. Raises `TransferError` when it cannot, and no byte comes.

        copies  (n, 3): address here, address at the peer, bytes
        """

    @abstractmethod
    def _check(self, request: Any) -> bool:
        """Whether all bytes of a request are there; then the request is gone.

        Raises `TransferError` when it has failed and no byte comes any more; then it is gone, too.
        """


def _check_alone(allocator: BlockAllocator, ticket: Ticket, ids: list[int]) -> None:
    """Nobody but the caller may see what is written into these blocks."""
    if len(ids) != len(ticket.blocks):
        raise ValueError(f"the ticket has {len(ticket.blocks)} blocks, {len(ids)} were given to read them into")
    if len(set(ids)) != len(ids):
        raise ValueError(f"of {len(ids)} blocks to read into only {len(set(ids))} are different")
    for block in ids:
        count = allocator.ref_count(block)
        if count != 1:
            raise InvalidBlock(f"block {block} has {count} references, not the 1 of who reads into it")
