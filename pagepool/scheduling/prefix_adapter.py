"""The scheduler and its prefix cache: blocks found when a request starts, published when they are full."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pagepool._arguments import wrong
from pagepool.errors import InvalidBlock
from pagepool.prefix.keys import root_key
from pagepool.prefix.radix_tree import token_row
from pagepool.scheduling.batch import ScheduledBatch
from pagepool.scheduling.block_manager import BlockManager
from pagepool.scheduling.request import SeqState, Sequence, by_id

__all__ = ["PrefixAdapter", "check_has"]

# What a scheduler asks of its prefix cache, whoever made it.
NEEDED = (
    "allocator",
    "block_size",
    "cache_blocks",
    "cached_tokens",
    "evict",
    "evictable",
    "forgotten",
    "inserted",
    "match_held",
)


@dataclass(slots=True)
class SequencePrefix:
    """What the adapter notes of a sequence.

    key         the key of its salt and extra keys
    row         its first `row_end` tokens, as an array
    published   how many of its leading blocks came from the cache or were offered to it
    all_cached  whether the cache took them all
    epoch       how many blocks the cache had been told to forget when the sequence began
    """

    key: bytes
    row: Any
    row_end: int
    published: int = 0
    all_cached: bool = True
    epoch: int = 0

    def fork(self) -> SequencePrefix:
        """The same for a fork, which writes its own outputs into the row."""
        return replace(self, row=None if self.row is None else self.row[: self.row_end].copy())


class PrefixAdapter:
    """What a scheduler does with a `PrefixCache` over its pool; with None nothing is found and nothing published.

    A block is published when its last token is stored for certain: when the step that filled it is committed. A block
    that a sequence holds is never evicted. After the cache is told to forget blocks, sequences publish nothing more
    until they begin anew: what they have computed by then may follow from wrong blocks.

    Of sequences with several groups the cache has the blocks of each under a key of its own, the number of the group,
    and a prefix is found as far as every group has it. Blocks that a window has left stay cached until others need
    room.
    """

    def __init__(self, cache: Any, blocks: BlockManager, checkpoints: Any = None) -> None:
        self.cache = cache
        self.checkpoints = checkpoints
        self._blocks: Any = blocks
        if cache is None:
            return
        check_has(cache, NEEDED)
        if blocks.allocator is None:
            raise ValueError("a prefix cache needs a pool with blocks")
        if cache.allocator is not blocks.allocator:
            raise ValueError("the prefix cache and the pool must have one allocator")
        self._num_groups = len(blocks.sizes)
        for size in blocks.sizes:
            if cache.block_size != size:
                raise ValueError(f"the prefix cache has blocks of {cache.block_size} tokens, the pool {size}")
        blocks.cache = cache

    @property
    def inserted(self) -> int:
        """While it stays the same, `cached` gives no more than it did."""
        count: int = 0 if self.cache is None else self.cache.inserted
        return count

    def read(self, seq: Sequence) -> None:
        """Note the prompt of a new request as the cache reads it.

        Raises TypeError or ValueError for tokens and keys that no cache takes.
        """
        key = root_key(seq.cache_salt, seq.extra_keys)
        row = None if self.cache is None else token_row(np.array(seq.prompt_tokens))
        seq._prefix = SequencePrefix(key, row, len(seq.prompt_tokens))

    def cached(self, seq: Sequence) -> int:
        """Tokens of the prompt of `seq` that are cached."""
        if self.cache is None:
            return 0
        prompt = seq._prefix.row[: len(seq.prompt_tokens)]
        found = [self.cache.cached_tokens(prompt, **self._keys(seq, group)) for group in range(self._num_groups)]
        return int(min(found))

    def leader(self, seq: Sequence, prefills: Iterable[Sequence]) -> tuple[Sequence, int] | None:
        """The one of `prefills` that computes the next blocks of `seq`, and how many tokens it will have read when the
        last of these is cached; None when none does, or only those of lower priority.

        A prompt that shares nothing costs a comparison of one block with each of them.
        """
        if self.cache is None:
            return None
        size, prompt = self._blocks.block_size, seq.prompt_tokens
        head, most = prompt[:size], min(len(prompt), seq.total_tokens - 1) // size * size
        leader, until = None, 0
        for other in prefills:
            end = min(most, len(other.prompt_tokens) // size * size)
            if other.fed >= end or other.prompt_tokens[:size] != head or other._prefix.key != seq._prefix.key:
                continue
            if other._rank[:2] > seq._rank[:2] or not self.will_publish(other):
                continue
            differs = np.flatnonzero(seq._prefix.row[:end] != other._prefix.row[:end])
            shared = int(differs[0]) // size * size if len(differs) else end
            if shared > max(other.fed, until):
                leader, until = other, shared
        if leader is None:
            return None
        known = max(seq.fed, self.cached(seq))
        return (leader, until) if known < until else None

    def stop_at(self, seq: Sequence, position: int) -> None:
        """Let `seq` keep its recurrent state when it has read `position` tokens, for one that shares them."""
        if self.checkpoints is None:
            return
        position = self.checkpoints.index.aligned(position)
        if position > seq.fed and all(known != position for known, _ in seq._stops):
            seq._stops = sorted([*seq._stops, (position, "branch")])

    def will_publish(self, seq: Sequence) -> bool:
        """Whether `seq` is reading its prompt, and others may find the blocks that it fills."""
        return seq.state is SeqState.PREFILLING and bool(seq._prefix.epoch == self.cache.forgotten)

    def begin(self, seq: Sequence) -> None:
        """`seq` has an empty state: it computes all of its blocks anew."""
        if self.cache is not None:
            seq._prefix.epoch = self.cache.forgotten

    def adopt(self, seq: Sequence) -> bool:
        """Let `seq` begin with cached blocks where they are more than it has; at least one token is left to compute.

        True when its state has changed: the tokens that it had are the first of those that it has now.
        """
        if self.cache is None:
            return False
        blocks = self._blocks
        if not blocks.can_cut:
            return self._adopt_hybrid(seq)
        size = blocks.block_size
        full = (seq.total_tokens - 1) // size
        least = seq.fed // size + 1
        if full < least:
            return False
        tokens = self._tokens(seq, full * size)
        keys = {"cache_salt": seq.cache_salt, "extra_keys": seq.extra_keys}
        try:
            found = blocks.block_refs[0].match_prefix(self.cache, tokens, **keys)
            if len(found) < least:
                return False
            blocks.adopt(seq, [found])
            seq.fed = seq.kv.len
            seq._prefix.published = len(found)
            seq._prefix.all_cached = True
            seq._prefix.epoch = self.cache.forgotten
        finally:
            blocks.give_back()
        return True

    def _adopt_hybrid(self, seq: Sequence) -> bool:
        """The same for one that has no tokens: as far as its recurrent state, if it has one, was kept."""
        blocks, size, tokens = self._blocks, self._blocks.block_size, self._tokens(seq, seq.total_tokens)
        most = tokens[: (len(tokens) - 1) // size * size]
        try:
            found = [
                refs.match_prefix(self.cache, most, **self._keys(seq, group))
                for group, refs in enumerate(blocks.block_refs)
            ]
            begin = known = min(map(len, found)) * size
            if self.checkpoints is not None:
                self.checkpoints.follow(self.cache)
                keys = {"cache_salt": seq.cache_salt, "extra_keys": seq.extra_keys}
                begin = self.checkpoints.resume(seq.kv.state.index, tokens, known, **keys)
                seq._stops = [tuple(stop) for stop in self.checkpoints.stops(tokens, known, begin, **keys)]
            if begin:
                blocks.adopt(seq, [row[: begin // size] for row in found])
            seq.fed, seq._prefix.published, seq._prefix.all_cached = begin, begin // size, True
        finally:
            blocks.give_back()
        return bool(begin)

    def keep_states(self, batch: ScheduledBatch) -> None:
        """Keep the recurrent states of prompts that `batch`, which was run, has brought to a stop."""
        if self.checkpoints is None:
            return
        for seq in sorted(batch._sequences[batch.num_decodes :], key=by_id):
            while seq._stops and seq._stops[0][0] <= seq.fed:
                position, reason = seq._stops.pop(0)
                if position == seq.fed and seq.kv is not None:
                    self.keep_state(seq, reason)

    def keep_state(self, seq: Sequence, reason: str) -> None:
        """Keep the recurrent state of `seq`, which has passed over all that it was fed, where it may be kept."""
        if self.checkpoints is None or seq._prefix.epoch != self.cache.forgotten:
            return
        if seq.fed and self.checkpoints.index.aligned(seq.fed) == seq.fed:
            tokens, keys = self._tokens(seq, seq.fed), {"cache_salt": seq.cache_salt, "extra_keys": seq.extra_keys}
            self.checkpoints.save(seq.kv.state.index, tokens, seq.fed, reason, **keys)

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Let others find the full blocks among the first `num_tokens` tokens of `seq`.

        While all those before are cached, only the new ones are looked at: 20 us instead of 110 in each step of a
        prompt of 200,000 tokens. Otherwise the cache had others for some, which it may have evicted since.
        """
        if self.cache is None:
            return
        full = num_tokens // self._blocks.block_size
        if full and seq._prefix.epoch == self.cache.forgotten:
            start = min(seq._prefix.published, full) if seq._prefix.all_cached else 0
            tokens = self._tokens(seq, full * self._blocks.block_size)
            new = [self._publish_group(seq, group, tokens, full, start) for group in range(self._num_groups)]
            seq._prefix.all_cached = all(new)
        seq._prefix.published = full

    def publish_filled(self, batch: ScheduledBatch) -> None:
        """Publish the blocks that `batch`, which was run, has filled, in the order of ids."""
        if self.cache is None:
            return
        size = self._blocks.block_size
        filled = [seq for seq in batch._sequences if seq.fed // size > seq._prefix.published and seq.kv is not None]
        for seq in sorted(filled, key=by_id):
            if not seq._has_ended:  # those end anyhow
                self.publish(seq, seq.fed)

    def _publish_group(self, seq: Sequence, group: int, tokens: Any, full: int, start: int) -> bool:
        """Publish the full blocks of a group from `start` on; returns whether all of these were new to the cache.

        Where a window has left blocks, with ids of -1, the others can be found while the cache has all of those.
        """
        table, first = self._blocks.table(seq, group)
        if not first:
            return self._cache_blocks(seq, group, tokens, table[:full], start) == full - start
        try:
            self._cache_blocks(seq, group, tokens, table[:full], 0)
        except InvalidBlock:
            left = tokens[: first * self._blocks.block_size]
            if self.cache.cached_tokens(left, **self._keys(seq, group)) == len(left):
                raise
        return True

    def _keys(self, seq: Sequence, group: int) -> dict[str, Any]:
        """Under which the cache has the blocks of a group."""
        own = (group,) if self._num_groups > 1 else ()
        return {"cache_salt": seq.cache_salt, "extra_keys": (*seq.extra_keys, *own)}

    def _cache_blocks(self, seq: Sequence, group: int, tokens: Any, blocks: Any, start: int) -> int:
        count: int = self.cache.cache_blocks(tokens, blocks, **self._keys(seq, group), start=start)
        return count

    def _tokens(self, seq: Sequence, count: int) -> Any:
        """The first `count` tokens of `seq` as an array."""
        prefix, end = seq._prefix, seq._prefix.row_end
        if count > end:
            if len(prefix.row) < seq.max_tokens:
                row = np.empty(seq.max_tokens, np.int32)
                row[:end] = prefix.row[:end]
                prefix.row = row
            prompt = len(seq.prompt_tokens)
            prefix.row[end:count] = seq.output_tokens[end - prompt : count - prompt]
            prefix.row_end = count
        return prefix.row[:count]


def check_has(cache: Any, names: Iterable[str]) -> None:
    """Raises TypeError for what is no prefix cache, and for one that lacks what will be asked of it in a step."""
    missing = [name for name in names if not hasattr(cache, name)]
    if "cache_blocks" in missing:
        raise wrong("prefix_cache", "a PrefixCache or None", cache)
    if missing:
        raise TypeError(f"prefix_cache must be as a PrefixCache: {type(cache).__name__} has no {', '.join(missing)}")
