"""A tree of blocks, each found from its parent by its tokens, in plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Node", "cached_path", "keys_of", "part_of", "path_of", "root_of"]


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


def cached_path(node: Node, keys: list[tuple[int, ...]]) -> list[Node]:
    """The nodes below `node` of the first of these blocks, as far as they are cached."""
    path: list[Node] = []
    for key in keys:
        child = node.children.get(key)
        if child is None or child.block is None:
            break
        path.append(child)
        node = child
    return path


def part_of(node: Node, tokens: list[int]) -> tuple[Node | None, int]:
    """The cached child that begins with most of `tokens`, the lowest block of those, and how many; None and 0."""
    best, longest, lowest = None, 0, 0
    for key, child in node.children.items():
        pairs = zip(key, tokens, strict=False)
        same = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(key), len(tokens)))
        if child.block is not None and same and (same > longest or (same == longest and child.block < lowest)):
            best, longest, lowest = child, same, child.block
    return best, longest


def root_of(node: Node) -> Node:
    """The node without a parent that `node` is below."""
    while node.parent is not None:
        node = node.parent
    return node
