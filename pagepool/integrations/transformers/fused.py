"""Forwards of decoder layers in bfloat16 that do several of torch's operations in one call of C.

A module gets such a forward if its own forward has the same bytecode as the forward of a known class of transformers.
All results are rounded where torch rounds them, so they are equal bit by bit. This is checked for each norm and for the
logits of the whole model.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers.activations
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2

from pagepool.integrations.transformers.elementwise import lookup_mul, rms_norm, rotate
from pagepool.integrations.transformers.linear import FusedLayer, PackedLinears
from pagepool.integrations.transformers.step import current_step

__all__ = ["fused_forwards"]

ROWS = (1, 3, 32)  # numbers of rows at which a norm is checked


def bytecode_of(function: Any) -> tuple[Any, ...]:
    """Return what a function does: its instructions, names and constants, without texts and annotations."""
    code = inspect.unwrap(function).__code__
    constants = tuple(value for value in code.co_consts if not isinstance(value, str))
    return code.co_code, code.co_names, code.co_varnames, constants


@cache
def known(name: str) -> list[tuple[Any, ...]]:
    """Return the bytecodes of the forwards that a name of transformers' Llama stands for, such as `LlamaMLP`.

    For `LlamaAttention` also those of models that differ only in the window that they pass to the attention function:
    here the layout has the window.
    """
    found = [bytecode_of(getattr(modeling_llama, name).forward)]
    if name == "LlamaAttention":
        found += map(bytecode_of, (modeling_mistral.MistralAttention.forward, modeling_qwen2.Qwen2Attention.forward))
    return found


def is_plain(module: Any) -> bool:
    """Return whether a call of the module runs the forward of its class and nothing else."""
    return not ("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def is_like(module: Any, name: str) -> bool:
    """Return whether the module runs a forward with one of the bytecodes of `known(name)`."""
    try:
        return is_plain(module) and bytecode_of(type(module).forward) in known(name)
    except AttributeError:  # a forward that is not written in Python
        return False


def require_bf16(*tensors: torch.Tensor) -> None:
    """Raise TypeError for a tensor in another dtype than bfloat16: the functions in C do not check it."""
    for tensor in tensors:
        if tensor.dtype is not torch.bfloat16:
            raise TypeError(f"fused operations take bfloat16, not {tensor.dtype}")


class Norm:
    """RMSNorm, alone or after the addition of a residual."""

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
        self._run(x, 0, x, out)
        return out

    def add(self, x: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `x + delta` and its norm. The sum may be stored in `delta`, which must be a new tensor."""
        require_bf16(x, delta)
        x = x.contiguous()
        out = torch.empty_like(x)
        self._run(x, delta.data_ptr(), delta, out)
        return delta, out

    def _run(self, x: torch.Tensor, delta: int, total: torch.Tensor, out: torch.Tensor) -> None:
        size = self._size
        weight = self._parameters["weight"].data_ptr()
        threads = torch.get_num_threads()
        rms_norm(
            x.data_ptr(), delta, weight, self._eps, x.numel() // size, size, total.data_ptr(), out.data_ptr(), threads
        )

    def equals_module(self) -> bool:
        """Return whether the results for random rows equal those of the module, bit by bit."""
        random = torch.Generator().manual_seed(0)
        for rows in ROWS:
            x, delta = (torch.randn(1, rows, self._size, generator=random).bfloat16() for _ in range(2))
            total = x + delta
            own = type(self.module).forward(self.module, total)
            found = self.add(x, delta)
            if not (torch.equal(self(total), own) and torch.equal(found[0], total) and torch.equal(found[1], own)):
                return False
        return True


