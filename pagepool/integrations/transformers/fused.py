"""Forwards in bfloat16 that do several of torch's operations in one call of C: norms, MLPs and whole decoders.

A decoder's layers run in one call, without Python between them: csrc/step.h. A module is recognised by its type and its
parts. All results are rounded where torch rounds them, so they are equal bit by bit. This is checked for each norm, and
for the logits of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers.activations
from transformers.modeling_outputs import BaseModelOutputWithPast

from pagepool.integrations.transformers.elementwise import DecoderLayers, lookup_mul, rms_norm
from pagepool.integrations.transformers.layout import ModelLayout
from pagepool.integrations.transformers.linear import FusedLayer, PackedLinears
from pagepool.integrations.transformers.step import AttentionLayer, current_step

__all__ = ["fused_forwards"]

ROWS = (1, 3, 32)  # numbers of rows at which a norm is checked
# Models of transformers with the layers of csrc/step.h.
DECODERS = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def is_plain(module: Any) -> bool:
    """Return whether a call of the module runs the forward of its class and nothing else."""
    return not ("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def is_of_transformers(module: Any, suffix: str) -> bool:
    """Return whether the module has a class of transformers' models whose name ends so, and runs its forward."""
    kind = type(module)
    return kind.__module__.startswith("transformers.models.") and kind.__name__.endswith(suffix) and is_plain(module)


def require_bf16(*tensors: torch.Tensor) -> None:
    """Raise TypeError for a tensor in another dtype than bfloat16: the functions in C do not check it."""
    for tensor in tensors:
        if tensor.dtype is not torch.bfloat16:
            raise TypeError(f"fused operations take bfloat16, not {tensor.dtype}")


class Norm:
    """RMSNorm."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._parameters = module._parameters
        self._eps = module.variance_epsilon
        self._size = module.weight.shape[0]

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the norm of rows."""
        require_bf16(hidden_states)
        x = hidden_states.contiguous()
        out = torch.empty_like(x)
        weight, eps = self.address()
        rows, threads = x.numel() // self._size, torch.get_num_threads()
        rms_norm(x.data_ptr(), 0, weight, eps, rows, self._size, 0, out.data_ptr(), threads)
        return out

    def address(self) -> tuple[int, float]:
        """Return the address of the module's weight, and eps."""
        return self._parameters["weight"].data_ptr(), self._eps

    def equals_module(self) -> bool:
        """Return whether the results for random rows equal those of the module, bit by bit."""
        random = torch.Generator().manual_seed(0)
        for rows in ROWS:
            x = torch.randn(1, rows, self._size, generator=random).bfloat16()
            if not torch.equal(self(x), type(self.module).forward(self.module, x)):
                return False
        return True


