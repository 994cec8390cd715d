"""What callers hand in, read and checked before anything changes."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from pagepool.arguments import integer, real, wrong
from pagepool.scheduling.request import Sequence

__all__ = ["check_token", "check_tokens", "read_request", "read_results", "read_token", "usable"]

MAX_TOKEN = 2**31 - 1  # the largest id that a prefix cache holds
MAX_PRIORITY = 255


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
    """The sequence of a request. Raises ValueError for a prompt that is empty or longer than its limit, a priority or a
    ttl that no prefix cache takes; TypeError for what is no integer, or a tenant that cannot be hashed."""
    prompt = _as_list("prompt_tokens", prompt_tokens)
    if not _all_integers(prompt):
        prompt = [read_token(token) for token in prompt]
    limit = integer("max_tokens", max_tokens)
    level = 0 if priority is None else integer("priority", priority)
    if cache_ttl is not None:
        real("cache_ttl", cache_ttl, low=0)
    integer("cache_priority", cache_priority, 0, MAX_PRIORITY)
    try:
        hash(tenant)
    except TypeError:
        raise wrong("tenant", "hashable", tenant) from None
    if isinstance(extra_keys, (str, bytes)) or not isinstance(extra_keys, Iterable):
        raise TypeError(f"extra_keys must be a sequence of keys, not {type(extra_keys).__name__}")
    if not prompt:
        raise ValueError("a prompt needs at least 1 token, got 0")
    if len(prompt) > limit:
        raise ValueError(f"a prompt of {len(prompt)} tokens is longer than max_tokens, {limit}")
    return Sequence(seq_id, prompt, limit, level, tenant, cache_salt, tuple(extra_keys), cache_priority, cache_ttl)


def read_results(tokens: Iterable[Any], rows: bool) -> list[Any]:
    """The results of a step, as a new list: integers and None, and if `rows`, rows of drafted tokens as they came.

    Raises TypeError for anything else.
    """
    results = _as_list("tokens", tokens)
    if _all_integers(results):
        return results
    return [token if token is None or (rows and hasattr(token, "__len__")) else read_token(token) for token in results]


def read_token(token: Any) -> int:
    """A token as an int. Raises TypeError for what is no integer."""
    try:
        return operator.index(token)
    except TypeError:
        raise TypeError(f"a token must be an integer, not {type(token).__name__}") from None


def usable(results: list[Any]) -> list[bool]:
    """Which of the results, integers and None, are tokens."""
    return [token is not None and token >= 0 for token in results]


def check_token(token: Any, least: float = -MAX_TOKEN - 1) -> None:
    """Raises ValueError for one that a prefix cache cannot hold."""
    if token > MAX_TOKEN or token < least:
        raise ValueError(f"token {token} has more than 32 bits: {MAX_TOKEN} is the largest that the cache holds")


def check_tokens(results: list[Any]) -> None:
    """`check_token` of all that may be added: None and numbers below 0 pass, of a row of drafts each token counts."""
    if results and _all_integers(results):
        results = [max(results)]
    rows = [row if hasattr(row, "__len__") else (row,) for row in results]
    for token in [token for row in rows for token in row if token is not None]:
        check_token(token, float("-inf"))


def _as_list(name: str, values: Iterable[Any]) -> list[Any]:
    """A new list of the values; of Python ints, when they come from an array."""
    if type(values) is list:
        return values.copy()
    found = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(found, Iterable):
        raise wrong(name, "a sequence of integers", values)
    return found if type(found) is list else list(found)


def _all_integers(values: list[Any]) -> bool:
    """Whether all of them are int: their sum is then, which costs less than a look at each one's type."""
    try:
        return type(sum(values)) is int
    except (TypeError, OverflowError):  # None, a row, text; or an int beyond the floats that is added to one
        return False
