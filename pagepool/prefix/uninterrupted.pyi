from typing import final

__all__ = ["Uninterrupted"]

@final
class Uninterrupted: ...
