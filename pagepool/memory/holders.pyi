from collections.abc import Iterable
from typing import Protocol, SupportsIndex, overload

from typing_extensions import disjoint_base

from pagepool.memory.owners import Leak, Owner

__all__ = ["Holder", "HolderRegistry"]

class _HoldsBlocks(Protocol):
    @property
    def kind(self) -> str: ...
    @property
    def label(self) -> int | str | None: ...
    def references(self) -> Iterable[int]: ...

@disjoint_base
class Holder:
    kind: str
    label: int | str | None

@disjoint_base
class HolderRegistry:
    def add_holder(self, holder: _HoldsBlocks) -> None: ...
    @overload
    def owners(self, block: SupportsIndex) -> list[Owner]: ...
    @overload
    def owners(self, block: None = None) -> dict[int, list[Owner]]: ...
    def leaks(self) -> list[Leak]: ...
    def warn_of_leaks(self) -> None: ...
