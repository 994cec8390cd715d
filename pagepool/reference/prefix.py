"""The prefix cache in plain Python: a tree of blocks. A node finds its children by their tokens.

ref_count(node.block) >= 1      for each node with a block, because the cache has a reference
node.block is unique
a node with a block is either in the policy or in `_held`
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from pagepool.errors import InvalidBlock, PoolError
from pagepool.reference.gittins import Gittins
from pagepool.reference.policies import Lru

__all__ = ["POLICIES", "PrefixCache"]

POLICIES: dict[str, type[Lru]] = {"lru": Lru, "gittins": Gittins}


class Node:
    """A prefix: the prefix of its parent and one more block of tokens. `block` is None if it is not cached."""

    def __init__(self, parent: Node | None = None, key: tuple[int, ...] = ()) -> None:
        self.parent = parent
        self.key = key  # the tokens of this block
        self.block: int | None = None
        self.is_known = False  # it had a block, or the policy has refused one
        self.children: dict[tuple[int, ...], Node] = {}


class PrefixCache:
    """Keeps full blocks for later prompts that begin with the same tokens and have the same salt and extra keys.

    >>> from pagepool.reference import BlockAllocator
    >>> allocator = BlockAllocator(8)
    >>> cache = PrefixCache(allocator, block_size=2)
    >>> blocks = allocator.allocate_n(3)
    >>> cache.cache_blocks([1, 2, 3, 4, 5], blocks)
    2
    >>> allocator.free(blocks)
    >>> cache.match_prefix([1, 2, 3, 4, 9, 9])
    array([0, 1], dtype=int32)
    """

    kind = "cache"
    label = None

    def __init__(self, allocator: Any, block_size: int = 16, policy: str = "gittins") -> None:
        if not 1 <= operator.index(block_size) <= 1024:
            raise ValueError(f"block_size must be from 1 to 1024, not {block_size}")
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {policy!r}")
        self.allocator = allocator
        self.block_size = block_size
        self.policy = policy
        self.evicted = self.cleared = self.epoch = self.looked_up = self.hits = 0
        self._forget()
        allocator.add_owner(self)

    def match_prefix(self, tokens: Any, *, cache_salt: Any = None, extra_keys: Iterable[Any] = ()) -> np.ndarray:
        """Return the cached blocks of the longest prefix of `tokens`. The caller frees one reference to each."""
        keys = keys_of(tokens, self.block_size)
        found = cached_path(self._root(cache_salt, extra_keys), keys)
        refuse_negative(tokens, (len(found) + 1) * self.block_size)
        blocks = [node.block for node in found]
        self.allocator.share(blocks)
        for node in found:
            self._touch(node)
        self.looked_up += len(keys)
        self.hits += len(found)
        return np.array(blocks, dtype=np.int32)

    def match_held(self, held: Any, tokens: Any, *, cache_salt: Any = None, extra_keys: Iterable[Any] = ()) -> Any:
        """Like `match_prefix`, but also note the references in the list `held`."""
        found = self.match_prefix(tokens, cache_salt=cache_salt, extra_keys=extra_keys)
        held.extend(found)
        return found

    def match_tokens(
        self, tokens: Any, *, cache_salt: Any = None, extra_keys: Iterable[Any] = ()
    ) -> tuple[np.ndarray, int]:
        """Like `match_prefix`, but the last block may match in part. Return the blocks and the number of tokens."""
        blocks = self.match_prefix(tokens, cache_salt=cache_salt, extra_keys=extra_keys).tolist()
        node = self._cached[blocks[-1]] if blocks else self._root(cache_salt, extra_keys)
        best, longest = part_of(node, np.asarray(tokens).tolist()[len(blocks) * self.block_size :])
        num_tokens = len(blocks) * self.block_size + longest
        if best is not None:
            self.allocator.share(best.block)
            self._touch(best)
            blocks.append(best.block)
        return np.array(blocks, dtype=np.int32), num_tokens

    def cached_tokens(self, tokens: Any, *, cache_salt: Any = None, extra_keys: Iterable[Any] = ()) -> int:
        """Return the number of leading tokens that `match_prefix` would find."""
        path = cached_path(self._root(cache_salt, extra_keys), keys_of(tokens, self.block_size))
        refuse_negative(tokens, (len(path) + 1) * self.block_size)
        return len(path) * self.block_size

    def explain(
        self, tokens: Any, *, cache_salt: Any = None, extra_keys: Iterable[Any] = ()
    ) -> tuple[int, dict[str, int], int | None]:
        """Return the tokens found, the number of other tokens by reason, and the position of a divergence or None.

        It remembers everything since the last reset.
        """
        refuse_negative(tokens)
        keys, row, size = keys_of(tokens, self.block_size), np.asarray(tokens).tolist(), self.block_size
        root = self._root(cache_salt, extra_keys)
        found, known = len(cached_path(root, keys)), known_path(root, keys)
        others = [len(known_path(other, keys)) for other in self._roots.values() if other is not root]
        elsewhere = max([len(known), *others])
        node = known[-1] if known else root
        children = [child.key for child in node.children.values() if child.is_known]
        same = max((common(key, row[len(known) * size :]) for key in children), default=0)
        differs = len(known) < len(keys) and elsewhere == len(known) and bool((known and children) or same)
        counts = {
            "evicted": len(known) - found,
            "other_key": elsewhere - len(known),
            "diverges": differs * (len(keys) - len(known)),
            "never_seen": (not differs) * (len(keys) - elsewhere),
        }
        missed = {reason: count * size for reason, count in counts.items() if count}
        if len(row) % size:
            missed["short"] = len(row) % size
        return found * size, missed, len(known) * size + same if differs else None

    def cache_blocks(
        self,
        tokens: Any,
        blocks: Any,
        *,
        cache_salt: Any = None,
        extra_keys: Iterable[Any] = (),
        start: int = 0,
        epoch: int | None = None,
    ) -> int:
        """Cache the full blocks of a sequence; return how many of them are new. None are if `epoch` has risen."""
        refuse_negative(tokens)
        keys, ids = keys_of(tokens, self.block_size), [int(block) for block in blocks]
        if len(ids) < len(keys):
            raise ValueError(f"blocks must have at least {len(keys)} ids, one for each full block, not {len(ids)}")
        if not 0 <= start <= len(keys):
            raise ValueError(f"start must be from 0 to {len(keys)}, not {start}")
        if epoch not in (None, self.epoch):
            return 0
        root = node = self._root(cache_salt, extra_keys)
        last = self._cached.get(ids[start - 1]) if start else None
        if last is not None and last.key == keys[start - 1] and root_of(last) is root:
            node, keys, ids = last, keys[start:], ids[start:]
        path = path_of(node, keys)
        fresh = [(node, block) for node, block in zip(path, ids, strict=False) if self._gives_way(node, block)]
        taken = [block for _, block in fresh]
        if len(set(taken)) < len(taken) or any(block in self._cached for block in taken):
            raise InvalidBlock("a block is listed twice, or is already cached for other tokens")
        self.allocator.share(taken)
        for node, block in fresh:
            if node.block is None:
                self._put(node, block)
            else:
                self._replace(node, block)
        return len(fresh)

    def touch(self, tokens: Any, *, cache_salt: Any = None, extra_keys: Iterable[Any] = ()) -> int:
        """Pass one prompt through the cache without a sequence; return how many leading full blocks were cached."""
        refuse_negative(tokens)
        keys, leading = keys_of(tokens, self.block_size), 0
        for index, node in enumerate(path_of(self._root(cache_salt, extra_keys), keys)):
            if node.block is not None:
                self._touch(node)
                leading += leading == index
            elif self.allocator.free_count:
                self._put(node, self.allocator.allocate())
            elif self._order.refuses(node):
                node.is_known = True
                self.evicted += 1
            elif self.evict(1):
                self._put(node, self.allocator.allocate())
            else:
                break
        self.looked_up += len(keys)
        self.hits += leading
        return leading

    def evict(self, n: int) -> int:
        """Free up to n blocks that only the cache holds; return how many."""
        if operator.index(n) < 0:
            raise ValueError(f"n must be at least 0, not {n}")
        done = 0
        while done < n:
            node: Any = self._victim()
            if node is None:
                break
            if self._in_use(node):
                self._order.unlink(node)
                self._held[node] = None
            else:
                block, node.block = node.block, None
                del self._cached[block]
                self._order.evicted(node)
                self.allocator.free(block)
                done += 1
        self.evicted += done
        return done

    def discard(self, blocks: Iterable[int]) -> int:
        """Forget these blocks, in use or not. Return how many were cached. The policy counts them as evictions."""
        blocks = list(dict.fromkeys(blocks))
        found = [block for block in blocks if block in self._cached]
        for block in found:
            node = self._cached.pop(block)
            self._relink(node)
            node.block = None
            self._order.evicted(node)
            self.allocator.free(block)
        self.cleared += len(found)
        self.epoch += 2 * (len(blocks) > 0)
        return len(found)

    def reset_prefix_cache(self) -> None:
        """Forget all blocks and drop their references."""
        self.allocator.free(sorted(self._cached, reverse=True))
        self.cleared += self.num_cached
        self.epoch += 1
        self._forget()

    def references(self) -> list[int]:
        """Return the ids of the cached blocks."""
        return list(self._cached)

    @property
    def num_cached(self) -> int:
        """Number of cached blocks."""
        return len(self._cached)

    @property
    def inserted(self) -> int:
        """Number of blocks that were ever cached."""
        return self.num_cached + self.evicted + self.cleared

    @property
    def evictable(self) -> int:
        """Number of cached blocks that are referenced only by the cache."""
        return sum(not self._in_use(node) for node in self._cached.values())

    def stats(self) -> dict[str, Any]:
        """Return a dict of counters."""
        return {
            "policy": self.policy,
            "cached": self.num_cached,
            "evictable": self.evictable,
            "looked_up": self.looked_up,
            "hits": self.hits,
            "inserted": self.inserted,
            "evicted": self.evicted,
            "cleared": self.cleared,
        }

    def check(self) -> None:
        """Raise `PoolError` if an invariant above is broken."""
        for block, node in self._cached.items():
            if node.block != block or self.allocator.ref_count(block) < 1:
                raise PoolError(f"block {block} is cached at a node that has block {node.block}, or it is free")
        linked = [node for nodes in self._order.linked() for node in nodes if node.block is not None]
        if sorted(map(id, [*linked, *self._held])) != sorted(map(id, self._cached.values())):
            raise PoolError(f"{len(linked)} nodes are in the policy, {len(self._held)} held, not {self.num_cached}")

    def _forget(self) -> None:
        self._roots: dict[tuple[Any, ...], Node] = {}
        self._cached: dict[int, Node] = {}
        self._held: dict[Node, None] = {}  # nodes that could not be evicted because they were in use, oldest first
        self._order = POLICIES[self.policy](self.allocator.max_capacity)

    def _root(self, cache_salt: Any, extra_keys: Iterable[Any]) -> Node:
        return self._roots.setdefault(tuple((type(key), key) for key in (cache_salt, *extra_keys)), Node())

    def _touch(self, node: Node) -> None:
        self._relink(node)
        self._order.touch(node)

    def _relink(self, node: Node) -> None:
        """Return a held node to the policy."""
        if node in self._held:
            del self._held[node]
            self._order.link(node)

    def _put(self, node: Node, block: int) -> None:
        node.block, node.is_known = block, True
        self._cached[block] = node
        self._order.insert(node)

    def _gives_way(self, node: Node, block: int) -> bool:
        """Return true if `block` is to be cached at the node.

        The node has no block, or its block is unused and `block` is in use elsewhere.
        """
        if node.block is None or node.block == block or self._in_use(node):
            return node.block is None
        is_block = 0 <= block < self.allocator.max_capacity and block not in self._cached
        return bool(is_block and self.allocator.ref_count(block))

    def _replace(self, node: Any, block: int) -> None:
        """Replace the block of the node, without calling the policy."""
        del self._cached[node.block]
        self._cached[block] = node
        self.allocator.free(node.block)
        node.block = block
        self.cleared += 1

    def _victim(self) -> Any:
        """Return the next node to evict, in use or not."""
        self._return_held(2)
        node = self._order.victim()
        if node is None:
            self._return_held(len(self._held))
            node = self._order.victim()
        return node

    def _return_held(self, most: int) -> None:
        """Check up to `most` held nodes and return the unused ones to the policy."""
        for node in list(self._held)[:most]:
            del self._held[node]
            if self._in_use(node):
                self._held[node] = None
            else:
                self._order.link(node)

    def _in_use(self, node: Node) -> bool:
        return bool(self.allocator.ref_count(node.block) > 1)


def keys_of(tokens: Any, size: int) -> list[tuple[int, ...]]:
    """Return the tokens of each full block of `size`.

    >>> keys_of([1, 2, 3, 4, 5], 2)
    [(1, 2), (3, 4)]
    """
    row = np.asarray(tokens).tolist()
    return [tuple(row[at : at + size]) for at in range(0, len(row) - size + 1, size)]


def refuse_negative(tokens: Any, end: int | None = None) -> None:
    """Raise ValueError for the first negative token before `end`."""
    for place, token in enumerate(np.asarray(tokens).tolist()[:end]):
        if token < 0:
            raise ValueError(f"tokens must be at least 0; tokens[{place}] is {token}")


def path_of(node: Node, keys: list[tuple[int, ...]]) -> list[Node]:
    """Return the nodes of these blocks below `node`. Makes missing nodes."""
    path = []
    for key in keys:
        child = node.children.get(key)
        if child is None:
            child = node.children[key] = Node(node, key)
        path.append(child)
        node = child
    return path


def cached_path(node: Node, keys: list[tuple[int, ...]]) -> list[Node]:
    """Return the nodes of these blocks below `node`, up to the first block that is not cached."""
    path: list[Node] = []
    for key in keys:
        child = node.children.get(key)
        if child is None or child.block is None:
            break
        path.append(child)
        node = child
    return path


def known_path(node: Node, keys: list[tuple[int, ...]]) -> list[Node]:
    """Return the nodes of these blocks below `node`, up to the first block that was never cached."""
    path: list[Node] = []
    for key in keys:
        child = node.children.get(key)
        if child is None or not child.is_known:
            break
        path.append(child)
        node = child
    return path


def common(key: tuple[int, ...], tokens: list[int]) -> int:
    """Return the number of leading tokens that are equal."""
    pairs = zip(key, tokens, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(key), len(tokens)))


def part_of(node: Node, tokens: list[int]) -> tuple[Node | None, int]:
    """Return the cached child that shares the most leading tokens, and their number; None and 0 without one.

    The lowest block wins a tie.
    """
    best, longest, lowest = None, 0, 0
    for key, child in node.children.items():
        same = common(key, tokens)
        if child.block is not None and same and (same > longest or (same == longest and child.block < lowest)):
            best, longest, lowest = child, same, child.block
    return best, longest


def root_of(node: Node) -> Node:
    """Return the root of the tree of `node`."""
    while node.parent is not None:
        node = node.parent
    return node
