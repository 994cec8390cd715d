"""The prefix cache: blocks that are kept for the next prompt with the same beginning."""

from pagepool.prefix.cache import PrefixCache

__all__ = ["PrefixCache"]
