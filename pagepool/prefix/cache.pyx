"""PrefixCache: blocks of finished and running prompts, found again by the tokens that they hold."""

cimport cython
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t, uint64_t

from pagepool.csrc cimport PP_OK
from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.held_blocks cimport HeldBlocks
from pagepool.memory.ids cimport IdArray, read_ids, release_ids
from pagepool.prefix.cached_blocks cimport CachedBlocks
from pagepool.prefix.event_log cimport Event, EventLog
from pagepool.prefix.summary cimport CacheSummary
from pagepool.prefix.terms cimport time_key
from pagepool.prefix.uninterrupted cimport Uninterrupted

import operator

import numpy as np

from pagepool.errors import PoolError
from pagepool.prefix.keys import root_key
from pagepool.prefix.tokens import token_row
from pagepool.prefix.policies import POLICIES

__all__ = ["PrefixCache"]

cdef object empty = np.empty
cdef object INT32 = np.dtype(np.int32)


@cython.auto_pickle(False)
@cython.final
cdef class PrefixCache(CacheSummary):
    """Keeps full blocks for the next prompt that begins with the same tokens, under the same salt and extra keys.

    allocator   whose blocks these are; the cache holds one reference to each block that it keeps
    block_size  tokens per block, from 1 to 1,024; by default those of the pool that has these blocks, else 16
    policy      who is evicted first: "lru", "lfu", "s3fifo", "arc", "gittins", our own, or
                "priority", as given to `cache_blocks`
    max_events  how many events wait at most to be drained (see `drain_events`); 0: none are noted
    hash_bits   bits of the block hashes that count; fewer than 64 only to force collisions in tests

    A block is found behind the one before it, by a hash where there are several, and taken only when every token, from
    the first of the prompt on, and the salt and the keys are equal. Blocks leave through `evict` (and
    `touch`, which evicts), `discard` and `reset_prefix_cache`, or when `cache_blocks` has a copy take their place; one
    that a sequence holds is never evicted. The GIL makes each call atomic. Raises
    `ValueError` for a wrong block size or an unknown policy.

    >>> from pagepool import BlockAllocator
    >>> allocator = BlockAllocator(8)
    >>> cache = PrefixCache(allocator, block_size=2)
    >>> blocks = allocator.allocate_n(3)
    >>> cache.cache_blocks([1, 2, 3, 4, 5], blocks)  # the last block is not full
    2
    >>> allocator.free(blocks)
    >>> cache.match_prefix([1, 2, 3, 4, 9, 9]), cache.match_prefix([1, 2], cache_salt="another tenant")
    (array([0, 1], dtype=int32), array([], dtype=int32))
    """

    def __cinit__(
        self, BlockAllocator allocator not None, block_size=None, str policy="lru", *, max_events=0, int hash_bits=64
    ):
        cdef int32_t size = allocator.read_block_size(block_size)
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {policy!r}")
        self.allocator = allocator
        self.policy = policy
        self.block_size = size
        self.cached = CachedBlocks(allocator, size, policy, hash_bits)
        events = operator.index(max_events)
        if events < 0:
            raise ValueError(f"max_events must be 0 or more, not {events}")
        if events:
            self.cached.log = EventLog(self.cached.table, events)
        allocator.add_holder(self)

    def match_prefix(self, tokens, *, cache_salt=None, extra_keys=()):
        """The cached blocks of the longest prefix of `tokens`, in order: int32 `(n,)`, for `n * block_size` tokens.

        tokens      ids (n_tokens,): a sequence of integers or an array; an int32 array is read in place
        cache_salt  str, bytes, int or None: only blocks cached with an equal one, of the same type, are found
        extra_keys  what else the keys and values depend on, an adapter or the hash of an image; as the salt

        Each block has one reference more, the caller's to free: it is not evicted before. All of them count as used,
        from the first to the last. Raises `TypeError` and `ValueError` for what are no tokens or keys, `PoolError` when
        a block was freed behind the cache's back; then nothing has changed.
        """
        return self.match(tokens, cache_salt, extra_keys, False, None)[0]

    def match_tokens(self, tokens, *, cache_salt=None, extra_keys=()):
        """As `match_prefix`, and beyond: `(blocks, num_tokens)`, the last block perhaps the same in part only.

        That last block is the one, among those cached behind the full ones, that goes on with the same tokens for
        longest; of a crowd of more than 1,024 the youngest are looked at. Each block has one reference more, the
        caller's to free. `PagedSeqState.adopt(blocks, num_tokens)` begins a sequence with them; its first `append` into
        a block that others hold copies the page.

        >>> from pagepool import BlockAllocator, PagedSeqState
        >>> allocator = BlockAllocator(8)
        >>> cache = PrefixCache(allocator, block_size=4)
        >>> first = allocator.allocate_n(2)
        >>> cache.cache_blocks([1, 2, 3, 4, 5, 6, 7, 8], first)
        2
        >>> blocks, num_tokens = cache.match_tokens([1, 2, 3, 4, 5, 6, 9])
        >>> blocks, num_tokens
        (array([0, 1], dtype=int32), 6)
        >>> state = PagedSeqState(allocator, block_size=4)
        >>> state.adopt(blocks, num_tokens)
        >>> allocator.free(blocks)
        >>> state.append().tolist(), state.blocks
        ([10], [0, 2])
        """
        return self.match(tokens, cache_salt, extra_keys, True, None)

    def match_held(self, HeldBlocks held not None, tokens, cache_salt=None, extra_keys=()):
        """As `match_prefix`; it is `held`, of the same allocator, that has the references. Internal."""
        return self.match(tokens, cache_salt, extra_keys, False, held)[0]

    cdef tuple match(self, tokens, cache_salt, extra_keys, bint in_part, HeldBlocks held):
        """Blocks and number of tokens. All that can fail is done before anything changes."""
        cdef const int32_t[::1] row = token_row(tokens)
        cdef CachedBlocks cached = self.cached
        cdef int64_t n = row.shape[0] // self.block_size, num_full = 0, num_found, i
        cdef int32_t[::1] found
        cdef int32_t node, common = 0
        key = root_key(cache_salt, extra_keys)
        cdef Uninterrupted _guard = Uninterrupted()
        root = cached.table.roots.get(key)
        if root is not None and row.shape[0]:
            cached.c_reserve_path(n + 1)
            cached.order.c_reserve(n + 1)
            num_full = cached.c_walk(root, &row[0], n, True)
            if in_part and num_full * self.block_size < row.shape[0]:
                node = cached.path[num_full - 1] if num_full else root
                i = num_full * self.block_size
                cached.path[num_full] = cached.table.c_find_part(node, &row[i], row.shape[0] - i, &common)
        num_found = num_full + (common > 0)
        blocks = empty(num_found, INT32)
        result = blocks, num_full * self.block_size + common
        if num_found:
            found = blocks
            if held is not None:
                held.c_reserve(num_found)
            for i in range(num_found):
                found[i] = cached.table.nodes[cached.path[i]].block
            if self.allocator.c_share_n(&found[0], num_found) != PP_OK:
                raise PoolError("a cached block was freed by someone else, or has all the references a count can hold")
            if held is not None:
                held.c_hold(&found[0], num_found)
            cached.c_touch_path(num_found)
        self.looked_up += n
        self.hits += num_full
        return result

    def cached_tokens(self, tokens, *, cache_salt=None, extra_keys=()):
        """How many of the first of `tokens` are in cached blocks: those of `match_prefix`. Changes nothing.

        Arguments and errors as there.
        """
        cdef const int32_t[::1] row = token_row(tokens)
        cdef int64_t n = row.shape[0] // self.block_size
        root = self.cached.table.roots.get(root_key(cache_salt, extra_keys))
        if root is None or n == 0:
            return 0
        self.cached.c_reserve_path(n)
        return self.cached.c_walk(root, &row[0], n, True) * self.block_size

    def cache_blocks(
        self, tokens, blocks, *, cache_salt=None, extra_keys=(), start=0, priority=0, ttl=None, double now=0.0, group=0,
        bint beside=False
    ):
        """Keeps the full blocks of a sequence; returns how many of them it has taken now.

        tokens  those of the sequence from its first on, whose keys and values the blocks hold: as in `match_prefix`
        blocks  ids of its blocks, at least `len(tokens) // block_size`; those behind the last full one are ignored

        start     how many of the first blocks are cached already, found by `match_prefix` or kept by an earlier call:
                  where the last of them still is the one that is cached, with its tokens and under this salt and
                  these keys, those before it are not looked at, whatever their number
        priority  of the blocks that are new, from 0, the first to be evicted, to 255; for the policy "priority" alone
        ttl       how long from `now` on they have it, until `expire` is told that time, then it is 0; None: for good
        group     whose the new blocks are, from 0, nobody's, to 254; see `floors`
        beside    whether all that is cached stays, so that `discard` of the new blocks takes everything back

        The cache takes one reference to each block that it keeps. Where a block for the same tokens is cached already,
        that one stays while others use it, and the sequence's own remains the sequence's alone; one that nobody uses
        gives its place to the sequence's, and is free: what a sequence holds is not to be evicted. Raises
        `InvalidBlock` for a block that is free, out of range, or cached for other tokens, `ValueError` for too few
        blocks or a `start` behind the last full one, `TypeError`, `MemoryError`; then nothing has changed.
        """
        cdef const int32_t[::1] row = token_row(tokens)
        cdef CachedBlocks cached = self.cached
        cdef int64_t n = row.shape[0] // self.block_size
        cdef IdArray ids
        cdef int64_t known = operator.index(start)
        cdef int level = cached.order.level_of(priority, self.policy), mark = cached.floors.mark_of(group)
        cdef uint64_t end = cached.order.end_of(ttl, now, self.policy)
        if not 0 <= known <= n:
            raise ValueError(f"start must be from 0 to {n}, the number of full blocks, not {known}")
        key = self.cached.table.named_key(root_key(cache_salt, extra_keys))
        if n == 0:
            return 0
        cdef Uninterrupted _guard
        read_ids(blocks, &ids)
        try:
            _guard = Uninterrupted()
            if ids.count < n:
                raise ValueError(f"{row.shape[0]} tokens fill {n} blocks, here are {ids.count}")
            return cached.keep(key, &row[0], ids.ids, n, known, mark, level, end, beside)
        finally:
            release_ids(&ids)

    def expire(self, double now):
        """Tells the time: blocks whose priority ends by `now` get priority 0, as used just now; returns how many.

        As in `PrefixPins`, times are the caller's, here floats, and nothing ends unless it is told; one earlier than
        the last changes nothing. O(1) amortised a block. Raises `ValueError` when `now` is no number.

        >>> from pagepool import BlockAllocator
        >>> cache = PrefixCache(BlockAllocator(4), 1, "priority")
        >>> cache.cache_blocks([7, 8], cache.allocator.allocate_n(2), priority=9, ttl=60.0, now=100.0)
        2
        >>> cache.expire(159.9), cache.expire(160.0)
        (0, 2)
        """
        if now != now:
            raise ValueError("now must be a time, not nan")
        return self.cached.order.c_expire(time_key(now))

    def touch(self, tokens, *, cache_salt=None, extra_keys=()):
        """One prompt of a pure cache pass; returns how many of its leading full blocks were cached.

        From the first block to the last: a cached one counts as used, any other gets a block, free or else evicted from
        the cache, which keeps it. No block is held for the prompt, so that one longer than the cache evicts its own
        beginning. Arguments as for `match_prefix`. Stops where nothing can be evicted. Raises as `match_prefix` does.
        """
        cdef const int32_t[::1] row = token_row(tokens)
        cdef int64_t n = row.shape[0] // self.block_size, leading = 0
        key = self.cached.table.named_key(root_key(cache_salt, extra_keys))
        cdef Uninterrupted _guard = Uninterrupted()
        if n:
            self.cached.table.reserve(n + 1)
            self.cached.order.c_reserve(n)
            leading = self.cached.c_pass(self.cached.table.root(key), &row[0], n)
        self.looked_up += n
        self.hits += leading
        return leading

    def evict(self, n, *, group=0):
        """Gives up to n blocks that nobody else holds back to the allocator; returns how many, fewer when it has fewer.

        O(1) a block, in the order of the policy, but for those that `floors` keep from a request of `group`. A block in
        use waits aside until a later call finds it free, as if used just then. Raises `ValueError` when n is below 0.

        >>> from pagepool import BlockAllocator
        >>> PrefixCache(BlockAllocator(4)).evict(1)
        0
        """
        number = operator.index(n)
        if number < 0:
            raise ValueError(f"cannot evict {number} blocks")
        return self.cached.c_evict(min(number, INT32_MAX), <uint8_t>self.cached.floors.mark_of(group))

    def discard(self, blocks):
        """Forgets these blocks, in use or not; returns how many of them were cached. Other ids change nothing.

        For blocks whose keys and values turn out to be wrong, or were never written. What sequences hold stays theirs;
        what is cached behind a forgotten block is found no more until that is cached again. A sequence of a `Scheduler`
        that holds one gives the cache nothing more.

        >>> from pagepool import BlockAllocator
        >>> cache = PrefixCache(BlockAllocator(4), block_size=1)
        >>> cache.cache_blocks([7, 8], cache.allocator.allocate_n(2))
        2
        >>> cache.discard([1, 3]), cache.match_prefix([7, 8])
        (1, array([0], dtype=int32))
        """
        cdef IdArray ids
        cdef int64_t count = 0, i
        read_ids(blocks, &ids)
        for i in range(ids.count):
            if 0 <= ids.ids[i] < self.allocator.max_capacity:
                count += self.cached.c_discard(ids.ids[i])
        release_ids(&ids)
        return count

    def drain_events(self):
        """What was stored and removed since the last call, a list of `PrefixEvent`; `max_events` of them at most.

        When there were more the first ones are missing, as the `sequence` of the others shows: `snapshot` helps. A
        `PrefixMirror` in another process follows the cache by them. Raises `ValueError` without `max_events`.

        >>> from pagepool import BlockAllocator
        >>> cache = PrefixCache(BlockAllocator(4), block_size=1, max_events=8)
        >>> cache.touch([7]), cache.evict(1)
        (0, 1)
        >>> [(event.sequence, event.kind, event.block) for event in cache.drain_events()]
        [(1, 'stored', 0), (2, 'removed', 0)]
        """
        return self.log().drain()

    def snapshot(self):
        """All that is cached, as a `PrefixSnapshot` to begin a mirror with. O(nodes). Raises as `drain_events`."""
        return self.log().snapshot()

    cdef int64_t c_next_event(self, Event *event, int32_t *tokens) noexcept nogil:
        if self.cached.log is None:
            return 0
        return self.cached.log.c_next(event, tokens)

    cdef EventLog log(self):
        if self.cached.log is None:
            raise ValueError("the cache notes no events: it was made with max_events=0")
        return self.cached.log

    def reset_prefix_cache(self):
        """Forgets everything and drops every reference of the cache; blocks of sequences stay theirs, and those of a
        `Scheduler` do not bring back what they had before.

        The lowest id that is free then is the next to be handed out. O(n log n).
        """
        self.cached.reset()
