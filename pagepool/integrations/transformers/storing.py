"""Fingerprint of a transformers model, for stores and sessions of its pages."""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import torch

from pagepool.config import StateLayout
from pagepool.integrations.transformers.linear import PackedLinears
from pagepool.integrations.transformers.quantised import quantisation_of
from pagepool.memory.kv_pool import KvCachePool
from pagepool.memory.shared_files import MOST_FINGERPRINT
from pagepool.prefix.fingerprint import Fingerprint, fingerprint_of

__all__ = ["digest_of_weights", "model_fingerprint", "shared_fingerprint"]

NOT_OF_PAGES = ("_name_or_path", "transformers_version", "architectures")  # config keys that do not affect pages


def model_fingerprint(
    model: Any,
    pools: Iterable[KvCachePool],
    block_size: int,
    weights: str | None = None,
    packed: PackedLinears | None = None,
    states: StateLayout | None = None,
    arithmetic: str = "exact",
    quantised: str | None = None,
) -> Fingerprint:
    """Return the fingerprint of a model's pages.

    It includes the class of the model, its config, with RoPE and quantisation, the dtype of its weights, the state of
    its peft adapters and the arithmetic of attention. Whatever else changes keys and values, such as a forward hook,
    must change `weights`.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    pools : iterable of KvCachePool
        The pools of its pages.
    block_size : int
        Tokens per block.
    weights : str or None
        Digest of the weights. None: `digest_of_weights`, which takes about 1 s per GB.
    packed : PackedLinears or None
        Packed linear layers of the model, which may have dropped their weights.
    states : StateLayout or None
        The recurrent states of a sequence, for a model that has some.
    arithmetic : str
        The arithmetic of attention, as in `decode`.
    quantised : str or None
        How the linear layers will be quantised. None: as they are.
    """
    adapters = _digest_of_adapters(model)
    quantised = quantised or quantisation_of(model)
    config = {key: value for key, value in model.config.to_dict().items() if key not in NOT_OF_PAGES}
    return fingerprint_of(
        pools,
        digest_of_weights(model, packed) if weights is None else weights,
        block_size=block_size,
        states=states,
        model=type(model).__name__,
        config=json.loads(json.dumps(config, default=str), parse_constant=str),  # a limit may be infinite
        dtype=str(model.dtype),
        arithmetic=arithmetic,
        **({"adapters": adapters} if adapters else {}),
        **({} if quantised is None else {"quantised": quantised}),
    )


def _digest_of_adapters(model: Any) -> str:
    """Return a digest of all plain attributes of the layers of peft, or "" without such layers.

    They are the scaling, and the active, merged and disabled adapters.
    """
    of_torch = vars(torch.nn.Module())
    layers = []
    for name, module in model.named_modules():
        if any(base.__module__.partition(".")[0] == "peft" for base in type(module).__mro__):
            state = {key: value for key, value in vars(module).items() if key not in of_torch and _is_plain(value)}
            layers.append([name, type(module).__name__, state])
    return blake2b(json.dumps(layers, sort_keys=True).encode(), digest_size=16).hexdigest() if layers else ""


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | float | int)


def shared_fingerprint(
    model: Any, block_size: int, weights: str | None, arithmetic: str, quantised: str | None = None
) -> str:
    """Return the fingerprint of a shared pool of this model: `model_fingerprint` as text, or its digest if too long."""
    found = model_fingerprint(model, (), block_size, weights, arithmetic=arithmetic, quantised=quantised)
    is_short = len(found.text.encode()) <= MOST_FINGERPRINT
    return found.text if is_short else json.dumps({"weights": weights, "digest": found.digest.hex()})


def digest_of_weights(model: Any, packed: PackedLinears | None = None) -> str:
    """Return a digest of all bytes of a model's parameters and buffers, with their names, dtypes and shapes.

    Weights that the layers in `packed` have dropped are computed from the packed weights.
    """
    found = blake2b(digest_size=16)
    tensors = dict(model.named_parameters(remove_duplicate=False))  # a packed model refuses `state_dict`
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[f"{path}.{name}" if path else name] = buffer
    for name, tensor in sorted(tensors.items()):
        if packed is not None and tensor.is_meta:
            tensor = packed.weight_of(model.get_submodule(name.rpartition(".")[0]))
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()
