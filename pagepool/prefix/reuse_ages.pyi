from typing import final

__all__ = ["ReuseAges"]

@final
class ReuseAges: ...
