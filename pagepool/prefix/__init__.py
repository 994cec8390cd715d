"""The prefix cache: keeps blocks for later prompts that begin with the same tokens."""

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
