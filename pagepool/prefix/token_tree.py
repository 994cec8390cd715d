"""TokenTree: token sequences with common beginnings stored once, and marks at positions of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from pagepool.errors import PoolError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    _Tokens = NDArray[np.int32]

__all__ = ["TokenNode", "TokenTree"]


class TokenNode:
    """The tokens from the root up to `end`; the last of them are `edge`, behind those of the parent.

    root            edge and parent none, end 0
     └─ [5 7 9]             end 3
         ├─ [1 1]           end 5   marked
         └─ [2 8 8 8]       end 7   marked

    `mark` is what the owner of the tree keeps at the position, or None; `key` is that of the root.
    """

    __slots__ = ("children", "edge", "end", "key", "mark", "parent")

    def __init__(self, key: bytes, parent: TokenNode | None, edge: _Tokens, end: int) -> None:
        self.key = key
        self.parent = parent
        self.edge = edge
        self.end = end
        self.children: dict[int, TokenNode] = {}
        self.mark: object | None = None

    def above(self) -> TokenNode | None:
        """The nearest marked node above this one."""
        node = self.parent
        while node is not None and node.mark is None:
            node = node.parent
        return node

    def below(self) -> Iterator[TokenNode]:
        """The marked nodes below this one with no other marked node between."""
        line = list(self.children.values())
        while line:
            node = line.pop()
            if node.mark is not None:
                yield node
            else:
                line += node.children.values()


class TokenTree:
    """A compressed tree for each root key. Whatever is not on the way to a mark is dropped:

        every node but a root is marked or has two children at least
        num_tokens = sum of len(edge) over all nodes        end = end of the parent + len(edge)

    A walk compares a whole edge at a time, so its cost is that of a memcmp over the tokens and a step per node.
    """

    def __init__(self) -> None:
        self.roots: dict[bytes, TokenNode] = {}
        self.num_tokens = 0

    def walk(self, key: bytes, tokens: _Tokens) -> tuple[TokenNode | None, int]:
        """The last node all of whose tokens are the first of `tokens`, and how many tokens are those of the tree.

        None and 0 for a key that it does not know. More tokens than the node's `end` lie on the way to a child.
        """
        node = self.roots.get(key)
        if node is None:
            return None, 0
        while True:
            rest = tokens[node.end :]
            child = node.children.get(int(rest[0])) if len(rest) else None
            if child is None:
                return node, node.end
            same = _common(child.edge, rest)
            if same < len(child.edge):
                return node, node.end + same
            node = child

    def place(self, key: bytes, tokens: _Tokens) -> TokenNode:
        """The node of all of `tokens`, at least one, made where there was none. Mark it before the next call."""
        root = self.roots.get(key) or TokenNode(key, None, tokens[:0].copy(), 0)
        node, same = self.walk(key, tokens)
        if node is None:
            node = root
        if same == len(tokens) == node.end:
            return node
        rest = tokens[node.end :]
        child = node.children.get(int(rest[0]))
        if child is None:
            made = TokenNode(key, node, rest.copy(), len(tokens))
            self._hang(root, node, made)
            return made
        # The edge of the child is cut where the tokens leave it, or end.
        cut = same - node.end
        upper, lower = child.edge[:cut].copy(), child.edge[cut:].copy()
        middle = TokenNode(key, node, upper, same)
        made = middle if same == len(tokens) else TokenNode(key, middle, rest[cut:].copy(), len(tokens))
        middle.children[int(lower[0])] = child
        if made is not middle:
            middle.children[int(made.edge[0])] = made
            self.num_tokens += len(made.edge)
        child.parent, child.edge = middle, lower
        node.children[int(upper[0])] = middle
        return made

    def unmark(self, node: TokenNode) -> None:
        """Takes the mark away, and what only it kept alive; a node left with one child and no mark is joined to it."""
        node.mark = None
        while node.parent is not None and node.mark is None and not node.children:
            del node.parent.children[int(node.edge[0])]
            self.num_tokens -= len(node.edge)
            node = node.parent
        if node.parent is None:
            if not node.children:
                del self.roots[node.key]
        elif node.mark is None and len(node.children) == 1:
            (child,) = node.children.values()
            child.edge = np.concatenate([node.edge, child.edge])
            child.parent = node.parent
            node.parent.children[int(node.edge[0])] = child

    def nodes(self) -> Iterator[TokenNode]:
        """Every node, roots included, a parent before its children."""
        line = list(self.roots.values())
        while line:
            node = line.pop()
            yield node
            line += node.children.values()

    def check(self) -> None:
        """Raises `PoolError` naming an equation above that is broken. O(tokens)."""
        total = 0
        for node in self.nodes():
            total += len(node.edge)
            if node.parent is None:
                if node.end or len(node.edge) or not node.children:
                    raise PoolError(f"broken invariant: a root ends at {node.end}, with {len(node.children)} children")
            elif node.end != node.parent.end + len(node.edge) or not len(node.edge):
                raise PoolError(f"broken invariant: {len(node.edge)} tokens end at {node.end}, not {node.parent.end}")
            elif node.mark is None and len(node.children) < 2:
                raise PoolError(f"broken invariant: nothing keeps the node that ends at {node.end}")
            for token, child in node.children.items():
                if child.parent is not node or int(child.edge[0]) != token:
                    raise PoolError(f"broken invariant: a child of the node that ends at {node.end} is misplaced")
        if total != self.num_tokens:
            raise PoolError(f"broken invariant: {total} tokens are in the tree, {self.num_tokens} are counted")

    def _hang(self, root: TokenNode, parent: TokenNode, made: TokenNode) -> None:
        parent.children[int(made.edge[0])] = made
        self.num_tokens += len(made.edge)
        self.roots[root.key] = root


def _common(edge: _Tokens, tokens: _Tokens) -> int:
    """How many first tokens are equal."""
    size = min(len(edge), len(tokens))
    different = edge[:size] != tokens[:size]
    first = int(different.argmax()) if size else 0
    return first if size and different[first] else size
