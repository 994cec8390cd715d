"""The scheduler's use of the prefix cache: find blocks when a request starts, publish blocks when they are full."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import itemgetter
from time import perf_counter
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

# The attributes of a prefix cache that a scheduler uses.
NEEDED = (
    "allocator",
    "block_size",
    "cache_blocks",
    "cached_tokens",
    "discard",
    "epoch",
    "evict",
    "evictable",
    "inserted",
    "match_held",
)

PART_BYTES = 8 << 20  # of pages that are read from a store at a time while other requests run: some 10 ms
MOST_COMPARED = 16  # other prompts and other salts that are compared to explain a miss: 1 us for each request
DISCARD = 2  # by how much a `discard` raises `PrefixCache.epoch`


@dataclass(slots=True)
class SequencePrefix:
    """The adapter's data of a sequence.

    Attributes
    ----------
    key : bytes
        Key of its salt and extra keys.
    row : ndarray of int32
        Its first `row_end` tokens.
    row_end : int
        Number of valid tokens in `row`.
    published : int
        Number of its leading blocks that came from the cache or were offered to it.
    all_cached : bool
        The cache has accepted all offered blocks.
    epoch : int
        `PrefixCache.epoch` before its first block was found or computed.
    num_loaded : int
        Its tokens in the cache before the last part was read, over all groups. -1: nothing is being read.
    """

    key: bytes
    row: Any
    row_end: int
    published: int = 0
    all_cached: bool = True
    epoch: int = 0
    num_loaded: int = -1

    def fork(self) -> SequencePrefix:
        """Return a copy for a fork. The fork writes its own outputs into its own row."""
        return replace(self, row=None if self.row is None else self.row[: self.row_end].copy())


class PrefixAdapter:
    """Connects a scheduler to the `PrefixCache` over its pool. Without a cache, nothing is found or published.

    A block is published when the step that filled it is committed: before that, its K and V may not be stored. Blocks
    of sequences are never evicted. If the cache is told to forget blocks, tokens computed from them may be wrong. So
    sequences that run at that time publish nothing until they start again, see also `discard`.

    If sequences have several groups, the cache keeps the blocks of each group under a separate key, the number of the
    group. The length of a match is the shortest match of all groups. Blocks before a window stay cached until room is
    needed.
    """

    def __init__(self, cache: Any, blocks: BlockManager, checkpoints: Any = None, explains: bool = False) -> None:
        self.cache = cache
        self.checkpoints = checkpoints
        self._blocks: Any = blocks
        self._load_end = 0.0  # time at which the last part was read
        if cache is None:
            return
        check_has(cache, (*NEEDED, "miss") if explains else NEEDED)
        if blocks.allocator is None:
            raise ValueError("a prefix cache needs a pool with blocks")
        if cache.allocator is not blocks.allocator:
            raise ValueError("prefix_cache must have the allocator of the pool, not another one")
        self._num_groups = len(blocks.sizes)
        for size in blocks.sizes:
            if cache.block_size != size:
                raise ValueError(f"the prefix cache has blocks of {cache.block_size} tokens, the pool {size}")
        blocks.cache = cache

    @property
    def inserted(self) -> int:
        """A counter. While it stays the same, `cached` does not rise."""
        count: int = 0 if self.cache is None else self.cache.inserted
        return count

    def read(self, seq: Sequence) -> None:
        """Store the prompt and the key of a new request.

        Raises TypeError or ValueError for tokens or keys that a prefix cache does not accept.
        """
        key = root_key(seq.cache_salt, seq.extra_keys)
        row = None if self.cache is None else token_row(np.array(seq.prompt_tokens))
        seq._prefix = SequencePrefix(key, row, len(seq.prompt_tokens))

    def cached(self, seq: Sequence) -> int:
        """Return the number of cached prompt tokens of `seq`, 0 if it does not read the cache."""
        if self.cache is None or not seq.reads_cache:
            return 0
        prompt = seq._prefix.row[: len(seq.prompt_tokens)]
        found = [self.cache.cached_tokens(prompt, **self._keys(seq, group)) for group in range(self._num_groups)]
        return int(min(found))

    def leader(self, seq: Sequence, prefills: Iterable[Sequence]) -> tuple[Sequence, int] | None:
        """Find the sequence in `prefills` that computes the next blocks of `seq`. Its priority must not be lower.

        Returns it with the number of tokens in shared full blocks, or None. If nothing is shared, this compares one
        block per prefill.
        """
        if self.cache is None or not seq.reads_cache:
            return None
        size, prompt = self._blocks.block_size, seq.prompt_tokens
        head, most = prompt[:size], min(len(prompt), seq.total_tokens - 1) // size * size
        leader, until = None, 0
        for other in prefills:
            end = min(most, len(other.prompt_tokens) // size * size)
            if other.fed >= end or other.prompt_tokens[:size] != head or other._prefix.key != seq._prefix.key:
                continue
            if other._rank[0] > seq._rank[0] or not self.will_publish(other):
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
        """Make `seq` save its recurrent state after `position` tokens, for another sequence that shares them."""
        if self.checkpoints is None:
            return
        position = self.checkpoints.index.aligned(position)
        if position > seq.fed and all(known != position for known, _ in seq._stops):
            seq._stops = sorted([*seq._stops, (position, "branch")])

    def will_publish(self, seq: Sequence) -> bool:
        """Return true if `seq` is a prefill and will publish the blocks that it fills."""
        return seq.state is SeqState.PREFILLING and bool(seq._prefix.epoch == self.cache.epoch)

    def begin(self, seq: Sequence) -> None:
        """Note that `seq` starts with an empty state and will compute all its blocks."""
        if self.cache is not None:
            seq._prefix.epoch = self.cache.epoch

    def load(self, seq: Sequence) -> bool:
        """Read the next blocks of `seq` from the store into the cache: one part, or for as long as the last step took.

        Returns True if blocks were read: call it again, there may be more. Returns False if the store has no more of
        them, or if the cache has not kept those of the last call: it has no room for more.
        """
        link = getattr(self.cache, "link", None)
        if link is None or not seq.reads_cache:
            return False
        begin = perf_counter()
        seconds = begin - self._load_end if seq._prefix.num_loaded >= 0 else 0.0
        while self._load_part(seq, link):
            self._load_end = perf_counter()
            if self._load_end - begin >= seconds:
                return True
        return False

    def _load_part(self, seq: Sequence, link: Any) -> bool:
        """Read `PART_BYTES` of each group, or one block."""
        size = self._blocks.block_size
        tokens = self._tokens(seq, (seq.total_tokens - 1) // size * size)
        most = max(1, PART_BYTES // max(1, link.queue.page_bytes)) * size  # Mamba-2 has pages without bytes
        num_cached, has_read = 0, False
        try:
            for group, refs in enumerate(self._blocks.block_refs):
                keys = self._keys(seq, group)
                known = self.cache.cached_tokens(tokens, **keys)
                num_cached += known
                if link.has_next(self.cache, tokens, **keys):
                    refs.match_prefix(self.cache, tokens[: known + most], **keys, is_use=False)
                    has_read = True
        finally:
            self._blocks.give_back()
        goes_on = has_read and num_cached > seq._prefix.num_loaded
        seq._prefix.num_loaded = num_cached if goes_on else -1
        return goes_on

    def adopt(self, seq: Sequence) -> bool:
        """Replace the blocks of `seq` by cached blocks if these hold more tokens. Leaves at least one token to compute.

        Returns True if the state has changed; it then has more tokens than before.
        """
        if self.cache is None or not seq.reads_cache:
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
        epoch = self.cache.epoch  # before the look-up: the blocks that it finds can be forgotten at any time
        try:
            found = blocks.block_refs[0].match_prefix(self.cache, tokens, **keys)
            if len(found) < least:
                return False
            blocks.adopt(seq, [found])
            seq.fed = seq.kv.len
            seq._prefix.published = len(found)
            seq._prefix.all_cached = True
            seq._prefix.epoch = epoch
        finally:
            blocks.give_back()
        return True

    def _adopt_hybrid(self, seq: Sequence) -> bool:
        """Adopt cached blocks for a hybrid sequence without tokens, up to the last saved recurrent state."""
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

    def note_miss(self, seq: Sequence) -> None:
        """Note why the cache had only some of the prompt of `seq`, which was just admitted. O(1) for found blocks.

        With several groups, the group that has the fewest tokens decides.
        """
        if self.cache is None or not seq.reads_cache:
            return
        size, length = self._blocks.block_size, len(seq.prompt_tokens) - 1  # one token is computed again
        start, alone = min(seq._prefix.published, length // size), self._num_groups == 1
        misses = []
        for group in range(self._num_groups):
            keys = self._keys(seq, group)
            key = seq._prefix.key if alone else root_key(keys["cache_salt"], keys["extra_keys"])
            block = self._blocks.table(seq, group)[0][start - 1] if start else -1
            # The other groups have the same tokens under other keys, so keys are compared only if there is one group.
            misses.append(self.cache.miss(seq._prefix.row, key, length, block, start, MOST_COMPARED, alone))
        seq._miss = seq._prefix.row, min(misses, key=itemgetter(0)), seq.fed, length + 1

    def keep_states(self, batch: ScheduledBatch) -> None:
        """Save the recurrent states of prompts that have reached one of their stops in `batch`, which was run."""
        if self.checkpoints is None:
            return
        for seq in sorted(batch._sequences[batch.num_decodes :], key=by_id):
            while seq._stops and seq._stops[0][0] <= seq.fed:
                position, reason = seq._stops.pop(0)
                if position == seq.fed and seq.kv is not None:
                    self.keep_state(seq, reason)

    def keep_state(self, seq: Sequence, reason: str) -> None:
        """Save the recurrent state of `seq` if its position is aligned. The state must include all fed tokens."""
        if self.checkpoints is None:
            return
        self.checkpoints.follow(self.cache)
        if seq.fed and self.checkpoints.index.aligned(seq.fed) == seq.fed:
            tokens, keys = self._tokens(seq, seq.fed), {"cache_salt": seq.cache_salt, "extra_keys": seq.extra_keys}
            self.checkpoints.save(seq.kv.state.index, tokens, seq.fed, reason, epoch=seq._prefix.epoch, **keys)

    def discard(self, seq: Sequence, running: Iterable[Sequence]) -> None:
        """Forget all blocks of `seq` in the cache: their keys or values may be wrong.

        `seq` publishes nothing more, and neither do sequences that begin with the same tokens, because they can have
        read one of its blocks, or a recurrent state. The other `running` sequences go on.
        """
        if self.cache is None or seq.kv is None:
            return
        blocks = [block for table in getattr(seq.kv, "kv", [seq.kv]) for block in table.blocks]
        before = self.cache.epoch
        self.cache.discard(blocks)
        after = self.cache.epoch
        if after - before != DISCARD:  # another thread or process has forgotten blocks too
            return
        for other in running:
            if other._prefix.epoch == before and not self._begins_as(other, seq):
                other._prefix.epoch = after

    def _begins_as(self, seq: Sequence, other: Sequence) -> bool:
        """Return true if two sequences can have blocks of equal tokens, or one can be a fork of the other."""
        size = min(self._blocks.block_size, len(seq.prompt_tokens), len(other.prompt_tokens))
        is_equal: bool = seq.prompt_tokens[:size] == other.prompt_tokens[:size]
        return is_equal and seq._prefix.key == other._prefix.key

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Cache the full blocks among the first `num_tokens` tokens of `seq`.

        If the cache has accepted all earlier blocks, only new blocks are offered. This takes 20 us instead of 110 us in
        each step of a prompt of 200,000 tokens. Otherwise the cache had other blocks for the same tokens. It may have
        evicted these since, so all blocks are offered again.
        """
        if self.cache is None:
            return
        full = num_tokens // self._blocks.block_size
        if full and seq._prefix.epoch == self.cache.epoch:
            start = min(seq._prefix.published, full) if seq._prefix.all_cached else 0
            tokens = self._tokens(seq, full * self._blocks.block_size)
            new = [self._publish_group(seq, group, tokens, full, start) for group in range(self._num_groups)]
            seq._prefix.all_cached = all(new)
        seq._prefix.published = full

    def publish_filled(self, batch: ScheduledBatch) -> None:
        """Publish the blocks that `batch` has filled, in the order of sequence ids. `batch` was run."""
        if self.cache is None:
            return
        size = self._blocks.block_size
        filled = [seq for seq in batch._sequences if seq.fed // size > seq._prefix.published and seq.kv is not None]
        for seq in sorted(filled, key=by_id):
            if not seq._has_ended:  # `_finish` publishes these
                self.publish(seq, seq.fed)

    def _publish_group(self, seq: Sequence, group: int, tokens: Any, full: int, start: int) -> bool:
        """Publish the full blocks of a group from `start` on. Returns true if all of them were new to the cache.

        Blocks before a window have the id -1. Later blocks can be found only while the cache has blocks for those
        tokens.
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
        """Return the cache keys for the blocks of a group."""
        own = (group,) if self._num_groups > 1 else ()
        return {"cache_salt": seq.cache_salt, "extra_keys": (*seq.extra_keys, *own)}

    def _cache_blocks(self, seq: Sequence, group: int, tokens: Any, blocks: Any, start: int) -> int:
        keys = self._keys(seq, group)
        count: int = self.cache.cache_blocks(tokens, blocks, **keys, start=start, epoch=seq._prefix.epoch)
        return count

    def _tokens(self, seq: Sequence, count: int) -> Any:
        """Return the first `count` tokens of `seq` as an array."""
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
    """Raise TypeError if `cache` lacks one of the attributes of a prefix cache."""
    missing = [name for name in names if not hasattr(cache, name)]
    if "cache_blocks" in missing:
        raise wrong("prefix_cache", "a PrefixCache or None", cache)
    if missing:
        raise TypeError(f"prefix_cache must be like PrefixCache: {type(cache).__name__} has no {', '.join(missing)}")
