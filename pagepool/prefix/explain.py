"""Why tokens of a prompt were not found in a `PrefixCache`.

A prompt is a row of parts without gaps: the tokens that were found, then parts that were not, each for one reason:

    tokens found + sum of the tokens of all parts = length of the prompt

| reason | the tokens of the part |
|---|---|
| `no_state` | have keys and values, but no recurrent state is kept at their end |
| `evicted` | were cached. The first block was evicted or discarded, and later ones are found only behind it |
| `diverges` | begin at the block in which every known prompt under this salt and these keys has another token |
| `other_key` | are known only under another salt or other extra keys |
| `never_seen` | are behind the end of everything known, or not known at all |
| `shared_pool` | are not cached. The processes of a shared pool do not note what they evict |
| `short` | are fewer than a block; in a scheduler, which computes the last token of each prompt, at most a block |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["REASONS", "Divergence", "Explanation", "MissedPart"]

REASONS = ("no_state", "evicted", "diverges", "other_key", "never_seen", "shared_pool", "short")
SIDE = 6  # tokens that are shown before a divergence, and from it on


@dataclass(frozen=True)
class MissedPart:
    """Tokens `begin` to `end` of a prompt, which were not found for one `reason`."""

    reason: str
    begin: int
    end: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return self.end - self.begin


@dataclass(frozen=True)
class Divergence:
    """Where a prompt differs from the known prompt that shares most of it, under the same salt and keys.

    Attributes
    ----------
    position : int
        The first different token: `tokens[position]` is `token`, and `cached_token` in the other prompt.
    token, cached_token : int
        Token ids.
    around, cached_around : tuple of int
        Up to 6 tokens before the position and 6 from it on, of both prompts. Those of the other prompt may end earlier.
    """

    position: int
    token: int
    cached_token: int
    around: tuple[int, ...]
    cached_around: tuple[int, ...]


@dataclass(frozen=True)
class Explanation:
    """Why a `PrefixCache` did not find all of a prompt. `PrefixCache.explain` returns it.

    Attributes
    ----------
    num_tokens : int
        Length of the prompt.
    found : int
        Tokens that were found.
    parts : tuple of MissedPart
        What was not found, in order and without gaps: `found` is the begin of the first part, and the last one ends at
        `num_tokens`. The module has all reasons in ``REASONS``.
    divergence : Divergence or None
        For a part with the reason "diverges".
    evicted_ago : float or None
        For a part with the reason "evicted": seconds since its first block was evicted or discarded.
    remembers : float or None
        The cache knows everything that was cached in the last `remembers` seconds, and "never_seen" means: not in this
        time. None: everything since it was made.

    Examples
    --------
    >>> from pagepool import BlockAllocator, PrefixCache
    >>> cache = PrefixCache(BlockAllocator(4), block_size=2)
    >>> cache.touch([1, 2, 3, 4, 5, 6])
    0
    >>> explanation = cache.explain([1, 2, 3, 9, 5, 6, 7])
    >>> print(explanation)
    2 of 7 tokens found, 4 differ from token 3 on (9 here, 4 there), 1 is short of a block
    >>> explanation.counts()
    {'diverges': 4, 'short': 1}
    """

    num_tokens: int
    found: int
    parts: tuple[MissedPart, ...]
    divergence: Divergence | None = None
    evicted_ago: float | None = None
    remembers: float | None = None

    @classmethod
    def of(cls, row: Any, miss: tuple[Any, ...], found: int | None = None, length: int | None = None) -> Explanation:
        """Return the explanation for a result of `PrefixCache.miss`. Internal.

        If a caller could use only the first `found` tokens, the rest of the tokens in the cache has no recurrent state.
        If it looked up fewer tokens than the `length` of its prompt, the rest is short of a block.
        """
        in_cache, bounds, position, there, evicted, remembers = miss
        usable, whole = (in_cache if found is None else found), (len(row) if length is None else length)
        parts, begin = [], usable
        for reason, end in (("no_state", in_cache), *bounds, ("short", whole)):
            if end > begin:
                parts.append(MissedPart(reason, begin, end))
                begin = end
        divergence = None
        if there and position >= usable:
            around = tuple(map(int, row[max(0, position - SIDE) : position + SIDE]))
            before = around[: min(SIDE, position)]
            divergence = Divergence(position, int(row[position]), there[0], around, before + there)
        ago = None if evicted < 0 else evicted / 10
        return cls(whole, usable, tuple(parts), divergence, ago, None if remembers < 0 else remembers / 10)

    def counts(self) -> dict[str, int]:
        """Return the number of tokens of each reason."""
        return {part.reason: part.num_tokens for part in self.parts}

    def without_other_keys(self) -> Explanation:
        """Return it with "never_seen" for tokens under another salt or other keys, as tenants may see it."""
        begins = [part.begin for part in self.parts if part.reason == "other_key"]
        if not begins:
            return self
        hidden = [part for part in self.parts if part.reason in ("other_key", "never_seen")]
        merged = MissedPart("never_seen", begins[0], hidden[-1].end)
        others = [part for part in self.parts if part not in hidden]
        return replace(self, parts=tuple(sorted([merged, *others], key=lambda part: part.begin)))

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return the parts as objects for JSON, each with its `reason`, its number of `tokens` and more."""
        found: list[dict[str, Any]] = []
        for part in self.parts:
            more: dict[str, Any] = {}
            if part.reason == "evicted" and self.evicted_ago is not None:
                more["seconds_ago"] = self.evicted_ago
            if part.reason == "never_seen" and self.remembers is not None:
                more["in_seconds"] = self.remembers
            if part.reason == "diverges" and self.divergence is not None:
                at = self.divergence
                more |= {"position": at.position, "token": at.token, "cached_token": at.cached_token}
                more |= {"around": list(at.around), "cached_around": list(at.cached_around)}
            found.append({"reason": part.reason, "tokens": part.num_tokens, **more})
        return found

    def __str__(self) -> str:
        return ", ".join([f"{self.found:,} of {self.num_tokens:,} tokens found", *self._phrases()])

    def _phrases(self) -> Iterator[str]:
        for part in self.parts:
            count, is_one = f"{part.num_tokens:,}", part.num_tokens == 1
            be, have = ("is", "has") if is_one else ("are", "have")
            if part.reason == "evicted":
                yield f"{count} evicted" + ("" if self.evicted_ago is None else f" {self.evicted_ago:,.1f} s ago")
            elif part.reason == "diverges" and self.divergence is not None:
                at = self.divergence
                verb = "differs" if is_one else "differ"
                yield f"{count} {verb} from token {at.position} on ({at.token} here, {at.cached_token} there)"
            elif part.reason == "never_seen":
                yield f"{count} never seen" + ("" if self.remembers is None else f" in {self.remembers:,.1f} s")
            else:
                yield (
                    count
                    + {
                        "no_state": f" {have} no recurrent state",
                        "diverges": f" {have} other tokens in earlier prompts",
                        "other_key": f" {be} cached for another salt or other keys",
                        "shared_pool": f" {be} not in the shared pool",
                        "short": f" {be} short of a block",
                    }[part.reason]
                )
