"""Token ids for the requests of a trace that names prefix blocks, so that a prefix cache finds what they share."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise, repeat

import numpy as np
from numpy.typing import NDArray

from pagepool.replay.order import sessions_of
from pagepool.replay.prompts import PassError
from pagepool.replay.ptrace import Trace

__all__ = ["TraceTokens"]

NO_TOKEN = 0
MAX_ID = 2**31 - 2


class TraceTokens:
    """Tokens that are equal where the trace says that prefixes are.

    Every token of block b is b + 1, whatever block size the pool has. What a block id says nothing of, a prompt's end
    and its output, is what the next request of the session has in that place, if its prompt goes on from this one's; if
    not, the end of the prompt is a token of its own, and the output 0. A session's ids are its own: its number is the
    salt of its requests.

    Raises `PassError` for a trace without prefix blocks and for ids beyond 31 bits.
    """

    def __init__(self, trace: Trace) -> None:
        if not trace.block or trace.runs is None:
            raise PassError("the trace names no prefix blocks, which --policy needs")
        self._trace = trace
        self._runs = trace.runs
        last = max((start + length for runs in trace.runs for start, length in _pairs(runs)), default=0)
        if last > MAX_ID:
            raise PassError(f"{last} block ids are more than {MAX_ID}")
        self._next: dict[int, int] = {}
        for session in sessions_of(trace):
            self._next.update(pairwise(session))

    def of(self, index: int) -> tuple[list[int], Iterator[int]]:
        """The prompt of request `index`, and the tokens that its model makes, without end."""
        trace, length = self._trace, self._trace.prompt[index]
        known = self._known(index)
        rest = self._next_tokens(index, known)
        prompt = np.full(length, -1 - index, np.int32)
        prompt[: len(known)] = known
        tail = rest[: length - len(known)]
        prompt[len(known) : len(known) + len(tail)] = tail
        output = rest[length - len(known) :][: trace.output[index]].tolist()
        return prompt.tolist(), chain(output, repeat(NO_TOKEN))

    def salt(self, index: int) -> int:
        """What keeps the ids of its session apart."""
        return self._trace.session[index]

    def _known(self, index: int) -> NDArray[np.int32]:
        """The tokens of a prompt that block ids tell."""
        block, length = self._trace.block, self._trace.prompt[index]
        ids = [np.arange(start, start + count, dtype=np.int32) for start, count in _pairs(self._runs[index])]
        blocks = np.concatenate(ids) if ids else np.empty(0, np.int32)
        return np.repeat(blocks + np.int32(1), block)[:length]

    def _next_tokens(self, index: int, known: NDArray[np.int32]) -> NDArray[np.int32]:
        """What follows `known` in the prompt of the session's next request; nothing when that does not begin so."""
        following = self._next.get(index)
        if following is None:
            return known[:0]
        tokens = self._known(following)
        if len(tokens) < len(known) or not np.array_equal(tokens[: len(known)], known):
            return known[:0]
        return tokens[len(known) :]


def _pairs(runs: list[int]) -> Iterator[tuple[int, int]]:
    return zip(runs[::2], runs[1::2], strict=True)
