from typing import Any, final

__all__ = ["EventLog", "prefix_names"]

@final
class EventLog:
    def __new__(cls, table: Any, max_events: int) -> EventLog: ...

def prefix_names(tokens: Any, block_size: int, root: bytes) -> list[bytes]: ...
