"""Transaction: changes to sequences, allocators, prefix caches and recurrent states, all of which stay, or none."""

from __future__ import annotations

import weakref
from array import array
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from pagepool.arguments import wrong
from pagepool.errors import InvalidBlock, PoolError, refuse_copy
from pagepool.memory.block_refs import block_refs
from pagepool.memory.journal import Journal, Made, Participation, run_all

__all__ = ["Transaction"]

_TIMES = count()


class Publication:
    """Blocks to be cached. `held` keeps them until then; while it holds none there is nothing to do."""

    __slots__ = ("_fresh", "blocks", "cache", "held", "keys", "tokens")

    def __init__(self, cache: Any, tokens: Any, blocks: list[int], keys: dict[str, Any]) -> None:
        self.cache = cache
        self.tokens = tokens
        self.blocks = array("i", blocks)
        self.keys = keys
        self.held = block_refs(cache.allocator)
        self._fresh = array("i")

    def publish(self) -> None:
        """Caches them, or raises, and changes nothing."""
        if len(self.held):
            holds = self.cache.holds
            self._fresh = array("i", [block for block in self.blocks if not holds(block)])
            self.cache.cache_blocks(self.tokens, self.blocks, **{**self.keys, "beside": True})

    def take_back(self) -> None:
        """Undoes `publish`, if that was done."""
        self.cache.discard(self._fresh)


class Deferred:
    """`check` and `publish` may fail, and have changed nothing then; of the steps of `last` none may."""

    __slots__ = ("done", "frees", "publications", "releases")

    def __init__(self) -> None:
        self.frees: list[tuple[Any, array[int]]] = []
        self.releases: list[Any] = []
        self.publications: list[Publication] = []
        self.done: list[Callable[[], object]] = []

    def and_then(self, later: Deferred) -> Deferred:
        """Both, as a new one."""
        both = Deferred()
        for name in self.__slots__:
            setattr(both, name, getattr(self, name) + getattr(later, name))
        return both

    def check(self) -> None:
        """Raises `InvalidBlock` when a block has fewer references than are to be dropped, `StaleHandle` for a state."""
        for handle in self.releases:
            _ = handle.slot
        held = [(known.cache.allocator, known.blocks) for known in self.publications if len(known.held)]
        wanted: dict[int, tuple[Any, Counter[int]]] = {}
        for allocator, blocks in self.frees + held:
            wanted.setdefault(id(allocator), (allocator, Counter()))[1].update(blocks)
        for allocator, times in wanted.values():
            for block in times:
                count = allocator.ref_count(block)
                if count < times[block]:
                    raise InvalidBlock(f"cannot drop {times[block]} references of block {block}: it has {count}")

    def publish(self) -> None:
        """All publications or none: those before one that raises are taken back."""
        undo: list[Callable[[], object]] = [publication.take_back for publication in self.publications[::-1]]
        try:
            for publication in self.publications:
                publication.publish()
        except BaseException:
            run_all(undo)
            raise

    def last(self, commits: list[Callable[[], object]]) -> list[Callable[[], object]]:
        """The steps that are left, `commits` of the participants among them."""
        frees = [partial(allocator.free, blocks) for allocator, blocks in self.frees]
        held = [publication.held.give_back for publication in self.publications]
        return [*frees, *held, *commits, *[handle.release for handle in self.releases], *self.done]


