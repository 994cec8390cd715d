from typing import final

__all__ = ["NodeTable"]

@final
class NodeTable:
    def __new__(cls, block_size: int, hash_bits: int = 64) -> NodeTable: ...
    @property
    def block_size(self) -> int: ...
