"""The sequences that a scheduler knows, and what it tells of them."""

from __future__ import annotations

from typing import Any

from pagepool.config import SchedulerConfig
from pagepool.scheduling.active import ActiveSequences
from pagepool.scheduling.admission import Admission
from pagepool.scheduling.batch import ScheduledBatch
from pagepool.scheduling.blocks import BlockAccount, NoBlocks
from pagepool.scheduling.floors import TenantFloors
from pagepool.scheduling.no_reuse import NoReuse
from pagepool.scheduling.planner import Planner
from pagepool.scheduling.pressure import PressureLadder
from pagepool.scheduling.records import PressureLog
from pagepool.scheduling.request import Sequence
from pagepool.scheduling.reuse import PrefixReuse
from pagepool.scheduling.tenants import Tenants
from pagepool.scheduling.undo import Undo
from pagepool.scheduling.waiting import WaitingQueue

__all__ = ["Roster"]


class Roster:
    """The part of a `Scheduler` that answers questions."""

    _sequences: dict[int, Sequence]
    _finished: dict[int, Sequence]
    _waiting: WaitingQueue
    _active: ActiveSequences
    _account: BlockAccount | NoBlocks
    _ladder: PressureLadder
    _tenants: Tenants
    _floors: TenantFloors
    _reuse: PrefixReuse | NoReuse
    _admission: Admission
    _planner: Planner
    _out: ScheduledBatch | None
    _undo: Undo | None
    config: SchedulerConfig
    num_steps: int

    def __repr__(self) -> str:
        counts = f"{self.active_count} active, {self.waiting_count} waiting, {len(self._finished)} finished"
        return f"<{type(self).__name__}: {counts}>"

    def get_sequence(self, seq_id: int) -> Sequence | None:
        """The sequence with this id, or None when it is unknown, drained or removed."""
        return self._sequences.get(seq_id)

    @property
    def outstanding(self) -> ScheduledBatch | None:
        """The batch that `schedule` has handed out and no `commit` has taken yet, or None.

        For a caller that was interrupted, perhaps before it had the batch: run again, it stores the same.
        """
        return None if self._out is None or self._out._committed else self._out

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
    def num_preemptions(self) -> int:
        """How often an active sequence had to give way."""
        return self._ladder.num_preemptions

    @property
    def pressure(self) -> PressureLog:
        """What gave way when blocks ran out, and why."""
        return self._ladder.log

    @property
    def num_tokens(self) -> int:
        """Tokens whose places in the pool are taken, over all active sequences and those that kept blocks
        when they were preempted; 0 without a pool."""
        return self._account.num_tokens

    def stats(self) -> dict[str, Any]:
        """Where everything stands, as a dict; `pressure` counts the steps down each rung, `given` their blocks."""
        account = self._account
        return {
            "steps": self.num_steps,
            "active": self.active_count,
            "waiting": self.waiting_count,
            "finished": len(self._finished),
            "tokens": account.num_tokens,
            "capacity": account.capacity,
            "available": account.available(),
            "promised": self._active.promised,
            "preemptions": self.num_preemptions,
            "pressure": dict(self.pressure.counts),
            "given": dict(self.pressure.blocks),
        }
