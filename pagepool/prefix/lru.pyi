from typing import final

from pagepool.prefix.policy import EvictionPolicy

__all__ = ["LruPolicy"]

@final
class LruPolicy(EvictionPolicy): ...
