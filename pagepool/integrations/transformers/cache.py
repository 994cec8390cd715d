"""Cache layers for transformers that store keys and values in pages, and recurrent states in slots."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DummyLayer, LinearAttentionLayer

from pagepool.integrations.transformers.step import AttentionLayer, current_step

__all__ = ["DummyLayer", "PagedLayer", "PagedStateLayer", "StateLayer"]


class PagedLayer(CacheLayerMixin):
    """Cache layer that stores keys and values in the pages of the running step."""

    is_sliding = False

    def __init__(self, layer: AttentionLayer) -> None:
        super().__init__()
        self.layer = layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pages are already allocated."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the keys and values of the step and return them. The attention function reads the pages instead."""
        current_step().append(self.layer, key_states, value_states)
        if self.layer.latent:  # the model expands the result but never uses it, so return one token
            return key_states[:, :, :1], value_states[:, :, :1]
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return the largest number of earlier tokens of any sequence in the step."""
        return current_step().seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return sizes for the mask that transformers builds. Paged attention does not use this mask."""
        return query_length + self.get_seq_length(), 0

    def get_max_length(self) -> int:
        """Return -1: the length is unlimited."""
        return -1


class StateLayer(LinearAttentionLayer):
    """Cache layer with the recurrent states of the step's sequences. The model updates these tensors in place."""

    def __init__(self, states: dict[str, torch.Tensor], has_previous_state: bool) -> None:
        indices = [int(name.rpartition(".")[2]) for name in states]
        super().__init__(number_of_states=max(indices, default=0) + 1)
        for name, tensor in states.items():
            kind, _, index = name.rpartition(".")
            getattr(self, kind)[int(index)] = tensor
            getattr(self, f"is_{kind}_initialized")[int(index)] = True
            if kind == "conv_states":
                self.conv_kernel_size[int(index)] = tensor.shape[-1]
            self.has_previous_state[int(index)] = has_previous_state
            self.dtype, self.device = tensor.dtype, tensor.device


class PagedStateLayer(StateLayer, PagedLayer):
    """Cache layer for a model layer with both attention and a recurrent state."""

    def __init__(self, layer: AttentionLayer, states: dict[str, torch.Tensor], has_previous_state: bool) -> None:
        PagedLayer.__init__(self, layer)
        StateLayer.__init__(self, states, has_previous_state)