class Transaction:
    """Changes to several objects that `commit` keeps and `abort` undoes, all of them.

    As a context manager it commits at the end of the block and aborts when the block raises:

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

    Participants (the arguments, and `enlist`) are a `PagedSeqState`, a `HybridSequence`, a `StateHandle`, or anything
    with `begin`, `commit`, `abort` and `open_transactions`. The caller goes on using their own methods. Everything else
    goes through methods of the transaction:

        done at once, undone by abort       allocate_n, share, match_prefix, alloc_state, fork, close_on_abort
        done by commit, dropped by abort    free, release_state, cache_blocks

    So others never find a prefix whose request was aborted, and nobody else gets a block that an abort needs. Each of
    these calls reserves its entry in the journal first: one that raises, `MemoryError` and `KeyboardInterrupt`
    included, has taken nothing.

    Beginning copies the ids of each sequence and looks at nothing else. `commit` first does what may fail; when that
    raises, nothing has changed and the transaction is still open. `abort` cannot fail: it finishes, then raises what a
    participant of a foreign type has raised. A transaction that is dropped while open aborts. Transactions nest
    (`nested`): the changes of an inner one are final when the outermost commits. One thread at a time may use a
    transaction; different ones may run in parallel, on different sequences.
    """

    __reduce__ = refuse_copy

    def __init__(self, *participants: Any) -> None:
        self._parent: Transaction | None = None
        self._child: weakref.ref[Transaction] | None = None  # of the one within that is open
        self._participants: dict[int, Participation] = {}
        self._deferred = Deferred()
        self._journal = Journal()
        try:
            self.enlist(*participants)
        except BaseException:
            self.abort()
            raise

    @property
    def is_open(self) -> bool:
        """True until it commits or aborts."""
        return self._journal.is_open

    def enlist(self, *participants: Any) -> None:
        """Adds participants and begins a transaction on each; skips those that take part already.

        Raises `PoolError` when one takes part in another transaction, and what `begin` raises: `MemoryError`,
        `PoolExhausted` or `StaleHandle`. Participants before it then take part.
        """
        self._use()
        for participant in participants:
            self._enlist(participant)

    def allocate_n(self, allocator: Any, n: int) -> Any:
        """Takes n blocks for the caller: see `BlockAllocator.allocate_n`. An abort gives them back."""
        held = block_refs(allocator)
        return self._perform(held.give_back, held.allocate_n, n)

    def share(self, allocator: Any, blocks: Any) -> None:
        """Adds a reference to each block: see `BlockAllocator.share`. An abort drops them."""
        held = block_refs(allocator)
        self._perform(held.give_back, held.share, blocks)

    def free(self, allocator: Any, blocks: Any) -> None:
        """Drops one reference of each block at the commit. The caller gives the references up now.

        Raises `InvalidBlock` for a block that is free or out of range; then nothing has changed.
        """
        self._use()
        ids = _as_ids(blocks)
        for block in ids:
            if not allocator.ref_count(block):
                raise InvalidBlock(f"cannot drop 1 reference of block {block}: it is free and has 0")
        self._deferred.frees.append((allocator, array("i", ids)))

    def match_prefix(self, cache: Any, tokens: Any, **keys: Any) -> Any:
        """The cached blocks of a prompt: see `PrefixCache.match_prefix`. An abort drops the references."""
        held = block_refs(cache.allocator)
        return self._perform(held.give_back, partial(held.match_prefix, **keys), cache, tokens)

    def cache_blocks(self, cache: Any, tokens: Any, blocks: Any, **keys: Any) -> None:
        """Caches the full blocks at the commit: see `PrefixCache.cache_blocks`. Blocks that are cached already stay.

        Until then the transaction shares the blocks, so that their present contents are cached whatever the sequence
        does. Raises `ValueError` for too few blocks, `InvalidBlock` for a free one; then nothing has changed.
        """
        self._use()
        tokens = tokens.copy() if hasattr(tokens, "copy") else list(tokens)
        full, ids = len(tokens) // cache.block_size, _as_ids(blocks)
        if len(ids) < full:
            raise ValueError(f"{len(tokens)} tokens fill {full} blocks, got {len(ids)}")
        publication = Publication(cache, tokens, ids[:full], keys)
        held = publication.held
        self._deferred.publications.append(publication)
        try:
            self._perform(held.give_back, held.share, publication.blocks)
        except BaseException:
            if not len(held):
                self._deferred.publications.pop()
            raise

    def alloc_state(self, pool: Any, request_id: int) -> Any:
        """Takes a recurrent state: a `StateHandle`, see `SsmStatePool.acquire`. An abort takes it back."""
        return self._make(pool.acquire, request_id)

    def release_state(self, handle: Any) -> None:
        """Takes the state of a `StateHandle` back when it commits. Raises `StaleHandle` when that was done already."""
        self._use()
        if any(handle is other for other in self._deferred.releases):
            raise PoolError(f"this transaction releases slot {handle.index} already")
        _ = handle.slot  # raises for a stale one
        self._deferred.releases.append(handle)

    def fork(self, sequence: Any) -> Any:
        """Returns a fork of a sequence. An abort closes it."""
        return self._make(sequence.fork)

    def close_on_abort(self, thing: Any) -> Any:
        """Returns `thing`; an abort calls its `close`."""
        return self._make(_itself, thing)

    def on_commit(self, function: Callable[[], object]) -> None:
        """Registers a function that the commit calls at its end, in order. It must not raise."""
        self._use()
        self._deferred.done.append(function)

    def on_abort(self, function: Callable[[], object]) -> None:
        """Registers a function that an abort calls, among its other steps in reverse order."""
        self._use()
        self._journal.add(next(_TIMES), function)

    def nested(self, *participants: Any) -> Transaction:
        """Begins a transaction within this one. It ends first; when this one aborts, its changes are undone too.

        Raises `PoolError` while another inner one is open, and as `enlist`.
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
        """Keeps all changes. When it raises, nothing has changed and the transaction is still open.

        Raises `InvalidBlock` when someone else freed a block that is to be freed, `StaleHandle` for a state, and as
        `PrefixCache.cache_blocks`; `PoolError` when it is not open or an inner one is.
        """
        self._use()
        commits: list[Callable[[], object]] = [taking_part.commit for taking_part in self._participants.values()]
        commits.reverse()
        parent = self._parent
        if parent is None:
            self._deferred.check()
            last = self._deferred.last(commits)
            self._deferred.publish()
            self._journal.keep(last)
            return
        deferred, steps = parent._deferred.and_then(self._deferred), self._journal.merged(parent._journal)
        parent._deferred, parent._child = deferred, None
        self._journal.join(parent._journal, steps, commits)

    def abort(self) -> None:
        """Undoes all changes, the last one first. Cannot fail. Does nothing when the transaction is not open."""
        if not self._journal.is_open:
            return
        child = None if self._child is None else self._child()
        if child is not None:
            child.abort()
        if self._parent is not None:
            self._parent._child = None
        self._journal.undo()

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None and self.is_open:
                self.commit()
        finally:
            self.abort()

    def __del__(self) -> None:
        if hasattr(self, "_journal"):  # the last thing that __init__ makes
            self.abort()

    def _use(self) -> None:
        if not self._journal.is_open:
            raise PoolError("the transaction has ended")
        if self._child is not None:
            raise PoolError("a transaction within this one is open: it ends first")

    def _enlist(self, participant: Any) -> None:
        """In those around this one, too, unless it was made here: what this one commits is theirs to undo."""
        key = id(participant)
        if key in self._participants:
            return
        if self._parent is not None and not self._journal.made(participant):
            self._parent._enlist(participant)
        depth, around = 0, self._parent
        while around is not None:
            depth += key in around._participants
            around = around._parent
        found = getattr(participant, "open_transactions", None)
        if found is None:
            raise wrong("a participant", "a sequence, a StateHandle or what has begin, commit and abort", participant)
        if found != depth:
            raise PoolError(f"it takes part in {found} transactions, {depth} are around this one")
        taking_part = self._participants[key] = Participation(participant)
        try:
            self._journal.perform(next(_TIMES), taking_part, taking_part.begin)
        except BaseException:
            del self._participants[key]
            raise

    def _perform(self, undo: Callable[[], object], function: Callable[..., Any], *arguments: Any) -> Any:
        self._use()
        return self._journal.perform(next(_TIMES), undo, function, *arguments)

    def _make(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns; an abort closes it."""
        made = Made()
        return self._perform(made, made.make, function, *arguments)


def _itself(thing: Any) -> Any:
    return thing


def _as_ids(blocks: Any) -> list[int]:
    """Block ids as callers give them, an int, a sequence or an array, as a new list."""
    if hasattr(blocks, "tolist"):
        blocks = blocks.tolist()
    return [int(block) for block in blocks] if hasattr(blocks, "__iter__") else [int(blocks)]
