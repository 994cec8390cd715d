"""A tree of blocks, each found from its parent by its tokens, in plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Node", "keys_of", "path_of", "root_of"]


class Node:
    """A prefix: that of its parent and one block of tokens more. `block` is None when it is not cached."""

    def __init__(self, parent: Node | None = None, key: tuple[int, ...] = ()) -> None:
        self.parent = parent
        self.key = key  # its own tokens
        self.block: int | None = None
        self.children: dict[tuple[int, ...], Node] = {}


def keys_of(tokens: Any, size: int) -> list[tuple[int, ...]]:
    """The tokens of each full block of `size`.

    >>> keys_of([1, 2, 3, 4, 5], 2)
    [(1, 2), (3, 4)]
    """
    row = np.asarray(tokens).tolist()
    return [tuple(row[at : at + size]) for at in range(0, len(row) - size + 1, size)]


def path_of(node: Node, keys: list[tuple[int, ...]]) -> list[Node]:
    """The nodes below `node` of these blocks, made where there are none."""
    path = []
    for key in keys:
        child = node.children.get(key)
        if child is None:
            child = node.children[key] = Node(node, key)
        path.append(child)
        node = child
    return path


def root_of(node: Node) -> Node:
    """The node without a parent that `node` is below."""
    while node.parent is not None:
        node = node.parent
    return node
