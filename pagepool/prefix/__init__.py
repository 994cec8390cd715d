"""The prefix cache: blocks that are kept for the next prompt with the same beginning."""

from pagepool.prefix.cache import PrefixCache
from pagepool.prefix.checkpoints import StateCheckpoints
from pagepool.prefix.events import NameSnapshot, PrefixEvent, PrefixSnapshot

__all__ = [
    "NameSnapshot",
    "PrefixCache",
    "PrefixEvent",
    "PrefixSnapshot",
    "StateCheckpoints",
]
