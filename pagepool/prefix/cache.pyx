"""PrefixCache: blocks of finished and running prompts, found again by their tokens."""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, Py_buffer, PyBuffer_Release, PyObject_GetBuffer
from cpython.long cimport PyLong_CheckExact
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from libc.stdint cimport INT32_MAX, int32_t, int64_t

from pagepool.csrc cimport PP_OK
from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.block_refs cimport BlockRefs, PrefixMatch, new_match
from pagepool.memory.arrays cimport IdArray, read_ids, release_ids
from pagepool.prefix.events cimport EventLog
from pagepool.prefix.eviction cimport CachedBlocks
from pagepool.prefix.radix_tree cimport NodeTable, pause_collector, refuse_negative, resume_collector
from pagepool.prefix.shared_index cimport SharedIndex
from pagepool.prefix.stored_pages cimport PageQueue

from contextlib import nullcontext
from time import monotonic

import numpy as np

from pagepool._arguments import integer
from pagepool.errors import PoolError, refuse_copy
from pagepool.prefix.eviction import POLICIES
from pagepool.prefix.keys import listed, root_key
from pagepool.prefix.radix_tree import token_row

__all__ = ["PrefixCache"]

cdef object empty = np.empty
cdef object INT32 = np.dtype(np.int32)

cdef enum:
    MOST_COMPARED = 1024  # prompts and keys that `explain` compares


