"""What the calls of a scheduler change, when all that they were given is right."""

from __future__ import annotations

from typing import Any

from pagepool.scheduling.batch import ScheduledBatch
from pagepool.scheduling.intake import usable
from pagepool.scheduling.lookahead import accept_drafts, rewind
from pagepool.scheduling.mending import Mending, whole
from pagepool.scheduling.request import SeqState, Sequence
from pagepool.scheduling.undo import Undo

__all__ = ["Changes"]

FINISHED = SeqState.FINISHED
DECODING = SeqState.DECODING
PREFILLING = SeqState.PREFILLING


class Changes(Mending):
    """The part of a `Scheduler` that acts: each call altogether, or not at all until it can only go forward."""

    @whole
    def _add(self, undo: Undo, seq: Sequence) -> None:
        """A request."""
        undo.added = seq
        self._sequences[seq.id] = seq
        if seq.at_limit:
            seq.state = FINISHED
            self._finished[seq.id] = seq
        else:
            self._tenants.arrive(seq)
            self._waiting.push(seq)

    @whole
    def _append(self, undo: Undo, seq: Sequence, token: int) -> None:
        """One token more."""
        self._planner.settle()
        seq.output_tokens.append(token)  # from here on it goes forward
        if seq.at_limit:
            self._finish([seq])

    @whole
    def _stop(self, undo: Undo, seq: Sequence) -> None:
        """Ends, finished or not."""
        seq.stopped = True  # from here on it goes forward
        if seq.state is not FINISHED:
            self._planner.settle()
            self._finish([seq])

    @whole
    def _forget(self, undo: Undo, seq_id: int) -> None:
        """It is known no more."""
        self._finished.pop(seq_id, None)
        self._sequences.pop(seq_id, None)

    @whole
    def _step(self, undo: Undo, now: float | None) -> ScheduledBatch:
        """The next batch, its blocks taken."""
        self.num_steps += 1
        if self._out is not None:
            self._close(self._out)
        self._reuse.tell(self.num_steps if now is None else now)
        self._admission.admit(self.num_steps)
        batch = self._planner.next_step(self.num_steps, undo)
        if not batch.is_empty:
            self._out = batch
            if self._tenants.charges:
                self._tenants.charge(batch, undo)
        return batch

    @whole
    def _take(self, undo: Undo, batch: ScheduledBatch, results: list[Any], rows: list[list[int] | None] | None) -> None:
        """The results of a batch; `rows` are those of `read_drafts`, None without lookahead."""
        cohort, first = self._planner.cohort, 0
        finished: list[Sequence] = []
        tokens = None if cohort is None else cohort.tokens_of(batch, results)
        if cohort is not None and tokens is not None:
            first = len(tokens)
            given = usable(results[first:])
            undo.note_tokens(batch, first, batch._sequences[first:])
            finished = cohort.commit(tokens)
        else:
            self._planner.settle()
            undo.note_tokens(batch, 0, batch._sequences)
            if rows is not None:
                results = accept_drafts(batch, results, rows, self._account, batch is self._out)
            given = usable(results)
        got, missed = batch._append(results, first, given, finished)
        undo.tokens = None  # all are taken; from here on it goes forward
        if batch is self._out:
            self._close(batch)
        if finished:
            self._finish(finished)
        self._planner.regroup(got, missed)

    def _close(self, batch: ScheduledBatch) -> None:
        """`batch` was run: what it stored can be kept, and slots that were for drafts are taken back."""
        if self.config.lookahead:
            self._out = None  # first: its slots are gone from the first one on
            rewind(batch, self._account)
        self._reuse.publish_filled(batch, self._planner.cohort)
        self._out = None

    def _finish(self, sequences: list[Sequence]) -> None:
        """Mark them FINISHED, wherever they stand, in the order of ids, and free their blocks."""
        sequences.sort(key=lambda seq: seq.id)
        states = [seq.kv for seq in sequences if seq.kv is not None]
        for seq in sequences:
            if seq.kv is not None:
                # What is in a batch that is out may not have been stored yet.
                self._reuse.publish(seq, seq._fed - (self._out.tokens_of(seq) if self._out else 0))
            if self._tenants.keeps_out(seq):
                self._waiting.changed(seq.tenant)  # first: it may want memory, and what has left must be FINISHED
            if seq.state is PREFILLING or seq.state is DECODING:
                self._active.leave(seq)
            else:
                self._waiting.remove(seq)
                self._reuse.starts(seq)
                self._ladder.forget(seq)
            self._tenants.leave(seq)
            self._floors.leave(seq)
            seq.state = FINISHED
            seq.kv = None
            self._finished[seq.id] = seq
        self._account.give_back(states)
