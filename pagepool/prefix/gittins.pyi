from typing import final

from pagepool.prefix.grouped import GroupedPolicy

__all__ = ["GittinsPolicy"]

@final
class GittinsPolicy(GroupedPolicy): ...
