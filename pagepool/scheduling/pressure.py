"""What gives way when the pool is out of blocks."""

from __future__ import annotations

from collections.abc import Mapping

from pagepool.scheduling.active import ActiveSequences
from pagepool.scheduling.blocks import BlockAccount, NoBlocks
from pagepool.scheduling.request import SeqState, Sequence
from pagepool.scheduling.step import Step

__all__ = ["make_room"]


def make_room(
    step: Step, sequences: Mapping[int, Sequence], active: ActiveSequences, account: BlockAccount | NoBlocks
) -> list[Sequence]:
    """Preempt, greatest rank first, until `step` without the preempted would fit; returns them, their blocks free.

    At least one is preempted, unless only one is active: the oldest is never touched. With the pool to itself it always
    finds room, since no request larger than the pool is accepted, so every call of the scheduler makes progress.
    """
    needs = dict(zip(step.batch.seq_ids, account.needs(step.batch.states, step.grow), strict=True))
    missing = sum(needs.values())
    preempted: list[Sequence] = []
    while active.size > 1:
        seq = sequences[active.newest_id()]
        active.preempt(seq)
        account.give_back([seq.kv])
        seq.kv = None
        # All that it knows, outputs included, will be read again as its prompt.
        seq._fed = 0
        seq.state = SeqState.PREEMPTED
        seq.num_preemptions += 1
        preempted.append(seq)
        missing -= needs.pop(seq.id, 0)
        if account.free_blocks() >= missing:
            break
    return preempted
