from typing_extensions import disjoint_base

from pagepool.prefix.radix_tree import NodeTable

__all__ = ["LruPolicy"]

@disjoint_base
class LruPolicy:
    def __new__(cls, table: NodeTable, capacity: int) -> LruPolicy: ...
