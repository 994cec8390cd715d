"""Who may become active: as many as the places, the backlog of prompts, the quotas and the blocks allow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pagepool.config import SchedulerConfig
from pagepool.scheduling.active import ActiveSequences
from pagepool.scheduling.blocks import BlockAccount, NoBlocks
from pagepool.scheduling.floors import TenantFloors
from pagepool.scheduling.no_reuse import NoReuse
from pagepool.scheduling.pressure import PressureLadder
from pagepool.scheduling.request import SeqState, Sequence
from pagepool.scheduling.reuse import PrefixReuse
from pagepool.scheduling.shares import first_chunk
from pagepool.scheduling.tenants import Tenants
from pagepool.scheduling.waiting import WaitingQueue

__all__ = ["Admission"]

PREFILLING = SeqState.PREFILLING


@dataclass(slots=True)
class Refusal:
    """Whose turn it was when one did not fit, how many had gone by then, and the room; how much of it was cached, when
    the cache had taken in `inserted` blocks: no more of it since, while it takes in none."""

    seq: Sequence
    num_gone: int
    room: int
    cached: int
    inserted: int


class Bounds:
    """As `Admission` for a policy, at no cost: `cached` may be more than it is."""

    def __init__(self, reuse: PrefixReuse | NoReuse, tenants: Tenants) -> None:
        self.cached = reuse.found
        self.served = tenants.served


class Admission:
    """Moves sequences from the waiting line to the active ones, with the blocks that the prefix cache has for them.

    Nobody overtakes the one whose turn it is: a large request is not starved by small ones behind it. It is tried again
    when more blocks are there than when it did not fit, when more of its prompt is cached, so that it wants fewer, or
    when someone has gone, who counts for a quota, hysteresis and whole admission.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        waiting: WaitingQueue,
        active: ActiveSequences,
        account: BlockAccount | NoBlocks,
        reuse: PrefixReuse | NoReuse,
        tenants: Tenants,
        floors: TenantFloors,
        ladder: PressureLadder,
    ) -> None:
        self._config = config
        self._waiting = waiting
        self._active = active
        self._account = account
        self._reuse = reuse
        self._tenants = tenants
        self._floors = floors
        self._ladder = ladder
        self._short: Refusal | None = None  # of the last try, unless it was admitted
        self.bounds = Bounds(reuse, tenants)

    def cached(self, seq: Sequence) -> int:
        """Tokens of `seq` that the prefix cache has, for the policy."""
        return self._reuse.cached(seq)

    def grown(self) -> Iterable[Any] | None:
        """The tenants of those of whom more may be cached than at the last call, None for all, for the policy."""
        return self._reuse.grown()

    def served(self, tenant: object) -> float:
        """What a tenant was served, for the policy."""
        return self._tenants.served(tenant)

    def forget(self) -> None:
        """Try the next one whatever came of it last."""
        self._short = None

    def admit(self, now: int) -> None:
        """Admit until the next one has to wait."""
        config, active, waiting = self._config, self._active, self._waiting
        backlog = config.max_prefill_backlog
        while len(waiting) and active.size < config.max_sequences and (backlog is None or active.unread < backlog):
            seq = waiting.peek(self, now, self._tenants.may_start)
            if seq is None:
                return
            room = self._account.available() - active.promised
            if self._is_short(seq, room):
                return
            if not self._start(seq, now):
                inserted = self._reuse.inserted  # before it is looked up: others may use the cache, too
                self._short = Refusal(seq, active.num_gone, room, self._reuse.cached(seq), inserted)
                return
            self._short = None
            if waiting.is_aged(seq, now):
                seq._rank = (0, 0, seq.id)
            # It waits, whatever raises, until it is active.
            waiting.starts(seq)
            self._tenants.start(seq)
            self._floors.enter(seq)
            seq.num_cached = seq._fed
            seq._prefill_end = seq.total_tokens
            active.add(seq)
            seq.state = PREFILLING
            waiting.remove(seq)
            self._reuse.starts(seq)

    def _is_short(self, seq: Sequence, room: int) -> bool:
        """Whether `seq` did not fit when it was tried last, and would not now."""
        short, reuse = self._short, self._reuse
        if short is None or not self._active.size:
            return False
        if seq is not short.seq or self._active.num_gone != short.num_gone or room > short.room:
            return False
        inserted = reuse.inserted
        if inserted != short.inserted:
            if reuse.cached(seq) > short.cached:
                return False
            short.inserted = inserted
        return True

    def _start(self, seq: Sequence, now: int) -> bool:
        """Give `seq` its state, with all that is cached, kept or swapped; False, with nothing changed, when it does not
        fit."""
        kept, state, fits = seq._fed, seq.kv, False
        try:
            if state is None:
                seq.kv = self._account.open(seq.max_tokens, seq.id)
                if seq._swapped is None:
                    self._reuse.begins(seq)
            self._reuse.adopt(seq)
            fits = self._fits(seq, now)
            if fits:
                self._ladder.restore(seq, now)
        finally:
            if not fits:
                self._stay(seq, kept, state is None)
        return fits

    def _stay(self, seq: Sequence, kept: int, had_none: bool) -> None:
        """Give back what it was to start with."""
        if had_none and seq.kv is not None:
            self._account.give_back([seq.kv])
            seq.kv = None
        elif seq.kv is not None and seq.kv.len > kept:
            self._account.cut(seq.kv, kept)
        seq._fed = kept
        seq._kept = self._account.blocks_for(kept)

    def _fits(self, seq: Sequence, now: int) -> bool:
        account, active, config = self._account, self._active, self._config
        held = account.blocks_for(seq._fed)
        if not active.size:
            end = seq._fed + first_chunk(seq.total_tokens - seq._fed, config)
            if seq._swapped is not None:
                end = max(end, seq._swapped[2])
            # Enough when nothing else runs: a request as large as the pool must start, and no watermark is left then.
            wanted = account.blocks_for(end) - held
            return account.available({seq._group: wanted}) >= wanted or self._ladder.make_room_for(seq, wanted, now)
        if config.admission == "whole" and (active.reserved + account.blocks_for(seq.max_tokens) > account.capacity):
            return False
        wanted = account.blocks_for(seq.total_tokens) - held
        if seq.state is SeqState.PREEMPTED:
            wanted += config.hysteresis * active.size
        return account.admits(wanted, active.promised, seq._group)
