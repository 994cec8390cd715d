"""Router: sends each prompt to the worker with the lowest cost. It follows the prefix caches of all workers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagepool._arguments import integer, real, wrong
from pagepool.config import MAX_BLOCK_SIZE
from pagepool.errors import PoolError
from pagepool.prefix.directory import PrefixDirectory
from pagepool.prefix.events import NameSnapshot, PrefixEvent, PrefixSnapshot, check_snapshot, name_row
from pagepool.prefix.keys import root_key, root_name
from pagepool.prefix.radix_tree import token_row

__all__ = ["RULES", "Choice", "Router"]

RULES = ("cost", "prefix")
AVERAGED = 256  # number of choices in the router's averages of prompt tokens and cached tokens

MAX_WORKERS = 65_536
MAX_NUMBER = 2**53
NAME_BYTES = {"stored": 16, "removed": 16, "cleared": 0}
FORECASTS = ("choices", "reports", "forecast_tokens", "found_tokens", "overestimated", "underestimated")
COUNTS = (*FORECASTS, "events", "gaps", "snapshots", "epochs")
NEVER = float("-inf")


@dataclass(eq=False)
class Choice:
    """The chosen worker for a prompt, and the number of tokens expected in its cache.

    Attributes
    ----------
    worker
        Name of the worker.
    forecast_tokens : int
        Number of prompt tokens that the worker is expected to have cached.
    found_tokens : int or None
        Number that was passed to `Router.report`, or None before that.
    """

    worker: Any
    forecast_tokens: int
    found_tokens: int | None = None


@dataclass
class _Worker:
    """The router's record of a worker, without its blocks. `number` is the worker's index in the router's arrays."""

    name: Hashable
    number: int
    epoch: int
    next_sequence: int = 1
    received: int = 0  # number of choices that are part of its reported load
    on_way: deque[int] = field(default_factory=deque)  # for each later choice, the number of tokens to compute


