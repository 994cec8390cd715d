"""The attention function "pagepool" for transformers, and replacement forwards for modules that do not call it."""

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
from pagepool.integrations.transformers.recurrent import recurrence_of
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
    """Attend over the pages of the running step. The cache layer has already stored keys and values in them."""
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
    """`BloomAttention.forward` over pages. Biases are computed from the slope of each head, not read from `alibi`."""
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    layer_past.update(key, value, module.layer_idx)
    slopes = _get_alibi_slopes(module.num_heads, hidden_states.device)
    context = current_step().attend(module, query, module.inv_norm_factor, alibi_slopes=slopes)
    return module.dense(context.flatten(2)) + residual, None


# Replacement forwards for classes of attention modules that do not call the attention function.
ADAPTERS: dict[str, Callable[..., Any]] = {"BloomAttention": bloom_attention}


_locks: WeakKeyDictionary[torch.nn.Module, RLock] = WeakKeyDictionary()


class Hooks:
    """Switches a model to paged attention: sets the attention name in its configs and replaces forwards of modules.

    A lock per model lets only one thread use the hooks of a model, also if several runners share the model.

    Attributes
    ----------
    steps_in_place : set of int
        Layers that update their recurrent states in the slots of the running step.
    takes_drafts : dict of int to set
        The kinds of states that a recurrent layer computes for drafts, by layer.
    packed : PackedLinears or None
        Linear layers over packed weights. Set by `use`.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._lock = _locks.setdefault(model, RLock())
        configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
        self._configs = [config for config in configs.values() if hasattr(config, "_attn_implementation_internal")]
        self._adapted = [module for module in model.modules() if type(module).__name__ in ADAPTERS]
        self._forwards: dict[torch.nn.Module, Callable[..., Any]] = {
            module: MethodType(ADAPTERS[type(module).__name__], module) for module in self._adapted
        }
        self.steps_in_place: set[int] = set()
        self.takes_drafts: dict[int, set[str]] = {}
        self.packed: PackedLinears | None = None
        self._replaced: dict[torch.nn.Module, Callable[..., Any]] | None = None
        with self._lock:  # another runner of this model may have replaced forwards
            for module in model.modules():
                found = recurrence_of(module)
                if found is not None:
                    self._forwards[module] = found.forward
                    self.takes_drafts[module.layer_idx] = found.takes
                    if found.steps_in_place:
                        self.steps_in_place.add(module.layer_idx)

    def use(self, packed: PackedLinears | None, fused: dict[torch.nn.Module, Callable[..., Any]] | None = None) -> None:
        """Set the packed linear layers, and the fused forwards of other modules. None: the model's own."""
        self.packed, self._replaced = packed, None
        if packed is not None:
            forwards = self._forwards | packed.forwards | (fused or {})
            inner = {part for module in fused or () for part in module.modules() if part is not module}
            self._replaced = {module: forward for module, forward in forwards.items() if module not in inner}

    def has_adapter(self, layer: int) -> bool:
        """Return whether this layer's attention does not call the attention function but has a replacement forward."""
        return any(module.layer_idx == layer for module in self._adapted)

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Context manager in which the model calls the attention function with this name."""
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
        """Context manager in which the model uses the pages and states of the running step, and all replaced forwards.

        Raises RuntimeError if a weight was changed since it was packed.
        """
        forwards = self._forwards
        with self.calling(IMPLEMENTATION):
            if self.packed is not None:
                self.packed.require_unchanged()
            if self._replaced is not None:
                forwards = self._replaced
            own = {module: vars(module)["forward"] for module in forwards if "forward" in vars(module)}
            for module, forward in forwards.items():
                vars(module)["forward"] = forward  # 10 times faster than torch's `__setattr__`
            try:
                yield
            finally:
                for module in forwards:
                    if module in own:
                        vars(module)["forward"] = own[module]
                    else:
                        del vars(module)["forward"]
