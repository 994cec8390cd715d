"""The active sequences, and the choice of sequences for the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from pagepool.config import SchedulerConfig
from pagepool.scheduling.batch import Decodes, ScheduledBatch
from pagepool.scheduling.request import SeqState, Sequence, by_rank

__all__ = ["ActiveSequences"]

DECODING, PREFILLING = SeqState.DECODING, SeqState.PREFILLING


class ActiveSequences:
    """Active sequences in a ring: the head has waited longest for a step.

    A step takes its sequences from the head and puts them back at the tail, prefills and decodes alike. There is one
    exception: the oldest prefill has a place in every step, or in every second step if a step has a single place.

    With n active sequences and P places, no sequence waits longer than 2 * ceil(n / P) steps. A sequence that was just
    scheduled has at most n - 1 others ahead, and new sequences join behind it. The oldest prefill costs the ring at
    most one place a step. So with P >= 2 at least P - 1 >= P / 2 sequences leave the head in each step, and with P = 1
    one in every two steps. The last of n sequences is reached after at most ceil(2 n / P) <= 2 * ceil(n / P) steps.

    Invariants, between calls: the ring has every active sequence once. `prefills` has the sequences in the state
    PREFILLING, by id, in the order of admission. `promised` is the number of blocks that the prefills need for the
    tokens that they have yet to read. `num_gone` sequences have left so far. A step costs O(places), a sequence that
    leaves O(active).
    """

    def __init__(self, config: SchedulerConfig, blocks_for: Callable[[int], int]) -> None:
        self._places = min(config.max_batch_sequences, config.max_batch_tokens)
        self._blocks_for = blocks_for
        self._taken: list[Sequence] | None = None  # sequences taken out of the ring for a step
        self._prefill_next = True
        self._decodes: Decodes | None = None  # kept while no decode joins or leaves the ring
        self._prefills_before: list[int] = []  # ids of the prefills before the last step that fed a prefill
        self.ring: deque[Sequence] = deque()
        self.prefills: dict[int, Sequence] = {}
        self.num_gone = 0
        self.promised = 0

    def __len__(self) -> int:
        return len(self.ring) + len(self._taken or ())

    def add(self, seq: Sequence) -> None:
        """Put `seq` at the tail."""
        self.ring.append(seq)
        if seq.state is PREFILLING:
            self.prefills[seq.id] = seq
            self._owe(seq, 1)
        else:
            self._decodes = None

    def remove(self, seq: Sequence) -> None:
        """Drop `seq`, which is about to finish or to be preempted."""
        self.ring.remove(seq)
        self.num_gone += 1
        self._decodes = None
        if seq.state is PREFILLING:
            del self.prefills[seq.id]
            self._owe(seq, -1)

    def by_rank(self) -> list[Sequence]:
        """Return all active sequences, greatest rank first, which is the order of preemption."""
        return sorted(self.ring, key=by_rank, reverse=True)

    def pick(self) -> tuple[Decodes, list[Sequence]]:
        """Return the decodes and the prefills of the next step.

        If there are fewer places than sequences, the chosen sequences are out of the ring until `put_back`.
        """
        ring, places, prefills = self.ring, self._places, list(self.prefills.values())
        if len(ring) <= places:
            if self._decodes is None:
                self._decodes = Decodes([seq for seq in ring if seq.state is DECODING])
            return self._decodes, prefills
        oldest = prefills[0] if prefills and (places > 1 or self._prefill_next) else None
        self._taken = taken = [ring.popleft() for _ in range(places)]
        chosen = taken
        if oldest is not None:
            if oldest not in taken:
                # The last sequence waits instead; the oldest prefill keeps its place in the ring as well.
                ring.appendleft(taken.pop())
            chosen = [oldest, *[seq for seq in taken if seq is not oldest]]
        self._decodes = None
        decodes = Decodes([seq for seq in chosen if seq.state is DECODING])
        return decodes, [seq for seq in chosen if seq.state is PREFILLING]

    def put_back(self, scheduled: bool) -> None:
        """Return the sequences that `pick` took out: to the tail if the step was scheduled, otherwise to the head."""
        if self._taken is not None:
            if scheduled:
                self.ring.extend(self._taken)
                self._prefill_next = not self._prefill_next
            else:
                self.ring.extendleft(reversed(self._taken))
            self._taken = None

    def feed(self, batch: ScheduledBatch) -> None:
        """Count the tokens of `batch` as fed. A prefill with no tokens left becomes a decode."""
        for seq, count in zip(batch._sequences, batch._fed, strict=True):
            seq.fed += count
        blocks_for, first = self._blocks_for, batch.num_decodes
        if first == len(batch._sequences):
            return
        self._prefills_before = list(self.prefills)
        for seq, before in zip(batch._sequences[first:], batch._fed_before[first:], strict=True):
            self.promised -= blocks_for(seq.fed) - blocks_for(before)
            if seq.fed == seq._prefill_end:
                seq.state = DECODING
                del self.prefills[seq.id]
                self._decodes = None

    def take_back(self, fed_before: list[tuple[Sequence, int]]) -> None:
        """Undo `feed`. `fed_before` has each sequence with its earlier number of fed tokens.

        Sequences with prompt tokens left become prefills again, in the order of admission.
        """
        again: dict[int, Sequence] = {}
        for seq, fed in fed_before:
            if seq.state is PREFILLING:
                self._owe(seq, -1)
            seq.fed = fed
            if fed < seq._prefill_end:
                seq.state = PREFILLING
                self._owe(seq, 1)
                again[seq.id] = seq
        if again:
            places = {seq_id: place for place, seq_id in enumerate(self._prefills_before)}
            prefills = {**self.prefills, **again}.items()
            self.prefills = dict(sorted(prefills, key=lambda item: places.get(item[0], len(places))))
            self._decodes = None

    def summary(self) -> dict[str, Any]:
        """Return the values that `Scheduler.check` compares with a ring rebuilt from the sequences."""
        return {
            "active sequences": sorted(seq.id for seq in self.ring),
            "prefills": sorted(self.prefills),
            "promised blocks": self.promised,
        }

    def _owe(self, seq: Sequence, sign: int) -> None:
        """Add to `promised` the number of blocks that a prefill has not filled yet. With `sign` -1, subtract it."""
        self.promised += sign * (self._blocks_for(seq._prefill_end) - self._blocks_for(seq.fed))