class Mlp:
    """`down_proj(act_fn(gate_proj(x)) * up_proj(x))`, with gate and up as one packed layer."""

    def __init__(self, gate_and_up: FusedLayer, down: FusedLayer, table: torch.Tensor) -> None:
        self.gate_and_up, self.down, self.table = gate_and_up, down, table
        self.size = gate_and_up.linears[0].out_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result for rows."""
        both = self.gate_and_up.run(x)
        require_bf16(both)
        size, gate = self.size, both.data_ptr()
        out = both.new_empty((*both.shape[:-1], size))
        rows, threads = both.numel() // (2 * size), torch.get_num_threads()
        lookup_mul(gate, gate + 2 * size, 2 * size, self.table.data_ptr(), rows, size, out.data_ptr(), threads)
        return self.down.run(out)


class Layer:
    """The parts of a decoder layer."""

    def __init__(self, module: Any, place: AttentionLayer, qkv: FusedLayer, output: FusedLayer, mlp: Mlp) -> None:
        attention = module.self_attn
        self.place, self.scale, self.mlp = place, attention.scaling, mlp
        self.linears = [qkv, output, mlp.gate_and_up, mlp.down]
        own = [module.input_layernorm, module.post_attention_layernorm]
        of_heads = [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
        self.norms = [*own, *of_heads]
        self.dim = attention.head_dim
        self.heads = [linear.out_features // self.dim for linear in qkv.linears]


class Decoder:
    """The forward of a decoder: embedding, rotary embedding, and all layers with the last norm in one call of C.

    Parameters
    ----------
    module : torch.nn.Module
        The decoder.
    layers : sequence of Layer
        Its layers.
    norms : dict
        Module -> its norm, for all norms of the decoder.
    windows : sequence of int or None
        The window of each group of layers.
    """

    def __init__(
        self, module: Any, layers: Sequence[Layer], norms: dict[Any, Norm], windows: Sequence[int | None]
    ) -> None:
        self._embed, self._rotary = module.embed_tokens, module.rotary_emb
        self._windows = windows
        first = layers[0]
        self._dim, self._query_size = first.dim, first.heads[0] * first.dim
        self._hidden_size, self._middle = module.norm.weight.shape[0], first.mlp.size
        self._sizes = sum(first.heads) * self._dim, self._hidden_size, 2 * self._middle
        self._linears = [layer.linears for layer in layers]
        used = [norms[norm] for layer in layers for norm in layer.norms] + [norms[module.norm]]
        self._norms = [(norm.module._parameters, norm.module.weight) for norm in used]
        self._tables = [layer.mlp.table for layer in layers]  # holds their memory
        rows: list[Any] = []
        for layer in layers:
            of_layer: list[Any] = [norms[norm].address() for norm in layer.norms]
            of_layer += [None] * (4 - len(of_layer))
            addresses = [linear.address() for linear in layer.linears]
            place = layer.place.group, layer.place.pool_layer
            rows.append((*addresses, *of_layer, layer.mlp.table.data_ptr(), layer.scale, *place))
        self._layers = DecoderLayers(
            self._hidden_size, first.heads[0], first.heads[1], self._dim, rows, norms[module.norm].address()
        )

    def __call__(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, cache: Any = None, **ignored: Any
    ) -> BaseModelOutputWithPast:
        """Store keys and values of the step's tokens in their slots, and return the norm of the last layer's rows."""
        if any(parameters["weight"] is not weight for parameters, weight in self._norms):
            raise RuntimeError("the weight of a norm was replaced after the runner had read it: make a new runner")
        x = self._embed(input_ids)
        cos, sin = (part.contiguous() for part in self._rotary(x, position_ids))
        require_bf16(x, cos, sin)
        batch, rows, hidden = x.shape
        if (batch, hidden) != (1, self._hidden_size) or not cos.shape == sin.shape == (1, rows, self._dim):
            raise ValueError(
                f"a step has one sequence of rows of {self._hidden_size}, with {self._dim} elements of cos and sin for "
                f"each, not {tuple(x.shape)} and {tuple(cos.shape)}"
            )
        normed = torch.empty_like(x)
        attended, activated = (x.new_empty((1, rows, size)) for size in (self._query_size, self._middle))
        inputs = normed, attended, normed, activated
        linears, step = self._linears, current_step()
        results = [x.new_empty(rows * size) for size in self._sizes]
        memory = [tensor.data_ptr() for tensor in (x, normed, attended, activated, *results)]
        self._layers.run(
            rows,
            memory,
            cos.data_ptr(),
            sin.data_ptr(),
            step.pools,
            step.tables,
            self._windows,
            step.arithmetic,
            step.threads,
            lambda layer, place: linears[layer][place].run(inputs[place]),
        )
        return BaseModelOutputWithPast(last_hidden_state=normed, cache=cache)


def fused_forwards(
    model: torch.nn.Module, packed: PackedLinears, layout: ModelLayout
) -> Iterator[dict[torch.nn.Module, Callable[..., Any]]]:
    """Yield the forwards of all modules that can be fused: first with decoders, then norms and MLPs, then norms.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    packed : PackedLinears
        Its packed layers. Decoders and MLPs are fused only if their linear layers are packed.
    layout : ModelLayout
        Its keys and values.
    """
    norms: dict[Any, Norm] = {}
    mlps: dict[Any, Mlp] = {}
    tables: dict[Any, torch.Tensor] = {}
    equal: dict[Any, bool] = {}  # whether norms are equal, by class, size and eps
    with torch.inference_mode():
        for module in model.modules():
            if is_norm(module):
                norm = Norm(module)
                key = type(module), module.weight.shape, module.variance_epsilon
                if key not in equal:
                    equal[key] = norm.equals_module()
                if equal[key]:
                    norms[module] = norm
            elif is_of_transformers(module, "MLP") and {*dict(module.named_children())} == MLP_PARTS:
                mlp = mlp_of(module, packed, tables)
                if mlp is not None:
                    mlps[module] = mlp
    decoders = {module: decoder_of(module, packed, layout, norms, mlps) for module in model.modules()}
    found = {module: decoder for module, decoder in decoders.items() if decoder is not None}
    if found:
        yield {**norms, **mlps, **found}
    if mlps:
        yield {**norms, **mlps}
    if norms:
        yield {**norms}


def mlp_of(module: Any, packed: PackedLinears, tables: dict[Any, torch.Tensor]) -> Mlp | None:
    """Return the fused forward of an MLP, or None if its linear layers are not packed or its activation is unknown."""
    gate_and_up, down = layer_of(packed, module.gate_proj, module.up_proj), layer_of(packed, module.down_proj)
    table = table_of(module.act_fn, tables)
    return None if gate_and_up is None or down is None or table is None else Mlp(gate_and_up, down, table)


def decoder_of(
    module: Any, packed: PackedLinears, layout: ModelLayout, norms: dict[Any, Norm], mlps: dict[Any, Mlp]
) -> Decoder | None:
    """Return the fused forward of a decoder, or None if a part is not known."""
    family = type(module).__module__.rpartition(".modeling_")[2]
    if family not in DECODERS or not is_part(module, family, "Model"):
        return None
    layers: list[Layer] = []
    for layer in module.layers:
        attention = layer.self_attn
        place = layout.by_cache_layer.get(attention.layer_idx)
        qkv = layer_of(packed, attention.q_proj, attention.k_proj, attention.v_proj)
        output = layer_of(packed, attention.o_proj)
        is_known = is_part(layer, family, "DecoderLayer") and is_part(attention, family, "Attention")
        if not is_known or place is None or qkv is None or output is None or layer.mlp not in mlps:
            return None
        layers.append(Layer(layer, place, qkv, output, mlps[layer.mlp]))
    shapes = {(*layer.heads, layer.dim, layer.mlp.size) for layer in layers}
    used = {module.norm, *(norm for layer in layers for norm in layer.norms)}
    if len(shapes) != 1 or used - set(norms) or len(layers) != len(layout.attention):
        return None
    return Decoder(module, layers, norms, [group.window for group in layout.groups])


def is_part(module: Any, family: str, kind: str) -> bool:
    """Return whether the module is this part of a family of transformers, and runs its forward."""
    own = type(module)
    place = f"transformers.models.{family}.modeling_{family}"
    return (own.__module__, own.__name__) == (place, DECODERS[family] + kind) and is_plain(module)


def is_norm(module: Any) -> bool:
    """Return whether a module is an RMSNorm with a plain weight in bfloat16."""
    if not is_of_transformers(module, "RMSNorm") or not hasattr(module, "variance_epsilon"):
        return False
    if [*module._parameters] != ["weight"] or [*module.buffers()]:
        return False
    weight = module.weight
    return type(weight) is torch.nn.Parameter and weight.dtype is torch.bfloat16 and weight.is_contiguous()


def layer_of(packed: PackedLinears, *linears: Any) -> FusedLayer | None:
    """Return the packed layer of exactly these linear layers, in this order. None without such a layer in bfloat16."""
    for layer in packed.layers:
        if [*map(id, layer.linears)] == [*map(id, linears)]:
            return layer if linears[0].weight.dtype is torch.bfloat16 else None
    return None


def table_of(activation: Any, tables: dict[Any, torch.Tensor]) -> torch.Tensor | None:
    """Return the results of an activation for all values of bfloat16. None if its class or a parameter is unknown."""
    kind = type(activation)
    if kind.__module__ not in (torch.nn.SiLU.__module__, transformers.activations.__name__):
        return None
    if [*activation.parameters(), *activation.buffers()] or not is_plain(activation):
        return None
    key = kind, repr(sorted(vars(activation).items(), key=str))
    if key not in tables:
        values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        tables[key] = activation(values)
    return tables[key]
