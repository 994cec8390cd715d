"""Detects the keys, values and recurrent states that a model stores per token, by one short forward of the model."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    LinearAttentionCacheLayerMixin,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from pagepool.integrations.transformers.attention import Hooks
from pagepool.integrations.transformers.step import AttentionLayer, Shape

__all__ = ["ModelLayout", "Unsupported", "read_layout"]

PROBE = "pagepool_probe"
# A window is derived from the model's mask. Both are then compared at positions up to this one.
FAR = 1 << 20


class Unsupported(ValueError):
    """The model cannot run over pages. The message is the reason."""


class Group(NamedTuple):
    """Layers with the same window and the same pool. They share a block table."""

    window: int | None
    pool: int


@dataclass
class ModelLayout:
    """The keys, values and recurrent states that a model stores.

    Attributes
    ----------
    attention : list of AttentionLayer
        Attention layers, in the order of the cache.
    states : list of dict
        Recurrent states of each cache layer: name -> (shape, dtype). Empty for a layer without states.
    borrowed : dict
        Modules that attend to the keys and values of another layer -> this layer.
    groups : list of Group
        Groups of layers. Each group has one block table.
    shapes : list of (Shape, int)
        Shape and number of layers of each pool.
    logits : torch.Tensor
        float32 (tokens, vocab_size): the model's own logits for the tokens of the probe.
    """

    attention: list[AttentionLayer]
    states: list[dict[str, tuple[tuple[int, ...], str]]]
    borrowed: dict[Any, AttentionLayer]
    groups: list[Group]
    shapes: list[tuple[Shape, int]]
    logits: torch.Tensor

    def __post_init__(self) -> None:
        self.by_cache_layer = {layer.cache_layer: layer for layer in self.attention}

    @property
    def has_states(self) -> bool:
        """Return whether any layer has a recurrent state."""
        return any(self.states)


@dataclass
class Probe:
    """Records of a forward: each store into the cache, and each call of the attention function."""

    stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    returned: dict[int, int] = field(default_factory=dict)  # address of the keys that a store returned -> its layer
    windows: dict[int, int | None] = field(default_factory=dict)  # by layer of the cache
    masks: dict[int, int | None] = field(default_factory=dict)  # address of a mask -> its window
    modules: dict[int, Any] = field(default_factory=dict)  # the module that attended, by layer of the cache
    borrowed: dict[Any, int] = field(default_factory=dict)
    pending: int | None = None


_probing = threading.local()  # `probe`: the records of the forward that this thread runs


def probe_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend as the model itself would, and record the layer and its window."""
    probe: Probe = _probing.probe
    if attention_mask is None or attention_mask.data_ptr() not in probe.masks:
        raise Unsupported(f"{type(module).__name__} makes its mask itself, and pages need to know its window")
    layer, probe.pending = probe.pending, None
    if layer is None:
        if key.data_ptr() not in probe.returned:
            raise Unsupported(f"{type(module).__name__} attends to keys that it does not store in the cache")
        probe.borrowed[module] = probe.returned[key.data_ptr()]
    else:
        probe.returned[key.data_ptr()] = layer
        probe.modules[layer] = module
        probe.windows[layer] = probe.masks[attention_mask.data_ptr()]
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", sdpa_attention_forward)
    result: tuple[torch.Tensor, torch.Tensor | None] = own(module, query, key, value, attention_mask, **kwargs)
    return result


