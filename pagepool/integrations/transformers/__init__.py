"""Runs causal language models of transformers on pagepool's memory. Needs the extra `transformers`.

The module `pretrained` can be imported without torch and transformers. The names below import them on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagepool.integrations.transformers.install import release, use
    from pagepool.integrations.transformers.runner import ModelRunner

__all__ = ["ModelRunner", "release", "use"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'runner' if name == 'ModelRunner' else 'install'}"), name)
