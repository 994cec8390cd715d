"""Preemption: what is evicted or preempted when the pool is out of blocks, by which action, and how it comes back."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import NamedTuple

from pagepool.config import SchedulerConfig
from pagepool.scheduling.active import ActiveSequences
from pagepool.scheduling.batch import ScheduledBatch
from pagepool.scheduling.block_manager import BlockManager
from pagepool.scheduling.prefix_adapter import PrefixAdapter
from pagepool.scheduling.request import SeqState, Sequence, by_rank
from pagepool.scheduling.waiting import WaitingQueue

__all__ = ["MAX_RECORDS", "Preemption", "PreemptionLog", "PreemptionRecord"]

MAX_RECORDS = 1024  # kept by a scheduler


class PreemptionRecord(NamedTuple):
    """One action of the scheduler when blocks ran out: see `Scheduler.preemptions`."""

    step: int
    action: str
    seq_id: int
    blocks: int
    wanted: int
    free: int
    reason: str


class PreemptionLog:
    """The last records, the newest last. Of all actions: how often each was taken, and how many blocks it gave."""

    def __init__(self) -> None:
        self.records: deque[PreemptionRecord] = deque(maxlen=MAX_RECORDS)
        self.counts: Counter[str] = Counter()
        self.blocks: Counter[str] = Counter()
        self.num_preemptions = 0

    def add(self, record: PreemptionRecord) -> None:
        """Note one record."""
        self.records.append(record)
        self.counts[record.action] += 1
        self.blocks[record.action] += record.blocks


@dataclass(eq=False)
class Preemption:
    """Frees blocks in this order: cached blocks that nobody uses; the remaining blocks of preempted sequences; then
    those of active sequences, the greatest rank first. A sequence gives its last blocks, no more than are needed
    ("partial", or always with a prefix cache), or all of them. The active sequence with the least rank is never
    preempted. With the pool to itself it always finds room, since no request
    larger than the pool is accepted, so every call of the scheduler makes progress.

    Invariant: for a preempted sequence `fed == kv.len`, 0 without a state.
    """

    config: SchedulerConfig
    waiting: WaitingQueue
    active: ActiveSequences
    blocks: BlockManager
    prefix: PrefixAdapter
    log: PreemptionLog

    def __post_init__(self) -> None:
        # With a cache, too: what is given goes to the cache, and only as much of it is evicted as is needed.
        # What a window has given back and a recurrent state cannot be cut: hybrid sequences give all.
        is_partial = "partial" in self.config.preemption_actions or self.prefix.cache is not None
        self._partial = is_partial and self.blocks.can_cut
        self._now = 0
        self._wanted = 0
        self._evicted = self.blocks.evicted  # of which there are records

    def take(self, batch: ScheduledBatch, now: int) -> bool:
        """Take the blocks of `batch`, cached prefixes evicted as needed; False when the pool is out."""
        sequences, blocks = batch._sequences, self.blocks
        taken = blocks.append(batch.states, batch._grow)
        if blocks.evicted != self._evicted:
            grown = batch._grow if taken else [0] * len(sequences)
            self._now, self._wanted = (
                now,
                sum(
                    blocks.blocks_for(state.len - done + count) - blocks.blocks_for(state.len - done)
                    for state, done, count in zip(batch.states, grown, batch._grow, strict=True)
                ),
            )
            evicted, self._evicted = blocks.evicted - self._evicted, blocks.evicted
            self._record("evict", 0, evicted, 0, "cached prefixes that nobody uses go first")
        return taken

    def make_room(self, batch: ScheduledBatch, now: int) -> bool:
        """Preempt until `batch` without the preempted sequences would fit. False when none is left to preempt."""
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
        """While nothing runs, take blocks of preempted sequences other than `seq` until `wanted` are available."""
        self._now, self._wanted = now, wanted
        for other in self._victims():
            missing = wanted - self.blocks.available()
            if missing <= 0:
                break
            if other is not seq:
                self._preempt(other, missing)
        return self.blocks.available() >= wanted

    def restart(self, seq: Sequence, now: int) -> None:
        """Preempt `seq`, whose recurrent state may have passed over tokens that it will be fed again."""
        self._now, self._wanted = now, 0
        held, free = self.blocks.held(seq), self.blocks.available()
        self.active.remove(seq)
        self.blocks.close([seq])
        seq.fed = seq._published = 0
        self._park(seq)
        self._record("recompute", seq.id, held, free, "its step was given up, and with it its recurrent state")

    def _victims(self) -> list[Sequence]:
        """The sequences to take blocks from, in order: preempted ones come first, since they do not run."""
        parked = sorted(self.waiting.preempted.values(), key=by_rank, reverse=True)
        return [seq for seq in [*parked, *self.active.by_rank()[:-1]] if seq.kv is not None]

    def _preempt(self, seq: Sequence, blocks: int) -> None:
        """Take `blocks` blocks, or all, from the end of `seq`; an active sequence waits then."""
        size = self.blocks.block_size
        held = self.blocks.held(seq)
        given = min(blocks, held) if self._partial else held
        keep = (held - given) * size
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
        seq._published = self.blocks.blocks_for(keep)
        if was_active:
            self._park(seq)
        if not self._partial:
            reason = "the config has no partial preemption"
        else:
            reason = "its last blocks are enough" if keep else "all of its blocks are needed"
        self._record("partial" if keep else "recompute", seq.id, given, free, reason)

    def _park(self, seq: Sequence) -> None:
        """`seq`, which was active, waits."""
        seq.state = SeqState.PREEMPTED
        seq.num_preemptions += 1
        self.log.num_preemptions += 1
        self.waiting.push(seq)

    def _record(self, action: str, seq_id: int, blocks: int, free: int, reason: str) -> None:
        self.log.add(PreemptionRecord(self._now, action, seq_id, blocks, self._wanted, free, reason))
