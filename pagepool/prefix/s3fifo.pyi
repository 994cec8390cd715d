from typing import final

from pagepool.prefix.policy import EvictionPolicy

__all__ = ["S3FifoPolicy"]

@final
class S3FifoPolicy(EvictionPolicy): ...
