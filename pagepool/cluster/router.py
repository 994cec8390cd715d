"""Router: sends each prompt to the worker where it costs least, by the events of all workers' prefix caches."""

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
# A computed token delays this request, and later ones while the worker is busy. In a model of the queues, eight workers
# computed 3.3 % more tokens of mooncake_synthetic than with the rule "prefix" at weight 1, and 1.2 % more at weight 2.
COMPUTE_WEIGHT = 2.0
AVERAGED = 256  # choices over which the router averages what prompts cost

MAX_WORKERS = 65_536
MAX_NUMBER = 2**53
NAME_BYTES = {"stored": 16, "removed": 16, "cleared": 0}
FORECASTS = ("choices", "reports", "forecast_tokens", "found_tokens", "overestimated", "underestimated")
COUNTS = (*FORECASTS, "events", "gaps", "snapshots", "epochs")
NEVER = float("-inf")


@dataclass(eq=False)
class Choice:
    """Where a prompt goes, and how many of its tokens are expected to be cached there.

    Attributes
    ----------
    found_tokens
        What `Router.report` was told; None before.
    """

    worker: Any
    forecast_tokens: int
    found_tokens: int | None = None


@dataclass
class _Worker:
    """What the router knows of a worker beside its blocks. `number` is its place in the arrays of the router."""

    name: Hashable
    number: int
    epoch: int
    next_sequence: int = 1
    received: int = 0  # choices that its load includes
    on_way: deque[int] = field(default_factory=deque)  # tokens of each later choice


