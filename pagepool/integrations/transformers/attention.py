"""The attention function that transformers calls by the name "pagepool", and modules that have code of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import AttentionInterface
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

from pagepool.integrations.transformers.linear import PackedLinears
from pagepool.integrations.transformers.recurrent import forward_in_place
from pagepool.integrations.transformers.step import current_step

__all__ = ["Hooks"]

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


def bloom_attention(
    module: Any,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    alibi: torch.Tensor,
    attention_mask: torch.Tensor | None,
    layer_past: Any = None,
    **ignored: Any,
) -> tuple[torch.Tensor, None]:
    """`BloomAttention.forward` over pages: biases come from the slope of each head, not from a tensor of them."""
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    layer_past.update(key, value, module.layer_idx)
    slopes = _get_alibi_slopes(module.num_heads, hidden_states.device)
    context = current_step().attend(module, query, module.inv_norm_factor, alibi_slopes=slopes)
    return module.dense(context.flatten(2)) + residual, None


# Classes of attention modules that call no attention function, each with its forward over pages.
ADAPTERS: dict[str, Callable[..., Any]] = {"BloomAttention": bloom_attention}


_locks: WeakKeyDictionary[torch.nn.Module, RLock] = WeakKeyDictionary()


class Hooks:
    """Where a model chooses its attention: the configs that name the function, and modules with code of their own.

    steps_in_place  numbers of the layers whose recurrent states are stepped in the slots of the running step
    packed          linear layers over packed weights, or None

    One thread at a time changes it, whichever runner it runs for.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._lock = _locks.setdefault(model, RLock())
        configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
        self._configs = [config for config in configs.values() if hasattr(config, "_attn_implementation_internal")]
        self._adapted = [module for module in model.modules() if type(module).__name__ in ADAPTERS]
        self._forwards = {module: MethodType(ADAPTERS[type(module).__name__], module) for module in self._adapted}
        self.steps_in_place: set[int] = set()
        self.packed: PackedLinears | None = None
        with self._lock:  # while no other runner of this model has put its forwards there
            for module in model.modules():
                forward = forward_in_place(module)
                if forward is not None:
                    self._forwards[module] = forward
                    self.steps_in_place.add(module.layer_idx)

    def has_adapter(self, layer: int) -> bool:
        """Whether the attention of this layer is code of its own for which there is a forward over pages."""
        return any(module.layer_idx == layer for module in self._adapted)

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Within, the model calls the attention function of this name."""
        with self._lock:
            before = [config._attn_implementation_internal for config in self._configs]
            for config in self._configs:
                config._attn_implementation_internal = name
            try:
                yield
            finally:
                for config, own in zip(self._configs, before, strict=True):
                    config._attn_implementation_internal = own

    @contextmanager
    def over_pages(self) -> Iterator[None]:
        """Within, the model attends over the pages, steps the recurrent states of the running step, and has packed
        weights. Raises RuntimeError if one of these was changed since it was packed."""
        forwards = self._forwards
        with self.calling(IMPLEMENTATION):
            if self.packed is not None:
                self.packed.require_unchanged()
                forwards = forwards | self.packed.forwards
            own = {module: vars(module)["forward"] for module in forwards if "forward" in vars(module)}
            for module, forward in forwards.items():
                vars(module)["forward"] = forward  # torch's `__setattr__` takes ten times as long
            try:
                yield
            finally:
                for module in forwards:
                    if module in own:
                        vars(module)["forward"] = own[module]
                    else:
                        del vars(module)["forward"]
