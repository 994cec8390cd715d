"""Tokens that followed a text in a prefix cache, for drafts."""

cimport cython
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from pagepool.prefix.cache cimport PrefixCache
from pagepool.prefix.radix_tree cimport NodeTable

import numpy as np

from pagepool._arguments import integer
from pagepool.prefix.keys import root_key
from pagepool.prefix.radix_tree import token_row

__all__ = ["following"]


def following(PrefixCache cache not None, tokens, most, *, cache_salt=None, extra_keys=()):
    """Return tokens that followed `tokens` in a cached text. Changes nothing.

    If several cached texts begin with `tokens`, one that was used recently is read. The blocks of a shared pool are not
    read.

    Parameters
    ----------
    cache : PrefixCache
        The cache.
    tokens : sequence of int or integer array (n_tokens,)
        All tokens of a text from the first one on, as in `PrefixCache.match_prefix`.
    most : int
        Maximum number of tokens to return.
    cache_salt, extra_keys
        Only texts that were cached under an equal salt and equal keys are read.

    Returns
    -------
    int32 array (n,)
        Empty if no cached text begins with these tokens and goes on.

    Examples
    --------
    >>> from pagepool import BlockAllocator, PrefixCache
    >>> cache = PrefixCache(BlockAllocator(8), block_size=2)
    >>> cache.cache_blocks([1, 2, 3, 4, 5, 6], cache.allocator.allocate_n(3))
    3
    >>> following(cache, [1, 2, 3], 2), following(cache, [1, 2, 9], 2)
    (array([4, 5], dtype=int32), array([], dtype=int32))
    """
    cdef const int32_t[::1] row = token_row(tokens)
    cdef int64_t full = row.shape[0] // cache.block_size, count = 0
    result = np.empty(integer("most", most, 0), np.int32)
    cdef int32_t[::1] found = result
    cdef int32_t node
    key = root_key(cache_salt, extra_keys)
    if cache.shared is None and row.shape[0] and found.shape[0]:
        with cython.critical_section(cache):
            root = cache.cached.tree.roots.get(key)
            if root is not None:
                cache.c_reserve_path(full)
                if cache.cached.tree.c_walk(root, &row[0], full, True, cache.path) == full:
                    node = cache.path[full - 1] if full else root
                    count = c_copy(cache.cached.tree, node, row[full * cache.block_size :], found)
    return result[:count]


cdef int64_t c_copy(NodeTable tree, int32_t parent, const int32_t[::1] begin, int32_t[::1] found) noexcept:
    """Copy tokens of the nodes below `parent` that follow `begin`, less than a block. Returns their number."""
    cdef int64_t skip = begin.shape[0], most = found.shape[0], count = 0, new
    cdef int32_t common = 0, node = c_recent(tree, parent)
    if skip:
        node = tree.c_find_part(parent, &begin[0], skip, &common)
        if common < skip:
            return 0
    while node >= 0 and count < most:
        new = min(tree.block_size - skip, most - count)
        memcpy(&found[count], tree.tokens + <size_t>node * <size_t>tree.block_size + skip, new * sizeof(int32_t))
        count += new
        skip = 0
        node = c_recent(tree, node)
    return count


cdef int32_t c_recent(NodeTable tree, int32_t node) noexcept:
    """The child that was used last if it is known, else the youngest one; -1 without a child."""
    return tree.nodes[node].last_child if tree.nodes[node].last_child >= 0 else tree.nodes[node].first_child
