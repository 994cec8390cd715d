from typing import final

from pagepool.prefix.policy import EvictionPolicy

__all__ = ["LfuPolicy"]

@final
class LfuPolicy(EvictionPolicy): ...
