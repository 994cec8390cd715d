from typing import Literal, final

__all__ = ["PageBuffer"]

@final
class PageBuffer:
    def __new__(cls, count: int, format: Literal["f", "e", "H", "i", "B"], huge: bool = False) -> PageBuffer: ...
