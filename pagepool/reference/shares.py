"""How a step is shared out, in plain Python."""

from __future__ import annotations

from pagepool.config import SchedulerConfig
from pagepool.reference.request import Request

__all__ = ["decode_rows", "share_tokens", "whole_prompts"]


def decode_rows(decodes: list[Request], lookahead: int) -> list[tuple[int, int]]:
    """For each how many tokens it has to feed, and how many slots for drafts it can use: with one token only, and one
    token comes without a draft."""
    rows = []
    for request in decodes:
        new = request.total_tokens - request.fed
        most = min(lookahead, request.max_tokens - request.total_tokens - 1)
        rows.append((new, most if new == 1 else 0))
    return rows


def share_tokens(decodes: list[int], prefills: list[int], config: SchedulerConfig) -> list[int]:
    """Everyone one token; what is left to decodes that have more to feed, then to prompts, each up to its chunk."""
    counts, left = [], config.max_batch_tokens - len(decodes) - len(prefills)
    for most in [*decodes, *(min(unread, config.max_prefill_tokens) for unread in prefills)]:
        extra = max(0, min(most - 1, left))
        counts.append(1 + extra)
        left -= extra
    return counts


def whole_prompts(prefills: list[int], config: SchedulerConfig) -> list[int]:
    """Whole prompts, in order, while they fit; only the first may be cut."""
    counts: list[int] = []
    for unread in prefills[: config.max_batch_sequences]:
        count = min(unread, config.max_prefill_tokens)
        left = config.max_batch_tokens - sum(counts)
        if count > left and counts:
            break
        counts.append(min(count, left))
        if count > left:
            break
    return counts
