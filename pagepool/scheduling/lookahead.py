"""Slots for drafted tokens: what a decode may verify beside its own token, and how it is taken back."""

from __future__ import annotations

import operator
from typing import Any

from pagepool.scheduling.batch import ScheduledBatch
from pagepool.scheduling.blocks import BlockAccount, NoBlocks
from pagepool.scheduling.request import SeqState, Sequence

__all__ = ["accept_drafts", "drafts_of", "read_drafts", "rewind"]


def drafts_of(seq: Sequence, lookahead: int) -> int:
    """The slots for drafts that a decode of `seq`, with one token to feed, can use: one token comes without a draft."""
    return min(lookahead, seq._max_output - len(seq.output_tokens) - 1)


def read_drafts(batch: ScheduledBatch, results: list[Any]) -> list[list[int] | None]:
    """The tokens of each row of `results` that is a list, None for the others.

    Such a row holds the tokens that its sequence goes on with: the accepted drafts, then the one that the model made
    itself. Raises ValueError for a list that is empty, is longer than the row's slots, or is for a row whose result is
    no token.
    """
    rows = [_as_row(result) for result in results]
    for row, (tokens, slots) in enumerate(zip(rows, batch.lookahead, strict=True)):
        if tokens is None:
            continue
        if not 1 <= len(tokens) <= slots + 1:
            raise ValueError(f"row {row} got {len(tokens)} tokens, it may have from 1 to {slots + 1}")
        if min(tokens) < 0:
            raise ValueError(f"row {row} got token {min(tokens)}, which is below 0")
        if not batch.wants_token[row]:
            raise ValueError(f"row {row} is a prompt chunk that is not the last: it has no tokens")
    return rows


def accept_drafts(
    batch: ScheduledBatch,
    results: list[Any],
    rows: list[list[int] | None],
    account: BlockAccount | NoBlocks,
    is_last: bool,
) -> list[Any]:
    """Count the drafts that were accepted and take back the slots of the others; returns the last token of each row.

    `rows` are those of `read_drafts`. Unless `batch` is the last, its slots are taken back already, and the tokens are
    fed again.
    """
    for row, tokens in enumerate(rows):
        seq = batch._sequences[row]
        if tokens is not None and seq.state is not SeqState.FINISHED:
            seq.output_tokens += tokens[:-1]
            if is_last:
                seq._fed += len(tokens) - 1
    if is_last:
        rewind(batch, account)
    return [result if tokens is None else tokens[-1] for result, tokens in zip(results, rows, strict=True)]


def rewind(batch: ScheduledBatch, account: BlockAccount | NoBlocks) -> None:
    """Take back the slots behind what the sequences of `batch` have been fed."""
    for seq in batch._sequences:
        if seq.kv is not None and seq.kv.len > seq._fed:
            account.cut(seq.kv, seq._fed)


def _as_row(result: Any) -> list[int] | None:
    """The tokens of a row that is a sequence or an array, else None."""
    if not hasattr(result, "__len__"):
        return None
    return [operator.index(token) for token in result]
