from typing import final

from pagepool.prefix.policy import EvictionPolicy

__all__ = ["ArcPolicy"]

@final
class ArcPolicy(EvictionPolicy): ...
