from typing_extensions import disjoint_base

from pagepool.prefix.policy import EvictionPolicy

__all__ = ["GroupedPolicy"]

@disjoint_base
class GroupedPolicy(EvictionPolicy): ...
