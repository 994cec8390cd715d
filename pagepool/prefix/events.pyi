from typing import Any, NamedTuple, final

__all__ = ["EventLog", "PrefixEvent", "PrefixSnapshot", "prefix_names"]

class PrefixEvent(NamedTuple):
    sequence: int
    kind: str
    block: int
    name: bytes
    parent: bytes
    tokens: bytes

class PrefixSnapshot(NamedTuple):
    next_sequence: int
    stored: list[PrefixEvent]

@final
class EventLog:
    def __new__(cls, table: Any, max_events: int) -> EventLog: ...

def prefix_names(tokens: Any, block_size: int, root: bytes) -> list[bytes]: ...
