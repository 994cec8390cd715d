"""Admission: make waiting requests active within the limits of places, quotas and blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from pagepool.config import SchedulerConfig
from pagepool.scheduling.active import ActiveSequences
from pagepool.scheduling.block_manager import BlockManager
from pagepool.scheduling.preemption import Preemption
from pagepool.scheduling.prefix_adapter import PrefixAdapter
from pagepool.scheduling.request import SeqState, Sequence
from pagepool.scheduling.tenants import Tenants
from pagepool.scheduling.waiting import WaitingQueue

__all__ = ["Admission"]

# Free blocks per active sequence that must remain when a preempted sequence is admitted.
SPARE_BLOCKS = 1
# Share of the blocks that stays free when a request is admitted while others run. Without it a full pool preempts 2.5
# times as often; hybrid sequences, which lose all blocks then, wait a quarter longer for their first token (p99).
WATERMARK = 0.01


class Refusal(NamedTuple):
    """The state in which the next request did not fit.

    Attributes
    ----------
    seq : Sequence
        The request.
    num_gone : int
        Number of sequences that had left the active sequences.
    room : int
        Number of blocks that were available for it.
    cached : int
        Number of its prompt tokens in the prefix cache. It cannot rise while `inserted` stays the same.
    inserted : int
        `PrefixCache.inserted` at that time.
    """

    seq: Sequence
    num_gone: int
    room: int
    cached: int
    inserted: int


@dataclass(eq=False)
class Admission:
    """Moves sequences from the waiting queue to the active sequences, with their blocks from the prefix cache.

    No request overtakes the next one, so small requests cannot starve a large one. There is one exception: a request
    that needs blocks which another request is computing is deferred until they are in the prefix cache, and later
    requests pass it. A request that did not fit is tried again when there is more room, when more of its prompt is
    cached, or when a sequence has left: this affects quotas and preempted sequences.

    While other requests run, blocks in a store are read over several steps, before a request is admitted.
    """

    config: SchedulerConfig
    waiting: WaitingQueue
    active: ActiveSequences
    blocks: BlockManager
    prefix: PrefixAdapter
    tenants: Tenants
    preemption: Preemption
    refusal: Refusal | None = None  # why the last attempt was refused, None if it succeeded

    def served(self, tenant: Any) -> float:
        """Return the counter of a tenant, for the policy."""
        return self.tenants.served(tenant)

    def admit(self, now: int) -> None:
        """Admit requests until the next one has to wait."""
        config, active, waiting = self.config, self.active, self.waiting
        waiting.resume(self.prefix.will_publish)
        while len(waiting) and len(active) < config.max_sequences:
            seq = waiting.peek(self, self.tenants.may_start)
            if seq is None:
                return
            if self.blocks.free_slots == 0:
                return  # decide which request gets the next slot only when a slot is free
            room = self.blocks.available() - active.promised
            if self._is_short(seq, room):
                return
            leader = self.prefix.leader(seq, active.prefills.values())
            if leader is not None:
                waiting.defer(seq, *leader)
                self.prefix.stop_at(*leader)
                continue
            if len(active) and self.prefix.load(seq):
                return  # the next steps read the rest
            if not self._start(seq, now):
                inserted = self.prefix.inserted  # read before the lookup: other threads may use the cache
                self.refusal = Refusal(seq, active.num_gone, room, self.prefix.cached(seq), inserted)
                return
            self.refusal = None
            waiting.remove(seq)
            seq.num_cached = seq.fed
            if config.explain_misses and not seq.output_tokens:
                self.prefix.note_miss(seq)
            seq._prefill_end = seq.total_tokens
            seq.state = SeqState.PREFILLING
            self.enter(seq)

    def enter(self, seq: Sequence) -> None:
        """Make `seq` active."""
        self.tenants.start(seq)
        self.waiting.change(seq.tenant)  # its quota has less room now
        self.active.add(seq)

    def refuses_forks(self, seq: Sequence, n: int) -> str | None:
        """Return the reason why `n` forks of `seq` cannot become active, or None."""
        config, active, needed = self.config, len(self.active), n * self.blocks.blocks_for(seq.max_tokens)
        if active + n > config.max_sequences:
            return f"{n} forks and {active} active sequences are more than max_sequences, {config.max_sequences}"
        slots = self.blocks.free_slots
        if slots is not None and slots < n:
            return f"{n} forks need {n} slots for their recurrent states, {slots} are free"
        held, quota = self.tenants.quota(seq.tenant)
        if held + needed > quota:
            return f"{n} forks may need {needed} blocks, tenant {seq.tenant!r} has used {held} of its quota of {quota}"
        return None

    def _is_short(self, seq: Sequence, room: int) -> bool:
        """Return true if `seq` did not fit at the last attempt and nothing has changed that could make it fit."""
        last = self.refusal
        if last is None or not len(self.active):
            return False
        if seq is not last.seq or self.active.num_gone != last.num_gone or room > last.room:
            return False
        inserted = self.prefix.inserted
        if inserted != last.inserted:
            if self.prefix.cached(seq) > last.cached:
                return False
            self.refusal = last._replace(inserted=inserted)
        return True

    def _start(self, seq: Sequence, now: int) -> bool:
        """Give `seq` cached blocks and its kept blocks. Returns false and restores `seq` if it does not fit."""
        fed, had_none = seq.fed, seq.kv is None
        if had_none:
            self.blocks.open(seq)
            self.prefix.begin(seq)
        found = self.prefix.adopt(seq)
        if self._fits(seq, now):
            return True
        if had_none:
            self.blocks.close([seq])
        elif found:
            self.blocks.truncate(seq, fed)
        seq.fed = fed
        seq._prefix.published = self.blocks.blocks_for(fed)
        return False

    def _fits(self, seq: Sequence, now: int) -> bool:
        blocks, active, config = self.blocks, self.active, self.config
        held = blocks.blocks_for(seq.fed)
        if not len(active):
            # If nothing else runs, room for the first chunk is enough: a request as large as the pool must start.
            end = seq.fed + min(seq.total_tokens - seq.fed, config.max_prefill_tokens, config.max_batch_tokens)
            wanted = blocks.blocks_for(end) - held
            return blocks.can_take(wanted) or self.preemption.make_room_for(seq, wanted, now)
        # The whole prompt must fit, and the remaining blocks of the admitted prompts. A check of the first chunk alone
        # would admit more prompts than the pool can hold, and then preempt them.
        wanted = blocks.blocks_for(seq.total_tokens) - held
        if seq.state is SeqState.PREEMPTED:
            wanted += SPARE_BLOCKS * len(active)
        return blocks.can_take(active.promised + wanted + int(blocks.capacity * WATERMARK))
