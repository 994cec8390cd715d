"""The step after admission: who runs, with which tokens, in blocks that are there."""

from __future__ import annotations

from pagepool.config import SchedulerConfig
from pagepool.scheduling.active import ActiveSequences
from pagepool.scheduling.batch import ScheduledBatch
from pagepool.scheduling.cohort import Cohort
from pagepool.scheduling.pressure import PressureLadder
from pagepool.scheduling.request import SeqState, Sequence
from pagepool.scheduling.shares import places
from pagepool.scheduling.step import LooseDecodes, Step
from pagepool.scheduling.undo import Undo

__all__ = ["Planner"]

DECODING = SeqState.DECODING
PREFILLING = SeqState.PREFILLING


class Planner:
    """Picks the sequences of a step and takes its blocks, those of others if it must.

    cohort      the decoding sequences while they are in lockstep, else None
    block_size  of the blocks that a cohort is to tell when they are full; 0: it need not
    """

    def __init__(
        self, config: SchedulerConfig, active: ActiveSequences, ladder: PressureLadder, block_size: int
    ) -> None:
        self._config = config
        self._active = active
        self._ladder = ladder
        self._block_size = block_size
        self._places = places(config)
        self._prefill_first = config.schedule == "prefill-first"
        self.cohort: Cohort | None = None

    def next_step(self, now: int, undo: Undo) -> ScheduledBatch:
        """The batch of step `now`; empty when there is none. What it changes is noted in `undo` first."""
        if self.cohort is not None:
            step = self._step_of_cohort(self.cohort)
            if step is not None:
                undo.note_step(step.batch._sequences[step.batch.num_decodes :], self.cohort.steps)
                if self._ladder.take(step, now):
                    self.cohort.scheduled(step.batch)
                    self._read_prompts(step)
                    return step.batch
                undo.step = None
            self.settle()
            if step is not None and not self._ladder.make_room(step, now):
                return ScheduledBatch.empty()
        while self._active.size:
            decodes, prefills, by_turns = self._pick()
            step = Step(LooseDecodes(decodes, self._config.lookahead), prefills, self._config)
            undo.note_step(step.batch._sequences)
            taken = self._ladder.take(step, now)
            if by_turns:
                self._active.put_back(scheduled=taken)
            if taken:
                for seq, count, drafts in zip(decodes, step.grow, step.batch.lookahead):  # noqa: B905 -- decodes first
                    seq._fed += count - drafts
                self._read_prompts(step)
                return step.batch
            undo.step = None
            if not self._ladder.make_room(step, now):
                break
        return ScheduledBatch.empty()

    def regroup(self, got: list[Sequence], missed: bool) -> None:
        """After a step in which `got` got their tokens, and whether one that wanted a token got none: who decodes in
        lockstep from now on."""
        active = self._active
        if missed:
            self.settle()
        elif self.cohort is not None:
            if got:
                self.cohort.join(got)
        elif (
            len(got) == active.size - active.num_prefills and active.size <= self._places and not self._config.lookahead
        ):
            self.cohort = Cohort.form(got, self._block_size)

    def settle(self) -> None:
        """End the cohort, if there is one."""
        if self.cohort is not None:
            self.cohort.settle()
            self.cohort = None

    def _step_of_cohort(self, cohort: Cohort) -> Step | None:
        """The step of all decodes in lockstep and all prefills; None when that is not the step to take."""
        active = self._active
        if not cohort.ready or active.size > self._places or len(cohort.sequences) != active.size - active.num_prefills:
            return None
        if self._prefill_first and active.num_prefills:
            return None
        return Step(cohort, active.prefills(), self._config)

    def _read_prompts(self, step: Step) -> None:
        """Count the prompt tokens of `step` as fed."""
        decodes = step.batch.num_decodes
        for seq, count in zip(step.batch._sequences[decodes:], step.grow[decodes:], strict=True):
            self._active.read(seq, count)

    def _pick(self) -> tuple[list[Sequence], list[Sequence], bool]:
        """The decodes and the prefills (first admitted first) of the next step, and whether they take turns."""
        active = self._active
        if self._prefill_first and active.num_prefills:
            return [], active.prefills(), False
        by_turns = active.size > self._places
        chosen = active.take(self._places) if by_turns else active.take_all()
        decodes = [seq for seq in chosen if seq.state is DECODING]
        prefills = [seq for seq in chosen if seq.state is PREFILLING] if by_turns else active.prefills()
        return decodes, prefills, by_turns
