"""The layers of transformers' cache that write to pages and to slots of recurrent states."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DummyLayer, LinearAttentionLayer

from pagepool.integrations.transformers.step import AttentionLayer, current_step

__all__ = ["DummyLayer", "PagedLayer", "PagedStateLayer", "StateLayer"]


class PagedLayer(CacheLayerMixin):
    """The keys and values of one layer: they go to pages of the running step."""

    is_sliding = False

    def __init__(self, layer: AttentionLayer) -> None:
        super().__init__()
        self.layer = layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Pages are there already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the tokens of the step and returns them: the attention function reads the pages."""
        current_step().append(self.layer, key_states, value_states)
        if self.layer.latent:  # what the model would expand and nobody reads: one token will do
            return key_states[:, :, :1], value_states[:, :, :1]
        return key_states, value_states

    def get_seq_length(self) -> int:
        """The most tokens that a sequence of the step had before."""
        return current_step().seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """For masks, which nobody reads."""
        return query_length + self.get_seq_length(), 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


class StateLayer(LinearAttentionLayer):
    """The recurrent states of one layer: tensors of the step's sequences, updated where they lie."""

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
    """A layer that attends and has a recurrent state."""

    def __init__(self, layer: AttentionLayer, states: dict[str, torch.Tensor], has_previous_state: bool) -> None:
        PagedLayer.__init__(self, layer)
        StateLayer.__init__(self, states, has_previous_state)
