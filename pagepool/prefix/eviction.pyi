from pagepool.prefix.policies import EvictionPolicy

__all__ = ["POLICIES"]

POLICIES: dict[str, type[EvictionPolicy]]
