"""Frozen descriptions of layouts and schedulers. Each checks its fields once, when it is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from pagepool._arguments import dtype_name, integer, plain_dtype, real

__all__ = ["KV_DTYPES", "KvLayout", "SchedulerConfig", "StateLayout", "Tenant"]

# Bytes of an element of each dtype that pages may have.
KV_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Bits of an element of each quantised dtype. Each token and head also has a float32 scale.
QUANTISED_BITS = {"int8": 8, "int4": 4}
SCALE_BYTES = 4
GROUP = 16

MAX_BLOCK_SIZE = 1024
MAX_COUNT = 2**31 - 1
CHOICES = {"policy": ("priority", "fcfs", "fair")}
MAX_HEAD_DIM = 1024
MAX_BLOCK_BYTES = 1 << 40
# Largest number of rows for which packed layers in bfloat16 give a row the same bits, on CPUs with AMX. It is also the
# largest step with drafts: a draft must not change the result of another row.
EQUAL_ROWS = 64


def _state_item_bytes(who: str, dtype: Any) -> int:
    """Bytes of an element of this dtype; TypeError / ValueError, which names the state, when a state cannot have it."""
    if isinstance(dtype, str) and dtype == "bfloat16":
        return 2
    try:
        found = np.dtype(object if dtype is None else dtype)
    except (TypeError, ValueError, SyntaxError):
        found = np.dtype(object)
    if found.hasobject or not found.itemsize:
        error = ValueError if isinstance(dtype, (str, type, np.dtype)) else TypeError
        raise error(f"the dtype of {who} must be one of numbers that numpy.dtype takes, not {dtype!r}")
    return found.itemsize


@dataclass(frozen=True)
class KvLayout:
    """The shape of a KV pool: the contents of one block.

    Parameters
    ----------
    num_layers : int
        Layers that share a block table. A block holds the keys and values of its tokens in all of them.
    num_kv_heads : int
        KV heads of a layer.
    head_dim : int
        Dimensions of queries and keys, a multiple of 8 from 8 to 1,024.
    block_size : int
        Tokens per block, from 1 to 1,024. Multiples of 16 take the vector path, other sizes are slower.
    dtype : str or dtype
        Dtype of the stored keys: "float32", "float16" or "bfloat16", by name or as a dtype of NumPy, ml_dtypes or
        torch. Or quantised, "int8" or "int4": the dimensions of a token and head share one float32 scale.
    v_head_dim : int or None
        Dimensions of values and results. None: `head_dim`.
    v_in_k : bool
        Whether the first `v_head_dim` dimensions of a key are its value, stored once. This is the latent cache of
        multi-head latent attention.
    v_dtype : str, dtype or None
        Dtype of the stored values. None, which an equal dtype becomes: `dtype`. The only other choice is "int4" for
        keys in "int8". `block_size` must be a multiple of 16 if the dtypes are quantised.

    Raises
    ------
    ValueError, TypeError
        For a field out of range.

    Examples
    --------
    >>> KvLayout(num_layers=2, num_kv_heads=2, head_dim=64).page_size
    8192
    >>> KvLayout(num_layers=1, num_kv_heads=1, head_dim=576, v_head_dim=512, v_in_k=True).page_size
    9216
    >>> KvLayout(num_layers=1, num_kv_heads=1, head_dim=64, dtype="int8").block_bytes
    2176
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: Any = "bfloat16"
    v_head_dim: int = None  # type: ignore[assignment]  # None is taken for head_dim
    v_in_k: bool = False
    v_dtype: Any = None

    def __post_init__(self) -> None:
        for name, high in (("num_layers", MAX_COUNT), ("num_kv_heads", MAX_COUNT), ("block_size", MAX_BLOCK_SIZE)):
            object.__setattr__(self, name, integer(name, getattr(self, name), 1, high))
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        for name in ("head_dim", "v_head_dim"):
            dim = integer(name, getattr(self, name), 8, MAX_HEAD_DIM)
            if dim % 8:
                raise ValueError(f"{name} must be a multiple of 8, not {dim}")
            object.__setattr__(self, name, dim)
        if not isinstance(self.v_in_k, bool):
            raise TypeError(f"v_in_k must be True or False, not {self.v_in_k!r}")
        if self.v_in_k and self.v_head_dim > self.head_dim:
            raise ValueError(f"K of {self.head_dim} dims cannot hold a V of {self.v_head_dim}")
        for name in ("dtype", "v_dtype"):
            dtype = getattr(self, name)
            if name == "v_dtype" and dtype is None:
                continue
            dtype = dtype_name(name, dtype)
            object.__setattr__(self, name, dtype)
            if dtype not in KV_DTYPES and dtype not in QUANTISED_BITS:
                known = ", ".join((*KV_DTYPES, *QUANTISED_BITS))
                raise ValueError(f"{name} must be one of {known}, not {dtype!r}")
        if self.v_dtype == self.dtype:
            object.__setattr__(self, "v_dtype", None)
        if self.v_dtype is not None and (self.dtype, self.v_dtype) != ("int8", "int4"):
            raise ValueError(
                f"v_dtype must be equal to dtype, or int4 for a dtype of int8, not {self.v_dtype} for {self.dtype}"
            )
        if self.is_quantised and (self.v_in_k or self.block_size % GROUP):
            reason = "V in K" if self.v_in_k else f"a block_size of {self.block_size}, which is no multiple of {GROUP}"
            raise ValueError(f"K of {self.dtype} and V of {self.v_dtype or self.dtype} cannot be stored with {reason}")
        if self.block_bytes >= MAX_BLOCK_BYTES:
            raise ValueError(f"a block must have fewer than {MAX_BLOCK_BYTES} bytes, not {self.block_bytes}")

    @property
    def page_size(self) -> int:
        """Elements of a page: K and V of `block_size` tokens in every layer."""
        return self.num_layers * self.token_size * self.block_size

    @property
    def token_size(self) -> int:
        """Elements that one layer stores per token."""
        return self.num_kv_heads * (self.head_dim + (0 if self.v_in_k else self.v_head_dim))

    @property
    def is_quantised(self) -> bool:
        """Whether keys and values are quantised. Such a pool shows its pages as bytes."""
        return self.dtype in QUANTISED_BITS

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes in all layers, scales included."""
        v_bytes = 0 if self.v_in_k else _row_bytes(self.v_dtype or self.dtype, self.v_head_dim)
        return self.num_layers * self.num_kv_heads * (_row_bytes(self.dtype, self.head_dim) + v_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of a page."""
        return self.token_bytes * self.block_size


