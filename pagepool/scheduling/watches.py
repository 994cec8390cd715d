"""Who of those that wait may find more in the prefix cache, now that some blocks more are in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from zlib import crc32

from pagepool.scheduling.request import Sequence

__all__ = ["Watches"]


class Watches:
    """A request for which k blocks were found finds more only when block k, the next one of its prompt, is cached
    behind the same k. It watches for that under a sum over all of these, salt and keys included: prompts that are equal
    have equal ones, and sums that are equal by chance cost a look.

    Invariant: `_lines[s]` has exactly the requests whose `_watch` is (`_epoch`, tokens found, s), by id. For each of
    these, or with None for s, the prompt having no further block, no more tokens are cached than were found.

    Cost: a sum over the prompt's beginning for each look, one over each block that is stored while somebody watches.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._lines: dict[int, dict[int, Sequence]] = {}
        self._epoch = 0
        self._grown: dict[Any, None] | None = {}

    def found(self, seq: Sequence) -> int | None:
        """At least as many tokens as are cached of `seq`; None when it has to be looked up."""
        watch = seq._watch
        return None if watch is None or watch[0] != self._epoch else watch[1]

    def note(self, seq: Sequence, prompt: Any, found: int) -> None:
        """Of `seq`, which waits, so many tokens are cached."""
        self.drop(seq)
        end, total = found + self._size, None
        if end <= len(prompt):
            total = crc32(prompt[:end], _start(seq))
            self._lines.setdefault(total, {})[seq.id] = seq
        seq._watch = self._epoch, found, total

    def drop(self, seq: Sequence) -> None:
        """It does not wait any more, or is looked up anew."""
        watch, seq._watch = seq._watch, None
        if watch is not None and watch[2] in self._lines:
            line = self._lines[watch[2]]
            line.pop(seq.id, None)
            if not line:
                del self._lines[watch[2]]

    def stored(self, seq: Sequence, tokens: Any, first: int) -> None:
        """Blocks of `tokens`, the first ones of `seq`, from block `first` on, may be new in the cache."""
        if not self._lines:
            return
        size, end = self._size, len(tokens) // self._size
        done, total = seq._summed
        if done > first:
            done, total = 0, 0
        if not done:
            total = _start(seq)
        for block in range(done, end):
            total = crc32(tokens[block * size : (block + 1) * size], total)
            if block >= first and total in self._lines:
                for other in self._lines.pop(total).values():
                    other._watch = None
                    if self._grown is not None:
                        self._grown[other.tenant] = None
        seq._summed = end, total

    def forget(self) -> None:
        """Of nobody it is known how much is cached."""
        self._epoch += 1
        self._lines = {}
        self._grown = None

    def grown(self) -> Iterable[Any] | None:
        """The tenants of those of whom more may be cached than at the last call; None: all."""
        grown, self._grown = self._grown, {}
        return grown


def _start(seq: Sequence) -> int:
    return hash((seq.cache_salt, seq.extra_keys)) & 0xFFFFFFFF
