"""The prompts of a trace: as rows of block ids for the prefix cache alone, and as token ids for the scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise, repeat

import numpy as np
from numpy.typing import NDArray

from pagepool.replay.ptrace import Trace

__all__ = ["MAX_IDS", "PassError", "Prompts", "TraceTokens"]

MAX_IDS = 2**31
NO_TOKEN = 0
MAX_TOKEN = 2**31 - 1


class PassError(ValueError):
    """The trace has no prefix blocks, or its prefix blocks do not fit the options."""


class Prompts:
    """The prompts of a trace as rows of block ids. Blocks have the same id if they and all earlier blocks are equal.

    Parameters
    ----------
    trace : Trace
        A trace that was read with its prefixes.
    block_size : int, optional
        Tokens per block. It must divide the block size of the trace, which is the default.

    Raises
    ------
    PassError
        If the trace has no prefix blocks, `block_size` does not divide theirs, or an id needs more than 31 bits.
    """

    def __init__(self, trace: Trace, block_size: int | None = None) -> None:
        if not trace.block or trace.runs is None:
            raise PassError("the trace has no prefix blocks, which --clock none needs")
        self.trace = trace
        self.block_size = block_size or trace.block
        if trace.block % self.block_size:
            raise PassError(
                f"--block-size must divide the trace's block size, {trace.block} tokens, and {self.block_size} does not"
            )
        self._cuts = trace.block // self.block_size
        last = _last_id(trace.runs)
        if last * self._cuts > MAX_IDS:
            raise PassError(f"the trace has {last} block ids; cut into {self._cuts} parts, they exceed {MAX_IDS}")
        self.full_blocks = sum(tokens // self.block_size for tokens in trace.prompt)
        self.most_ids = sum(-(-tokens // self.block_size) for tokens in trace.prompt)

    def __iter__(self) -> Iterator[tuple[NDArray[np.int32], int]]:
        """Yield the ids of the full blocks and the session of each prompt, by arrival."""
        for index in range(len(self)):
            yield self.row(index), self.trace.session[index]

    def __len__(self) -> int:
        return len(self.trace)

    def row(self, index: int, partial: bool = False) -> NDArray[np.int32]:
        """Return the ids of the full blocks of request `index`. `partial` includes a partial last block."""
        tokens = self.trace.prompt[index]
        ids = _ids((self.trace.runs or [])[index], self._cuts)
        return ids[: -(-tokens // self.block_size) if partial else tokens // self.block_size]


class TraceTokens:
    """Token ids for the requests of a trace. Blocks with equal ids have equal tokens.

    Every token of block b is b + 1, with every block size of the pool. The end of a prompt and the output have no block
    id. If the session's next prompt continues this one, they get its tokens. Otherwise the end of the prompt gets a
    token that no other prompt has, and the output is 0. Sessions have unrelated ids, so the salt of a request is its
    session.

    Raises `PassError` for a trace without prefix blocks and for ids beyond 31 bits.
    """

    def __init__(self, trace: Trace) -> None:
        if not trace.block or trace.runs is None:
            raise PassError("the trace has no prefix blocks, which --policy needs")
        self._trace = trace
        self._runs = trace.runs
        last = _last_id(trace.runs)
        if last > MAX_TOKEN - len(trace):
            limit = MAX_TOKEN - len(trace)
            raise PassError(f"a trace of {len(trace)} requests must have at most {limit} block ids, not {last}")
        self._next: dict[int, int] = {}
        for session in trace.sessions():
            self._next.update(pairwise(session))

    def of(self, index: int) -> tuple[list[int], Iterator[int]]:
        """Return the prompt of request `index`, and an endless iterator of its output tokens."""
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
        """Return the cache salt of request `index`: its session."""
        return self._trace.session[index]

    def _known(self, index: int) -> NDArray[np.int32]:
        """Return the tokens of a prompt that have block ids."""
        blocks = _ids(self._runs[index])
        return np.repeat(blocks + np.int32(1), self._trace.block)[: self._trace.prompt[index]]

    def _next_tokens(self, index: int, known: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the tokens after `known` in the session's next prompt, or none if it begins with other tokens."""
        following = self._next.get(index)
        if following is None:
            return known[:0]
        tokens = self._known(following)
        if len(tokens) < len(known) or not np.array_equal(tokens[: len(known)], known):
            return known[:0]
        return tokens[len(known) :]


def _ids(runs: list[int], cuts: int = 1) -> NDArray[np.int32]:
    """Return the block ids of runs [start, length, ...]. Each block is cut into `cuts` blocks."""
    parts = [
        np.arange(start * cuts, (start + length) * cuts, dtype=np.int32)
        for start, length in zip(runs[::2], runs[1::2], strict=True)
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _last_id(rows: list[list[int]]) -> int:
    """Return the highest block id in these runs plus 1, or 0 without runs."""
    pairs = (pair for runs in rows for pair in zip(runs[::2], runs[1::2], strict=True))
    return max((start + length for start, length in pairs), default=0)