def _row_bytes(dtype: str, dims: int) -> int:
    """Bytes of one token's dims of a head."""
    if dtype in QUANTISED_BITS:
        return dims * QUANTISED_BITS[dtype] // 8 + SCALE_BYTES
    return dims * KV_DTYPES[dtype]


@dataclass(frozen=True)
class StateLayout:
    """The recurrent states of one sequence: for each layer a mapping from name to `(shape, dtype)`.

    A layer may have no state, one or several. A shape has no zeros, and a state at most a terabyte. `dtype` is
    "bfloat16", a dtype of torch or anything that `numpy.dtype` takes, for example "float32", but no objects.

    >>> StateLayout(layers=[{"conv_states": ((64, 4), "float32")}, {}]).num_layers
    2
    """

    layers: Sequence[Mapping[str, tuple[tuple[int, ...], Any]]]

    def __post_init__(self) -> None:
        layers = []
        if not isinstance(self.layers, Iterable):
            raise TypeError(f"layers must be an iterable of mappings, not {type(self.layers).__name__}")
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, Mapping):
                raise TypeError(f"layer {index} must map names to (shape, dtype), not be a {type(layer).__name__}")
            states = {}
            for name, state in layer.items():
                if not isinstance(name, str):
                    raise TypeError(f"the name of a state of layer {index} must be a str, not {name!r}")
                if not (isinstance(state, (tuple, list)) and len(state) == 2 and isinstance(state[0], (tuple, list))):
                    raise TypeError(f"state {name!r} of layer {index} must be (shape, dtype), not {state!r}")
                who = f"state {name!r} of layer {index}"
                shape = tuple(integer(f"each dimension of {who}", dim, 1) for dim in state[0])
                dtype = plain_dtype(state[1])
                size = prod(shape) * _state_item_bytes(who, dtype)
                if size >= MAX_BLOCK_BYTES:
                    raise ValueError(f"{who} must have fewer than {MAX_BLOCK_BYTES} bytes, not {size}")
                states[name] = (shape, dtype)
            layers.append(states)
        object.__setattr__(self, "layers", tuple(layers))

    def __hash__(self) -> int:
        return hash(tuple(frozenset((name, shape) for name, (shape, _) in layer.items()) for layer in self.layers))

    @property
    def num_layers(self) -> int:
        """Layers, those without state included."""
        return len(self.layers)

    @property
    def num_elements(self) -> int:
        """Elements of all states of one sequence."""
        return sum(prod(shape) for layer in self.layers for shape, _ in layer.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all states of one sequence."""
        states = [state for layer in self.layers for state in layer.items()]
        return sum(prod(shape) * _state_item_bytes(name, dtype) for name, (shape, dtype) in states)


@dataclass(frozen=True)
class Tenant:
    """The limits of one tenant.

    Parameters
    ----------
    weight : float
        Its share under the policy "fair": a tenant with twice the weight is served twice the tokens.
    max_blocks : int or None
        Its quota: the maximum number of blocks that its running requests may ever need together. None: no limit. Cached
        blocks that no sequence uses do not count, because they are evicted when a request needs room.

    Raises
    ------
    ValueError, TypeError
        For a weight that is not above 0 and finite, or a `max_blocks` below 0.

    Examples
    --------
    >>> SchedulerConfig(policy="fair", tenants={"batch": Tenant(max_blocks=16), "chat": Tenant(weight=2.0)}).policy
    'fair'
    """

    weight: float = 1.0
    max_blocks: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 < real("weight", self.weight) < float("inf"):
            raise ValueError(f"weight must be above 0 and finite, not {self.weight}")
        if self.max_blocks is not None:
            object.__setattr__(self, "max_blocks", integer("max_blocks", self.max_blocks, 0))


@dataclass(frozen=True)
class SchedulerConfig:
    """The budgets and policies of a `Scheduler`.

    Parameters
    ----------
    max_sequences : int
        Maximum number of active sequences (prefilling or decoding).
    max_batch_tokens : int
        Maximum number of tokens of one step, prefill and decode together.
    max_batch_sequences : int
        Maximum number of sequences of one step. Each takes at least one of the step's tokens.
    max_prefill_tokens : int
        Maximum number of prompt tokens of one sequence in one step (its chunk).
    block_size : int or None
        Tokens per block. None: the block size of the pool, or 16 when the pool has none.
    policy : str
        Which request goes next: "priority" (lower number first, then first come), "fcfs" (first come), "fair" (the
        tenant that was served the fewest tokens).
    lookahead : int
        Slots for drafted tokens that each decode takes in addition to its own; see `Scheduler.commit`.
    tenants : mapping
        A `Tenant` for each tenant's name. A tenant without one has no bounds and weight 1.
    explain_misses : bool
        Note for each request why tokens of its prompt were not in the prefix cache: `Sequence.miss`.

    Raises
    ------
    ValueError, TypeError
        For a field that is out of range, or for a policy that does not exist.

    Examples
    --------
    >>> SchedulerConfig(max_batch_sequences=32, policy="fcfs").max_sequences
    32
    """

    max_sequences: int = 32
    max_batch_tokens: int = 512
    max_batch_sequences: int = 8
    max_prefill_tokens: int = 256
    block_size: int | None = None
    policy: str = "priority"
    lookahead: int = 0
    tenants: Mapping[Any, Tenant] = field(default_factory=dict, hash=False)
    explain_misses: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.explain_misses, bool):
            raise TypeError(f"explain_misses must be a bool, not a {type(self.explain_misses).__name__}")
        for name in ("max_sequences", "max_batch_tokens", "max_batch_sequences", "max_prefill_tokens"):
            object.__setattr__(self, name, integer(name, getattr(self, name), 1))
        if self.block_size is not None:
            object.__setattr__(self, "block_size", integer("block_size", self.block_size, 1, MAX_BLOCK_SIZE))
        object.__setattr__(self, "lookahead", integer("lookahead", self.lookahead, 0))
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, not {getattr(self, name)!r}")
        if not isinstance(self.tenants, Mapping):
            raise TypeError(f"tenants must map names to Tenants, not be a {type(self.tenants).__name__}")
        object.__setattr__(self, "tenants", dict(self.tenants))
        for tenant, limits in self.tenants.items():
            if not isinstance(limits, Tenant):
                raise TypeError(f"tenant {tenant!r} must have a Tenant, not {type(limits).__name__}")
