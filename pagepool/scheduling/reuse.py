"""The scheduler and a prefix cache: blocks found when a request starts, kept when they are full."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from pagepool.arguments import wrong
from pagepool.memory.allocator import BlockAllocator
from pagepool.prefix.keys import root_key
from pagepool.prefix.radix_tree import token_row
from pagepool.scheduling.batch import ScheduledBatch
from pagepool.scheduling.blocks import BlockAccount, NoBlocks
from pagepool.scheduling.cohort import Cohort
from pagepool.scheduling.no_reuse import NoReuse
from pagepool.scheduling.request import Sequence
from pagepool.scheduling.watches import Watches

__all__ = ["PrefixReuse", "check_has", "open_reuse"]

# What a scheduler asks of its prefix cache, whoever made it.
NEEDED = (
    "allocator",
    "block_size",
    "cache_blocks",
    "cached_tokens",
    "count_cached",
    "evict",
    "evictable",
    "expire",
    "forgotten",
    "inserted",
)


class PrefixReuse:
    """Blocks of a prefix cache in the sequences of an account.

    A block is published when its last token is stored for certain: when the step that filled it is committed, or, if it
    holds outputs and `outputs` is "end", when the sequence ends or gives way. A block that a sequence holds is never
    evicted, and takes the place of one for the same tokens that nobody uses. The cache is told the time of each step,
    in which requests say how long their blocks have their priority. With `by_cache` it is asked often, of all that
    wait, who finds how much: then it is known who may find more than before.
    """

    keeps = True

    def __init__(self, cache: Any, account: BlockAccount, outputs: str, by_cache: bool) -> None:
        if cache.allocator is not account.allocator:
            raise ValueError("the prefix cache and the pool must have one allocator")
        if cache.block_size != account.block_size:
            raise ValueError(f"the prefix cache has blocks of {cache.block_size} tokens, the pool {account.block_size}")
        self._cache = cache
        self._account = account
        self._prompts_only = outputs == "end"
        self._watches = Watches(account.block_size) if by_cache else None
        self._seen = cache.inserted  # by whoever: blocks that `_watches` knows of
        self._now = 0.0
        self._has_terms = False
        # Of the blocks that a cohort is to tell when they are full.
        self.block_size = 0 if self._prompts_only else account.block_size
        account.cache = cache

    def row(self, seq: Sequence) -> Any:
        """The prompt of `seq` as the cache reads it. Raises TypeError or ValueError for tokens, keys, a priority and a
        ttl that the cache does not take."""
        root_key(seq.cache_salt, seq.extra_keys)
        row = token_row(np.array(seq.prompt_tokens))
        self._cache_blocks(seq, row[:0], (), 0)
        self._has_terms |= seq.cache_ttl is not None
        return row

    def tell(self, now: float) -> None:
        """The time of the step that begins; what ends by then ends."""
        self._now = now
        if self._has_terms:
            self._cache.expire(now)

    @property
    def inserted(self) -> int:
        """While it stays the same, `cached` gives no more than it did."""
        count: int = self._cache.inserted
        return count

    def cached(self, seq: Sequence) -> int:
        """Tokens of the prompt of `seq`, which waits, that are cached."""
        prompt = seq._row[: len(seq.prompt_tokens)]
        count: int = self._cache.cached_tokens(prompt, cache_salt=seq.cache_salt, extra_keys=seq.extra_keys)
        if self._watches is not None:
            self._watches.note(seq, prompt, count)
        return count

    def found(self, seq: Sequence) -> int:
        """At least as many, without a look unless there may be more than at the last one."""
        count = None if self._watches is None else self._watches.found(seq)
        return self.cached(seq) if count is None else count

    def grown(self) -> Iterable[Any] | None:
        """The tenants of those of whom more may be cached than at the last call; None: all."""
        if self._watches is None:
            return None
        self._see()
        return self._watches.grown()

    def starts(self, seq: Sequence) -> None:
        """`seq` does not wait any more."""
        if self._watches is not None:
            self._watches.drop(seq)

    def rebuild(self) -> None:
        """Of nobody it is known what is cached."""
        if self._watches is not None:
            self._watches.forget()

    def _see(self) -> None:
        """Whether somebody else has cached blocks."""
        if self._watches is not None and self._seen != self._cache.inserted:
            self._watches.forget()
            self._seen = self._cache.inserted

    def adopt(self, seq: Sequence) -> bool:
        """Begin `seq` with its cached blocks, where they are more than it has; at least one token is left to read.

        True when its state has changed: the tokens that it had are the first of those that it has now.
        """
        account = self._account
        size = account.block_size
        full = (seq.total_tokens - 1) // size
        # What waits in the swap file is as good, unless the cache has all of it.
        least = max(seq._fed // size + 1, 0 if seq._swapped is None else seq._swapped[2] // size)
        if full < least:
            return False
        readable = self._tokens(seq, full * size)
        try:
            blocks = account.held.match_prefix(
                self._cache, readable, cache_salt=seq.cache_salt, extra_keys=seq.extra_keys
            )
            if len(blocks) < least:
                return False
            old, state = [seq.kv], account.open(seq.max_tokens, seq.id)
            account.adopt(state, blocks)
            seq.kv = state
            account.give_back(old)
            seq._fed = state.len
            seq._kept = len(blocks)
            seq._twins = seq._barred = False
            seq._forgotten = self._cache.forgotten
        finally:
            account.held.give_back()
        return True

    def publish(self, seq: Sequence, num_tokens: int, start: int = 0) -> None:
        """Keep the full blocks among the first `num_tokens` of `seq`, of which the first `start` are kept already.

        All are looked at in the end, and each time when the cache has had another's block in the place of one: when
        nobody uses that one any more, it is its own that is wanted. Nothing is kept once the cache was made to forget
        one of them, whose keys and values may be wrong then, and with them all that were worked out after it.
        """
        full = num_tokens // self._account.block_size
        if full and not self._is_barred(seq):
            tokens, blocks = self._tokens(seq, full * self._account.block_size), seq.kv.block_table[:full]
            first = 0 if seq._twins else start
            self._see()
            taken = self._cache_blocks(seq, tokens, blocks, first)
            if taken and self._watches is not None:
                self._seen = self._cache.inserted
                self._watches.stored(seq, tokens, first)
            seq._twins = seq._twins or taken < full - seq._kept
        seq._kept = max(seq._kept, full)  # of outputs, too, it may have begun with what is cached
        self.recount(seq)

    def begins(self, seq: Sequence) -> None:
        """It has no blocks, and will have read all of its tokens itself."""
        seq._twins = seq._barred = False

    def recount(self, seq: Sequence) -> None:
        """`_kept` is another."""
        if seq._twins:
            seq._own = self._cache.count_cached(seq.kv.block_table[: seq._kept]) if seq._kept else 0

    def _is_barred(self, seq: Sequence) -> bool:
        """A block that it holds leaves the cache only where that is made to forget it."""
        forgotten = self._cache.forgotten
        if seq._forgotten != forgotten and not seq._barred:
            own = seq._own if seq._twins else seq._kept
            seq._barred = own > 0 and self._cache.count_cached(seq.kv.block_table[: seq._kept]) < own
            seq._forgotten = forgotten
        return seq._barred

    def publish_filled(self, batch: ScheduledBatch, cohort: Cohort | None) -> None:
        """Keep the blocks that `batch`, which was run, has filled, in the order of ids. Its decodes are the members of
        `cohort`, if there is one: it knows who has filled a block. Those that are at their limit end anyhow."""
        decodes = batch.num_decodes
        if not self._prompts_only:
            sequences = batch._sequences if cohort is None else cohort.filled() + batch._sequences[decodes:]
            size = self._account.block_size
            filled = [seq for seq in sequences if seq.kv is not None and seq.fed // size > seq._kept]
            for seq in sorted(filled, key=_by_id) if len(filled) > 1 else filled:
                if not seq.at_limit:
                    self.publish(seq, seq.fed, seq._kept)
            return
        for seq in sorted(batch._sequences[decodes:], key=_by_id):
            if seq.kv is not None:
                num_tokens = min(seq.fed, len(seq.prompt_tokens))
                self.publish(seq, num_tokens, min(seq._kept, num_tokens // self._account.block_size))

    def _cache_blocks(self, seq: Sequence, tokens: Any, blocks: Any, start: int) -> int:
        taken: int = self._cache.cache_blocks(
            tokens,
            blocks,
            cache_salt=seq.cache_salt,
            extra_keys=seq.extra_keys,
            start=start,
            priority=seq.cache_priority,
            ttl=seq.cache_ttl,
            now=self._now,
            group=seq._group,
        )
        return taken

    def _tokens(self, seq: Sequence, count: int) -> Any:
        """The first `count` tokens."""
        end = seq._row_end
        if count > end:
            if len(seq._row) < seq.max_tokens:
                row = np.empty(seq.max_tokens, np.int32)
                row[:end] = seq._row[:end]
                seq._row = row
            prompt = len(seq.prompt_tokens)
            seq._row[end:count] = seq.output_tokens[end - prompt : count - prompt]
            seq._row_end = count
        return seq._row[:count]


def _by_id(seq: Sequence) -> int:
    return seq.id


def check_has(cache: Any, names: Iterable[str]) -> None:
    """Raises TypeError for what is no prefix cache, and for one that lacks what will be asked of it in a step."""
    missing = [name for name in names if not hasattr(cache, name)]
    if "cache_blocks" in missing:
        raise wrong("prefix_cache", "a PrefixCache or None", cache)
    if missing:
        raise TypeError(f"prefix_cache must be as a PrefixCache: {type(cache).__name__} has no {', '.join(missing)}")


def open_reuse(
    cache: Any, account: BlockAccount | NoBlocks, outputs: str, by_cache: bool = False
) -> PrefixReuse | NoReuse:
    """For a `PrefixCache` over the pool of `account`, or None; `outputs` as in `SchedulerConfig.cache_outputs`,
    `by_cache` as of the policy."""
    if cache is None:
        return NoReuse()
    ours = isinstance(getattr(cache, "allocator", None), BlockAllocator)
    check_has(cache, (*NEEDED, "match_held" if ours else "match_prefix"))
    if not isinstance(account, BlockAccount):
        raise ValueError("a prefix cache needs a pool with blocks")
    return PrefixReuse(cache, account, outputs, by_cache)