@cython.auto_pickle(False)
@cython.final
cdef class PrefixCache:
    """PrefixCache(allocator, block_size=None, policy=None, *, max_events=0, store=None)\n--\n
    Keep full blocks for the next prompt that begins with the same tokens, under the same salt and extra keys.

    A block is found behind the block before it, and only when the salt, the keys and every token from the first of the
    prompt on are equal. Blocks leave through `evict`, `touch` (which evicts), `discard` and `reset_prefix_cache`, or
    when `cache_blocks` replaces an idle block by a copy that a sequence holds. A block that a sequence holds is never
    evicted. Each call is atomic: any number of threads may use one cache, also without the GIL.

    Parameters
    ----------
    allocator : BlockAllocator
        The allocator of the blocks. The cache holds one reference to each block that it keeps.
    block_size : int or None
        Tokens per block, from 1 to 1,024. None: the block size of the pool of this allocator, 16 without a pool.
    policy : {"gittins", "lru"} or None
        Which block is evicted first. None: "gittins", and "lru" for a shared pool, whose processes learn alone.
    max_events : int
        How many events are kept until `drain_events` is called. 0: no events are noted.
    store : PrefixStore or None
        Pages on disk, with the layout of all pools of the allocator. A thread writes a page to it when the page is
        evicted or found again. Look-ups read pages that the pool does not have from it, into free or evicted blocks.

    Raises
    ------
    ValueError
        A wrong block size, an unknown policy, or a store of other pages.

    Notes
    -----
    The policy "gittins" learns from reuse which kinds of blocks come back, and after how long. Until it has learnt
    something it does the same as LRU. After a change of the traffic it may have fewer hits than LRU. When the loss
    reaches a tenth of the allocator's blocks and a fourth of its earlier gain, it follows LRU for a while, each time
    twice as long. The loss may double until the cache has the blocks that LRU would have. It remembers up to four
    evicted prefixes for each block of the allocator, at `64 + 4 * block_size` bytes each: 512 bytes more than LRU for a
    block of 16 tokens. Inserting and evicting a block costs about twice as much as with LRU.

    Examples
    --------
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

    kind = "cache"

    def __cinit__(self, BlockAllocator allocator not None, block_size=None, str policy=None, *, max_events=0,
                  store=None):
        cdef int32_t size = allocator.read_block_size(block_size)
        policy = policy or ("gittins" if allocator.shared == NULL else "lru")
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {policy!r}")
        self.allocator = allocator
        self.policy = policy
        self.block_size = size
        self.cached = CachedBlocks(NodeTable(size), allocator.max_capacity, policy, allocator)
        events = integer("max_events", max_events, 0, INT32_MAX)
        if allocator.shared != NULL:
            self.shared = SharedIndex(allocator, size)
            if policy != "lru":
                (<SharedIndex>self.shared).evict_by(policy)
        if events:
            self.note_events(events)
        if store is not None:
            self.open_store(store)
        allocator.add_owner(self)

    cdef int note_events(self, int64_t max_events) except -1:
        if self.shared is not None:
            return (<SharedIndex>self.shared).note_events(max_events)
        self.cached.log = EventLog(self.cached.tree, self.cached.tree.give_names(bytes(16)), max_events)
        return 0

    cdef int open_store(self, store) except -1:
        from pagepool.prefix.store import PrefixStore  # late: loads hashes and threads
        from pagepool.prefix.store_link import QUEUE_BYTES, StoreLink
        if not isinstance(store, PrefixStore):
            raise TypeError(f"store must be a PrefixStore or None, not {type(store).__name__}")
        queue = PageQueue(self.allocator, self.block_size, QUEUE_BYTES)
        self.link = StoreLink(store, queue)
        self.followed = self.epoch
        if self.shared is not None:
            return (<SharedIndex>self.shared).offer_to(queue, store.seed)
        self.cached.number = self.cached.tree.give_names(store.seed)
        self.cached.queue = queue
        return 0

    def __dealloc__(self):
        PyMem_Free(self.path)

    def __reduce__(self):
        refuse_copy(self)

    def __repr__(self):
        cached = f"{self.num_cached} of {self.allocator.max_capacity} blocks cached"
        return f"<{type(self).__name__} {self.policy}: {cached}>"

    def match_prefix(self, tokens, *, cache_salt=None, extra_keys=()):
        """Return the cached blocks of the longest prefix of `tokens`, and mark them as used.

        Each block gets one more reference, which the caller frees. Until then the block is not evicted.

        Parameters
        ----------
        tokens : sequence of int or integer array (n_tokens,)
            Token ids of at least 0. An int32 array is read in place.
        cache_salt : str, bytes, int or None
            Find only blocks that were cached with an equal salt of the same type.
        extra_keys : sequence of str, bytes, int or None
            What else the keys and values depend on, such as an adapter or the hash of an image.

        Returns
        -------
        int32 array (n,)
            The ids of the blocks of the first `n * block_size` tokens.

        Raises
        ------
        TypeError
            The tokens are not integers, or a key has another type.
        ValueError
            A token of the found blocks or of the block after them is negative, or a token has more than 32 bits.
        PoolError
            A cached block was freed by another owner. Nothing has changed.
        """
        return self.match(tokens, cache_salt, extra_keys, False, None, True)[0]

    def match_tokens(self, tokens, *, cache_salt=None, extra_keys=()):
        """Like `match_prefix`, but also find a last block that matches only in part.

        Among the blocks cached behind the full ones, the last block is the one that shares the most tokens with the
        prompt. If there are more than 1,024 candidates, only the most recent ones are compared.

        Parameters
        ----------
        tokens, cache_salt, extra_keys
            As in `match_prefix`.

        Returns
        -------
        PrefixMatch
            Holds one more reference to each block until it is closed or dropped, so these blocks are not evicted.
            `PagedSeqState.adopt(match)` begins a sequence with them. The first `append` of the sequence into a shared
            block copies the page.

        Raises
        ------
        TypeError, ValueError, PoolError
            As in `match_prefix`.

        Examples
        --------
        >>> from pagepool import BlockAllocator, PagedSeqState
        >>> allocator = BlockAllocator(8)
        >>> cache = PrefixCache(allocator, block_size=4)
        >>> first = allocator.allocate_n(2)
        >>> cache.cache_blocks([1, 2, 3, 4, 5, 6, 7, 8], first)
        2
        >>> match = cache.match_tokens([1, 2, 3, 4, 5, 6, 9])
        >>> match.blocks, match.num_tokens
        (array([0, 1], dtype=int32), 6)
        >>> state = PagedSeqState(allocator, block_size=4)
        >>> state.adopt(match)
        >>> state.append().tolist(), state.blocks
        ([10], [0, 2])
        """
        cdef PrefixMatch found = new_match(self.allocator)
        found.blocks, found.num_tokens = self.match(tokens, cache_salt, extra_keys, True, found.refs, True)
        return found

    def match_held(self, BlockRefs held not None, tokens, cache_salt=None, extra_keys=(), is_use=True, reads=True):
        """Like `match_prefix`, but store the references in `held`, which must have the same allocator. Internal: if
        `is_use` is false, blocks are not marked as used. If `reads` is false, the store is not read."""
        return self.match(tokens, cache_salt, extra_keys, False, held, is_use, reads)[0]

    cdef tuple match(
        self, tokens, cache_salt, extra_keys, bint in_part, BlockRefs held, bint is_use, bint reads=True
    ):
        """Return blocks and the number of tokens. Brings blocks from the store into the cache first."""
        if self.link is None or not (is_use or reads):
            return self.match_cached(tokens, cache_salt, extra_keys, in_part, held, is_use)
        keys, row = listed(extra_keys), token_row(tokens)
        self.follow()
        with self.link.promoted(self, np.asarray(row), cache_salt, keys, reads):
            return self.match_cached(row, cache_salt, keys, in_part, held, is_use)

    cdef tuple match_cached(self, tokens, cache_salt, extra_keys, bint in_part, BlockRefs held, bint is_use):
        """Find a prompt in this cache only, without the store. All steps that can fail come before the first change."""
        cdef const int32_t[::1] row = token_row(tokens)
        cdef CachedBlocks cached = self.cached
        cdef int64_t n = row.shape[0] // self.block_size, num_full = 0, num_found, i
        cdef int32_t node, common = 0
        cdef int32_t *found
        cdef Py_buffer view
        cdef int paused
        key = root_key(cache_salt, extra_keys)
        if self.shared is not None:
            refuse_negative(&row[0], 0, row.shape[0])
            return (<SharedIndex>self.shared).match(row, key, in_part, held, is_use)
        with cython.critical_section(self):
            paused = pause_collector()
            try:
                root = cached.tree.roots.get(key)
                if root is not None and row.shape[0]:
                    self.c_reserve_path(n + 1)
                    num_full = cached.tree.c_walk(root, &row[0], n, True, self.path)
                    if in_part and num_full * self.block_size < row.shape[0]:
                        node = self.path[num_full - 1] if num_full else root
                        i = num_full * self.block_size
                        self.path[num_full] = cached.tree.c_find_part(node, &row[i], row.shape[0] - i, &common)
                self.refuse_next(row, num_full)
                num_found = num_full + (common > 0)
                blocks = empty(num_found, INT32)
                result = blocks, num_full * self.block_size + common
                if num_found:
                    if held is not None:
                        held.c_reserve(num_found)
                    PyObject_GetBuffer(blocks, &view, PyBUF_SIMPLE | PyBUF_WRITABLE)
                    found = <int32_t *>view.buf
                    PyBuffer_Release(&view)  # the array stays where it is
                    for i in range(num_found):
                        found[i] = cached.tree.nodes[self.path[i]].block
                    if self.allocator.c_share_n(found, num_found) != PP_OK:
                        raise PoolError(
                            "a cached block was freed by someone else, or has all the references a count can hold"
                        )
                    if held is not None:
                        held.c_note(found, num_found)
                    if is_use:
                        for i in range(num_found):
                            cached.c_touch(self.path[i])
                        if cached.queue is not None:
                            cached.c_found(self.path, num_full)
                if is_use:
                    self.looked_up += n
                    self.hits += num_full
                return result
            finally:
                resume_collector(paused)

    def cached_tokens(self, tokens, *, cache_salt=None, extra_keys=()):
        """Return how many of the first tokens `match_prefix` would find. Changes nothing.

        Parameters and errors as in `match_prefix`.
        """
        cdef const int32_t[::1] row = token_row(tokens)
        cdef int64_t n = row.shape[0] // self.block_size, found = 0
        key = root_key(cache_salt, extra_keys)
        if self.shared is not None:
            refuse_negative(&row[0], 0, row.shape[0])
            return (<SharedIndex>self.shared).cached_tokens(row, key)
        with cython.critical_section(self):
            root = self.cached.tree.roots.get(key)
            if root is not None and n:
                self.c_reserve_path(n)
                found = self.cached.tree.c_walk(root, &row[0], n, True, self.path)
            self.refuse_next(row, found)
            return found * self.block_size

    def explain(self, tokens, *, cache_salt=None, extra_keys=()):
        """Say why `match_prefix` does not find all of `tokens`. Changes nothing.

        Call it before the prompt is cached. The store is not read: pages that are only there count as evicted, or as
        never seen after a restart. At most 1,024 prompts that differ at one place and 1,024 other salts and keys are
        compared, the youngest first. Tokens of another salt or other keys are never shown. In a shared pool the reason
        of all full blocks is "shared_pool", since other processes evict too. Parameters and errors as in
        `match_prefix`. Returns an `Explanation`.

        Examples
        --------
        >>> from pagepool import BlockAllocator
        >>> cache = PrefixCache(BlockAllocator(4), block_size=2)
        >>> cache.touch([1, 2, 3, 4])
        0
        >>> print(cache.explain([1, 2, 3, 5, 6]))
        2 of 5 tokens found, 2 differ from token 3 on (5 here, 4 there), 1 is short of a block
        """
        from pagepool.prefix.explain import Explanation  # late: few callers ask
        row, key = token_row(tokens), root_key(cache_salt, extra_keys)
        return Explanation.of(row, self.miss(row, key, len(row), -1, 0, MOST_COMPARED, True))

    def miss(
        self, const int32_t[::1] row, bytes key not None, int64_t length, int32_t block, int64_t start,
        int32_t most_compared, bint compares_keys,
    ):
        """Look up the first `length` tokens for `explain`; return the tuple that `Explanation.of` reads. Internal.

        `block` is the last one of `start` blocks that a look-up of this prompt has just found: the walk begins there.
        At most `most_compared` prompts are compared and, with `compares_keys`, as many other keys.
        """
        cdef CachedBlocks cached = self.cached
        cdef int64_t size = self.block_size, n = length // size
        cdef int32_t root, node
        cdef const int32_t *tokens = &row[0] if row.shape[0] else NULL
        if start * size > length:
            start = 0
        refuse_negative(tokens, start * size, length)
        if self.shared is not None:
            found = (<SharedIndex>self.shared).cached_tokens(row[:length], key)
            return found, (("shared_pool", n * size),), -1, (), -1, -1
        with cython.critical_section(self):
            self.c_reserve_path(n + 1)
            cached.c_read_clock()
            known_root = cached.tree.roots.get(key)
            root = -1 if known_root is None else known_root
            node = -1 if root < 0 else cached.c_at(root, tokens, block, start)
            if node < 0:
                node, start = root, 0
            return cached.tree.miss(root, node, start, tokens, n, most_compared, compares_keys, self.path)

    def cache_blocks(self, tokens, blocks, *, cache_salt=None, extra_keys=(), start=0, epoch=None):
        """Cache the full blocks of a sequence; return how many of them are new to the cache.

        The cache takes one reference to each block that it keeps. If another block is cached for the same tokens and in
        use, that block stays, and the block of this sequence is not cached. If the other block is idle, it is freed and
        the block of the sequence takes its place, since a block that a sequence holds is not evicted.

        Parameters
        ----------
        tokens : sequence of int or integer array (n_tokens,)
            All tokens of the sequence from the first one on, as in `match_prefix`.
        blocks : sequence of int or integer array
            The ids of its blocks, at least `len(tokens) // block_size`. Blocks behind the last full one are ignored.
        cache_salt, extra_keys
            As in `match_prefix`.
        start : int
            How many of the first blocks are cached already, from `match_prefix` or an earlier call. If the last of them
            is still cached for these tokens, salt and keys, the blocks before it are not looked at.
        epoch : int or None
            `epoch` before the first block was found or computed. If it has risen, nothing is cached. None: no check.

        Returns
        -------
        int
            The number of blocks to which the cache has taken a reference.

        Raises
        ------
        InvalidBlock
            A block is free, out of range, or cached for another path of tokens. Nothing has changed.
        ValueError
            Too few blocks, a `start` behind the last full block, or a negative token. Nothing has changed.
        TypeError
            The tokens, ids or keys have another type.
        MemoryError
            Nothing has changed.
        """
        cdef const int32_t[::1] row = token_row(tokens)
        cdef int64_t n = row.shape[0] // self.block_size
        cdef IdArray ids
        known = start if PyLong_CheckExact(start) else integer("start", start)
        if not 0 <= known <= n:
            raise ValueError(f"start must be from 0 to {n}, the number of full blocks, not {known}")
        since = self.epoch if epoch is None else integer("epoch", epoch, 0)
        key = self.cached.tree.named_key(root_key(cache_salt, extra_keys))
        refuse_negative(&row[0], n * self.block_size, row.shape[0])
        if n == 0:
            return 0
        read_ids(blocks, &ids)
        try:
            if ids.count < n:
                raise ValueError(f"{row.shape[0]} tokens fill {n} blocks, got {ids.count}")
            if self.shared is not None:
                refuse_negative(&row[0], 0, row.shape[0])
                return (<SharedIndex>self.shared).insert(row, key[0], &ids, since)
            with cython.critical_section(self):
                return 0 if self.cached.epoch != since else self.keep(key, &row[0], ids.ids, n, known)
        finally:
            release_ids(&ids)

    def touch(self, tokens, *, cache_salt=None, extra_keys=()):
        """Pass one prompt through the cache without a sequence; return how many leading full blocks were cached.

        This is for simulations. From the first block to the last, a cached block is marked as used, and any other block
        is cached in a free block or else in an evicted one. The prompt holds no block, so a prompt longer than the
        cache evicts its own beginning. Stops where nothing can be evicted. Parameters and errors as in
        `match_prefix`.
        """
        cdef const int32_t[::1] row = token_row(tokens)
        cdef int64_t n = row.shape[0] // self.block_size, leading = 0
        if self.link is not None or self.shared is not None:
            raise ValueError("touch caches blocks without keys and values: it needs no store and no shared pool")
        key = self.cached.tree.named_key(root_key(cache_salt, extra_keys))
        refuse_negative(&row[0], 0, row.shape[0])
        cdef int paused
        with cython.critical_section(self):
            paused = pause_collector()
            try:
                if n:
                    self.cached.tree.reserve(n + 1)
                    self.cached.c_read_clock()
                    leading = self.cached.c_pass(self.cached.tree.root(key), &row[0], n)
                self.looked_up += n
                self.hits += leading
                return leading
            finally:
                resume_collector(paused)

    def evict(self, n):
        """Give up to `n` blocks that only the cache holds back to the allocator, in the order of the policy.

        O(1) per block. A block in use is set aside. When a later call finds it idle, it counts as used at that moment.

        Parameters
        ----------
        n : int
            At least 0.

        Returns
        -------
        int
            How many blocks were freed, fewer than `n` when the cache has fewer idle ones.

        Raises
        ------
        ValueError
            `n` is below 0.

        Examples
        --------
        >>> from pagepool import BlockAllocator
        >>> PrefixCache(BlockAllocator(4)).evict(1)
        0
        """
        number = n if PyLong_CheckExact(n) else integer("n", n)
        if number < 0:
            raise ValueError(f"cannot evict {number} blocks")
        self.follow()
        if self.shared is not None:
            evicted = (<SharedIndex>self.shared).evict(min(number, INT32_MAX))
        else:
            with cython.critical_section(self):
                self.cached.c_read_clock()
                evicted = self.cached.c_evict(min(number, INT32_MAX))
        if self.link is not None:
            self.link.wake()
        return evicted

    def discard(self, blocks):
        """Forget these blocks, in use or not; return how many of them were cached. Other ids are ignored.

        Use it when the keys and values of blocks are wrong or were never written. Sequences keep their blocks. Blocks
        cached behind a forgotten block are not found until that block is cached again. A `Scheduler` caches nothing
        more of the sequences that run now: they may have read one of the blocks, also one that is not cached any more.
        `Scheduler.remove_sequence(id, discard=True)` does this only to sequences that begin with the same tokens.

        Examples
        --------
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
        try:
            with self.forgetting(lambda: self.names_of(&ids)):
                if self.shared is not None:
                    count = (<SharedIndex>self.shared).forget(ids.ids, ids.count)
                    self.followed += 2 * (ids.count > 0)
                    return count
                self.followed += 2 * (ids.count > 0)
                with cython.critical_section(self):
                    self.cached.epoch += 2 * (ids.count > 0)
                    self.cached.c_read_clock()
                    for i in range(ids.count):
                        if self.cached.is_block(ids.ids[i]):
                            count += self.cached.c_discard(ids.ids[i])
            return count
        finally:
            release_ids(&ids)

    cdef object forgetting(self, names):
        return nullcontext() if self.link is None else self.link.forgetting(self.atomically(names))

    cdef int follow(self) except -1:
        """Forget the pages of the store if another process has forgotten blocks: nothing says which."""
        if self.link is not None and self.epoch != self.followed:
            with self.forgetting(lambda: None):
                self.followed = self.epoch
        return 0

    cdef object names_of(self, IdArray *ids):
        if self.shared is not None:
            return (<SharedIndex>self.shared).names_of(ids.ids, ids.count)
        return self.cached.names_of(ids.ids, ids.count)

    def flush(self, timeout=None):
        """Write every cached block and kept state to the store, and wait until it has them, at most `timeout` seconds.

        Call it before a restart. False when time has run out, without a store, and while another process writes it."""
        if self.link is None or not self.link.take_over():
            return False
        self.follow()
        all_offered, end = False, None if timeout is None else monotonic() + timeout
        while not all_offered:
            all_offered = self.atomically(lambda: self.offer_all()) and self.link.offer_states()
            if not self.link.wait(None if end is None else max(0.0, end - monotonic())):
                return False
        return True

    cdef bint offer_all(self):
        return self.cached.offer_all() if self.shared is None else (<SharedIndex>self.shared).offer_all()

    def drain_events(self):
        """Return what was stored and removed since the last call.

        Returns
        -------
        list of PrefixEvent
            At most `max_events`. If there were more, the first ones are missing, as the `sequence` of the next event
            shows. Begin with `snapshot` then.

        Raises
        ------
        ValueError
            The cache was made without `max_events`.

        Examples
        --------
        >>> from pagepool import BlockAllocator
        >>> cache = PrefixCache(BlockAllocator(4), block_size=1, max_events=8)
        >>> cache.touch([7]), cache.evict(1)
        (0, 1)
        >>> [(event.sequence, event.kind, event.block) for event in cache.drain_events()]
        [(1, 'stored', 0), (2, 'removed', 0)]
        """
        cdef EventLog log = self.log()
        return self.atomically(lambda: self.drain(log))

    cdef list drain(self, EventLog log):
        if self.shared is not None:
            (<SharedIndex>self.shared).note_changes()
        return log.drain()

    def snapshot(self):
        """Return a `PrefixSnapshot` of every cached block. O(nodes). Raises as `drain_events`."""
        cdef EventLog log = self.log()
        return self.atomically(lambda: log.snapshot(False))

    def name_snapshot(self):
        """Return a `NameSnapshot` of every cached block, for routers. O(nodes). Raises as `drain_events`."""
        cdef EventLog log = self.log()
        return self.atomically(lambda: log.snapshot(True))

    cdef EventLog log(self):
        log = self.cached.log if self.shared is None else (<SharedIndex>self.shared).log
        if log is None:
            raise ValueError("the cache notes no events: it was made with max_events=0")
        return log

    def reset_prefix_cache(self):
        """Forget all blocks, including the pages of the store, and drop their references. Sequences keep their blocks.

        Running sequences of a `Scheduler` do not cache their blocks again. The next allocated block is the lowest free
        id. O(n log n).
        """
        with self.forgetting(lambda: None):
            if self.shared is not None:
                (<SharedIndex>self.shared).forget(NULL, 0)
                self.followed += 2
            else:
                self.atomically(lambda: self.cached.reset())
                self.followed += 1

    @property
    def store(self):
        """The `PrefixStore`, or None."""
        return None if self.link is None else self.link.store

    @property
    def label(self):
        """The name of the policy: the label of this cache in `BlockAllocator.owners`."""
        return self.policy

    def references(self):
        """Return a list of the ids of the cached blocks. The cache holds one reference to each."""
        return self.atomically(lambda: self.cached.list_blocks())

    @property
    def num_cached(self):
        """Blocks that the cache holds a reference to."""
        return self.cached.num_cached if self.shared is None else (<SharedIndex>self.shared).count(False)

    @property
    def inserted(self):
        """How many blocks were ever cached. While it stays the same, no look-up finds more than before."""
        return self.cached.inserted if self.shared is None else (<SharedIndex>self.shared).inserted()

    @property
    def epoch(self):
        """Rises with each call of `reset_prefix_cache`, and by 2 with each `discard` of some blocks, in any process.

        Read it before the first look-up of a sequence, and give it to each `cache_blocks` of that sequence."""
        return self.cached.epoch if self.shared is None else (<SharedIndex>self.shared).epoch()

    @property
    def evictable(self):
        """Cached blocks that only the cache holds: what `evict` could free now. O(1)."""
        return self.cached.refs.c_idle() if self.shared is None else (<SharedIndex>self.shared).count(True)

    def stats(self):
        """Return a dict of counters. O(1).

        `looked_up` and `hits` are full blocks asked for and found; `inserted` = `cached` + `evicted` + `cleared`;
        `nodes` are the known prefixes, cached or not; `collisions` are equal hashes of different blocks.
        """
        cdef int64_t capacity, free, evictable
        if self.shared is not None:
            return (<SharedIndex>self.shared).stats()
        with cython.critical_section(self):
            capacity, free = self.allocator.c_capacity(), self.allocator.c_free_count()
            evictable = self.cached.refs.c_idle()
            return {
                "policy": self.policy,
                "capacity": capacity,
                "cached": self.cached.num_cached,
                "used": capacity - free - evictable,
                "evictable": evictable,
                "free": free,
                "looked_up": self.looked_up,
                "hits": self.hits,
                "inserted": self.cached.inserted,
                "evicted": self.cached.evicted,
                "cleared": self.cached.cleared,
                "nodes": self.cached.tree.num_alive,
                "collisions": self.cached.tree.collisions,
            }

    def check(self):
        """Audit tree, policy, allocator and counters. Raises `PoolError` with the name of a broken invariant.

        O(nodes + tokens cached). Changes nothing.
        """
        if self.shared is not None:
            (<SharedIndex>self.shared).check()
        broken = self.atomically(lambda: self.cached.audit())
        if broken is not None:
            raise PoolError(f"broken invariant: {broken}")

    cdef object atomically(self, function):
        """Call the function with the cache locked and the garbage collector paused, so that no finalizer and no other
        thread can run meanwhile."""
        cdef int paused
        with cython.critical_section(self):
            paused = pause_collector()
            try:
                return function()
            finally:
                resume_collector(paused)

    cdef int refuse_next(self, const int32_t[::1] row, int64_t found) except -1:
        """Raise ValueError for a negative token in the block after the `found` ones, which have none since all cached
        tokens are 0 or more. Checking all of a prompt of 8,192 tokens would take 1.2 us more than 1.5."""
        cdef int64_t begin = found * self.block_size
        return refuse_negative(&row[0], begin, min(begin + self.block_size, row.shape[0]))

    cdef int c_reserve_path(self, int64_t n) except -1:
        cdef void *memory
        if n > self.path_room:
            memory = PyMem_Realloc(self.path, n * sizeof(int32_t))
            if memory == NULL:
                raise MemoryError(f"no memory for a path of {n} nodes")
            self.path = <int32_t *>memory
            self.path_room = n
        return 0

    cdef int64_t keep(
        self, tuple named_key, const int32_t *tokens, const int32_t *blocks, int64_t n, int64_t start
    ) except -1:
        cdef int paused = pause_collector()
        cdef int32_t root
        try:
            self.c_reserve_path(2 * n)
            self.cached.tree.reserve(n + 1)
            root = self.cached.tree.root(named_key)
            self.cached.tree.c_pin(root)
            try:
                return self.cached.publish(root, tokens, blocks, n, start, self.path)
            finally:
                self.cached.tree.c_unpin(root)
        finally:
            resume_collector(paused)
