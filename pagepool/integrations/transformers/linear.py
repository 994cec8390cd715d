"""Linear layers with weights that oneDNN has packed once, for the forwards of a runner.

`F.linear` packs its weights again in each call. oneDNN can pack them once, and layers with the same input can be fused.
A decode step in bfloat16 then takes 0.64 to 0.78 of the time. On CPUs with AMX our own kernel multiplies up to 64 rows
by a packed weight. It takes 0.8 of the time of oneDNN's, because it prefetches.

In 16-bit dtypes the results are equal bit by bit. This is checked for each shape, and a layer with different results is
not packed. Exception: on CPUs with AMX, a row's result of `F.linear` depends on the number of rows from a certain
number on, between 33 and about 100 for most shapes. From there on the last bit may differ.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from pagepool.config import EQUAL_ROWS
from pagepool.integrations.transformers.elementwise import QuantisedWeights, has_linear_few, linear_few
from pagepool.integrations.transformers.quantised import QuantisedLinear, product

__all__ = ["FusedLayer", "PackedLinears", "packs"]

PACK = torch.ops.mkldnn._reorder_linear_weight
RUN = torch.ops.mkldnn._linear_pointwise
# Smallest number of rows for packed weights. Below it oneDNN is slower in float32: 0.8 of the speed for one row.
LEAST_ROWS = {torch.bfloat16: 0, torch.float32: 4}
ROWS = (1, 3, 8, 17, 32, 40, 100, 256)  # numbers of rows at which a shape is checked
PART_ROWS = 32  # up to this number of rows, 16-bit results always equal those of `F.linear`
# Largest difference between sums in another order, relative to the largest result. Rounding to the dtype is extra.
TOLERANCE = 1e-5
# On CPUs with AMX our kernel multiplies up to EQUAL_ROWS rows. With 128 rows it takes as long as oneDNN. The number of
# inputs must be a multiple of FEW_INPUTS, and oneDNN pads the outputs to a multiple of FEW_OUTPUTS.
FEW_INPUTS, FEW_OUTPUTS = 32, 32
HUGE_PAGE = 1 << 21
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25


def packs(dtype: torch.dtype) -> bool:
    """Return whether packed weights of this dtype are faster on this CPU than `F.linear`."""
    if not torch.backends.mkldnn.is_available() or dtype not in LEAST_ROWS:
        return False
    return dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class FusedLayer:
    """Linear layers with the same input, which one call computes.

    Attributes
    ----------
    linears : sequence of torch.nn.Module
        The layers.
    """

    def __init__(self, linears: Sequence[Any]) -> None:
        self.linears = linears
        self._sizes = [linear.out_features for linear in linears]
        self._input: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()
        self._left = 0  # results of the fused layers that were not returned yet

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Return the results of all layers, concatenated in the last dimension."""
        raise NotImplementedError

    def address(self) -> Any:
        """Return a linear layer of `DecoderLayers`."""
        raise NotImplementedError

    def part(self, place: int, x: torch.Tensor) -> torch.Tensor:
        """Return the result of one layer. The first layer that gets `x` computes the results of all layers."""
        if self._input is not x:
            self._input, self._parts, self._left = x, self.run(x).split(self._sizes, -1), len(self._sizes)
        part = self._parts[place]
        self._left -= 1
        if not self._left:
            self._input, self._parts = None, ()
        return part

    def forwards(self) -> Iterable[tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]]]:
        """Yield each layer with its forward."""
        for place, linear in enumerate(self.linears):
            yield linear, self._forward(place, linear)

    def _forward(self, place: int, linear: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        return self.run if len(self.linears) == 1 else lambda x: self.part(place, x)

    def require_unchanged(self) -> None:
        """Raise RuntimeError if a weight was changed since the layer was made."""

    def restore(self) -> None:
        """Restore the weights of the layers if they were dropped."""


class QuantisedLayer(FusedLayer):
    """Quantised layers with the same input. Their weights stay in the layers."""

    def __init__(self, linears: Sequence[QuantisedLinear]) -> None:
        super().__init__(linears)
        self._weights = QuantisedWeights(linears[0].in_features, [linear.address() for linear in linears])

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Return the results of all layers, concatenated in the last dimension."""
        return product(self._weights, x)

    def address(self) -> QuantisedWeights:
        """Return a linear layer of `DecoderLayers`."""
        return self._weights


class PackedLayer(FusedLayer):
    """Linear layers with the same input, fused to one layer with packed weights.

    Up to `few_rows` rows are computed by our kernel, more by oneDNN.

    Attributes
    ----------
    weights : list of torch.nn.Parameter or None
        The original weights of the layers, or None after `drop`.
    few_rows : int
        Up to this number of rows, `linear_few` computes the results instead of oneDNN.
    """

    def __init__(self, linears: Sequence[torch.nn.Linear]) -> None:
        super().__init__(linears)
        self.weights: list[torch.nn.Parameter] | None = [linear.weight for linear in linears]
        self._versions = [version_of(weight) for weight in self.weights]
        weights = [weight.detach() for weight in self.weights]
        self._packed = PACK(weights[0] if len(weights) == 1 else torch.cat(weights), ROWS[-1])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self._bias = torch.cat(biases) if len(biases) > 1 else biases[0] if biases else None
        self._inputs, self._outputs = linears[0].in_features, sum(self._sizes)
        self._address = torch.ops.mkldnn.data_ptr(self._packed)
        self.few_rows = EQUAL_ROWS if self._suits_few() else 0

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Return the results of all layers, concatenated in the last dimension."""
        if 0 < x.numel() <= self.few_rows * self._inputs and self._can_read(x):
            result = x.new_empty((*x.shape[:-1], self._outputs))
            rows, threads = x.numel() // self._inputs, torch.get_num_threads()
            outputs, weight, bias, _ = self.address()
            linear_few(x.data_ptr(), rows, self._inputs, weight, bias, outputs, result.data_ptr(), threads)
            return result
        result = RUN(x, self._packed, self._bias, "none", [], "")
        return result

    def address(self) -> tuple[int, int, int, int]:
        """Return a linear layer of `DecoderLayers`."""
        return self._outputs, self._address, 0 if self._bias is None else self._bias.data_ptr(), self.few_rows

    def _can_read(self, x: torch.Tensor) -> bool:
        """Return whether `linear_few` can read rows, which it does not check. oneDNN refuses all wrong ones."""
        return x.shape[-1] == self._inputs and x.dtype is torch.bfloat16 and x.is_cpu and x.is_contiguous()

    def _suits_few(self) -> bool:
        """Return whether `linear_few` can read the packed weights. `equals_linear` checks their order."""
        outputs = -(-self._outputs // FEW_OUTPUTS) * FEW_OUTPUTS
        dtypes = {tensor.dtype for one in self.linears for tensor in (one.weight, one.bias) if tensor is not None}
        if dtypes != {torch.bfloat16} or self._inputs % FEW_INPUTS or not has_linear_few():
            return False
        if self._bias is not None and not self._bias.is_contiguous():
            return False
        return bool(torch.ops.mkldnn._nbytes(self._packed) == 2 * outputs * self._inputs)

    def _forward(self, place: int, linear: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        part = super()._forward(place, linear)
        least = LEAST_ROWS[linear.weight.dtype] * linear.in_features
        if self.weights is None or not least:
            return part
        return lambda x: F.linear(x, linear.weight, linear.bias) if x.numel() < least else part(x)

    def usable_rows(self) -> int | None:
        """Return the largest usable value of `few_rows`, or None if results do not equal `F.linear`."""
        for rows in dict.fromkeys((self.few_rows, 0)):
            self.few_rows = rows
            if self.equals_linear():
                return rows
        return None

    def equals_linear(self) -> bool:
        """Return whether results equal `F.linear`: bit by bit in 16-bit dtypes, within rounding in float32.

        In 16-bit dtypes they may differ by rounding from the first number of rows on at which `F.linear` itself does
        not return the results that it returns for parts of the rows.
        """
        linear = self.linears[0]
        random = torch.Generator().manual_seed(0)
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        for rows in ROWS:
            x = torch.randn(rows, linear.in_features, generator=random).to(linear.weight.dtype)
            own, found = self._own(x), self.run(x)
            seen.append((x, own))
            if torch.equal(own, found):
                continue
            if own.dtype is not torch.float32 and all(torch.equal(own, self._own_of_parts(x)) for x, own in seen):
                return False
            largest = own.abs().max()
            if ((own - found).abs() > torch.finfo(own.dtype).eps * own.abs() + TOLERANCE * largest).any():
                return False
        return True

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        """Return the results of `F.linear`, concatenated in the last dimension."""
        return torch.cat([F.linear(x, one.weight, one.bias) for one in self.linears], -1)

    def _own_of_parts(self, x: torch.Tensor) -> torch.Tensor:
        """Return the results of `F.linear` for parts of the rows."""
        return torch.cat([*map(self._own, x.split(PART_ROWS))])

    def require_unchanged(self) -> None:
        """Raise RuntimeError if a weight was replaced or written to after it was packed."""
        if self.weights is None:
            return
        for linear, weight, version in zip(self.linears, self.weights, self._versions, strict=True):
            if linear._parameters["weight"] is not weight or version_of(weight) != version:
                raise RuntimeError("a weight was changed after the runner had packed it: make a new runner")

    def drop(self) -> None:
        """Remove the weights from the layers until `restore`, to free their memory.

        A direct call of such a layer raises RuntimeError, because torch would compute with missing weights, and so does
        each method that reads or changes weights, see `lock`.
        """
        for linear in self.linears:
            empty = torch.empty_like(linear.weight, device="meta")
            linear.weight = torch.nn.Parameter(empty, requires_grad=linear.weight.requires_grad)
            vars(linear)["forward"] = refuse
        self.weights = None

    def restore(self) -> None:
        """Restore the weights of the layers if they were dropped."""
        if self.weights is None:
            for linear, weight in zip(self.linears, self.unpacked(), strict=True):
                linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=linear.weight.requires_grad)
                del vars(linear)["forward"]
            self.weights = [linear.weight for linear in self.linears]

    def unpacked(self) -> tuple[torch.Tensor, ...]:
        """Return copies of the weights, computed from the packed weights."""
        parts: tuple[torch.Tensor, ...] = self._packed.to_dense().split(self._sizes)
        return parts

    def use_huge_pages(self) -> None:
        """Ask Linux to keep the packed weights in huge pages. The kernel may ignore this."""
        begin = -(-self._address // HUGE_PAGE) * HUGE_PAGE
        size = self._address + torch.ops.mkldnn._nbytes(self._packed) - begin
        if size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            madvise = ctypes.CDLL(None).madvise
            for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):
                madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size // HUGE_PAGE * HUGE_PAGE), advice)


# `_apply` is called by `to`, `float`, `half` and others, `__reduce_ex__` by `copy.deepcopy` and `pickle`
LOCKED = ("_apply", "load_state_dict", "state_dict", "save_pretrained", "__reduce_ex__")


def lock(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Make methods of a model and its modules that read or change all weights raise, if a weight below was dropped.

    They would convert, load, copy or save the other weights only. Returns the locked modules, for `unlock`.
    """
    locked = [module for module in model.modules() if any(weight.is_meta for weight in module.parameters())]
    for module in locked:
        vars(module).update({name: refuse for name in LOCKED if hasattr(module, name)})
    return locked


def unlock(modules: Iterable[torch.nn.Module]) -> None:
    """Undo `lock`."""
    for module in modules:
        for name in LOCKED:
            vars(module).pop(name, None)


def refuse(*arguments: Any, **names: Any) -> Any:
    """Raise RuntimeError. Replaces methods of modules with dropped weights."""
    raise RuntimeError(
        "the weights of this model are packed for an engine or a runner: close it first, or make it with "
        "pack_weights=True, which keeps the model's own weights, or pack_weights=False"
    )


def version_of(weight: torch.Tensor) -> int:
    """Return how often a weight was written to. 0 for inference tensors, which torch does not count."""
    return 0 if weight.is_inference() else weight._version


class PackedLinears:
    """The linear layers of a model that run with packed weights. All other layers are unchanged.

    Parameters
    ----------
    model : torch.nn.Module
        A model on the CPU, in evaluation mode.
    tokens : torch.Tensor
        int64 (1, n): the model runs once over these tokens, to find layers with the same input.
    fuses : bool
        Whether layers with the same input are fused.
    drops : bool
        Whether layers drop their weights until `close`. Weights that other modules hold or read are not dropped.

    Attributes
    ----------
    forwards : dict
        Layer -> its forward over packed weights.
    """

    def __init__(self, model: torch.nn.Module, tokens: torch.Tensor, fuses: bool, drops: bool) -> None:
        self._layers: list[FusedLayer] = []
        few_rows: dict[Any, int | None] = {}  # by shape
        needed = weights_in_use(model) if drops else set()
        with torch.inference_mode(False), torch.no_grad():
            groups = layers_by_input(model, tokens)
            if not fuses:
                groups = [[linear] for group in groups for linear in group]
            while groups:
                group = groups.pop(0)
                if isinstance(group[0], QuantisedLinear):
                    self._layers.append(QuantisedLayer(group))
                    continue
                layer = PackedLayer(group)
                shape = tuple((linear.weight.shape, linear.weight.dtype, linear.bias is None) for linear in group)
                if shape not in few_rows:
                    few_rows[shape] = layer.usable_rows()
                rows = few_rows[shape]
                if rows is not None:
                    layer.few_rows = rows
                    layer.use_huge_pages()
                    self._layers.append(layer)
                    if drops and not any(id(linear.weight) in needed for linear in group):
                        layer.drop()
                elif len(group) > 1:
                    groups[:0] = [[linear] for linear in group]
        self.forwards = dict(pair for layer in self._layers for pair in layer.forwards())
        self._locked = lock(model) if drops else []

    @property
    def layers(self) -> Sequence[FusedLayer]:
        """The packed layers, and quantised ones."""
        return self._layers

    def weight_of(self, linear: torch.nn.Module) -> torch.Tensor:
        """Return a copy of the weight of a packed layer, computed from the packed weight."""
        packed = [layer for layer in self._layers if isinstance(layer, PackedLayer)]
        layer = next(layer for layer in packed if linear in layer.linears)
        return layer.unpacked()[list(layer.linears).index(linear)]

    def require_unchanged(self) -> None:
        """Raise RuntimeError if a weight was replaced or written to after it was packed."""
        for layer in self._layers:
            layer.require_unchanged()

    def close(self) -> None:
        """Restore the weights of all layers. A second call does nothing."""
        unlock(self._locked)
        with torch.inference_mode(False), torch.no_grad():
            while self._layers:
                self._layers.pop().restore()
        self.forwards = {}


def weights_in_use(model: torch.nn.Module) -> set[int]:
    """Return ids of weights that several modules share, and of weights that latent attention reads directly."""
    found = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    latent = [module.kv_b_proj for module in model.modules() if hasattr(module, "kv_b_proj")]
    return {weight for weight, count in found.items() if count > 1} | {id(module.weight) for module in latent}


def layers_by_input(model: torch.nn.Module, tokens: torch.Tensor) -> list[list[Any]]:
    """Return the linear and quantised layers that the model calls, in order, grouped by their input.

    Layers are in one group only if the input is not written to between their calls.
    """
    calls: list[tuple[Any, torch.Tensor, int]] = []

    def note(linear: Any, args: tuple[torch.Tensor, ...]) -> None:
        calls.append((linear, args[0], version_of(args[0])))  # holding the input prevents reuse of its id

    handles = [linear.register_forward_pre_hook(note) for linear in model.modules() if can_be_packed(linear)]
    try:
        model(input_ids=tokens, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    times = Counter(linear for linear, _, _ in calls)
    groups: dict[Any, list[Any]] = {}
    for linear, x, version in calls:
        key: Any = (id(x), version, type(linear), linear.weight.dtype, linear.bias is None)
        if times[linear] > 1:
            key = linear
        group = groups.setdefault(key, [])
        if linear not in group:
            group.append(linear)
    return list(groups.values())


def can_be_packed(module: torch.nn.Module) -> bool:
    """Return whether a module is a `QuantisedLinear`, or `torch.nn.Linear` with a plain weight and without hooks."""
    if type(module) is QuantisedLinear:
        return True
    if type(module) is not torch.nn.Linear or "forward" in vars(module):
        return False
    weight = module.weight
    is_plain = type(weight) is torch.nn.Parameter and type(weight.data) is torch.Tensor and weight.device.type == "cpu"
    return is_plain and packs(weight.dtype) and not module._forward_pre_hooks and not module._forward_hooks
