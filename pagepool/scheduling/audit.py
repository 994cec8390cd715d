"""Whether all that a scheduler keeps agrees with what its sequences say of themselves."""

from __future__ import annotations

from pagepool.scheduling.request import SeqState, Sequence
from pagepool.scheduling.roster import Roster

__all__ = ["audit", "is_active", "slots_of"]

WAITING, FINISHED = SeqState.WAITING, SeqState.FINISHED


def audit(self: Roster) -> str | None:
    """The first equation that does not hold, or None."""
    sequences = self._sequences
    alive = [seq for seq in sequences.values() if seq.state is not FINISHED]
    ended = {number: seq for number, seq in sequences.items() if seq.state is FINISHED}
    if any(seq.id != number for number, seq in sequences.items()) or self._finished != ended:
        return f"{len(ended)} sequences have finished, {len(self._finished)} are to be drained"
    slots = slots_of(self)
    for seq in sequences.values():
        broken = _audit_sequence(self, seq, slots.get(seq.id, 0))
        if broken is not None:
            return f"sequence {seq.id}, {seq.state.value}: {broken}"
    return (
        self._account.audit([seq.kv for seq in alive if seq.kv is not None])
        or self._active.audit([seq for seq in alive if is_active(seq)])
        or self._waiting.audit([seq for seq in alive if not is_active(seq)])
        or self._tenants.audit(alive)
        or self._floors.audit(alive)
        or self._ladder.audit(alive)
    )


def _audit_sequence(self: Roster, seq: Sequence, slots: int) -> str | None:
    held = 0 if seq.kv is None else seq.kv.len
    if seq.state is FINISHED or seq.state is WAITING:
        return None if seq.kv is None and seq._swapped is None else f"it has {held} tokens in blocks, or a ticket"
    if seq.stopped or seq.at_limit or not 0 <= seq.fed <= seq.total_tokens:
        return f"it was fed {seq.fed} of {seq.total_tokens} tokens, at most {seq.max_tokens}"
    if self._account.capacity and held != seq.fed + slots:
        return f"it was fed {seq.fed} tokens and has {slots} slots, {held} tokens are in blocks"
    if is_active(seq) and (seq.state is SeqState.DECODING) != (seq.fed >= seq._prefill_end):
        return f"it was fed {seq.fed} of the {seq._prefill_end} tokens of its prompt"
    if seq._cohort is not None and seq._cohort is not self._planner.cohort:
        return "it is in a cohort that is over"
    return None


def is_active(seq: Sequence) -> bool:
    return seq.state is SeqState.PREFILLING or seq.state is SeqState.DECODING


def slots_of(self: Roster) -> dict[int, int]:
    """How many slots for drafts each sequence of the batch that is out has beyond what it was fed."""
    out = self.outstanding
    return {} if out is None else dict(zip(out.seq_ids, out.lookahead, strict=True))
