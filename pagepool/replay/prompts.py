"""The prompts of a trace as rows of block ids, in some order: what a pass through the prefix cache is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from pagepool.replay.ptrace import Trace

__all__ = ["MAX_IDS", "PassError", "Prompts"]

MAX_IDS = 2**31


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


def _pairs(runs: list[int]) -> Iterator[tuple[int, int]]:
    return zip(runs[::2], runs[1::2], strict=True)
