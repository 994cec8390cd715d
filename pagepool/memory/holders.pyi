from typing_extensions import disjoint_base

__all__ = ["Holder"]

@disjoint_base
class Holder:
    kind: str
    label: int | str | None
