"""The continuous-batching scheduler: decides who runs, and takes the blocks for it."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from pagepool.config import SchedulerConfig
from pagepool.scheduling import policy
from pagepool.scheduling.active import ActiveSequences
from pagepool.scheduling.admission import admit
from pagepool.scheduling.batch import ScheduledBatch
from pagepool.scheduling.blocks import open_account
from pagepool.scheduling.cohort import Cohort
from pagepool.scheduling.pressure import make_room
from pagepool.scheduling.request import SeqState, Sequence
from pagepool.scheduling.step import LooseDecodes, Step
from pagepool.scheduling.waiting import WaitingQueue

__all__ = ["Scheduler"]

FINISHED = SeqState.FINISHED
DECODING = SeqState.DECODING
PREFILLING = SeqState.PREFILLING


class Scheduler:
    """Continuous batching with chunked prefill over a paged pool.

    config  a `SchedulerConfig`; default: its defaults
    pool    a `KvCachePool`, `SequencePool` or `BlockAllocator` whose blocks the sequences take, or None

    Each step: `schedule()` picks the batch and takes its blocks, all or none; the caller runs it;
    `commit(batch, tokens)` hands back the new tokens (or `append_token` and `finish_sequence` do, one by one). Blocks
    are freed when a sequence finishes, is removed or is preempted. When the pool runs out, the newest sequence of the
    lowest priority gives its blocks back, waits at the front and is recomputed later; the oldest always keeps going, so
    every request ends.
    One thread at a time may use a scheduler.

    >>> scheduler = Scheduler(SchedulerConfig(max_batch_tokens=4))
    >>> scheduler.add_request([11, 12, 13, 14, 15], max_tokens=7)
    1
    >>> batch = scheduler.schedule()
    >>> batch.tokens, batch.is_prefill, batch.wants_token
    ([[11, 12, 13, 14]], [True], [False])
    >>> scheduler.commit(batch, [None])
    >>> while scheduler.has_work:
    ...     batch = scheduler.schedule()
    ...     scheduler.commit(batch, [99] * len(batch))
    >>> [seq.all_tokens for seq in scheduler.drain_finished()]
    [[11, 12, 13, 14, 15, 99, 99]]
    """

    def __init__(self, config: SchedulerConfig | None = None, pool: Any = None) -> None:
        self.config = SchedulerConfig() if config is None else config
        self._account = open_account(pool, self.config.block_size, self.config.watermark)
        self._places = policy.places(self.config)
        self._prefill_first = self.config.schedule == "prefill-first"
        self._sequences: dict[int, Sequence] = {}
        self._waiting = WaitingQueue()
        self._active = ActiveSequences(self._account.blocks_for)
        self._finished: dict[int, Sequence] = {}
        self._cohort: Cohort | None = None
        self._next_id = 1
        self.num_preemptions = 0

    def add_request(self, prompt_tokens: Iterable[int], max_tokens: int, priority: int | None = None) -> int:
        """Queue a request and return its id: 1, 2, ...

        prompt_tokens  token ids, at least one; copied
        max_tokens     limit of prompt + output
        priority       lower goes first; None is 0; equals go in the order of arrival

        Raises ValueError, and changes nothing, when the prompt is empty or longer than `max_tokens`, or when the pool
        could never hold `max_tokens`. A prompt of exactly `max_tokens` leaves nothing to generate: it is finished at
        once.
        """
        prompt = _as_list(prompt_tokens)
        limit = operator.index(max_tokens)
        level = 0 if priority is None else operator.index(priority)
        if not prompt:
            raise ValueError("a prompt needs at least 1 token, got 0")
        if len(prompt) > limit:
            raise ValueError(f"a prompt of {len(prompt)} tokens is longer than max_tokens, {limit}")
        refusal = self._account.refusal(limit)
        if refusal is not None:
            raise ValueError(refusal)
        seq = Sequence(self._next_id, prompt, limit, level)
        self._next_id += 1
        self._sequences[seq.id] = seq
        if seq.at_limit:
            seq.state = FINISHED
            self._finished[seq.id] = seq
        else:
            self._waiting.push(seq)
        return seq.id

    def append_token(self, seq_id: int, token: int) -> None:
        """Add one output token to a sequence; at its limit it finishes. Unknown and finished ids are ignored."""
        seq = self._sequences.get(seq_id)
        if seq is None or seq.state is FINISHED:
            return
        self._settle()
        seq.output_tokens.append(token)
        if seq.at_limit:
            self._finish([seq])

    def finish_sequence(self, seq_id: int) -> None:
        """Stop a sequence and free its blocks; `drain_finished` will return it. Unknown ids are ignored."""
        seq = self._sequences.get(seq_id)
        if seq is None:
            return
        seq.stopped = True
        if seq.state is not FINISHED:
            self._settle()
            self._finish([seq])

    def remove_sequence(self, seq_id: int) -> None:
        """Forget a sequence entirely and free its blocks. Unknown ids are ignored."""
        self.finish_sequence(seq_id)
        self._finished.pop(seq_id, None)
        self._sequences.pop(seq_id, None)

    def drain_finished(self) -> list[Sequence]:
        """Remove and return the finished sequences, in the order in which they finished."""
        drained = list(self._finished.values())
        self._finished.clear()
        for seq in drained:
            del self._sequences[seq.id]
        return drained

    def get_sequence(self, seq_id: int) -> Sequence | None:
        """The sequence with this id, or None when it is unknown, drained or removed."""
        return self._sequences.get(seq_id)

    @property
    def active_count(self) -> int:
        """Sequences that are prefilling or decoding."""
        return self._active.size

    @property
    def waiting_count(self) -> int:
        """Sequences that wait, preempted ones included."""
        return len(self._waiting)

    @property
    def total_count(self) -> int:
        """Sequences that are known: waiting, active, and finished but not drained."""
        return len(self._sequences)

    @property
    def has_work(self) -> bool:
        """True while a sequence waits or is active."""
        return self._active.size > 0 or len(self._waiting) > 0

    @property
    def num_tokens(self) -> int:
        """Tokens whose places in the pool are taken, over all active sequences; 0 without a pool."""
        return self._account.num_tokens

    def schedule(self) -> ScheduledBatch:
        """The next step, its blocks taken. All budgets of the config hold.

        Admits waiting sequences, picks by turns, shares out the tokens, and preempts when the pool is out. The batch is
        empty when there is no work, or when blocks that others hold (forks, another scheduler on the same pool) leave
        not even one sequence room: `has_work` stays True then, and the caller has to free blocks or wait.
        """
        admit(self._waiting, self._active, self._account, self.config)
        if self._cohort is not None:
            batch = self._step_of_cohort(self._cohort)
            if batch is not None:
                return batch
            self._settle()
        while self._active.size:
            decodes, prefills, by_turns = self._pick()
            step = Step(LooseDecodes(decodes), prefills, self.config)
            taken = self._account.take(step.batch.states, step.grow)
            if by_turns:
                self._active.put_back(scheduled=taken)
            if taken:
                for seq, count in zip(decodes, step.grow[: len(decodes)], strict=True):
                    seq._fed += count
                self._read_prompts(step)
                return step.batch
            preempted = make_room(step, self._sequences, self._active, self._account)
            if not preempted:
                break
            self.num_preemptions += len(preempted)
            for seq in preempted:
                self._waiting.push(seq)
        return ScheduledBatch.empty()

    def commit(self, batch: ScheduledBatch, tokens: Iterable[int | None]) -> None:
        """Hand back the results of `batch`: one entry per sequence, in its order.

        An entry that is None or negative adds nothing; neither does the entry of a prompt chunk that was not the last
        (`wants_token` False) or of a sequence that has finished meanwhile. Sequences that reach their limit finish.
        Raises ValueError when the lengths differ or the batch was committed before, TypeError when an entry is not a
        number, and changes nothing then.
        """
        results = _as_list(tokens)
        if len(results) != len(batch._sequences):
            raise ValueError(f"got {len(results)} tokens for a batch of {len(batch._sequences)} sequences")
        if batch._committed:
            raise ValueError("the batch was committed before")
        cohort = self._cohort
        finished: list[Sequence] = []
        first = 0 if cohort is None else len(cohort.sequences)
        usable = _usable(results[first:])
        if cohort is not None:
            done = cohort.commit(batch, results)
            if done is not None:
                finished = done
            else:
                usable = _usable(results[:first]) + usable
                first = 0
                self._settle()
        got, missed = batch._append(results, first, usable, finished)
        if finished:
            self._finish(finished)
        if missed:
            self._settle()
        elif self._cohort is not None:
            if got:
                self._cohort.join(got)
        elif len(got) == self._active.size - self._active.num_prefills and self._active.size <= self._places:
            self._cohort = Cohort.form(got)

    def _step_of_cohort(self, cohort: Cohort) -> ScheduledBatch | None:
        """The step of all decodes in lockstep and all prefills; None when that is not the step to take, or when the
        pool is out."""
        active = self._active
        if not cohort.ready or active.size > self._places or len(cohort.sequences) != active.size - active.num_prefills:
            return None
        if self._prefill_first and active.num_prefills:
            return None
        step = Step(cohort, active.prefills(), self.config)
        if not self._account.take(step.batch.states, step.grow):
            return None
        cohort.scheduled(step.batch)
        self._read_prompts(step)
        return step.batch

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

    def _finish(self, sequences: list[Sequence]) -> None:
        """Mark them FINISHED, wherever they stand, and free their blocks."""
        states = [seq.kv for seq in sequences if seq.kv is not None]
        for seq in sequences:
            if seq.state is PREFILLING or seq.state is DECODING:
                self._active.leave(seq)
            else:
                self._waiting.remove(seq)
            seq.state = FINISHED
            seq.kv = None
            self._finished[seq.id] = seq
        self._account.give_back(states)

    def _settle(self) -> None:
        """End the cohort, if there is one."""
        if self._cohort is not None:
            self._cohort.settle()
            self._cohort = None


def _usable(results: list[Any]) -> list[bool]:
    """Which of the results are tokens. Whatever is wrong with their types is raised here, before anything changes."""
    return [token is not None and token >= 0 for token in results]


def _as_list(values: Iterable[Any]) -> list[Any]:
    """A new list of the values; of Python ints, when they come from an array."""
    if type(values) is list:
        return values.copy()
    return values.tolist() if hasattr(values, "tolist") else list(values)
