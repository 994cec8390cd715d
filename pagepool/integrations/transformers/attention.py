"""The attention function that transformers calls by the name "pagepool", and modules whose attention is their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface

from pagepool.integrations.transformers.step import current_step

__all__ = ["ADAPTERS", "IMPLEMENTATION", "attends_with", "attention_configs"]

IMPLEMENTATION = "pagepool"


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **ignored: Any,
) -> tuple[torch.Tensor, None]:
    """Attends over the pages of the running step; keys and values are there already."""
    return current_step().attend(module, query, scaling, softcap, s_aux), None


AttentionInterface.register(IMPLEMENTATION, paged_attention)


# Attention modules that call no attention function, by class, with a forward over pages for each.
ADAPTERS: dict[str, Callable[..., Any]] = {}


def attention_configs(model: torch.nn.Module) -> list[Any]:
    """The configs in which modules of the model look up their attention function."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    return [config for config in configs.values() if hasattr(config, "_attn_implementation_internal")]


@contextmanager
def attends_with(configs: Sequence[Any], name: str) -> Iterator[None]:
    """Within, modules with these configs call the attention function of this name."""
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, own in zip(configs, before, strict=True):
            config._attn_implementation_internal = own
