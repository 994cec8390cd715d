"""Recurrent states on their way between `StateCheckpoints` and a store: the queue of states to write, and look-ups."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pagepool.prefix.keys import STATE

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["StateQueue", "StoredStates", "packed", "unpack"]

QUEUE_BYTES = 128 << 20  # of states that wait to be written; a state that finds no room is not written


class Waiting(NamedTuple):
    """A state to write, as `PrefixStore.write` takes it."""

    name: bytes
    parent: bytes
    tokens: bytes
    state: bytearray


class StateQueue:
    """States that wait for the thread that writes them to a store. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting: deque[Waiting] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, name: bytes, tokens: bytes, state: bytearray, is_right: Callable[[], bool]) -> bool:
        """Add a state unless the queue is full; return whether it is dealt with.

        `is_right` is asked with the lock held: a state that `clear` comes too early for is not added.
        """
        with self._lock:
            if not is_right():
                return True
            if self._waiting and self._bytes + len(state) > QUEUE_BYTES:
                return False
            self._waiting.append(Waiting(name, STATE, tokens, state))
            self._bytes += len(state)
            return True

    def peek(self) -> list[Waiting]:
        """Return the next state, or none."""
        with self._lock:
            return list(self._waiting)[:1]

    def pop(self, written: Sequence[Waiting]) -> None:
        """Forget the states that `peek` returned, unless `clear` has."""
        with self._lock:
            for one in written:
                if self._waiting and self._waiting[0] is one:
                    self._waiting.popleft()
                    self._bytes -= len(one.state)

    def clear(self) -> None:
        """Forget every state."""
        with self._lock:
            self._waiting.clear()
            self._bytes = 0


class StoredStates:
    """The states of one `StateCheckpoints` in the store of the prefix cache that it follows. Internal.

    Parameters
    ----------
    cache : PrefixCache
        A cache with a store that keeps states of this size.
    align : int
        Positions of states are multiples of it, and it is a multiple of the block size.
    state_bytes : int
        Bytes of a state.
    """

    def __init__(self, cache: Any, align: int, state_bytes: int) -> None:
        self._cache, self._link, self._align = cache, cache.link, align
        self._epoch = cache.epoch
        self._size = cache.block_size
        self.state = memoryview(bytearray(state_bytes))

    def _is_right(self) -> bool:
        return bool(self._cache.epoch == self._epoch)

    def load(self, row: NDArray[np.int32], key: bytes, begin: int, end: int) -> int:
        """Read the state after the longest prefix of `row` that has one in the store into `state`.

        Considers prefixes of more than `begin` and at most `end` tokens. Returns the length of the prefix, or 0.
        """
        link = self._link
        if end - end % self._align <= begin:
            return 0
        positions = range(begin - begin % self._align + self._align, end + 1, self._align)
        found = link.store.state_names(row[:end], key)
        names = [found[position // self._size - 1] for position in positions]
        tokens = [row[position - self._size : position].tobytes() for position in positions]
        place = link.load_state(names, tokens, self.state)
        return 0 if place < 0 else int(positions[place])

    def note_use(self, row: NDArray[np.int32], key: bytes) -> None:
        """Note that the state after the tokens of `row` was used in memory, so that the store drops it later."""
        store = self._link.store
        store.pages.note_use(store.state_names(row, key)[-1])

    def offer(self, row: NDArray[np.int32], key: bytes, state: bytearray) -> bool:
        """Queue the state after the tokens of `row` to be written. False when the queue is full."""
        link = self._link
        name = link.store.state_names(row, key)[-1]
        is_done: bool = link.states.offer(name, row[-self._size :].tobytes(), state, self._is_right)
        link.wake()
        return is_done


def packed(views: Sequence[NDArray[Any]], slot: int) -> bytearray:
    """Return the bytes of a state: of one slot in every view, one after the other."""
    return bytearray().join(view[slot].tobytes() for view in views)


def unpack(state: memoryview | bytearray, views: Sequence[NDArray[Any]], slot: int) -> None:
    """Copy the bytes of a state into one slot of every view."""
    at = 0
    for view in views:
        row = view[slot : slot + 1]
        row[...] = np.frombuffer(state, row.dtype, row.size, at).reshape(row.shape)
        at += row.nbytes