class Router:
    """Follows the prefix caches of many workers, and chooses a worker for each prompt.

    A worker sends what `PrefixCache.drain_events` gives it to `update`, some times in a second, and with it its load
    and its room. When events were lost, `update` raises `PoolError`, and the worker sends a snapshot to `restore`. The
    epoch tells a worker's runs apart: an integer that is higher after each restart, such as `time.time_ns()` at its
    start. What comes from an earlier epoch is ignored, and so is what comes twice.

    With the rule "cost" `choose` takes the worker where the prompt costs least, in tokens to compute:

        cost = load + weight * computed + hit_rate * evicted

    - load: tokens that the worker has to compute before.
    - computed: tokens of the prompt that it has not cached. A token that can be moved here counts as `move_cost`.
    - evicted: tokens that its cache must evict for the prompt: those that exceed its room less its load.
    - hit_rate: share of the tokens of recent prompts that was cached. So likely is an evicted token needed again.
    - weight: 2 + least load of all workers / computed tokens of a recent prompt. Computed tokens also delay the prompts
      that come after, the more of them the longer all workers are busy.

    The last two are measured while the router runs. With the rule "prefix" it takes the worker with the longest cached
    prefix. Among equals both take the one with least load, then with most room, then the one that was chosen least
    recently. The router keeps the names of a prompt's blocks and nothing else of it. A name has 128 bits and may be
    wrong: the worker compares tokens, and `report` says what it found.

    Any number of threads may call it. Raises `ValueError` and `TypeError` for arguments that cannot be.

    Parameters
    ----------
    block_size
        Tokens per block, from 1 to 1,024, as the caches have it.
    max_workers
        How many workers there may be at a time, up to 65,536; a block takes 32 to 64 bytes with up to 64.
    rule
        "cost" or "prefix": how `choose` compares workers.
    max_imbalance
        Tokens, for the rule "prefix": a worker is passed over if its load exceeds the least load of a worker by more
        than this number and the tokens of the prompt that it has cached.
    max_staleness
        Seconds: the prefixes of a worker count for so long after its last `update` or `restore`.
    clock
        Returns the time in seconds.

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
        self._places: list[Any] = [None] * self.max_workers  # their workers, by number
        # What workers have said that they hold; and what they will soon hold of prompts that were sent to them, of late
        # and of before: see _age.
        self._directories = [PrefixDirectory(self.max_workers) for _ in range(3)]
        self._aged = clock()
        # By number of worker. A place without a worker was never heard of.
        self._heard = np.full(self.max_workers, NEVER)
        self._load = np.zeros(self.max_workers, np.int64)  # as reported, and of choices on their way
        self._room = np.zeros(self.max_workers, np.int64)
        self._chosen = np.zeros(self.max_workers, np.int64)  # the number of the last choice
        # Averages over the last AVERAGED choices: tokens of a prompt, and how many of them were cached.
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
        """Takes in what a worker says of itself: changes of its cache, its load and its room.

        Raises `PoolError` when an event was lost, and when there are `max_workers` other workers; nothing changes then,
        but what was known of an earlier epoch is forgotten. After a lost event send a snapshot to `restore`.

        Parameters
        ----------
        worker
            Its name, any that can be a key of a dict; a new one is added.
        epoch
            Higher after each restart.
        events
            In order, as drained; none is a sign of life.
        load
            Tokens that it has to compute: queued and running.
        room
            Blocks that are free; blocks that only the prefix cache holds are not.
        received
            How many choices of this router it has received in this epoch: later ones are added to its load. None:
            all of them.
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
                        f"event {sequence} of worker {worker!r} was lost, here is {event.sequence}: restore a snapshot"
                    )
                if type(event.name) is not bytes:
                    raise wrong(f"the name of event {sequence}", "bytes", event.name)
                if NAME_BYTES.get(event.kind) != len(event.name):
                    raise ValueError(f"event {sequence} is {event.kind!r} with a name of {len(event.name)} bytes")
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
        """Replaces what is known of a worker's cache by a snapshot of it. Other arguments and errors as in `update`.

        A snapshot that is older than what is known changes nothing. Raises `PoolError` for one that was cut short.
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
        """Forgets a worker. Raises `KeyError` for one that is not known."""
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
        """Chooses the worker for a prompt, and counts the tokens that it has to compute as load of that worker.

        Workers that were not heard of for `max_staleness` come last, as if their caches were empty. Raises `PoolError`
        when there is no worker.

        Parameters
        ----------
        tokens : int (n,)
        cache_salt, extra_keys
            As in `PrefixCache.match_prefix`: prompts with others do not match.
        movable_tokens
            So many tokens at the beginning can be moved from another worker instead of computed.
        move_cost
            Time to move one of them, divided by the time to compute a token.
        avoid
            Names of workers that are chosen only if there is no other one.
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
            if 16 * held[best] < len(names):  # what it will soon hold: prompts that begin alike stay together meanwhile
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
        """Returns worker -> how many tokens of a prompt it has cached, workers without any left out. Changes nothing.

        This is for whoever moves pages between workers. Arguments as in `choose`.
        """
        with self._lock:
            names = self._block_names(token_row(tokens), cache_salt, extra_keys)
            lengths = self._with_expected(self._directories[0].prefix_lengths(names), names)
            has = [known for known in self._workers.values() if lengths[known.number]]
            return {known.name: int(lengths[known.number]) * self.block_size for known in has}

    def report(self, choice: Choice, found_tokens: int) -> None:
        """Says how many tokens of the prompt the worker found cached. Raises `ValueError` for a second report."""
        if not isinstance(choice, Choice):
            raise wrong("choice", "a Choice", choice)
        found = integer("found_tokens", found_tokens, 0)
        with self._lock:
            if choice.found_tokens is not None:
                raise ValueError(f"found_tokens of this choice is {choice.found_tokens} already, not {found}")
            choice.found_tokens = found
            counts, error = self._counts, choice.forecast_tokens - found
            counts["reports"] += 1
            counts["forecast_tokens"] += choice.forecast_tokens
            counts["found_tokens"] += found
            counts["overestimated" if error > 0 else "underestimated"] += abs(error)

    def check(self) -> None:
        """Audits the table of blocks. Raises `PoolError` when an equation does not hold. O(blocks)."""
        with self._lock:
            for directory in self._directories:
                directory.check()

    def _known(self, worker: Hashable, epoch: int) -> _Worker | None:
        """The record of a worker; None when the epoch is an earlier one. A new worker has no place until `_hear`."""
        known = self._workers.get(worker)
        if known is None:
            if len(self._workers) == self.max_workers:
                raise PoolError(f"worker {worker!r} is one more than the {self.max_workers} of max_workers")
            free = next(number for number in range(self.max_workers) if self._places[number] is None)
            known = _Worker(worker, free, epoch)
        elif epoch > known.epoch:
            self._clear(known.number)
            known.epoch, known.next_sequence, known.received = epoch, 1, 0
            known.on_way.clear()
            self._counts["epochs"] += 1
        return known if epoch == known.epoch else None

    def _block_names(self, row: NDArray[np.int32], cache_salt: Any, extra_keys: Iterable[Any]) -> bytes:
        # A worker computes at least the last token, so that a block that ends with it does not count.
        return name_row(row[: max(0, len(row) - 1)], self.block_size, root_name(root_key(cache_salt, extra_keys)))

    def _with_expected(self, held: NDArray[np.int32], names: bytes) -> NDArray[np.int32]:
        """The blocks of a prompt that each worker has or will have: none if it was not heard of for too long."""
        lengths = held
        for directory in self._directories[1:]:
            if len(directory):
                lengths = np.maximum(lengths, directory.prefix_lengths(names))
        return np.where(self._heard < self._clock() - self.max_staleness, np.int32(0), lengths)

    def _age(self) -> None:
        """Forgets what was expected for max_staleness, twice at most."""
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
        """The number of the worker that comes first. Raises `PoolError` when there is none.

        saved  share of the time to compute a token that is saved when the token is moved
        """
        left = (self._heard >= self._clock() - self.max_staleness).nonzero()[0]
        if not len(left):
            left = (self._heard > NEVER).nonzero()[0]
        if not len(left):
            raise PoolError(f"0 of {len(self._workers)} workers have reported: there is none to choose")
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
        # The last key comes first.
        return int(left[np.lexsort((self._chosen[left], -self._room[left], load, first))[0]])

    def _cost(
        self, load: NDArray[np.int64], missing: NDArray[np.int64], room: NDArray[np.int64], saved: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Expected cost of a prompt at each worker, in tokens to compute; the class describes it.

        missing  tokens that the worker has not cached
        saved    what it saves when it moves some of them, in tokens to compute
        """
        hit_rate = self._cached_tokens / max(1.0, self._prompt_tokens)
        weight = COMPUTE_WEIGHT + load.min() / max(1.0, self._prompt_tokens - self._cached_tokens)
        evicted = np.clip(load + missing - room * np.int64(self.block_size), 0, missing)
        cost: NDArray[np.float64] = load + weight * (missing - saved) + hit_rate * evicted
        return cost

    def stats(self) -> dict[str, int]:
        """Return the router's counters. The first four are current values, all others are sums since the start.

        Returns
        -------
        dict of str to int
            - `workers`, `stale`: known workers, and workers that were not heard of for `max_staleness`
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


def _reported(load: int, room: int, received: int | None) -> tuple[int, int, int | None]:
    count = None if received is None else integer("received", received, 0)
    return integer("load", load, 0, MAX_NUMBER), integer("room", room, 0, MAX_NUMBER), count


def _names_of(snapshot: NameSnapshot | PrefixSnapshot) -> tuple[int, bytes]:
    """The number of the first change after a snapshot, and the names of its blocks. Raises as `Router.restore`."""
    size = NAME_BYTES["stored"]
    if not isinstance(snapshot, NameSnapshot):
        check_snapshot(snapshot)
        rows = [event.name for event in snapshot.stored]
        odd = next((name for name in rows if type(name) is not bytes or len(name) != size), None)
        if odd is not None:
            raise ValueError(f"a stored block has a name of {size} bytes, not {len(odd)} of {type(odd).__name__}")
        return integer("next_sequence", snapshot.next_sequence, 1), b"".join(rows)
    if type(snapshot.names) is not bytes:
        raise wrong("the names of a snapshot", "bytes", snapshot.names)
    if len(snapshot.names) != size * integer("num_blocks", snapshot.num_blocks, 0):
        raise PoolError(
            f"a snapshot of {snapshot.num_blocks} blocks has {len(snapshot.names)} bytes of names: it was cut short"
        )
    return integer("next_sequence", snapshot.next_sequence, 1), snapshot.names
