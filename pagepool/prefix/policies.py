"""The eviction policies by name."""

from __future__ import annotations

from pagepool.prefix.arc import ArcPolicy
from pagepool.prefix.gittins import GittinsPolicy
from pagepool.prefix.lfu import LfuPolicy
from pagepool.prefix.lru import LruPolicy
from pagepool.prefix.policy import EvictionPolicy
from pagepool.prefix.priority import PriorityPolicy
from pagepool.prefix.s3fifo import S3FifoPolicy

__all__ = ["POLICIES"]

POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LruPolicy,
    "lfu": LfuPolicy,
    "s3fifo": S3FifoPolicy,
    "arc": ArcPolicy,
    "gittins": GittinsPolicy,
    "priority": PriorityPolicy,
}
