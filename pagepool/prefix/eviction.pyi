from pagepool.prefix.policies import LruPolicy

__all__ = ["POLICIES"]

POLICIES: dict[str, type[LruPolicy]]
