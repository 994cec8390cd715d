"""Linear layers and embeddings with weights of 8 or 4 bits, in the layout of csrc/linear_quantised.h.

A layer is a module of the model itself. It takes activations in float32, float16 and bfloat16, and returns the same
dtype. All numbers of rows are computed in one way, so a row's result never depends on the others.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from pagepool.integrations.transformers.elementwise import QuantisedWeights

__all__ = [
    "FORMATS",
    "Packed",
    "QuantisedEmbedding",
    "QuantisedLinear",
    "mark",
    "pack",
    "product",
    "quantisation_of",
    "quantise_linears",
    "quantised",
    "require_kind",
]

KINDS = ("int8", "int4")
FORMATS = ("int8", "int4", "int4 with least")  # the values of pp_quantised_format
INT8, INT4, INT4_LEAST = range(3)
GROUP, OUTPUTS = 32, 32
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # the values of pp_dtype
MARK = "_pagepool_weights"  # attribute of a quantised model: how it was quantised
PART = 1 << 22  # weights that are quantised at a time


class Packed:
    """The quantised weights of one linear layer.

    Attributes
    ----------
    form : int
        Index in FORMATS.
    outputs, inputs : int
        Size of the layer. `inputs` is a multiple of 32.
    data : torch.Tensor
        uint8, in the layout of csrc/linear_quantised.h.
    """

    def __init__(self, form: int, outputs: int, inputs: int, data: torch.Tensor) -> None:
        self.form, self.outputs, self.inputs, self.data = form, outputs, inputs, data

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the weights of some outputs, int64 (n,), in float32 (n, inputs)."""
        groups = self.inputs // GROUP
        width = OUTPUTS * (GROUP if self.form == INT8 else GROUP // 2)
        blocks = self.data.view(-(-self.outputs // OUTPUTS), groups, -1)
        block, place = outputs // OUTPUTS, outputs % OUTPUTS
        words = blocks[..., :width].view(torch.int32).view(len(blocks), groups, -1, OUTPUTS)
        found = words[block, :, :, place].view(torch.uint8).view(len(outputs), groups, -1)
        halves = blocks[..., width:].view(torch.float16)
        scale = halves[block, :, place].float()[..., None]
        if self.form == INT8:
            return (found.view(torch.int8) * scale).view(len(outputs), -1)
        levels = torch.cat((found & 15, found >> 4), -1)
        if self.form == INT4:
            return ((levels.to(torch.int8) - 8) * scale).view(len(outputs), -1)
        return (levels * scale + halves[block, :, place + OUTPUTS].float()[..., None]).view(len(outputs), -1)


def pack(form: int, levels: torch.Tensor, scale: torch.Tensor, least: torch.Tensor | None = None) -> Packed:
    """Bring quantised weights into the layout of the kernel.

    Parameters
    ----------
    form : int
        Index in FORMATS.
    levels : torch.Tensor
        uint8 (outputs, groups, 32), or (outputs, groups, 16) for 4 bits: byte i has input i, and input i + 16 in its
        upper half.
    scale, least : torch.Tensor
        float16 (outputs, groups).
    """
    outputs, groups, width = levels.shape
    count = -(-outputs // OUTPUTS)
    halves = [scale] if least is None else [scale, least]
    found = torch.zeros((count, groups, OUTPUTS * (width + 2 * len(halves))), dtype=torch.uint8)
    words = found[..., : OUTPUTS * width].view(torch.int32).view(count, groups, width // 4, OUTPUTS)
    fill(words, levels.contiguous().view(torch.int32), (0, 2, 3, 1))
    for number, half in enumerate(halves):
        at = OUTPUTS * (width + 2 * number)
        fill(found[..., at : at + 2 * OUTPUTS].view(torch.float16), half, (0, 2, 1))
    return Packed(form, outputs, groups * GROUP, found.view(-1))


def fill(to: torch.Tensor, rows: torch.Tensor, order: tuple[int, ...]) -> None:
    """Write rows (outputs, ...) to blocks of 32 outputs, with the dimensions of a block in another order."""
    whole = len(rows) // OUTPUTS
    if whole:
        to[:whole].copy_(rows[: whole * OUTPUTS].view(whole, OUTPUTS, *rows.shape[1:]).permute(order))
    if whole < len(to):
        left = rows[whole * OUTPUTS :]
        to[whole, ..., : len(left)].copy_(left[None].permute(order)[0])


def quantised(weight: torch.Tensor, kind: str) -> Packed:
    """Quantise a weight (outputs, inputs). "int4" has a scale and a least weight for each group."""
    inputs = weight.shape[1]
    form = INT8 if kind == "int8" else INT4_LEAST
    found: list[tuple[torch.Tensor, ...]] = []
    for rows in weight.detach().split(max(1, PART // inputs)):
        groups = rows.float().view(len(rows), -1, GROUP)
        if form == INT8:
            scale = (groups.abs().amax(-1) / 127).half()
            levels = torch.round(groups * inverse(scale)).clamp_(-127, 127).to(torch.int8).view(torch.uint8)
            found.append((levels, scale))
            continue
        least, most = groups.amin(-1).half(), groups.amax(-1)
        scale = ((most - least.float()) / 15).half()
        levels = torch.round((groups - least.float()[..., None]) * inverse(scale)).clamp_(0, 15).to(torch.uint8)
        found.append((levels[..., :16] | levels[..., 16:] << 4, scale, least))
    return pack(form, *map(torch.cat, zip(*found, strict=True)))


def inverse(scale: torch.Tensor) -> torch.Tensor:
    """Return 1 / scale in float32, and 0 for 0, with one more dimension."""
    wide = scale.float()
    return torch.where(wide > 0, 1 / wide, 0.0)[..., None]


class QuantisedLinear(torch.nn.Module):
    """A linear layer with quantised weights. Its results have the dtype of its input.

    Parameters
    ----------
    weight : Packed
        The weights.
    bias : torch.Tensor or None
        The bias, in any dtype.
    dtype : torch.dtype
        The dtype of the weights before they were quantised.
    """

    def __init__(self, weight: Packed, bias: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self._dtype = dtype
        self.form, self.in_features, self.out_features = weight.form, weight.inputs, weight.outputs
        self.register_buffer("packed", weight.data)
        self.register_buffer("bias", None if bias is None else bias.detach().float().contiguous())

    @property
    def weight(self) -> torch.Tensor:
        """A tensor without rows: models read its dtype and device. A product with it fails."""
        return torch.empty((0, self.in_features), dtype=self._dtype)

    @property
    def num_weights(self) -> int:
        """Number of weights."""
        return self.in_features * self.out_features

    def address(self) -> tuple[int, int, int, int]:
        """Return the arguments for `QuantisedWeights`."""
        bias = 0 if self.bias is None else self.bias.data_ptr()
        return self.form, self.out_features, self.packed.data_ptr(), bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the results for rows of inputs."""
        return product(QuantisedWeights(self.in_features, [self.address()]), x)

    def extra_repr(self) -> str:
        """Return the size for `repr`."""
        return f"{self.in_features}, {self.out_features}, {FORMATS[self.form]}"


def product(weights: QuantisedWeights, x: torch.Tensor) -> torch.Tensor:
    """Multiply rows by the weights of one or several layers. Raises TypeError or ValueError for unusable rows."""
    dtype = DTYPES.get(x.dtype)
    if dtype is None or not x.is_cpu:
        raise TypeError(f"quantised layers take float32, float16 and bfloat16 on the CPU, not {x.dtype} on {x.device}")
    if x.shape[-1] != weights.inputs:
        raise ValueError(f"quantised layers have {weights.inputs} inputs, and rows have {x.shape[-1]}")
    x = x.contiguous()
    out = torch.empty((*x.shape[:-1], weights.outputs), dtype=x.dtype)
    if x.numel():
        rows = x.numel() // weights.inputs
        weights.run(x.data_ptr(), dtype, rows, out.data_ptr(), torch.get_num_threads())
    return out


class QuantisedEmbedding(torch.nn.Module):
    """An embedding with the quantised weights of the output layer, which the model has tied to it."""

    def __init__(self, weight: Packed, dtype: torch.dtype) -> None:
        super().__init__()
        self._weight, self._dtype = weight, dtype
        self.num_embeddings, self.embedding_dim = weight.outputs, weight.inputs

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of token ids."""
        if ids.numel() and not (0 <= int(ids.min()) and int(ids.max()) < self.num_embeddings):
            raise IndexError(f"token ids must be from 0 to {self.num_embeddings - 1}")
        return self._weight.rows(ids.reshape(-1)).view(*ids.shape, -1).to(self._dtype)


def require_kind(model: torch.nn.Module, kind: str | None) -> None:
    """Raise ValueError unless `quantise_linears` can quantise the model in this way."""
    if kind is None:
        return
    if kind not in KINDS:
        raise ValueError(f"weights must be None, 'int8' or 'int4', not {kind!r}")
    found = quantisation_of(model)
    if found not in (None, kind):
        raise ValueError(f"weights are to be {kind!r}, but those of this {type(model).__name__} are {found!r} already")
    if found is None and not any(suits(module) for module in model.modules()):
        raise ValueError(f"{type(model).__name__} has no linear layer in plain floats that can be {kind!r}")


def quantisation_of(model: torch.nn.Module) -> str | None:
    """Return how a model was quantised, as `mark` was told. None: it was not."""
    found: str | None = vars(model).get(MARK)
    return found


def mark(model: torch.nn.Module, kind: str) -> None:
    """Note how a model was quantised: a part of its fingerprint."""
    vars(model)[MARK] = kind


def suits(module: torch.nn.Module) -> bool:
    """Return whether a module is `torch.nn.Linear` with plain weights in groups of 32 inputs, without hooks."""
    if type(module) is not torch.nn.Linear or "forward" in vars(module) or module.in_features % GROUP:
        return False
    weight = module.weight
    is_plain = type(weight) is torch.nn.Parameter and type(weight.data) is torch.Tensor and weight.device.type == "cpu"
    return is_plain and weight.dtype in DTYPES and not module._forward_pre_hooks and not module._forward_hooks


def quantise_linears(model: Any, kind: str | None) -> None:
    """Replace the linear layers of a model by quantised ones, one after another, and free their weights.

    Layers stay as they are if their inputs are no multiple of 32, if latent attention reads their weights, or if other
    modules share them. The output layer is always "int8", and so is an embedding that is tied to it.
    """
    if kind is None or quantisation_of(model) == kind:
        return
    require_kind(model, kind)
    uses = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    latent = {id(module.kv_b_proj) for module in model.modules() if hasattr(module, "kv_b_proj")}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head is not None and type(embedding) is torch.nn.Embedding and embedding.weight is head.weight
    with torch.inference_mode(False), torch.no_grad():
        for parent in [*model.modules()]:
            for name, module in [*parent.named_children()]:
                if not suits(module) or id(module) in latent:
                    continue
                shared = uses[id(module.weight)] > 1
                if shared and not (module is head and is_tied and uses[id(module.weight)] == 2):
                    continue
                packed = quantised(module.weight, "int8" if module is head else kind)
                if shared:
                    model.set_input_embeddings(QuantisedEmbedding(packed, embedding.weight.dtype))
                setattr(parent, name, QuantisedLinear(packed, module.bias, module.weight.dtype))
    mark(model, kind)
