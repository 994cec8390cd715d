"""Who may become active: as many as the places, the backlog of prompts and the blocks allow."""

from __future__ import annotations

from pagepool.config import SchedulerConfig
from pagepool.scheduling.active import ActiveSequences
from pagepool.scheduling.blocks import BlockAccount, NoBlocks
from pagepool.scheduling.policy import first_chunk
from pagepool.scheduling.request import SeqState
from pagepool.scheduling.waiting import WaitingQueue

__all__ = ["admit"]


def admit(
    waiting: WaitingQueue, active: ActiveSequences, account: BlockAccount | NoBlocks, config: SchedulerConfig
) -> None:
    """Move sequences from `waiting` to `active`, in the order of their rank, until the next one has to wait.

    Nobody overtakes: a large request at the front is not starved by small ones behind it. Costs O(1) when nobody moves.
    """
    backlog = config.max_prefill_backlog
    while active.size < config.max_sequences and (backlog is None or active.unread < backlog):
        seq = waiting.peek()
        if seq is None:
            return
        if active.size:
            fits = account.admits(seq.total_tokens, active.promised)
        else:
            fits = account.starts(first_chunk(seq.total_tokens, config))
        if not fits:
            return
        seq.kv = account.open(seq.max_tokens)
        if seq.kv is not None:
            seq.kv.label = seq.id
        waiting.pop()
        seq._prefill_end = seq.total_tokens
        seq.state = SeqState.PREFILLING
        active.add(seq)