def probe_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Return the mask for eager attention, and record its window."""
    mask = eager_mask(*args, **kwargs)
    if mask is not None:
        _probing.probe.masks[mask.data_ptr()] = window_of(kwargs["mask_function"], kwargs.get("local_size"))
    return mask


AttentionInterface.register(PROBE, probe_attention)
AttentionMaskInterface.register(PROBE, probe_mask)


def window_of(mask: Callable[..., Any], local_size: int | None) -> int | None:
    """Return `window_left` of a causal mask, or None without a window. Raises Unsupported for any other mask."""
    window = None if local_size is None else local_size - 1
    near = local_size or 64
    queries = [0, 1, near - 1, near, near + 1, 2 * near + near // 2, 7 * near + 3, FAR]
    for query in (position for position in queries if position >= 0):
        keys = {0, query // 2, query - near - 1, query - near, query - near + 1, query - 1, query, query + 1}
        for key in (position for position in keys if position >= 0):
            seen = key <= query and (window is None or query - key <= window)
            if bool(mask(torch.tensor(0), torch.tensor(0), torch.tensor(query), torch.tensor(key))) != seen:
                kind = "causal" if local_size is None else f"a causal window of {local_size}"
                raise Unsupported(f"its mask is not {kind}: query {query} and key {key} differ")
    return window


def read_layout(model: Any, hooks: Hooks, tokens: torch.Tensor) -> ModelLayout:
    """Run the model eagerly over tokens (1, n), and return the layout of the data that it stores.

    Raises Unsupported, with the reason, if pages cannot store the data of a layer.
    """
    probe = Probe()
    cache = DynamicCache(config=model.config)
    store = cache.update

    def note(keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        if isinstance(cache.layers[layer], DynamicIndexedLayer):
            raise Unsupported("its attention chooses tokens by an index")
        probe.stored[layer], probe.pending = (keys, values), layer
        result = store(keys, values, layer, *args, **kwargs)
        probe.returned[result[0].data_ptr()] = layer
        return result

    cache.update = note
    _probing.probe = probe
    try:
        with hooks.calling(PROBE):
            logits = model(input_ids=tokens, use_cache=True, cache=cache).logits[0].float()
    finally:
        del _probing.probe
    for number, window in probe.windows.items():
        require_same_window(number, cache.layers[number], window)
    states = [states_of(layer) for layer in cache.layers]
    attention = [attention_layer(hooks, probe, layer) for layer in sorted(probe.stored)]
    if not attention and not any(states):
        raise Unsupported("it keeps nothing in the cache that it is given")
    attention, groups, shapes = grouped(attention)
    by_number = {layer.cache_layer: layer for layer in attention}
    borrowed = {module: by_number[layer] for module, layer in probe.borrowed.items()}
    return ModelLayout(attention, states, borrowed, groups, shapes, logits)


def require_same_window(number: int, layer: Any, window: int | None) -> None:
    """Raise Unsupported if the model's own cache drops tokens that the layer's mask includes."""
    size = getattr(layer, "sliding_window", None)
    if size is not None and window != size - 1:
        seen = "all tokens" if window is None else f"{window + 1} tokens"
        raise Unsupported(f"layer {number} sees {seen}, and its own cache keeps {size}")


def states_of(layer: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shape and dtype of each recurrent state of one sequence in a cache layer."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        if not isinstance(layer, (CacheLayerMixin, DummyLayer)):
            raise Unsupported(f"its cache has a {type(layer).__name__}")
        return {}
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for kind in ("conv_states", "recurrent_states"):
        for index, tensor in getattr(layer, kind).items():
            if tensor is not None:
                found[f"{kind}.{index}"] = tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch.")
    return found


def attention_layer(hooks: Hooks, probe: Probe, number: int) -> AttentionLayer:
    """Return the shape of a layer's keys and values, and the window of its queries."""
    keys, values = probe.stored[number]
    module = probe.modules.get(number)
    if module is None:
        if not hooks.has_adapter(number):
            raise Unsupported(f"layer {number} attends in code of its own, which calls no attention function")
    elif hasattr(module, "kv_b_proj"):
        dims = module.kv_lora_rank, module.qk_rope_head_dim
        if (keys.shape[1], keys.shape[-1], values.shape[-1]) == (1, *dims):
            return AttentionLayer(number, 1, sum(dims), dims[0], probe.windows[number], latent=True)
    return AttentionLayer(number, keys.shape[1], keys.shape[-1], values.shape[-1], probe.windows.get(number), False)


def grouped(layers: list[AttentionLayer]) -> tuple[list[AttentionLayer], list[Group], list[tuple[Shape, int]]]:
    """Assign layers to groups. Return the layers, the groups, and the shape and number of layers of each pool.

    The layers of a group have the same window and shape. A block of a pool has room for the largest group of the pool.
    To waste little of it, no group is larger than the smallest set of layers with one window and shape.
    """
    kinds: dict[tuple[Shape, int | None], list[AttentionLayer]] = {}
    for layer in layers:
        kinds.setdefault((layer.shape, layer.window), []).append(layer)
    sizes: dict[Shape, int] = {}
    for (shape, _), members in kinds.items():
        sizes[shape] = min(len(members), sizes.get(shape, len(members)))
    groups: list[Group] = []
    found: list[AttentionLayer] = []
    for (shape, window), members in sorted(kinds.items(), key=lambda kind: (kind[0][1] is not None, kind[0][1] or 0)):
        for begin in range(0, len(members), sizes[shape]):
            chunk = members[begin : begin + sizes[shape]]
            found += [replace(layer, group=len(groups), pool_layer=place) for place, layer in enumerate(chunk)]
            groups.append(Group(window, list(sizes).index(shape)))
    return sorted(found, key=lambda layer: layer.cache_layer), groups, list(sizes.items())
