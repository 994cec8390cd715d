from typing import Any

__all__ = ["cpu_info"]

def cpu_info() -> dict[str, Any]: ...
