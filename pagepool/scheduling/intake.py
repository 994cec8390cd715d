"""What callers hand in, read and checked before anything changes."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from pagepool.scheduling.request import Sequence

__all__ = ["check_token", "check_tokens", "read_request", "read_results", "usable"]

MAX_TOKEN = 2**31 - 1  # the largest id that a prefix cache holds


def read_request(
    seq_id: int,
    prompt_tokens: Iterable[int],
    max_tokens: int,
    priority: int | None,
    tenant: Any,
    cache_salt: Any,
    extra_keys: Iterable[Any],
    cache_priority: int,
    cache_ttl: float | None,
) -> Sequence:
    """The sequence of a request. Raises ValueError for a prompt that is empty or longer than its limit, TypeError for
    what is no number, or a tenant that cannot be hashed."""
    prompt = _as_list(prompt_tokens)
    limit = operator.index(max_tokens)
    level = 0 if priority is None else operator.index(priority)
    hash(tenant)
    if not prompt:
        raise ValueError("a prompt needs at least 1 token, got 0")
    if len(prompt) > limit:
        raise ValueError(f"a prompt of {len(prompt)} tokens is longer than max_tokens, {limit}")
    return Sequence(seq_id, prompt, limit, level, tenant, cache_salt, tuple(extra_keys), cache_priority, cache_ttl)


def read_results(tokens: Iterable[Any]) -> list[Any]:
    """The results of a step, as a new list."""
    return _as_list(tokens)


def usable(results: list[Any]) -> list[bool]:
    """Which of the results are tokens. Whatever is wrong with their types is raised here, before anything changes."""
    return [token is not None and token >= 0 for token in results]


def check_token(token: Any, least: float = -MAX_TOKEN - 1) -> None:
    """Raises ValueError for one that a prefix cache cannot hold."""
    if token > MAX_TOKEN or token < least:
        raise ValueError(f"token {token} has more than 32 bits: {MAX_TOKEN} is the largest that the cache holds")


def check_tokens(results: list[Any]) -> None:
    """`check_token` of all that may be added: None and numbers below 0 pass, of a row of drafts each token counts."""
    if set(map(type, results)) == {int}:
        results = [max(results)]
    rows = [row if hasattr(row, "__len__") else (row,) for row in results]
    for token in [token for row in rows for token in row if token is not None]:
        check_token(token, float("-inf"))


def _as_list(values: Iterable[Any]) -> list[Any]:
    """A new list of the values; of Python ints, when they come from an array."""
    if type(values) is list:
        return values.copy()
    return values.tolist() if hasattr(values, "tolist") else list(values)
