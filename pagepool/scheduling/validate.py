"""Read and check the arguments of callers, before anything changes."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Mapping
from typing import Any

from pagepool._arguments import integer, wrong
from pagepool.scheduling.batch import ScheduledBatch
from pagepool.scheduling.block_manager import BlockManager
from pagepool.scheduling.request import SeqState, Sequence

__all__ = [
    "check_drafts",
    "check_hybrid",
    "check_outstanding",
    "check_results",
    "check_token",
    "check_width",
    "read_batch",
    "read_drafts",
    "read_request",
    "read_results",
    "read_token",
    "up_to_stop",
]

MAX_TOKEN = 2**31 - 1  # largest token id that a prefix cache accepts


def check_hybrid(blocks: BlockManager, prefix_cache: Any, checkpoints: Any) -> None:
    """Check the arguments for hybrid models. Raises TypeError for wrong checkpoints, ValueError for contradictions."""
    states = blocks.states
    if checkpoints is not None:
        if not hasattr(checkpoints, "resume"):
            raise wrong("checkpoints", "StateCheckpoints or None", checkpoints)
        if states is None or checkpoints.pool is not states:
            raise ValueError("checkpoints must use the state pool of the scheduler, states")
        align = checkpoints.index.align
        if prefix_cache is None or align % blocks.block_size:
            raise ValueError(
                "checkpoints need a prefix cache and an align that is a multiple of the block size "
                f"{blocks.block_size}, not {align}"
            )
    if prefix_cache is not None and not blocks.sizes:
        raise ValueError("a prefix cache needs a pool with blocks")
    if prefix_cache is not None and states is not None and checkpoints is None:
        raise ValueError("a prefix cache for sequences with recurrent states needs checkpoints of the states")


def read_request(
    prompt_tokens: Iterable[int],
    max_tokens: int | None = None,
    priority: int | None = None,
    max_new_tokens: int | None = None,
    stop_token_ids: Iterable[int] = (),
    request_id: int | str | None = None,
    tenant: Any = None,
    cache_salt: Any = None,
    extra_keys: Iterable[Any] = (),
    reads_cache: bool = True,
) -> Sequence:
    """Check a request and return its sequence, without an id.

    Raises ValueError for a prompt that is empty, is longer than its limit or has a token below 0, and for an output
    limit below 0. Raises TypeError for numbers that are not integers, a request without a limit, a tenant that is not
    hashable, or a `reads_cache` that is not a bool.
    """
    prompt = _as_row("prompt_tokens", prompt_tokens)
    if not _all_integers(prompt):
        prompt = [read_token(token) for token in prompt]
    limit = None if max_tokens is None else integer("max_tokens", max_tokens)
    most_new = None if max_new_tokens is None else integer("max_new_tokens", max_new_tokens, 0)
    level = 0 if priority is None else integer("priority", priority)
    stops = [read_token(token) for token in _as_list("stop_token_ids", stop_token_ids)]
    if request_id is not None and not isinstance(request_id, (int, str)):
        raise wrong("request_id", "an int, a str or None", request_id)
    try:
        hash(tenant)
    except TypeError:
        raise wrong("tenant", "hashable", tenant) from None
    if isinstance(extra_keys, (str, bytes)) or not isinstance(extra_keys, Iterable):
        raise TypeError(f"extra_keys must be a sequence of keys, not {type(extra_keys).__name__}")
    if not isinstance(reads_cache, bool):
        raise wrong("reads_cache", "a bool", reads_cache)
    if not prompt:
        raise ValueError("the prompt must have at least 1 token, not 0")
    for token in (min(prompt), *stops):
        check_token(token)
    if limit is not None and len(prompt) > limit:
        raise ValueError(f"the prompt must have at most max_tokens = {limit} tokens, not {len(prompt)}")
    limits = [] if limit is None else [limit]
    if most_new is not None:
        limits.append(len(prompt) + most_new)
    if not limits:
        raise TypeError("give max_tokens (limit of prompt and output) or max_new_tokens (limit of the output)")
    keys = (cache_salt, tuple(extra_keys))
    return Sequence(0, prompt, min(limits), level, tenant, *keys, frozenset(stops), request_id, reads_cache)


def read_token(token: Any) -> int:
    """Return a token as an int. Raises TypeError if it is not an integer."""
    try:
        return operator.index(token)
    except TypeError:
        raise TypeError(f"a token must be an integer, not {type(token).__name__}") from None


def read_batch(batch: Any) -> ScheduledBatch:
    """Return `batch`. Raises TypeError if it is not a `ScheduledBatch`."""
    if not isinstance(batch, ScheduledBatch):
        raise wrong("batch", "a ScheduledBatch", batch)
    return batch


def read_drafts(drafts: Any) -> dict[int, int] | None:
    """Return the numbers of drafts by sequence id, without zeros. Raises TypeError or ValueError for other values."""
    if drafts is None:
        return None
    if not isinstance(drafts, Mapping):
        raise wrong("drafts", "a mapping from sequence ids to numbers of drafts", drafts)
    counts = {seq_id: integer(f"drafts[{seq_id}]", count, 0) for seq_id, count in drafts.items()}
    return {seq_id: count for seq_id, count in counts.items() if count}


def check_outstanding(batch: ScheduledBatch, outstanding: ScheduledBatch | None) -> None:
    """Raise ValueError if `batch` is not the outstanding batch."""
    if batch is not outstanding:
        raise ValueError(
            f"batch of {len(batch)} sequences is not outstanding: it was committed or given up before, "
            "or another scheduler has made it"
        )


def read_results(tokens: Iterable[Any], lookahead: bool) -> list[Any]:
    """Return the results of a step as a new list of integers, None and, with `lookahead`, lists of integers.

    Raises TypeError for other values.
    """
    results = _as_row("tokens", tokens)
    return results if _all_integers(results) else [_read_result(result, lookahead) for result in results]


def _read_result(result: Any, lookahead: bool) -> Any:
    if result is None:
        return None
    if lookahead and hasattr(result, "__len__"):
        return [read_token(token) for token in result]
    return read_token(result)


def check_token(token: int) -> None:
    """Raise ValueError for a token below 0."""
    if token < 0:
        raise ValueError(f"a token must be 0 or more, not {token}")


def check_width(token: int) -> None:
    """Raise ValueError for a token that is too large for a prefix cache."""
    if token > MAX_TOKEN:
        raise ValueError(f"token {token} has more than 32 bits: {MAX_TOKEN} is the largest that the cache holds")


def check_results(batch: ScheduledBatch, results: list[Any], for_cache: bool) -> None:
    """Raise ValueError for wrong lists of drafts: empty, longer than the slots of the row, or in a row without a token.

    With `for_cache`, also for a token that is too large for a prefix cache. None and numbers below 0 are accepted.
    """
    if _all_integers(results):
        if for_cache and results:
            check_width(max(results))
        return
    rows = {row: result for row, result in enumerate(results) if type(result) is list}
    if for_cache:
        for token in [*(token for tokens in rows.values() for token in tokens), *results]:
            if type(token) is int:
                check_width(token)
    for row, tokens in rows.items():
        slots = batch.lookahead[row]
        if not 1 <= len(tokens) <= slots + 1:
            raise ValueError(f"row {row} must have from 1 to {slots + 1} tokens, not {len(tokens)}")
        if min(tokens) < 0:
            raise ValueError(f"tokens of row {row} must be at least 0, not {min(tokens)}")
        if not batch.wants_token[row]:
            raise ValueError(f"row {row} must have no tokens: its prompt chunk is not the last one")


def up_to_stop(tokens: list[int], stops: Container[int]) -> list[int]:
    """Return the tokens up to and including the first one in `stops`."""
    return next((tokens[: place + 1] for place, token in enumerate(tokens) if token in stops), tokens)


def check_drafts(batch: ScheduledBatch, results: list[Any]) -> None:
    """Raise ValueError if drafts were accepted for a sequence that got other tokens after `batch` was made.

    Those tokens need the slots of the drafts. With both, the sequence could also exceed its limit.
    """
    for row, (seq, result) in enumerate(zip(batch._sequences, results, strict=True)):
        if type(result) is list and len(result) > 1 and seq.state is not SeqState.FINISHED:
            since = seq.total_tokens - batch._fed_before[row] - len(batch.tokens[row])
            if since:
                raise ValueError(f"row {row} has {len(result)} tokens, but its sequence got {since} since schedule")


def _as_row(name: str, values: Iterable[Any]) -> list[Any]:
    """Like `_as_list`, but refuses sets, which have no order."""
    if isinstance(values, (set, frozenset)):
        raise wrong(name, "a sequence of integers", values)
    return _as_list(name, values)


def _as_list(name: str, values: Iterable[Any]) -> list[Any]:
    """Return a new list of the values. Values of an array become Python ints."""
    if type(values) is list:
        return values.copy()
    found = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(found, Iterable):
        raise wrong(name, "a sequence of integers", values)
    return found if type(found) is list else list(found)


def _all_integers(values: list[Any]) -> bool:
    """Return true if all values are int. Then their sum is an int, which is faster to check than each type."""
    try:
        return type(sum(values)) is int
    except (TypeError, OverflowError):  # a value is not a number, or a float and an int beyond float's range are added
        return False
