from typing import final

__all__ = ["TermQueue"]

@final
class TermQueue: ...
