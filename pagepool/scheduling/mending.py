"""Calls of the scheduler that end in the middle: by a signal, for want of memory, by whatever raises."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import CodeType, FrameType
from typing import Concatenate, ParamSpec, TypeVar

from pagepool.errors import PoolError
from pagepool.scheduling.audit import audit, is_active, slots_of
from pagepool.scheduling.cohort import leave
from pagepool.scheduling.request import SeqState, Sequence
from pagepool.scheduling.roster import Roster
from pagepool.scheduling.undo import Undo

__all__ = ["Mending", "whole"]

PREFILLING, DECODING = SeqState.PREFILLING, SeqState.DECODING
WAITING, PREEMPTED, FINISHED = SeqState.WAITING, SeqState.PREEMPTED, SeqState.FINISHED

CALLS: set[CodeType] = set()  # the code of `whole` methods: whether one is running is seen by it

S = TypeVar("S", bound="Mending")
P = ParamSpec("P")
R = TypeVar("R")


def whole(method: Callable[Concatenate[S, Undo, P], R]) -> Callable[Concatenate[S, P], R]:
    """For a method that changes a scheduler: what it leaves when it raises is mended, at once or, where that is
    interrupted as well, when the next one is called. It has ended when its `Undo` is forgotten, which one store does.
    """

    @wraps(method)
    def call(self: S, *arguments: P.args, **names: P.kwargs) -> R:
        if self._undo is not None:
            self._recover(self._undo)
        self._undo = undo = Undo()
        try:
            result = method(self, undo, *arguments, **names)
        except BaseException:
            self._mend(undo)
            raise
        self._undo = None
        return result

    CALLS.add(call.__code__)  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


class Mending(Roster):
    """The part of a `Scheduler` that makes its structures agree again.

    No order of statements keeps a dozen of them true to each other at every moment. So there is one truth, what every
    sequence says of itself, and all else is worked out anew from that.
    """

    def _finish(self, sequences: list[Sequence]) -> None:
        raise NotImplementedError

    def drain_finished(self) -> list[Sequence]:
        """Remove and return the finished sequences, in the order in which they finished."""
        return self._drain()

    @whole
    def _drain(self, undo: Undo) -> list[Sequence]:
        undo.drained = drained = self._finished
        self._finished = {}
        for number in drained:
            del self._sequences[number]
        return list(drained.values())

    def check(self) -> None:
        """Raises `PoolError` when one of the equations does not hold; sequences, places, blocks, quotas, floors and
        tickets are counted anew. O(all of them). `check` of the allocator and of the prefix cache audit theirs.

        >>> from pagepool import Scheduler
        >>> Scheduler().check()
        """
        if self._undo is not None:
            self._recover(self._undo)
        broken = audit(self)
        if broken is not None:
            raise PoolError(f"broken invariant: {broken}")

    def _recover(self, undo: Undo) -> None:
        """Mend what an earlier call left; raises RuntimeError when it has left nothing, but is running still."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code in CALLS and frame.f_locals.get("self") is self:
                raise RuntimeError("the scheduler is in the middle of a call: a finalizer or handler calls it")
            frame = frame.f_back
        self._mend(undo)

    def _mend(self, undo: Undo) -> None:
        """Make everything agree with the sequences. It may be interrupted, and begins again then.

        A step that `schedule` has not returned was not taken: its tokens are fed again, its slots go back. Tokens of a
        `commit` that has not taken all of them are taken back: it may be called again. Whoever was to end ends. An
        active sequence that lost blocks is a preempted one.
        """
        sequences, planner = self._sequences, self._planner
        if undo.drained:
            self._finished = {**undo.drained, **self._finished}
        sequences.update(self._finished)
        if undo.added is not None:
            self._finished.pop(undo.added.id, None)
            sequences.pop(undo.added.id, None)
        self._take_back_tokens(undo)
        steps = self._take_back_step(undo)
        for seq in sequences.values():
            if seq._cohort is not None:
                leave(seq, seq._cohort.steps if steps is None else steps)
        planner.cohort = None
        slots = slots_of(self)
        for seq in sequences.values():
            self._mend_sequence(seq, slots.get(seq.id, 0))
        self._recount([seq for seq in sequences.values() if seq.state is not FINISHED])
        for seq in sequences.values():
            if seq.state is FINISHED:
                self._finished.setdefault(seq.id, seq)
        undo.step = undo.tokens = undo.added = None
        ending = [seq for seq in sequences.values() if seq.state is not FINISHED and (seq.stopped or seq.at_limit)]
        if ending:
            self._finish(ending)
        self._undo = None

    def _recount(self, alive: list[Sequence]) -> None:
        """Work out everything from `alive`, all that wait or are active."""
        self._account.rebuild([seq.kv for seq in alive if seq.kv is not None])
        self._active.rebuild([seq for seq in alive if is_active(seq)])
        self._waiting.rebuild([seq for seq in alive if not is_active(seq)])
        self._tenants.rebuild(alive)
        self._floors.rebuild(alive)
        self._ladder.rebuild(alive)
        self._reuse.rebuild()
        self._admission.forget()

    def _take_back_tokens(self, undo: Undo) -> None:
        """Of results that were not taken altogether."""
        if undo.tokens is None:
            return
        batch, first, before = undo.tokens
        drafted = bool(self.config.lookahead) and batch is not None and batch is self._out
        for seq in batch._sequences[:first] if batch is not None else ():
            del seq.output_tokens[seq.fed - len(seq.prompt_tokens) :]
        for seq, count, fed in before:
            del seq.output_tokens[count:]
            if drafted:
                seq._fed = fed
        if drafted:
            self._out = None  # its slots go back: drafts that are accepted then are fed again
        if batch is not None:
            batch._committed = False

    def _take_back_step(self, undo: Undo) -> int | None:
        """One that was not returned. Returns how many the cohort had taken before, None if there was none."""
        if undo.step is None:
            return None
        steps, before = undo.step
        for seq, fed in before:
            if seq._cohort is None:
                seq._fed = fed
        self._out = None
        self._tenants.take_back(undo.served)
        return steps

    def _mend_sequence(self, seq: Sequence, slots: int) -> None:
        """`slots`: those for drafts that its state has beyond what it was fed."""
        if seq.state is FINISHED or seq.state is WAITING:
            seq.kv = seq._swapped = None
            seq._fed = seq._kept = 0
            return
        account = self._account
        if account.capacity:
            if seq.kv is not None and seq.kv.closed:
                seq.kv = None
            held = 0 if seq.kv is None else seq.kv.len
            if held > seq._fed + slots:
                account.cut(seq.kv, seq._fed)
            elif held < seq._fed:
                seq._fed = held
                seq.state = PREEMPTED
            if seq.kv is None:
                seq.state = PREEMPTED
            elif seq.state is PREEMPTED and not seq._fed:
                seq.kv = None
            if seq._kept > account.blocks_for(seq._fed):
                seq._kept, seq._own = account.blocks_for(seq._fed), 0
        if seq.state is not PREEMPTED:
            seq.state = DECODING if seq._fed >= seq._prefill_end else PREFILLING
        if seq._swapped is not None and (seq.state is not PREEMPTED or seq._swapped[0] != seq._fed):
            seq._swapped = None
