from typing import final

from pagepool.prefix.policy import EvictionPolicy

__all__ = ["GittinsPolicy"]

@final
class GittinsPolicy(EvictionPolicy): ...