class Router:
    """Follows the prefix caches of many workers, and chooses a worker for each prompt.

    A worker sends the events of `PrefixCache.drain_events`, its load and its room to `update` several times per second.
    If events were lost, `update` raises `PoolError`, and the worker sends a snapshot to `restore`. The epoch
    distinguishes the runs of a worker. It is an integer that increases with each restart, such as `time.time_ns()` at
    the start. Messages from an earlier epoch and repeated events are ignored.

    With the rule "cost", `choose` takes the worker with the lowest cost, in tokens to compute:

        cost = load + weight * computed + hit_rate * evicted

    - load: tokens that the worker has to compute before this prompt.
    - computed: tokens of the prompt that the worker has not cached. A token that can be moved counts as `move_cost`.
    - evicted: cached tokens that the worker must evict for the prompt. It is load + uncached tokens - room, limited to
      the range from 0 to the uncached tokens.
    - hit_rate: share of cached tokens in recent prompts. It estimates how likely an evicted token is needed again.
    - weight: 1 + share of busy workers + least load of all workers / computed tokens of a recent prompt. Computed
      tokens also delay later prompts on the same worker. There are none of these if other workers are idle, and most
      if all workers are busy.

    `hit_rate` and `weight` are measured while the router runs. With the rule "prefix", `choose` takes the worker with
    the longest cached prefix. Both rules break ties by the least load, then by the most room, then by the least recent
    choice. The router stores only the names of a prompt's blocks. A name is a hash of 128 bits, so two blocks can share
    a name. The worker compares the tokens themselves, and `report` records how many it found.

    Thread-safe.

    Parameters
    ----------
    block_size : int
        Tokens per block, from 1 to 1,024. Must be equal in all prefix caches.
    max_workers : int
        Largest number of known workers, at most 65,536. With at most 64 workers a block takes 32 to 64 bytes.
    rule : {"cost", "prefix"}
        How `choose` compares workers.
    max_imbalance : int
        For the rule "prefix", in tokens. A worker is skipped if its load minus the cached tokens of the prompt exceeds
        the least load of all workers by more than this number.
    max_staleness : float
        Seconds after the last `update` or `restore` until the cached prefixes of a worker no longer count.
    clock : callable
        Returns the time in seconds.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type or is out of range.

    Examples
    --------
    >>> from pagepool import BlockAllocator, PrefixCache
    >>> caches = {name: PrefixCache(BlockAllocator(8), block_size=2, max_events=64) for name in ("a", "b")}
    >>> router = Router(block_size=2)
    >>> caches["b"].touch([1, 2, 3, 4])
    0
    >>> for name, cache in caches.items():
    ...     router.update(name, 1, cache.drain_events(), load=0, room=8)
    >>> router.choose([1, 2, 3, 4, 5])
    Choice(worker='b', forecast_tokens=4, found_tokens=None)
    """

    def __init__(
        self,
        block_size: int,
        max_workers: int = 64,
        *,
        rule: str = "cost",
        max_imbalance: int = 32_768,
        max_staleness: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = integer("block_size", block_size, 1, MAX_BLOCK_SIZE)
        self.max_workers = integer("max_workers", max_workers, 1, MAX_WORKERS)
        if rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}, not {rule!r}")
        self.rule = rule
        self.max_imbalance = integer("max_imbalance", max_imbalance, 0, MAX_NUMBER)
        self.max_staleness = real("max_staleness", max_staleness, 0)
        self._clock = clock
        self._lock = Lock()
        self._workers: dict[Hashable, _Worker] = {}
        self._places: list[Any] = [None] * self.max_workers  # the workers, by number
        # The blocks that workers have reported, and two generations of blocks expected from prompts that were sent to
        # them: the current one and the previous one, see _age.
        self._directories = [PrefixDirectory(self.max_workers) for _ in range(3)]
        self._aged = clock()
        # Indexed by the number of the worker. An index without a worker has the time NEVER.
        self._heard = np.full(self.max_workers, NEVER)
        self._load = np.zeros(self.max_workers, np.int64)  # reported load and choices that it does not include
        self._room = np.zeros(self.max_workers, np.int64)
        self._chosen = np.zeros(self.max_workers, np.int64)  # the number of the last choice
        # Averages over about the last AVERAGED choices: tokens per prompt, and cached tokens per prompt.
        self._prompt_tokens = self._cached_tokens = 0.0
        self._counts = dict.fromkeys(COUNTS, 0)

    def update(
        self,
        worker: Hashable,
        epoch: int,
        events: Sequence[PrefixEvent],
        *,
        load: int,
        room: int,
        received: int | None = None,
    ) -> None:
        """Record the cache events, the load and the room of a worker.

        Parameters
        ----------
        worker : hashable
            Name of the worker. A new worker is added.
        epoch : int
            Epoch of the worker, which increases with each restart.
        events : sequence of PrefixEvent
            Events in order, as drained. May be empty, to report that the worker is alive.
        load : int
            Tokens that the worker has to compute, for queued and running requests.
        room : int
            Number of free blocks, without blocks that only the prefix cache holds.
        received : int or None
            Number of choices of this router that the worker has received in this epoch. Later choices are added to its
            load. None: it has received all choices.

        Raises
        ------
        PoolError
            An event was lost, or `max_workers` other workers are known. Nothing has changed, except that an earlier
            epoch of the worker is forgotten. After a lost event, send a snapshot to `restore`.
        """
        if not isinstance(events, Sequence) or not all(isinstance(event, PrefixEvent) for event in events):
            raise wrong("events", "a list of PrefixEvent", events)
        reported = _reported(load, room, received)
        with self._lock:
            known = self._known(worker, integer("epoch", epoch))
            if known is None:
                return
            fresh = [event for event in events if event.sequence >= known.next_sequence]
            for sequence, event in enumerate(fresh, known.next_sequence):
                if event.sequence != sequence:
                    self._counts["gaps"] += 1
                    raise PoolError(
                        f"event {sequence} of worker {worker!r} was lost, {event.sequence} came: restore a snapshot"
                    )
                _check_event(event)
            self._directories[0].reserve(len(fresh))
            for event in fresh:
                if event.kind == "stored":
                    self._directories[0].add(known.number, event.name)
                elif event.kind == "removed":
                    for directory in self._directories:
                        directory.remove(known.number, event.name)
                else:
                    self._clear(known.number)
            self._counts["events"] += len(fresh)
            known.next_sequence += len(fresh)
            self._hear(known, *reported)

    def restore(
        self,
        worker: Hashable,
        epoch: int,
        snapshot: NameSnapshot | PrefixSnapshot,
        *,
        load: int,
        room: int,
        received: int | None = None,
    ) -> None:
        """Replace the recorded cache contents of a worker by a snapshot. A snapshot older than the record is ignored.

        Parameters
        ----------
        worker, epoch, load, room, received
            As in `update`.
        snapshot : NameSnapshot or PrefixSnapshot
            The blocks in the worker's prefix cache.

        Raises
        ------
        PoolError
            The snapshot is incomplete, or `max_workers` other workers are known.
        """
        following, names = _names_of(snapshot)
        reported = _reported(load, room, received)
        with self._lock:
            known = self._known(worker, integer("epoch", epoch))
            if known is None or following < known.next_sequence:
                return
            self._directories[0].replace(known.number, names)
            known.next_sequence = following
            self._counts["snapshots"] += 1
            self._hear(known, *reported)

    def remove_worker(self, worker: Hashable) -> None:
        """Forget a worker. Raises `KeyError` if it is not known."""
        with self._lock:
            known = self._workers.pop(worker)
            self._clear(known.number)
            self._heard[known.number] = NEVER
            self._places[known.number] = None

    def choose(
        self,
        tokens: Any,
        *,
        cache_salt: Any = None,
        extra_keys: Iterable[Any] = (),
        movable_tokens: int = 0,
        move_cost: float = 1.0,
        avoid: Collection[Hashable] = (),
    ) -> Choice:
        """Choose the worker for a prompt, and add the tokens to compute to the worker's load.

        A worker without news for `max_staleness` is chosen only if no other worker is available. Its cache then counts
        as empty.

        Parameters
        ----------
        tokens : sequence of int or integer array (n,)
            Token ids of the prompt.
        cache_salt, extra_keys
            As in `PrefixCache.match_prefix`. Only prompts with equal values share blocks.
        movable_tokens : int
            Number of tokens at the start of the prompt that can be moved from another worker instead of computed.
        move_cost : float
            Time to move one token divided by the time to compute one token.
        avoid : collection of hashable
            Names of workers that are chosen only if no other worker is available.

        Returns
        -------
        Choice
            The worker and the number of tokens that it is expected to have cached.

        Raises
        ------
        PoolError
            No worker is known.
        """
        row = token_row(tokens)
        movable = min(integer("movable_tokens", movable_tokens, 0), max(0, len(row) - 1))
        saved = max(0.0, 1.0 - real("move_cost", move_cost, 0.0))
        with self._lock:
            names = self._block_names(row, cache_salt, extra_keys)
            self._age()
            held = self._directories[0].prefix_lengths(names)
            lengths = self._with_expected(held, names)
            best = self._best(lengths, len(row), movable, saved, avoid)
            forecast = int(lengths[best]) * self.block_size
            computed = len(row) - max(forecast, movable if saved else 0)
            if 16 * held[best] < len(names):  # expected blocks keep prompts with a common prefix on one worker
                self._directories[1].add(best, names)
            self._counts["choices"] += 1
            share = 1 / min(self._counts["choices"], AVERAGED)
            self._prompt_tokens += share * (len(row) - self._prompt_tokens)
            self._cached_tokens += share * (forecast - self._cached_tokens)
            self._chosen[best] = self._counts["choices"]
            self._load[best] += computed
            self._places[best].on_way.append(computed)
            return Choice(self._places[best].name, forecast)

    def forecast(self, tokens: Any, *, cache_salt: Any = None, extra_keys: Iterable[Any] = ()) -> dict[Any, int]:
        """Return the number of cached tokens of a prompt for each worker that has any. Changes nothing.

        Use it to select the source of pages that are moved between workers.

        Parameters
        ----------
        tokens, cache_salt, extra_keys
            As in `choose`.

        Returns
        -------
        dict
            Name of the worker -> number of tokens, greater than 0.
        """
        with self._lock:
            names = self._block_names(token_row(tokens), cache_salt, extra_keys)
            lengths = self._with_expected(self._directories[0].prefix_lengths(names), names)
            has = [known for known in self._workers.values() if lengths[known.number]]
            return {known.name: int(lengths[known.number]) * self.block_size for known in has}

    def report(self, choice: Choice, found_tokens: int) -> None:
        """Record how many tokens of the prompt the worker found cached. Raises `ValueError` for a second report."""
        if not isinstance(choice, Choice):
            raise wrong("choice", "a Choice", choice)
        found = integer("found_tokens", found_tokens, 0)
        with self._lock:
            if choice.found_tokens is not None:
                raise ValueError(
                    f"found_tokens of this choice was already reported as {choice.found_tokens}, now {found}"
                )
            choice.found_tokens = found
            counts, error = self._counts, choice.forecast_tokens - found
            counts["reports"] += 1
            counts["forecast_tokens"] += choice.forecast_tokens
            counts["found_tokens"] += found
            counts["overestimated" if error > 0 else "underestimated"] += abs(error)

    def check(self) -> None:
        """Check the table of blocks. Raises `PoolError` if an invariant does not hold. O(blocks)."""
        with self._lock:
            for directory in self._directories:
                directory.check()

    def _known(self, worker: Hashable, epoch: int) -> _Worker | None:
        """Return the record of a worker, or None if `epoch` is outdated. A new worker is not stored until `_hear`."""
        known = self._workers.get(worker)
        if known is None:
            if len(self._workers) == self.max_workers:
                raise PoolError(f"worker {worker!r} cannot be added: {self.max_workers} of max_workers are known")
            free = next(number for number in range(self.max_workers) if self._places[number] is None)
            known = _Worker(worker, free, epoch)
        elif epoch > known.epoch:
            self._clear(known.number)
            known.epoch, known.next_sequence, known.received = epoch, 1, 0
            known.on_way.clear()
            self._counts["epochs"] += 1
        return known if epoch == known.epoch else None

    def _block_names(self, row: NDArray[np.int32], cache_salt: Any, extra_keys: Iterable[Any]) -> bytes:
        # A worker computes at least the last token, so a block that ends with this token does not count.
        return name_row(row[: max(0, len(row) - 1)], self.block_size, root_name(root_key(cache_salt, extra_keys)))

    def _with_expected(self, held: NDArray[np.int32], names: bytes) -> NDArray[np.int32]:
        """Return int32 (max_workers,): blocks of a prompt that each worker has or will have; 0 for stale workers."""
        lengths = held
        for directory in self._directories[1:]:
            if len(directory):
                lengths = np.maximum(lengths, directory.prefix_lengths(names))
        return np.where(self._heard < self._clock() - self.max_staleness, np.int32(0), lengths)

    def _age(self) -> None:
        """Drop expected blocks after one to two times max_staleness."""
        if self._clock() - self._aged >= self.max_staleness:
            self._aged = self._clock()
            self._directories = [self._directories[0], PrefixDirectory(self.max_workers), self._directories[1]]

    def _clear(self, number: int) -> None:
        for directory in self._directories:
            directory.clear(number)

    def _hear(self, known: _Worker, load: int, room: int, received: int | None) -> None:
        while known.on_way and (received is None or known.received < received):
            known.on_way.popleft()
            known.received += 1
        known.received = max(known.received, received or 0)
        self._workers[known.name] = self._places[known.number] = known
        self._heard[known.number] = self._clock()
        self._load[known.number], self._room[known.number] = load + sum(known.on_way), room

    def _best(
        self, lengths: NDArray[np.int32], num_tokens: int, movable: int, saved: float, avoid: Collection[Hashable]
    ) -> int:
        """Return the number of the best worker. Raises `PoolError` if no worker is known.

        `saved` is the share of a token's compute time that moving the token saves.
        """
        left = (self._heard >= self._clock() - self.max_staleness).nonzero()[0]
        if not len(left):
            left = (self._heard > NEVER).nonzero()[0]
        if not len(left):
            raise PoolError("no worker can be chosen: 0 workers have called update or restore")
        avoided = {self._workers[name].number for name in avoid if name in self._workers}
        left = np.array([number for number in left.tolist() if number not in avoided], np.int64) if avoided else left
        if not len(left):
            left = (self._heard > NEVER).nonzero()[0]
        load, cached = self._load[left], lengths[left] * np.int64(self.block_size)
        if self.rule == "cost":
            moved = np.maximum(0, movable - cached)
            first = self._cost(load, num_tokens - cached, self._room[left], saved * moved)
        else:
            is_far_ahead = load - cached > load.min() + self.max_imbalance
            first = np.where(is_far_ahead, np.int64(1), -cached)
        # np.lexsort sorts by the last key first.
        return int(left[np.lexsort((self._chosen[left], -self._room[left], load, first))[0]])

    def _cost(
        self, load: NDArray[np.int64], missing: NDArray[np.int64], room: NDArray[np.int64], saved: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the expected cost of a prompt on each worker, in tokens to compute. The class docstring defines it.

        `missing` holds the tokens that each worker has not cached, and `saved` the part of them that moving saves.
        """
        hit_rate = self._cached_tokens / max(1.0, self._prompt_tokens)
        weight = 1.0 + (load > 0).mean() + load.min() / max(1.0, self._prompt_tokens - self._cached_tokens)
        evicted = np.clip(load + missing - room * np.int64(self.block_size), 0, missing)
        cost: NDArray[np.float64] = load + weight * (missing - saved) + hit_rate * evicted
        return cost

    def stats(self) -> dict[str, int]:
        """Return the router's counters. The first four are current values, all others are sums since the start.

        Returns
        -------
        dict of str to int
            - `workers`, `stale`: known workers, and workers without news for `max_staleness`
            - `blocks`, `bytes`: different blocks of all workers, and the size of their table
            - `choices`, `reports`: calls of `choose` and of `report`
            - `forecast_tokens`, `found_tokens`: tokens of the choices with a report
            - `overestimated`, `underestimated`: errors of the forecasts in tokens, by sign
            - `events`: events that were applied
            - `gaps`, `snapshots`: updates with lost events, and restored snapshots
            - `epochs`: restarts of workers
        """
        with self._lock:
            heard = self._heard[self._heard > NEVER]
            stale = int((heard < self._clock() - self.max_staleness).sum())
            size = sum(directory.nbytes for directory in self._directories)
            now = {"workers": len(heard), "stale": stale, "blocks": len(self._directories[0]), "bytes": size}
            return {**now, **self._counts}


def _check_event(event: PrefixEvent) -> None:
    """Raise `TypeError` or `ValueError` for an event that cannot be applied."""
    if type(event.name) is not bytes:
        raise wrong(f"the name of event {event.sequence}", "bytes", event.name)
    size, found = NAME_BYTES.get(event.kind), len(event.name)
    if size is None:
        raise ValueError(f"event {event.sequence} has kind {event.kind!r}, not one of {', '.join(NAME_BYTES)}")
    if found != size:
        raise ValueError(f"event {event.sequence}, {event.kind!r}, must have a name of {size} bytes, not {found}")


def _reported(load: int, room: int, received: int | None) -> tuple[int, int, int | None]:
    count = None if received is None else integer("received", received, 0)
    return integer("load", load, 0, MAX_NUMBER), integer("room", room, 0, MAX_NUMBER), count


def _names_of(snapshot: NameSnapshot | PrefixSnapshot) -> tuple[int, bytes]:
    """Return the number of the first event after a snapshot, and the block names in the snapshot.

    Raises the same errors as `restore`.
    """
    size = NAME_BYTES["stored"]
    if not isinstance(snapshot, NameSnapshot):
        check_snapshot(snapshot)
        rows = [event.name for event in snapshot.stored]
        odd = next((name for name in rows if type(name) is not bytes or len(name) != size), None)
        if odd is not None:
            raise ValueError(f"the name of a stored block must be {size} bytes, not {type(odd).__name__} of {len(odd)}")
        return integer("next_sequence", snapshot.next_sequence, 1), b"".join(rows)
    if type(snapshot.names) is not bytes:
        raise wrong("the names of a snapshot", "bytes", snapshot.names)
    if len(snapshot.names) != size * integer("num_blocks", snapshot.num_blocks, 0):
        raise PoolError(
            f"the names of {snapshot.num_blocks} blocks must have {size * snapshot.num_blocks} bytes, "
            f"not {len(snapshot.names)}: the snapshot was cut short"
        )
    return integer("next_sequence", snapshot.next_sequence, 1), snapshot.names
