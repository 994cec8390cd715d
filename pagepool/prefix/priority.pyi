from typing import final

from pagepool.prefix.policy import EvictionPolicy

__all__ = ["PriorityPolicy"]

@final
class PriorityPolicy(EvictionPolicy): ...
