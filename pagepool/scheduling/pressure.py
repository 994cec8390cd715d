"""The pressure ladder: what gives way when the pool is out of blocks, and how it comes back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pagepool.config import SchedulerConfig
from pagepool.errors import SwapError
from pagepool.scheduling.active import ActiveSequences
from pagepool.scheduling.blocks import BlockAccount, NoBlocks, by_group
from pagepool.scheduling.costs import cheaper_to_swap
from pagepool.scheduling.floors import TenantFloors
from pagepool.scheduling.no_reuse import NoReuse
from pagepool.scheduling.records import PressureLog, PressureRecord
from pagepool.scheduling.request import SeqState, Sequence
from pagepool.scheduling.reuse import PrefixReuse
from pagepool.scheduling.step import Step
from pagepool.scheduling.swap import SwapFile, Ticket
from pagepool.scheduling.tenants import Tenants
from pagepool.scheduling.waiting import WaitingQueue

__all__ = ["PressureLadder"]


class PressureLadder:
    """The rungs, from the first: cached prefixes that nobody uses; what preempted sequences were left with; then active
    sequences, the greatest rank first. Tenants at their floor are spared. Each gives its last blocks, no more than are
    needed ("partial", or any ladder with a prefix cache), or all; they are written to the swap file when the cost table
    says that this is cheaper than reading their tokens again. The oldest active sequence never gives way: with the pool
    to itself it always finds room, since no request larger than the pool is accepted, so every call of the scheduler
    makes progress.

    Invariants: `parked` holds exactly the preempted sequences that have blocks or a ticket; `fed == kv.len` for them;
    a ticket holds the tokens that follow `fed`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        sequences: Mapping[int, Sequence],
        waiting: WaitingQueue,
        active: ActiveSequences,
        account: BlockAccount | NoBlocks,
        reuse: PrefixReuse | NoReuse,
        tenants: Tenants,
        floors: TenantFloors,
        swap: SwapFile | None,
    ) -> None:
        self._costs = config.costs
        # With a cache, too: what is given goes to the cache, and only as much of it is evicted as is needed.
        self._partial = "partial" in config.ladder or isinstance(reuse, PrefixReuse)
        self._swap = swap if "swap" in config.ladder else None
        self._sequences = sequences
        self._active = active
        self._waiting = waiting
        self._account = account
        self._reuse = reuse
        self._floors = floors
        self._evicted = 0
        self._now = 0
        self._wanted = 0
        self.parked: dict[int, Sequence] = {}
        self.num_preemptions = 0
        self.log = PressureLog(config.max_records)

    def take(self, step: Step, now: int) -> bool:
        """Take the blocks of `step`, cached prefixes evicted as needed; False when the pool is out."""
        groups = [seq._group for seq in step.batch._sequences] if self._floors else None
        taken = self._account.take(step.batch.states, step.grow, groups)
        if self._account.evicted != self._evicted:
            grown = step.grow if taken else [0] * len(step.grow)
            before = [state.len - count for state, count in zip(step.batch.states, grown, strict=True)]
            blocks_for = self._account.blocks_for
            needs = [blocks_for(a + b) - blocks_for(a) for a, b in zip(before, step.grow, strict=True)]
            self._now, self._wanted = now, sum(needs)
            evicted, self._evicted = self._account.evicted - self._evicted, self._account.evicted
            self._record("evict", 0, evicted, 0, "cached prefixes that nobody uses go first")
        return taken

    def make_room(self, step: Step, now: int) -> bool:
        """Let others give way until `step` without them would fit. False when nobody is left who can."""
        needs = dict(zip(step.batch.seq_ids, self._account.needs(step.batch.states, step.grow), strict=True))
        groups = by_group(list(needs.values()), [seq._group for seq in step.batch._sequences])
        self._now = now
        self._wanted = sum(needs.values())
        gave = False
        for seq, most in self._victims():
            need = needs.pop(seq.id, 0)
            self._wanted -= need
            groups[seq._group] -= need
            missing = self._wanted - self._account.available(groups)
            if gave and missing <= 0:
                break
            self._give_way(seq, min(max(missing, 1), most))
            gave = True
        return gave

    def make_room_for(self, seq: Sequence, wanted: int, now: int) -> bool:
        """Take from preempted sequences other than `seq`, while nothing runs, until `wanted` blocks are there."""
        self._now, self._wanted = now, wanted
        needs = {seq._group: wanted}
        for other, most in self._victims():
            missing = wanted - self._account.available(needs)
            if missing <= 0:
                break
            if other is not seq:
                self._give_way(other, min(missing, most))
        return self._account.available(needs) >= wanted

    def restore(self, seq: Sequence, now: int) -> None:
        """Bring back what `seq`, whose blocks fit, has in the swap file; what cannot be read will be recomputed."""
        self._now = now
        swapped = seq._swapped
        if swapped is None or self._swap is None:
            seq._swapped = None
            self.parked.pop(seq.id, None)
            return
        first, ticket, end = swapped
        self._wanted = len(ticket.places)
        taken = first == seq._fed and self._account.take([seq.kv], [end - first], [seq._group])
        seq._swapped = None
        self.parked.pop(seq.id, None)
        if not taken:
            self._swap.drop(ticket)  # more of it was found in the prefix cache
            return
        try:
            held = self._account.blocks_for(first)
            self._swap.load(ticket, seq.kv.blocks[held:])
        except SwapError as error:
            self._account.cut(seq.kv, first)
            self._record("lost", seq.id, len(ticket.places), 0, f"{error}; its tokens are read again")
        else:
            seq._fed = end
            self._record("restore", seq.id, len(ticket.places), 0, "it was admitted again")

    def forget(self, seq: Sequence) -> None:
        """`seq`, which was preempted, ends."""
        self.parked.pop(seq.id, None)
        if seq._swapped is not None and self._swap is not None:
            self._swap.drop(seq._swapped[1])
            seq._swapped = None

    def rebuild(self, alive: list[Sequence]) -> None:
        """Have what `alive`, all that wait or are active, have, whatever stands here."""
        if self._swap is not None:
            self._swap.reclaim(self, [seq._swapped[1] for seq in alive if seq._swapped is not None])
        self.parked = {seq.id: seq for seq in alive if _is_parked(seq)}

    def audit(self, alive: list[Sequence]) -> str | None:
        """The first equation that does not hold, or None."""
        parked = {seq.id: seq for seq in alive if _is_parked(seq)}
        if self.parked != parked:
            return f"{len(parked)} preempted sequences have blocks or tickets, {len(self.parked)} are parked"
        tickets = [seq._swapped for seq in alive if seq._swapped is not None]
        if any(seq._swapped[0] != seq._fed for seq in parked.values() if seq._swapped is not None):
            return "a ticket does not hold the tokens that follow those in blocks"
        places = sorted(place for _, ticket, _ in tickets for place in ticket.places)
        if self._swap is not None and places != sorted(self._swap.places_of(self)):
            return f"tickets have {len(places)} places, {len(self._swap.places_of(self))} are held in the swap file"
        return None

    def _victims(self) -> Iterator[tuple[Sequence, int]]:
        """Who gives way, in order, and how many blocks at most. Preempted ones first: they stand still anyhow. Tenants
        go no lower than to their floor; only when nobody else is left, and blocks that the scheduler has not given
        away make the pool too small for what it promised, are they asked for all."""
        parked = sorted(self.parked.values(), key=lambda seq: seq._rank, reverse=True)
        running = [self._sequences[number] for number in self._active.by_rank()[:0:-1]]
        spared = []
        for seq in (*parked, *running):
            if seq.kv is None:
                continue
            above = self._floors.above(seq.tenant)
            held = self._account.blocks_for(seq.fed)
            if above is None or above >= held:
                yield seq, held
                continue
            if above > 0 and self._partial:
                yield seq, above
            spared.append(seq)
        for seq in spared:
            if seq.kv is not None:
                yield seq, self._account.blocks_for(seq.fed)

    def _give_way(self, seq: Sequence, blocks: int) -> None:
        """Take `blocks` blocks, or all that it has, from the end of `seq`; it waits then, if it was active."""
        account, size = self._account, 0
        held = account.blocks_for(seq._fed)
        given = min(blocks, held) if self._partial else held
        if held:
            size = seq.kv.block_size
        keep = (held - given) * size
        # The last token known is always fed again, since its result was not used.
        end = min(seq._fed, seq.total_tokens - 1)
        free = account.available()
        self._reuse.publish(seq, seq._fed)
        was_active = seq.state is not SeqState.PREEMPTED
        if was_active:
            self._active.preempt(seq)
        rung, reason = self._choose(seq, keep, end, given)
        if keep:
            account.cut(seq.kv, keep)
        elif seq.kv is not None:
            account.give_back([seq.kv])
            seq.kv = None
        seq._fed = keep
        seq._kept = account.blocks_for(keep)
        self._reuse.recount(seq)
        if was_active:
            seq.state = SeqState.PREEMPTED
            seq.num_preemptions += 1
            self.num_preemptions += 1
            self._waiting.push(seq)
        if seq.kv is not None or seq._swapped is not None:
            self.parked[seq.id] = seq
        else:
            self.parked.pop(seq.id, None)
        self._record(rung, seq.id, given, free, reason)

    def _choose(self, seq: Sequence, keep: int, end: int, blocks: int) -> tuple[str, str]:
        """The rung for the tokens from `keep` to `end`, in `blocks` blocks, with its reason; writes them to the swap
        file when that is it. What was swapped before stays useful only while no token before it is lost."""
        swapped = seq._swapped
        lost = max(swapped[2] if swapped is not None else end, end) - keep
        way, why = ("partial", "its last blocks are enough") if keep else ("recompute", "all of its blocks are needed")
        if not self._partial:
            why = "the ladder has no partial preemption"
        if self._swap is not None and end > keep:
            if not cheaper_to_swap(self._costs, blocks, lost):
                why += f"; reading {lost} tokens again costs no more than swapping {blocks} blocks"
            else:
                try:
                    used = -(-end // seq.kv.block_size)
                    ticket = self._swap.store(seq.kv.blocks[keep // seq.kv.block_size : used], self)
                except SwapError as error:
                    why += f"; {error}"
                else:
                    if swapped is not None:
                        ticket = Ticket(ticket.places + swapped[1].places, ticket.checksums + swapped[1].checksums)
                        end = swapped[2]
                    seq._swapped = (keep, ticket, end)
                    return "swap", f"swapping {blocks} blocks costs less than reading {lost} tokens again"
        if swapped is not None and self._swap is not None:
            self._swap.drop(swapped[1])
            seq._swapped = None
        return way, why

    def _record(self, rung: str, seq_id: int, blocks: int, free: int, reason: str) -> None:
        self.log.add(PressureRecord(self._now, rung, seq_id, blocks, self._wanted, free, reason))


def _is_parked(seq: Sequence) -> bool:
    return seq.state is SeqState.PREEMPTED and (seq.kv is not None or seq._swapped is not None)
