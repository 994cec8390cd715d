"""The eviction policies of the reference by name."""

from __future__ import annotations

from pagepool.reference.eviction import Arc, Lfu, Lru, Priority, S3Fifo
from pagepool.reference.gittins import Gittins

__all__ = ["POLICIES"]

POLICIES: dict[str, type[Lru]] = {
    "lru": Lru,
    "lfu": Lfu,
    "s3fifo": S3Fifo,
    "arc": Arc,
    "gittins": Gittins,
    "priority": Priority,
}
