"""Causal language models of transformers over pagepool's memory. Needs the extra `transformers`."""

from pagepool.integrations.transformers.runner import ModelRunner

__all__ = ["ModelRunner"]
