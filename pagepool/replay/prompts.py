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
MAX_TOKEN = 2**31 - 1


class PassError(ValueError):
    """The trace has no prefix blocks, or not such that the options can use them."""


class Prompts:
    """The prompts of a trace as rows of block ids: two blocks have the same id where they and all before are equal.

    trace       read with its prefixes
    block_size  tokens per block; None: the trace's own. It must divide the trace's, whose blocks are cut then
    order       indices of the requests, each once; None: as they arrive

    Raises `PassError` for a trace without prefix blocks, a size that does not divide theirs, and ids beyond 31 bits.
    """

    def __init__(self, trace: Trace, block_size: int | None = None, order: Sequence[int] | None = None) -> None:
        if not trace.block or trace.runs is None:
            raise PassError("the trace names no prefix blocks, which --clock none needs")
        self.trace = trace
        self.block_size = block_size or trace.block
        self.order = range(len(trace)) if order is None else order
        if trace.block % self.block_size:
            raise PassError(
                f"--block-size {self.block_size} does not divide the trace's blocks of {trace.block} tokens"
            )
        self._cuts = trace.block // self.block_size
        last = _last_id(trace.runs)
        if last * self._cuts > MAX_IDS:
            raise PassError(f"{last} block ids cut in {self._cuts} are more than {MAX_IDS}")
        self.full_blocks = sum(tokens // self.block_size for tokens in trace.prompt)
        self.most_ids = sum(-(-tokens // self.block_size) for tokens in trace.prompt)

    def __iter__(self) -> Iterator[tuple[NDArray[np.int32], int]]:
        """For each prompt the ids of its full blocks, and its session."""
        for index in self.order:
            yield self.row(index), self.trace.session[index]

    def __len__(self) -> int:
        return len(self.order)

    def row(self, index: int, partial: bool = False) -> NDArray[np.int32]:
        """The ids of the full blocks of request `index` of the trace; with `partial` also of a last, partial one."""
        tokens = self.trace.prompt[index]
        ids = _ids((self.trace.runs or [])[index], self._cuts)
        return ids[: -(-tokens // self.block_size) if partial else tokens // self.block_size]

    def flat(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The ids of all prompts in one row, different for different sessions, and where each prompt ends.

        Raises `PassError` when the ids need more than 31 bits.
        """
        first, size = self.id_ranges()
        if size > MAX_IDS:
            raise PassError(f"{size} block ids of all sessions are more than {MAX_IDS}")
        rows = [ids + np.int32(first[session]) for ids, session in self]
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        return np.concatenate(rows) if rows else np.empty(0, np.int32), ends

    def id_ranges(self) -> tuple[dict[int, int], int]:
        """The first id of each session if each session gets a range of its own, and the number of ids in all."""
        ends: dict[int, int] = {}
        for runs, session in zip(self.trace.runs or [], self.trace.session, strict=True):
            ends[session] = max(ends.get(session, 0), _last_id([runs]) * self._cuts)
        begins = accumulate(ends.values(), initial=0)
        return dict(zip(ends, begins, strict=False)), sum(ends.values())


class TraceTokens:
    """Token ids for the requests of a trace, equal where its block ids say so.

    Every token of block b is b + 1, whatever block size the pool has. The end of a prompt and the output have no block
    id. They get what the session's next prompt has in their place if it continues this one; else the end of the prompt
    is a token of its own and the output is 0. The ids of sessions are unrelated, so a request's salt is its session.

    Raises `PassError` for a trace without prefix blocks and for ids beyond 31 bits.
    """

    def __init__(self, trace: Trace) -> None:
        if not trace.block or trace.runs is None:
            raise PassError("the trace names no prefix blocks, which --policy needs")
        self._trace = trace
        self._runs = trace.runs
        last = _last_id(trace.runs)
        if last > MAX_TOKEN - len(trace):
            raise PassError(f"{last} block ids are more than {MAX_TOKEN - len(trace)}, beside {len(trace)} requests")
        self._next: dict[int, int] = {}
        for session in sessions_of(trace):
            self._next.update(pairwise(session))

    def of(self, index: int) -> tuple[list[int], Iterator[int]]:
        """The prompt of request `index`, and the endless tokens that its model generates."""
        trace, length = self._trace, self._trace.prompt[index]
        known = self._known(index)
        rest = self._next_tokens(index, known)
        prompt = np.full(length, MAX_TOKEN - index, np.int32)
        prompt[: len(known)] = known
        tail = rest[: length - len(known)]
        prompt[len(known) : len(known) + len(tail)] = tail
        output = rest[length - len(known) :][: trace.output[index]].tolist()
        return prompt.tolist(), chain(output, repeat(NO_TOKEN))

    def salt(self, index: int) -> int:
        """The cache salt of request `index`: its session."""
        return self._trace.session[index]

    def _known(self, index: int) -> NDArray[np.int32]:
        """The tokens of a prompt that have block ids."""
        blocks = _ids(self._runs[index])
        return np.repeat(blocks + np.int32(1), self._trace.block)[: self._trace.prompt[index]]

    def _next_tokens(self, index: int, known: NDArray[np.int32]) -> NDArray[np.int32]:
        """What follows `known` in the session's next prompt; nothing when that does not begin with it."""
        following = self._next.get(index)
        if following is None:
            return known[:0]
        tokens = self._known(following)
        if len(tokens) < len(known) or not np.array_equal(tokens[: len(known)], known):
            return known[:0]
        return tokens[len(known) :]


def _ids(runs: list[int], cuts: int = 1) -> NDArray[np.int32]:
    """The block ids of runs [start, length, ...], each cut in `cuts`."""
    parts = [
        np.arange(start * cuts, (start + length) * cuts, dtype=np.int32)
        for start, length in zip(runs[::2], runs[1::2], strict=True)
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _last_id(rows: list[list[int]]) -> int:
    """One more than the highest block id in these runs; 0 without runs."""
    pairs = (pair for runs in rows for pair in zip(runs[::2], runs[1::2], strict=True))
    return max((start + length for start, length in pairs), default=0)
