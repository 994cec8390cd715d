"""Causal language models of transformers over pagepool's memory. Needs the extra `transformers`."""

from pagepool.integrations.transformers.runner import ModelRunner
from pagepool.integrations.transformers.use import release, use

__all__ = ["ModelRunner", "release", "use"]
