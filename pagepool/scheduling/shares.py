"""How a step is shared out: places and tokens, as pure functions."""

from __future__ import annotations

from collections.abc import Sequence as Many

from pagepool.config import SchedulerConfig

__all__ = ["first_chunk", "places", "share_tokens", "whole_prompts"]


def places(config: SchedulerConfig) -> int:
    """Sequences that one step can hold: each needs a place and at least one token."""
    return min(config.max_batch_sequences, config.max_batch_tokens)


def first_chunk(num_tokens: int, config: SchedulerConfig) -> int:
    """Tokens of the first chunk of a prompt of `num_tokens`, when it has the step for itself."""
    return min(num_tokens, config.max_prefill_tokens, config.max_batch_tokens)


def share_tokens(decodes: Many[int], prefills: Many[int], config: SchedulerConfig) -> list[int]:
    """The tokens of each sequence of a step, given how many each still has to feed; decodes first, then prefills.

    Everyone gets one token. What is left of `max_batch_tokens` goes to decodes with several tokens to feed, then to the
    prefills in order, each up to `max_prefill_tokens`. `len(decodes) + len(prefills)` is at most `places(config)`.

    >>> share_tokens([1, 1, 3], [500, 40], SchedulerConfig(max_batch_tokens=100, max_prefill_tokens=64))
    [1, 1, 3, 64, 31]
    """
    left = config.max_batch_tokens - len(decodes) - len(prefills)
    counts = [1] * len(decodes)
    for index, waiting in enumerate(decodes if decodes.count(1) != len(decodes) else ()):
        if waiting > 1:
            extra = min(waiting - 1, left)
            counts[index] += extra
            left -= extra
    chunk = config.max_prefill_tokens
    for waiting in prefills:
        extra = min(waiting - 1, chunk - 1, left)
        counts.append(1 + extra)
        left -= extra
    return counts


def whole_prompts(prefills: Many[int], config: SchedulerConfig) -> list[int]:
    """The tokens of the first of `prefills` for a step of prompts only; the answer may be shorter than `prefills`.

    Prompts are taken whole, in order, while they fit. Only the first may be cut: when it alone is over the budget.

    >>> whole_prompts([60, 30, 20], SchedulerConfig(max_batch_tokens=100, max_prefill_tokens=100))
    [60, 30]
    """
    left = config.max_batch_tokens
    counts: list[int] = []
    for waiting in prefills[: config.max_batch_sequences]:
        chunk = min(waiting, config.max_prefill_tokens)
        if chunk > left:
            if not counts:
                counts.append(left)
            break
        counts.append(chunk)
        left -= chunk
    return counts
