"""Loads a model from a GGUF file, with the quantised weights as they are in the file. Needs the extra `gguf`.

Q8_0, Q4_0 and Q4_1 keep their bits. Q4_K becomes groups of 4 bits, whose scales are rounded to float16, and Q5_0, Q5_1,
Q5_K and Q6_K become groups of 8 bits. Other weights are converted to the dtype of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, dequantize
from gguf.quants import Q4_K
from tokenizers import Regex, pre_tokenizers
from transformers import modeling_gguf_pytorch_utils as theirs
from transformers.initialization import no_init_weights

from pagepool.integrations.transformers.quantised import (
    GROUP,
    INT4,
    INT4_LEAST,
    INT8,
    Packed,
    QuantisedEmbedding,
    QuantisedLinear,
    mark,
    pack,
    quantised,
)

__all__ = ["GgufError", "load_gguf"]

FLOATS = (Kind.F32, Kind.F16, Kind.BF16)
AS_INT8 = (Kind.Q5_0, Kind.Q5_1, Kind.Q5_K, Kind.Q6_K)
KINDS = (*FLOATS, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, *AS_INT8)
FACTORS = "rope_freqs.weight"  # divisors of the frequencies of rotary embeddings, as llama.cpp stores Llama 3.1's
# Regular expressions of pre-tokenizers by the names that llama.cpp has for them, which transformers does not read.
# None: digits are split one by one before the usual expression of GPT-2.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell")),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe"), WORDS % "{1,3}"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), WORDS % ""),
}
ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


class GgufError(ValueError):
    """The file does not contain a model that can be loaded. The message does not name the file."""


def load_gguf(path: Path, dtype: str) -> tuple[Any, Any]:
    """Return the model of a GGUF file, in evaluation mode, and its tokenizer.

    Parameters
    ----------
    path : Path
        The file.
    dtype : str
        Dtype of activations and of weights that are not quantised, as for `load_pretrained`. "auto": bfloat16, but
        float32 for a file with weights in float16 or float32 only.

    Raises
    ------
    GgufError
        The file is damaged, or it has a part that is not supported.
    """
    reader = opened(path)
    kinds = {tensor.tensor_type for tensor in reader.tensors if len(tensor.shape) > 1}
    for tensor in reader.tensors:
        if tensor.tensor_type not in KINDS:
            names = ", ".join(kind.name for kind in KINDS)
            raise GgufError(f"{tensor.name} is {tensor.tensor_type.name}, and the types that can be read are {names}")
    name = dtype if dtype != "auto" else "bfloat16" if kinds - {Kind.F32, Kind.F16} else "float32"
    options = {"gguf_file": path.name, "local_files_only": True}
    with reading_once(reader):
        config = transformers.AutoConfig.from_pretrained(path.parent, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **options)
        set_pre_tokenizer(tokenizer, reader)
        with no_init_weights():
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, name))
        model.tie_weights()
        with torch.no_grad():
            Loading(model, reader).run()
    ends = [int(reader.fields[key].contents()) for key in ENDS if key in reader.fields]
    if ends:
        model.generation_config.eos_token_id = ends
    return model.eval(), tokenizer


def set_pre_tokenizer(tokenizer: Any, reader: GGUFReader) -> None:
    """Let the tokenizer split texts as the file says, if the file names a known pre-tokenizer."""
    model, name = (reader.fields.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if model is None or name is None or model.contents() != "gpt2" or name.contents() not in PRE_TOKENIZERS:
        return
    words = PRE_TOKENIZERS[name.contents()]
    if words is None:
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        split = pre_tokenizers.Split(Regex(words), behavior="isolated")
        parts = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)


_reading = Lock()


@contextmanager
def reading_once(reader: GGUFReader) -> Iterator[None]:
    """Context manager in which transformers uses this reader. It would read a file three times, for 5 s each."""
    with _reading:
        names = vars(gguf)
        own = names["GGUFReader"], names["get_tensor_name_map"]
        names["GGUFReader"], names["get_tensor_name_map"] = lambda path: reader, cache(own[1])
        try:
            yield
        finally:
            names["GGUFReader"], names["get_tensor_name_map"] = own


def opened(path: Path) -> GGUFReader:
    """Return a reader of the file. Raises GgufError if it is damaged or a part of a split model."""
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise GgufError(f"it begins with {magic!r}, not with b'GGUF'")
    try:
        reader = GGUFReader(path)
    except Exception as error:  # the reader does not check sizes: numpy raises what comes first
        raise GgufError(f"the GGUF file is truncated or damaged: {type(error).__name__}: {error}") from error
    parts = reader.fields.get("split.count")
    if parts is not None and int(parts.contents()) > 1:
        raise GgufError(
            f"it is one of {int(parts.contents())} parts of a split file: merge them with llama-gguf-split --merge"
        )
    if "general.architecture" not in reader.fields or not reader.tensors:
        raise GgufError("it holds no model: it has no general.architecture or no tensors")
    family = reader.fields["general.architecture"].contents()
    if family not in theirs.GGUF_SUPPORTED_ARCHITECTURES:
        raise GgufError(f"its family {family!r} is none that transformers {transformers.__version__} reads")
    return reader


class Loading:
    """One load: the tensors of a file into the parameters of a model."""

    def __init__(self, model: Any, reader: GGUFReader) -> None:
        self.model, self.reader = model, reader
        family = reader.fields["general.architecture"].contents()
        config = {**model.config.to_dict()}
        self.processor = theirs.TENSOR_PROCESSORS.get(family, theirs.TensorProcessor)(config=config)
        self.names = theirs.get_gguf_hf_weights_map(model, self.processor)
        self.others: dict[str, Any] = {"tensors": {}}  # tensors that the processor stores itself
        self.left = {name for name, _ in model.named_parameters()}
        self.formats: set[str] = set()

    def run(self) -> None:
        """Load all tensors. Raises GgufError for an unknown, missing or misshapen one."""
        for tensor in self.reader.tensors:
            if tensor.name == FACTORS:
                self.divide_frequencies(tensor)
            elif self.names.get(tensor.name) not in self.left:
                raise GgufError(f"its tensor {tensor.name} is unknown to {type(self.model).__name__}, or there twice")
            elif not self.quantise(tensor, self.names[tensor.name]):
                self.convert(tensor)
        for name, found in self.others["tensors"].items():
            self.store(name, found)
        if self.left:
            names = sorted(self.left)
            raise GgufError(f"{len(names)} weights are missing, the first is {names[0]}")
        if self.formats:
            mark(self.model, "gguf")

    def quantise(self, tensor: Any, name: str) -> bool:
        """Replace the layer of a quantised weight. Returns False if the weight must be converted to floats."""
        parent, _, last = name.rpartition(".")
        module = self.model.get_submodule(parent)
        is_embedding = type(module) is torch.nn.Embedding
        if tensor.tensor_type in FLOATS or last != "weight" or not (is_embedding or type(module) is torch.nn.Linear):
            return False
        outputs, inputs = module.weight.shape
        if tuple(tensor.shape) != (inputs, outputs):
            raise GgufError(f"{tensor.name} has the shape {tuple(tensor.shape)[::-1]}, not {(outputs, inputs)}")
        if inputs % GROUP:
            return False
        order = self.order_of_rows(tensor.name, outputs)
        if order is None:
            return False
        packed = packed_weight(tensor, order, inputs)
        tied = [one for one, weight in self.model.named_parameters(remove_duplicate=False) if weight is module.weight]
        for one in tied:
            holder_name = one.rpartition(".")[0]
            holder = self.model.get_submodule(holder_name)
            new: Any = QuantisedEmbedding(packed, holder.weight.dtype) if type(holder) is torch.nn.Embedding else None
            if type(holder) is torch.nn.Linear:
                new = QuantisedLinear(packed, holder.bias, holder.weight.dtype)
            if new is None:  # such as an embedding that scales its rows
                raise GgufError(f"{tensor.name} is quantised, and {type(holder).__name__} cannot be")
            outer, _, place = holder_name.rpartition(".")
            setattr(self.model.get_submodule(outer), place, new)
            self.left.discard(one)
            if isinstance(new, QuantisedLinear) and new.bias is not None:
                self.left.add(f"{holder_name}.bias")
        self.formats.add(tensor.tensor_type.name)
        return True

    def order_of_rows(self, name: str, outputs: int) -> np.ndarray | None:
        """Return the row of the file for each row of the model. None: the processor does more than order rows."""
        numbers = np.arange(outputs, dtype=np.float64)[:, None]
        try:
            found = self.processor.process(weights=numbers, name=name, parsed_parameters=None, tensor_key_mapping=None)
        except Exception:  # it needs all columns
            return None
        if found.name != name or found.weights.shape != numbers.shape:
            return None
        order = found.weights[:, 0].astype(np.int64)
        return order if np.array_equal(np.sort(order), numbers[:, 0]) else None

    def convert(self, tensor: Any) -> None:
        """Store a tensor in the dtype of the model."""
        weights = dequantize(tensor.data, tensor.tensor_type)
        found = self.processor.process(
            weights=weights, name=tensor.name, tensor_key_mapping=self.names, parsed_parameters=self.others
        )
        if found.name is not None:
            self.store(self.names[found.name], torch.from_numpy(np.array(found.weights)))

    def store(self, name: str, found: torch.Tensor) -> None:
        parameter = self.model.state_dict(keep_vars=True).get(name)
        if parameter is None or parameter.shape != found.shape:
            shape = None if parameter is None else tuple(parameter.shape)
            raise GgufError(f"{name} has the shape {tuple(found.shape)}, not {shape}")
        parameter.data.copy_(found)
        self.left.discard(name)

    def divide_frequencies(self, tensor: Any) -> None:
        """Divide the frequencies of rotary embeddings by the factors in the file."""
        factors = torch.from_numpy(np.array(tensor.data, np.float32)).flatten()
        for module in self.model.modules():
            for name in ("inv_freq", "original_inv_freq"):
                found = vars(module).get("_buffers", {}).get(name)
                if found is not None:
                    if found.shape != factors.shape:
                        raise GgufError(f"{FACTORS} has {len(factors)} factors for {len(found)} frequencies")
                    found.div_(factors)


def packed_weight(tensor: Any, order: np.ndarray, inputs: int) -> Packed:
    """Return the packed weight of a tensor, with its rows in this order."""
    kind, groups = tensor.tensor_type, inputs // GROUP
    if kind in AS_INT8:
        rows = dequantize(tensor.data, kind).reshape(len(order), inputs)[order]
        return quantised(torch.from_numpy(np.ascontiguousarray(rows)), "int8")
    data = tensor.data.reshape(len(order), -1)[order]
    if kind is Kind.Q4_K:
        return packed_q4_k(tensor.name, data, groups)
    data = data.reshape(len(order), groups, -1)
    halves = 2 if kind is Kind.Q4_1 else 1
    found = torch.from_numpy(np.ascontiguousarray(data[..., : 2 * halves]).view(np.float16))
    require_finite(tensor.name, found)
    scale, least = found[..., 0], found[..., 1] if halves == 2 else None
    form = INT8 if kind is Kind.Q8_0 else INT4 if kind is Kind.Q4_0 else INT4_LEAST
    return pack(form, torch.from_numpy(np.ascontiguousarray(data[..., 2 * halves :])), scale, least)


def packed_q4_k(name: str, data: np.ndarray, groups: int) -> Packed:
    """Return groups of 4 bits for blocks of 256 weights, whose scales have 6 bits and a common factor."""
    outputs = len(data)
    blocks = np.ascontiguousarray(data.reshape(-1, 144))
    wide = np.ascontiguousarray(blocks[:, :4]).view(np.float16).astype(np.float32)
    scales, least = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    found = torch.from_numpy(np.stack([wide[:, :1] * scales, -wide[:, 1:] * least], -1).astype(np.float16))
    require_finite(name, found)
    found = found.view(outputs, groups, 2)
    nibbles = torch.from_numpy(np.ascontiguousarray(blocks[:, 16:])).view(outputs, groups // 2, 1, 32)
    levels = torch.cat((nibbles & 15, nibbles >> 4), 2).view(outputs, groups, 32)
    return pack(INT4_LEAST, levels[..., :16] | levels[..., 16:] << 4, found[..., 0], found[..., 1])


def require_finite(name: str, scales: torch.Tensor) -> None:
    """Raise GgufError for a scale that is infinite or NaN."""
    if not bool(torch.isfinite(scales).all()):
        raise GgufError(f"{name} has a scale that is not finite")
