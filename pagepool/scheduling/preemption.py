"""Eviction and preemption when the pool runs out of blocks."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import NamedTuple

from pagepool.scheduling.active import ActiveSequences
from pagepool.scheduling.batch import ScheduledBatch
from pagepool.scheduling.block_manager import BlockManager
from pagepool.scheduling.prefix_adapter import PrefixAdapter
from pagepool.scheduling.request import SeqState, Sequence, by_rank
from pagepool.scheduling.waiting import WaitingQueue

__all__ = ["MAX_RECORDS", "Preemption", "PreemptionRecord"]

MAX_RECORDS = 1024  # number of records that a scheduler keeps


class PreemptionRecord(NamedTuple):
    """One action of the scheduler when blocks ran out: see `Scheduler.preemptions`.

    Attributes
    ----------
    step : int
        The step in which it happened.
    action : str
        "evict", "partial" or "recompute".
    seq_id : int
        The sequence that gave blocks; 0 for "evict".
    blocks : int
        Blocks that it gave, or that were evicted.
    wanted, free : int
        Blocks that the step needed, and blocks that were free at that time.
    reason : str
        The reason, in words.
    """

    step: int
    action: str
    seq_id: int
    blocks: int
    wanted: int
    free: int
    reason: str


@dataclass(eq=False)
class Preemption:
    """Frees blocks when the pool runs out of them, and keeps records.

    Blocks are freed in this order: cached blocks that no sequence uses; blocks that preempted sequences kept; blocks of
    active sequences, greatest rank first. A sequence loses only as many of its last blocks as needed ("partial"). A
    hybrid sequence loses all of them, because windows and recurrent states cannot be truncated. The active sequence
    with the least rank is never preempted. It always fits when it has the pool to itself, because no request larger
    than the pool is accepted. So every call of the scheduler makes progress.

    `counts` has the number of actions of each kind, `given` the number of blocks that they freed.

    Invariant: for a preempted sequence `fed == kv.len`, 0 without a state.
    """

    waiting: WaitingQueue
    active: ActiveSequences
    blocks: BlockManager
    prefix: PrefixAdapter

    def __post_init__(self) -> None:
        self._now = 0
        self._wanted = 0
        self._evicted = self.blocks.evicted  # number of evictions that are in the records
        self.records: deque[PreemptionRecord] = deque(maxlen=MAX_RECORDS)
        self.counts: Counter[str] = Counter()
        self.given: Counter[str] = Counter()
        self.num_preemptions = 0

    def take(self, batch: ScheduledBatch, now: int) -> bool:
        """Take the blocks of `batch`. Evicts cached prefixes if needed. Returns False if there are too few blocks."""
        blocks = self.blocks
        taken = blocks.append(batch.states, batch._grow, batch.lookahead)
        if blocks.evicted != self._evicted:
            self._now, self._wanted = now, 0
            for state, count in zip(batch.states, batch._grow, strict=True):
                length = state.len - count if taken else state.len
                self._wanted += blocks.blocks_for(length + count) - blocks.blocks_for(length)
            evicted, self._evicted = blocks.evicted - self._evicted, blocks.evicted
            self._record("evict", 0, evicted, 0, "cached prefixes that no sequence uses go first")
        return taken

    def make_room(self, batch: ScheduledBatch, now: int) -> bool:
        """Preempt until `batch` fits without the preempted sequences. Returns False if no sequence can be preempted."""
        needs = dict(zip(batch.seq_ids, map(self.blocks.needed, batch.states, batch._grow), strict=True))
        self._now, self._wanted, gave = now, sum(needs.values()), False
        for seq in self._victims():
            self._wanted -= needs.pop(seq.id, 0)
            missing = self._wanted - self.blocks.available()
            if gave and missing <= 0:
                break
            self._preempt(seq, max(missing, 1))
            gave = True
        return gave

    def make_room_for(self, seq: Sequence, wanted: int, now: int) -> bool:
        """Free blocks of preempted sequences other than `seq` until `wanted` are available. For an idle scheduler."""
        self._now, self._wanted = now, wanted
        for other in self._victims():
            missing = wanted - self.blocks.available()
            if missing <= 0:
                break
            if other is not seq:
                self._preempt(other, missing)
        return self.blocks.available() >= wanted

    def restart(self, seq: Sequence, now: int) -> None:
        """Preempt `seq` after a failed step: its recurrent state may include tokens that will be fed again."""
        self._now, self._wanted = now, 0
        held, free = self.blocks.held(seq), self.blocks.available()
        self.active.remove(seq)
        self.blocks.close([seq])
        seq.fed = seq._prefix.published = 0
        self._park(seq)
        self._record("recompute", seq.id, held, free, "its step was given up, so its recurrent state is lost")

    def _victims(self) -> list[Sequence]:
        """Return the sequences to take blocks from, in order. Preempted ones come first, since they do not run."""
        parked = sorted(self.waiting.preempted.values(), key=by_rank, reverse=True)
        return [seq for seq in [*parked, *self.active.by_rank()[:-1]] if seq.kv is not None]

    def _preempt(self, seq: Sequence, blocks: int) -> None:
        """Free the last `blocks` blocks of `seq`, or all. An active sequence becomes a waiting one."""
        held = self.blocks.held(seq)
        given = min(blocks, held) if self.blocks.can_cut else held
        keep = (held - given) * self.blocks.block_size
        free = self.blocks.available()
        self.prefix.publish(seq, seq.fed)
        was_active = seq._is_active
        if was_active:
            self.active.remove(seq)
        if keep:
            self.blocks.truncate(seq, keep)
        else:
            self.blocks.close([seq])
        seq.fed = keep
        seq._prefix.published = self.blocks.blocks_for(keep)
        if was_active:
            self._park(seq)
        if self.blocks.can_cut:
            reason = "its last blocks are enough" if keep else "all of its blocks are needed"
        else:
            reason = "recurrent states and windows cannot be cut"
        self._record("partial" if keep else "recompute", seq.id, given, free, reason)

    def _park(self, seq: Sequence) -> None:
        """Queue `seq`, which was active."""
        seq.state = SeqState.PREEMPTED
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(seq)

    def _record(self, action: str, seq_id: int, blocks: int, free: int, reason: str) -> None:
        self.records.append(PreemptionRecord(self._now, action, seq_id, blocks, self._wanted, free, reason))
        self.counts[action] += 1
        self.given[action] += blocks