class Mlp:
    """`down_proj(act_fn(gate_proj(x)) * up_proj(x))`, with gate and up as one packed layer."""

    def __init__(self, gate_and_up: FusedLayer, down: FusedLayer, table: torch.Tensor) -> None:
        self._gate_and_up, self._down, self._table = gate_and_up.run, down.run, table
        self._size = gate_and_up.linears[0].out_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result for rows."""
        both = self._gate_and_up(x)
        require_bf16(both)
        size, gate = self._size, both.data_ptr()
        out = both.new_empty((*both.shape[:-1], size))
        rows, threads = both.numel() // (2 * size), torch.get_num_threads()
        lookup_mul(gate, gate + 2 * size, 2 * size, self._table.data_ptr(), rows, size, out.data_ptr(), threads)
        return self._down(out)


class Attention:
    """Attention with rotary embeddings over pages, with q, k and v as one packed layer."""

    def __init__(self, module: Any, qkv: FusedLayer, output: FusedLayer) -> None:
        self.module = module
        self._qkv, self._output = qkv.run, output.run
        self._dim, self._layer_idx = module.head_dim, module.layer_idx
        self._query_heads, self._key_heads, _ = (linear.out_features // self._dim for linear in qkv.linears)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        **ignored: Any,
    ) -> tuple[torch.Tensor, None]:
        """Store keys and values of the step's tokens in their slots, and return the projected attention."""
        qkv = self._qkv(hidden_states)
        batch, count, width = qkv.shape
        dim, queries = self._dim, self._query_heads
        rotated = queries + self._key_heads
        cos, sin = (part.expand(batch, count, dim).contiguous() for part in position_embeddings)
        require_bf16(qkv, cos, sin)
        rows, threads = batch * count, torch.get_num_threads()
        rotate(qkv.data_ptr(), width, cos.data_ptr(), sin.data_ptr(), rows, rotated, dim, threads)
        heads = qkv.view(batch, count, -1, dim).transpose(1, 2)
        cache.layers[self._layer_idx].update(heads[:, queries:rotated], heads[:, rotated:])
        out = current_step().attend(self.module, heads[:, :queries], None)
        return self._output(out.view(batch, count, -1)), None


def fused_layer(norm: Norm, attention: Any, second_norm: Norm, mlp: Any) -> Callable[..., torch.Tensor]:
    """Return the forward of a decoder layer: attention and MLP, each after a norm and with a residual."""

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        delta, _ = attention(hidden_states=norm(hidden_states), **named(args), **kwargs)
        residual, x = second_norm.add(hidden_states, delta)
        return residual.add_(mlp(x))

    return forward


def named(args: tuple[Any, ...]) -> dict[str, Any]:
    """Return positional arguments of a decoder layer after the hidden states by their names."""
    names = ("attention_mask", "position_ids", "cache", "use_cache", "position_embeddings")
    return dict(zip(names, args, strict=False)) if args else {}


def fused_forwards(model: torch.nn.Module, packed: PackedLinears) -> dict[torch.nn.Module, Callable[..., Any]]:
    """Return the forwards of all modules that can be fused: norms, MLPs, attention and decoder layers.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    packed : PackedLinears
        Its packed layers. Attention and MLPs are fused only if their linear layers are packed.
    """
    found: dict[torch.nn.Module, Callable[..., Any]] = {}
    tables: dict[Any, torch.Tensor] = {}
    equal: dict[Any, bool] = {}  # whether norms are equal, by size and eps
    with torch.inference_mode():
        for module in model.modules():
            if is_norm(module):
                norm = Norm(module)
                key = module.weight.shape, module.variance_epsilon
                if key not in equal:
                    equal[key] = norm.equals_module()
                if equal[key]:
                    found[module] = norm
            elif is_like(module, "LlamaMLP"):
                gate_and_up, down = (
                    layer_of(packed, module.gate_proj, module.up_proj),
                    layer_of(packed, module.down_proj),
                )
                table = table_of(module.act_fn, tables)
                if gate_and_up is not None and down is not None and table is not None:
                    found[module] = Mlp(gate_and_up, down, table)
            elif is_like(module, "LlamaAttention") and has_plain_rotary(module):
                qkv = layer_of(packed, module.q_proj, module.k_proj, module.v_proj)
                output = layer_of(packed, module.o_proj)
                if qkv is not None and output is not None:
                    found[module] = Attention(module, qkv, output)
    for module in model.modules():
        if is_like(module, "LlamaDecoderLayer"):
            first, second = (found.get(norm) for norm in (module.input_layernorm, module.post_attention_layernorm))
            if isinstance(first, Norm) and isinstance(second, Norm) and not module.training:
                attention, mlp = found.get(module.self_attn), found.get(module.mlp)
                if isinstance(attention, Attention) and isinstance(mlp, Mlp):
                    found[module] = fused_layer(first, attention, second, mlp)
    return found


def is_norm(module: Any) -> bool:
    """Return whether a module is an RMSNorm with a plain weight in bfloat16."""
    if not is_like(module, "LlamaRMSNorm"):
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


def has_plain_rotary(module: Any) -> bool:
    """Return whether the module's source file has the same functions for rotary embeddings as Llama."""
    names, ours = vars(sys.modules[type(module).__module__]), vars(modeling_llama)
    functions = ("apply_rotary_pos_emb", "rotate_half")
    return all(name in names and bytecode_of(names[name]) == bytecode_of(ours[name]) for name in functions)
