"""The prompts of a trace: as rows of block ids for the prefix cache alone, and as token ids for the scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise, repeat

import numpy as np
from numpy.typing import NDArray

from pagepool.replay.order import sessions_of
from pagepool.replay.ptrace import Trace

__all__ = ["MAX_IDS", "PassError", "Prompts", "TraceTokens"]

MAX_IDS = 2**31
NO_TOKEN = 0
MAX_ID = 2**31 - 2


class PassError(ValueError):
    """The trace cannot go through a prefix cache, or not with this block size."""


class Prompts:
    """The prompts of a trace as rows of block ids, which stand for blocks of tokens: equal where all tokens are.

    trace       one that was read with its prefixes
    block_size  tokens per block; None: the trace's own. One that divides it cuts each block of the trace
    partial     whether a last block that is not full has an id, too
    order       indices of the requests, each once; None: as they arrive

    Raises `PassError` for a trace without prefix blocks, a size that does not divide theirs, and ids beyond 31 bits.
    """

    def __init__(self, trace: Trace, block_size: int | None, partial: bool, order: Sequence[int] | None = None) -> None:
        if not trace.block or trace.runs is None:
            raise PassError("the trace names no prefix blocks, which --clock none needs")
        self.trace = trace
        self.block_size = block_size or trace.block
        self.partial = partial
        self.order = range(len(trace)) if order is None else order
        if trace.block % self.block_size:
            raise PassError(
                f"--block-size {self.block_size} does not divide the trace's blocks of {trace.block} tokens"
            )
        self._cuts = trace.block // self.block_size
        last = max((start + length for runs in trace.runs for start, length in _pairs(runs)), default=0)
        if last * self._cuts > MAX_IDS:
            raise PassError(f"{last} block ids cut in {self._cuts} are more than {MAX_IDS}")
        self.full_blocks = sum(tokens // self.block_size for tokens in trace.prompt)
        self.most_ids = sum(-(-tokens // self.block_size) for tokens in trace.prompt)

    def __iter__(self) -> Iterator[tuple[NDArray[np.int32], int, int]]:
        """For each prompt its ids, how many of its blocks are full, and its session."""
        for index in self.order:
            ids, full = self.row(index, self.partial)
            yield ids, full, self.trace.session[index]

    def __len__(self) -> int:
        return len(self.order)

    def row(self, index: int, partial: bool) -> tuple[NDArray[np.int32], int]:
        """The block ids of request `index` of the trace, with the last one, not full, or without, and how many of its
        blocks are full."""
        trace, cuts, tokens = self.trace, self._cuts, self.trace.prompt[index]
        runs = _pairs((trace.runs or [])[index])
        parts = [np.arange(start * cuts, (start + length) * cuts, dtype=np.int32) for start, length in runs]
        ids = np.concatenate(parts) if parts else np.empty(0, np.int32)
        full = tokens // self.block_size
        return ids[: -(-tokens // self.block_size) if partial else full], full

    def flat(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The ids of all prompts in one row, those of different sessions made different, and where each prompt ends.

        Raises `PassError` when so many ids have no 31 bits.
        """
        first, size = self.id_ranges()
        if size > MAX_IDS:
            raise PassError(f"{size} block ids of all sessions are more than {MAX_IDS}")
        rows = [ids + np.int32(first[session]) for ids, _, session in self]
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        return np.concatenate(rows) if rows else np.empty(0, np.int32), ends

    def id_ranges(self) -> tuple[dict[int, int], int]:
        """Where the ids of each session would begin if those of all sessions lay side by side, and their number."""
        ends: dict[int, int] = {}
        for runs, session in zip(self.trace.runs or [], self.trace.session, strict=True):
            for start, length in _pairs(runs):
                ends[session] = max(ends.get(session, 0), (start + length) * self._cuts)
            ends.setdefault(session, 0)
        begins = accumulate(ends.values(), initial=0)
        return dict(zip(ends, begins, strict=False)), sum(ends.values())


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
