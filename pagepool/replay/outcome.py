"""What a run of `pagepool replay` comes to, and the trace that it takes when none is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Outcome", "bundled_trace"]


@dataclass(frozen=True)
class Outcome:
    """The numbers, for JSON; what prints them as a table; what `--plot` and `--html` draw, empty when neither asks."""

    numbers: dict[str, Any]
    show: Callable[[dict[str, Any]], None]
    picture: dict[str, Any]


def bundled_trace() -> Path:
    """The trace that comes with the package: the first 2,000 requests of azure2023_conv."""
    return Path(__file__).parent.parent / "data" / "azure2023_conv_head.ptrace.xz"
