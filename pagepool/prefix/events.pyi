from typing import Any, NamedTuple, final

__all__ = [
    "EventLog",
    "NameSnapshot",
    "PrefixEvent",
    "PrefixSnapshot",
    "check_snapshot",
    "name_of_root",
    "name_row",
    "prefix_names",
]

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
    num_blocks: int

class NameSnapshot(NamedTuple):
    next_sequence: int
    names: bytes
    num_blocks: int

def check_snapshot(snapshot: PrefixSnapshot) -> None: ...

@final
class EventLog:
    def __new__(cls, source: Any, number: int, max_events: int) -> EventLog: ...
    @property
    def number(self) -> int: ...

def name_of_root(digest: bytes, secret: bytes) -> bytes: ...
def name_row(tokens: Any, block_size: int, root: bytes) -> bytes: ...
def prefix_names(tokens: Any, block_size: int, root: bytes) -> list[bytes]: ...
