"""What a transaction does when it commits, and not at all when it aborts: frees, releases, publications."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from pagepool.errors import InvalidBlock
from pagepool.memory.held_blocks import hold
from pagepool.memory.journal import run_all

__all__ = ["Deferred", "Publication", "as_ids"]


class Publication:
    """Blocks to be cached. `held` keeps them until then; while it holds none there is nothing to do."""

    __slots__ = ("_fresh", "blocks", "cache", "held", "keys", "tokens")

    def __init__(self, cache: Any, tokens: Any, blocks: list[int], keys: dict[str, Any]) -> None:
        self.cache = cache
        self.tokens = tokens
        self.blocks = array("i", blocks)
        self.keys = keys
        self.held = hold(cache.allocator)
        self._fresh = array("i")

    def publish(self) -> None:
        """Caches them, or raises, and changes nothing."""
        if len(self.held):
            holds = self.cache.holds
            self._fresh = array("i", [block for block in self.blocks if not holds(block)])
            self.cache.cache_blocks(self.tokens, self.blocks, **{**self.keys, "beside": True})

    def take_back(self) -> None:
        """Undoes `publish`, if that was done."""
        self.cache.discard(self._fresh)


class Deferred:
    """`check` and `publish` may fail, and have changed nothing then; of the steps of `last` none may."""

    __slots__ = ("done", "frees", "publications", "releases")

    def __init__(self) -> None:
        self.frees: list[tuple[Any, array[int]]] = []
        self.releases: list[Any] = []
        self.publications: list[Publication] = []
        self.done: list[Callable[[], object]] = []

    def and_then(self, later: Deferred) -> Deferred:
        """Both, as a new one."""
        both = Deferred()
        for name in self.__slots__:
            setattr(both, name, getattr(self, name) + getattr(later, name))
        return both

    def check(self) -> None:
        """Raises `InvalidBlock` when a block has fewer references than are to be dropped, `StaleHandle` for a state."""
        for handle in self.releases:
            _ = handle.slot
        held = [(known.cache.allocator, known.blocks) for known in self.publications if len(known.held)]
        wanted: dict[int, tuple[Any, Counter[int]]] = {}
        for allocator, blocks in self.frees + held:
            wanted.setdefault(id(allocator), (allocator, Counter()))[1].update(blocks)
        for allocator, times in wanted.values():
            for block in times:
                count = allocator.ref_count(block)
                if count < times[block]:
                    raise InvalidBlock(f"cannot drop {times[block]} references of block {block}: it has {count}")

    def publish(self) -> None:
        """All publications or none: those before one that raises are taken back."""
        undo: list[Callable[[], object]] = [publication.take_back for publication in self.publications[::-1]]
        try:
            for publication in self.publications:
                publication.publish()
        except BaseException:
            run_all(undo)
            raise

    def last(self, commits: list[Callable[[], object]]) -> list[Callable[[], object]]:
        """The steps that are left, `commits` of the participants among them."""
        frees = [partial(allocator.free, blocks) for allocator, blocks in self.frees]
        held = [publication.held.give_back for publication in self.publications]
        return [*frees, *held, *commits, *[handle.release for handle in self.releases], *self.done]


def as_ids(blocks: Any) -> list[int]:
    """Block ids as callers give them, an int, a sequence or an array, as a new list."""
    if hasattr(blocks, "tolist"):
        blocks = blocks.tolist()
    return [int(block) for block in blocks] if hasattr(blocks, "__iter__") else [int(blocks)]
