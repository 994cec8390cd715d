"""Which waiting requests become active: as many as the places, quotas and blocks allow."""

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

# Free blocks per active sequence that must remain when a preempted sequence comes back.
SPARE_BLOCKS = 1


class Refusal(NamedTuple):
    """The next request, when it did not fit.

    num_gone   sequences that had left the active ones by then
    room       blocks that were free for it
    cached     tokens of its prompt that were cached when the cache had inserted `inserted` blocks in all; they are no
               more as long as `inserted` stays the same
    """

    seq: Sequence
    num_gone: int
    room: int
    cached: int
    inserted: int


@dataclass(eq=False)
class Admission:
    """Moves sequences from the waiting queue to the active ones, with the blocks that the prefix cache has for them.

    No request overtakes the next one, so a large request is not starved by small ones behind it. The exception is a
    request that needs the blocks which another request is computing: it is deferred until they are in the prefix cache,
    and others pass it. A request that did not fit is tried again when there is more room, when more of its prompt is
    cached, or when a sequence has left. A sequence that leaves counts for quotas, for preempted sequences and for the
    admission of whole requests.
    """

    config: SchedulerConfig
    waiting: WaitingQueue
    active: ActiveSequences
    blocks: BlockManager
    prefix: PrefixAdapter
    tenants: Tenants
    preemption: Preemption
    refusal: Refusal | None = None  # of the last try, unless it was admitted

    def cached(self, seq: Sequence) -> int:
        """Tokens of `seq` that the prefix cache has, for the policy."""
        return self.prefix.cached(seq)

    def served(self, tenant: Any) -> float:
        """The counter of a tenant, for the policy."""
        return self.tenants.served(tenant)

    def admit(self, now: int) -> None:
        """Admit until the next one has to wait."""
        config, active, waiting = self.config, self.active, self.waiting
        waiting.resume(now, self.prefix.will_publish)
        while len(waiting) and len(active) < config.max_sequences:
            seq = waiting.peek(self, now, self.tenants.may_start)
            if seq is None:
                return
            if self.blocks.free_slots == 0:
                return  # which request gets the next slot is decided when one is freed
            room = self.blocks.available() - active.promised
            if self._is_short(seq, room):
                return
            leader = None if waiting.is_aged(seq, now) else self.prefix.leader(seq, active.prefills.values())
            if leader is not None:
                waiting.defer(seq, *leader)
                self.prefix.stop_at(*leader)
                continue
            if not self._start(seq, now):
                inserted = self.prefix.inserted  # read before the lookup: other threads may use the cache
                self.refusal = Refusal(seq, active.num_gone, room, self.prefix.cached(seq), inserted)
                return
            self.refusal = None
            waiting.remove(seq)
            if waiting.is_aged(seq, now):
                seq._rank = (0, 0, seq.id)  # goes before every request that came later
            seq.num_cached = seq.fed
            seq._prefill_end = seq.total_tokens
            seq.state = SeqState.PREFILLING
            self.enter(seq)

    def enter(self, seq: Sequence) -> None:
        """`seq` is active from now on."""
        self.tenants.start(seq)
        self.waiting.change(seq.tenant)  # requests that had room in its quota may have none now
        self.active.add(seq)

    def refuses_forks(self, seq: Sequence, n: int) -> str | None:
        """The reason why `n` forks of `seq` cannot be active, or None."""
        config, active, needed = self.config, len(self.active), n * self.blocks.blocks_for(seq.max_tokens)
        if active + n > config.max_sequences:
            return f"{n} forks do not fit beside {active} active sequences: max_sequences is {config.max_sequences}"
        if config.admission == "whole" and self.active.reserved + needed > self.blocks.capacity:
            return (
                f"{n} forks may need {needed} blocks and all others {self.active.reserved}, "
                f"the pool has {self.blocks.capacity}"
            )
        slots = self.blocks.free_slots
        if slots is not None and slots < n:
            return f"{n} forks need {n} slots for their recurrent states, {slots} are free"
        held, quota = self.tenants.quota(seq.tenant)
        if held + needed > quota:
            return f"{n} forks may need {needed} blocks beside {held}, the quota of tenant {seq.tenant!r} is {quota}"
        return None

    def _is_short(self, seq: Sequence, room: int) -> bool:
        """Whether `seq` did not fit when it was tried last, and would not now."""
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
        """Give `seq` its blocks: cached ones and those that it kept. False, and as before, when it does not fit."""
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
            # Enough for its first chunk when nothing else runs: a request as large as the pool must start.
            end = seq.fed + min(seq.total_tokens - seq.fed, config.max_prefill_tokens, config.max_batch_tokens)
            wanted = blocks.blocks_for(end) - held
            return blocks.available() >= wanted or self.preemption.make_room_for(seq, wanted, now)
        if config.admission == "whole" and active.reserved + blocks.blocks_for(seq.max_tokens) > blocks.capacity:
            return False
        # Room for the whole prompt, and for the blocks that the admitted prompts have yet to take. Asking only for the
        # first chunk would admit more prompts than the pool can hold, and then preempt them.
        wanted = blocks.blocks_for(seq.total_tokens) - held
        if seq.state is SeqState.PREEMPTED:
            wanted += SPARE_BLOCKS * len(active)
        return blocks.available() - active.promised - wanted >= int(blocks.capacity * config.watermark)
