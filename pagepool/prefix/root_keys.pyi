from typing import final

__all__ = ["RootKeys"]

@final
class RootKeys:
    def __new__(cls) -> RootKeys: ...
