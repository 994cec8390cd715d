"""The prefix cache: blocks that are kept for the next prompt with the same beginning."""

from pagepool.prefix.cache import PrefixCache
from pagepool.prefix.events import PrefixEvent, PrefixSnapshot
from pagepool.prefix.mirror import PrefixMirror
from pagepool.prefix.pins import PrefixPins
from pagepool.prefix.space import PrefixSpace
from pagepool.prefix.state_checkpoints import StateCheckpoints

__all__ = [
    "PrefixCache",
    "PrefixEvent",
    "PrefixMirror",
    "PrefixPins",
    "PrefixSnapshot",
    "PrefixSpace",
    "StateCheckpoints",
]
