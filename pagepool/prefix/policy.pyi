from typing_extensions import disjoint_base

from pagepool.prefix.node_table import NodeTable

__all__ = ["EvictionPolicy"]

@disjoint_base
class EvictionPolicy:
    def __new__(cls, table: NodeTable, capacity: int) -> EvictionPolicy: ...
