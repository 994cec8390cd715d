"""Transaction: changes to sequences, allocators, prefix caches and recurrent states, all of which stay, or none."""

from __future__ import annotations

import weakref
from array import array
from collections import Counter
from collections.abc import Callable
from itertools import count
from operator import itemgetter
from typing import Any

from pagepool.errors import InvalidBlock, PoolError
from pagepool.scheduling.steps import run_all

__all__ = ["Transaction"]

_TIMES = count()


class Transaction:
    """Everything that is done through it, and to what takes part in it, stays when it commits and is undone by `abort`.

    A block that ends commits; one that raises aborts:

    >>> from pagepool import BlockAllocator, PagedSeqState
    >>> allocator = BlockAllocator(8)
    >>> state = PagedSeqState(allocator, block_size=4)
    >>> slots = state.append(5)
    >>> with Transaction(state) as transaction:
    ...     slots = state.append(9)
    ...     branch = transaction.fork(state)
    ...     transaction.abort()
    >>> state.len, state.blocks, branch.closed, allocator.in_use
    (5, [0, 1], True, 2)

    What takes part (`enlist`) is used as ever meanwhile, by whichever functions: a `PagedSeqState`, a
    `HybridSequence`, a `StateHandle`, or anything with `begin`, `commit`, `abort` and `open_transactions`. Of the rest:

        taken at once, given back by abort     allocate_n, share, match_prefix, alloc_state, fork, close_on_abort
        done by commit, not at all by abort    free, release_state, cache_blocks

    so that others never find a prefix whose request was aborted, and nothing that an abort needs is handed out again.
    Beginning costs a copy of the ids of each sequence; nothing else that is in the pools is looked at. `commit` first
    does what may fail; when that raises, it has changed nothing and the transaction is still open. `abort` cannot fail:
    what a participant of a foreign type raises comes out when all the rest is done. One that is dropped while open
    aborts. Transactions nest (`nested`): the inner one's changes stay for good when the outer one commits. One belongs
    to one thread at a time; different ones may run in parallel, on different sequences.
    """

    def __init__(self, *participants: Any) -> None:
        self._open = False
        self._parent: Transaction | None = None
        self._child: weakref.ref[Transaction] | None = None  # of the one within that is open
        self._participants: dict[int, Any] = {}
        self._undo: list[tuple[int, Any, bool]] = []  # when; what; whether it ends a participant's
        self._made: set[int] = set()  # the ids of what an abort closes
        self._done: list[Callable[[], object]] = []
        self._frees: list[tuple[Any, array[int]]] = []
        self._releases: list[Any] = []
        self._publications: list[tuple[Any, Any, list[int], dict[str, Any]]] = []
        self._open = True
        try:
            self.enlist(*participants)
        except BaseException:
            self.abort()
            raise

    @property
    def is_open(self) -> bool:
        """Whether it has neither committed nor aborted."""
        return self._open

    def enlist(self, *participants: Any) -> None:
        """Begins a transaction on each participant that is not in this one yet.

        Raises `PoolError` when one takes part in another transaction, and what their `begin` raises, `MemoryError`,
        `PoolExhausted` or `StaleHandle`; then those before it take part.
        """
        self._use()
        for participant in participants:
            self._enlist(participant)

    def allocate_n(self, allocator: Any, n: int) -> Any:
        """Takes n blocks for the caller: see `BlockAllocator.allocate_n`. An abort gives them back."""
        self._use()
        blocks = allocator.allocate_n(n)
        self._take(allocator, blocks.tolist())
        return blocks

    def share(self, allocator: Any, blocks: Any) -> None:
        """Adds a reference to each block: see `BlockAllocator.share`. An abort drops them."""
        self._use()
        ids = _as_ids(blocks)
        allocator.share(ids)
        self._take(allocator, ids)

    def free(self, allocator: Any, blocks: Any) -> None:
        """Drops one reference of each block when it commits, until then they are held. The caller's are given up now.

        Raises `InvalidBlock` for a block that is free or out of range; then nothing has changed.
        """
        self._use()
        ids = _as_ids(blocks)
        for block in ids:
            if not allocator.ref_count(block):
                raise InvalidBlock(f"cannot drop 1 reference of block {block}: it is free and has 0")
        self._frees.append((allocator, array("i", ids)))

    def match_prefix(self, cache: Any, tokens: Any, **keys: Any) -> Any:
        """The cached blocks of a prompt: see `PrefixCache.match_prefix`. An abort drops the references."""
        self._use()
        blocks = cache.match_prefix(tokens, **keys)
        self._take(cache.allocator, [int(block) for block in blocks])
        return blocks

    def cache_blocks(self, cache: Any, tokens: Any, blocks: Any, **keys: Any) -> None:
        """Caches the full blocks when it commits: see `PrefixCache.cache_blocks`.

        The blocks are shared until then, so that what is cached is what they hold now, whatever becomes of the
        sequence. Raises `ValueError` for too few blocks, `InvalidBlock` for a free one; then nothing has changed.
        """
        tokens = tokens.copy() if hasattr(tokens, "copy") else list(tokens)
        full, ids = len(tokens) // cache.block_size, _as_ids(blocks)
        if len(ids) < full:
            raise ValueError(f"{len(tokens)} tokens fill {full} blocks, here are {len(ids)}")
        self.share(cache.allocator, ids[:full])
        self._frees.append((cache.allocator, array("i", ids[:full])))
        self._publications.append((cache, tokens, ids[:full], keys))

    def alloc_state(self, pool: Any, request_id: int) -> Any:
        """Lends a recurrent state: a `StateHandle`, see `SsmStatePool.alloc`. An abort takes it back."""
        self._use()
        return self.close_on_abort(pool.handle(pool.alloc(request_id)))

    def release_state(self, handle: Any) -> None:
        """Takes the state of a `StateHandle` back when it commits. Raises `StaleHandle` when that was done already."""
        self._use()
        if any(handle is other for other in self._releases):
            raise PoolError(f"slot {handle.index} is to be released already")
        _ = handle.slot  # raises for a stale one
        self._releases.append(handle)

    def fork(self, sequence: Any) -> Any:
        """A fork of a sequence, closed by an abort."""
        self._use()
        return self.close_on_abort(sequence.fork())

    def close_on_abort(self, thing: Any) -> Any:
        """Closes what was made within the transaction when it aborts; returns it. `thing` has a `close`."""
        self.on_abort(thing.close)
        self._made.add(id(thing))
        return thing

    def on_commit(self, function: Callable[[], object]) -> None:
        """Calls the function at the end of the commit, in order; it must not raise."""
        self._use()
        self._done.append(function)

    def on_abort(self, function: Callable[[], object]) -> None:
        """Calls the function by an abort, among the other steps in reverse order."""
        self._use()
        self._undo.append((next(_TIMES), function, False))

    def nested(self, *participants: Any) -> Transaction:
        """A transaction within this one: it ends first, and what it commits is undone when this one aborts.

        Raises `PoolError` while another one within is open, and as `enlist`.
        """
        self._use()
        inner = Transaction()
        inner._parent = self
        self._child = weakref.ref(inner)
        try:
            inner.enlist(*participants)
        except BaseException:
            inner.abort()
            raise
        return inner

    def commit(self) -> None:
        """Keeps all changes. What may fail comes first: when it raises, nothing has changed and this is still open.

        Raises `InvalidBlock` when a block to free was freed by someone else, `StaleHandle` for a state, and as
        `PrefixCache.cache_blocks`; `PoolError` when it is not open or one within is.
        """
        self._use()
        if self._parent is not None:
            self._join(self._parent)
            return
        for handle in self._releases:
            _ = handle.slot
        self._check_frees()
        self._publish()
        for allocator, blocks in self._frees:
            allocator.free(blocks)
        self._close()
        run_all([participant.commit for participant in reversed(self._participants.values())])
        run_all([*[handle.release for handle in self._releases], *self._done])

    def abort(self) -> None:
        """Undoes all changes, the last one first. Does nothing when it is not open. Cannot fail."""
        if not self._open:
            return
        steps = map(itemgetter(1), reversed(self._undo))  # from here on nothing wants memory
        child = None if self._child is None else self._child()
        if child is not None:
            child.abort()
        self._close()
        run_all(steps)

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None and self._open:
                self.commit()
        finally:
            self.abort()

    def __del__(self) -> None:
        """In a cycle with a participant, that may have gone before it, and ended its transaction."""
        if self._open:
            self._undo[:] = [step for step in self._undo if not step[2] or step[1].__self__.open_transactions]
            self.abort()

    def _use(self) -> None:
        if not self._open:
            raise PoolError("the transaction has ended")
        if self._child is not None:
            raise PoolError("a transaction within this one is open: it ends first")

    def _enlist(self, participant: Any) -> None:
        """In those around this one, too, unless it was made here: what this one commits is theirs to undo."""
        key = id(participant)
        if key in self._participants:
            return
        if self._parent is not None and key not in self._made:
            self._parent._enlist(participant)
        depth, around = 0, self._parent
        while around is not None:
            depth += key in around._participants
            around = around._parent
        found = participant.open_transactions
        if found != depth:
            raise PoolError(f"it takes part in {found} transactions, {depth} are around this one")
        participant.begin()
        self._participants[key] = participant
        self._undo.append((next(_TIMES), participant.abort, True))

    def _take(self, allocator: Any, blocks: list[int]) -> None:
        """The last taken is freed first: the next to be handed out are the same as before. Arrays are read in place."""
        if blocks:
            ids = array("i", blocks[::-1])  # to free a long list takes memory, which an abort must not want
            self.on_abort(lambda: allocator.free(ids))

    def _join(self, parent: Transaction) -> None:
        """Hands over to the transaction around: what is to be undone, and what is to be done when that commits."""
        for participant in reversed(self._participants.values()):
            participant.commit()
        parent._made |= self._made
        parent._undo = sorted([*parent._undo, *[step for step in self._undo if not step[2]]], key=itemgetter(0))
        parent._frees += self._frees
        parent._releases += self._releases
        parent._publications += self._publications
        parent._done += self._done
        self._close()

    def _check_frees(self) -> None:
        for allocator in {id(allocator): allocator for allocator, _ in self._frees}.values():
            times = Counter(block for other, blocks in self._frees if other is allocator for block in blocks)
            for block, wanted in times.items():
                count = allocator.ref_count(block)
                if count < wanted:
                    raise InvalidBlock(f"cannot drop {wanted} references of block {block}: it has {count}")

    def _publish(self) -> None:
        """All publications or none: those before one that raises are taken back."""
        done: list[tuple[Any, list[int]]] = []
        try:
            for cache, tokens, blocks, keys in self._publications:
                fresh = [block for block in blocks if not cache.holds(block)]
                cache.cache_blocks(tokens, blocks, **keys)
                done.append((cache, fresh))
        except BaseException:
            for cache, fresh in reversed(done):
                cache.discard(fresh)
            raise

    def _close(self) -> None:
        self._open = False
        if self._parent is not None:
            self._parent._child = None


def _as_ids(blocks: Any) -> list[int]:
    if hasattr(blocks, "tolist"):
        blocks = blocks.tolist()
    return [int(block) for block in blocks] if hasattr(blocks, "__iter__") else [int(blocks)]
