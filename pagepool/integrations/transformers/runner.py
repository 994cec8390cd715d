"""ModelRunner: runs a causal language model of transformers with pages and slots of recurrent states."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from pagepool._arguments import dtype_name, integer
from pagepool.attention.decode import auto_arithmetic
from pagepool.config import SchedulerConfig
from pagepool.integrations.transformers.linear import packs
from pagepool.integrations.transformers.memory import ModelMemory, kv_layouts
from pagepool.integrations.transformers.quantised import quantisation_of, quantise_linears, require_kind
from pagepool.integrations.transformers.storing import model_fingerprint, shared_fingerprint
from pagepool.integrations.transformers.trial import pack_linears, takes_drafts, try_out
from pagepool.memory.allocator import BlockAllocator
from pagepool.memory.budget import MemoryBudget
from pagepool.memory.hybrid import KvGroup
from pagepool.memory.kv_pool import KvCachePool
from pagepool.memory.ssm_pool import SsmStatePool
from pagepool.prefix.cache import PrefixCache
from pagepool.prefix.checkpoints import StateCheckpoints
from pagepool.prefix.fingerprint import Fingerprint
from pagepool.prefix.store import PrefixStore
from pagepool.scheduling.batch import ScheduledBatch
from pagepool.scheduling.scheduler import Scheduler

__all__ = ["ModelRunner"]

DEFAULT_LENGTH = 2048  # capacity of the default pool, in tokens per sequence
STATE_TOKENS = 65_536  # capacity of a prefix cache for a model without attention, in tokens per sequence


class ModelRunner:
    """Runs a causal language model of transformers on the CPU, with keys, values and states in pagepool's memory.

    The constructor runs the model over about a dozen random tokens in float32, to detect the data that it stores and to
    check that it computes the same logits over pages. This takes five forwards, or up to a dozen with recurrent states.
    The model is not changed: outside of `run` it behaves as before.

    Parameters
    ----------
    model : PreTrainedModel
        A model that can generate, in evaluation mode.
    pool_bytes : int or None
        Size of all pages in bytes. Excludes `num_blocks`.
    num_blocks : int or None
        Number of blocks. If both are None, the pool has room for `max_sequences` sequences of 2,048 tokens, or of
        `max_model_len` tokens if this is less. Pages that are never used take no memory.
    dtype : dtype or None
        Dtype of the pages, as in `KvLayout`. None: the dtype of the model.
    block_size : int
        Tokens per block.
    max_sequences : int
        Largest number of running sequences, which is also the number of recurrent states.
    pack_weights : bool or str
        Whether linear layers use weights that oneDNN has packed, with layers of the same input fused. In bfloat16,
        norms and MLPs are fused as well, and all layers of Llama, Mistral, Qwen 2 and Qwen 3 run in one call. True: the
        model keeps its own weights, so weights take twice the memory. "only": the packed weights replace the model's
        weights until `close`, and until then the model runs only in this runner. "auto": "only" for a model in bfloat16
        on a CPU with bfloat16 instructions, otherwise False.
    shared : str, int or None
        The name or memfd of a shared pool, as in `KvCachePool.from_layout`. The model must have keys and values of one
        shape. Recurrent states are not shared.
    budget : MemoryBudget or None
        A limit in bytes for the shared pools of several models. By default the pool may have all of it.
    weights_digest : str or None
        A digest of the weights for the fingerprint of a shared pool, such as `weights_digest` returns. None: every
        weight is read.
    weights : str or None
        "int8" or "int4": the linear layers of the model are quantised, in groups of 32 inputs, and their own weights
        are freed. A decode step then reads a half or 0.31 of the bytes of 16-bit weights. The output layer, and an
        embedding that is tied to it, are always int8. The model stays quantised after `close`.
    arithmetic : str
        The arithmetic of attention: "exact", "bf16x2", "bf16" or "auto", as in `decode`. "auto" is "bf16x2" for a model
        in 16 bits with pages in bfloat16 on a CPU with AMX, otherwise "exact". Runners share pages through stores and
        transfers only if they have the same arithmetic: choose one for CPUs with and without AMX.

    Attributes
    ----------
    model : PreTrainedModel
        The model.
    arithmetic : str
        The arithmetic in use: not "auto".
    block_size : int
        Tokens per block.
    max_sequences : int
        Largest number of running sequences.
    vocab_size : int
        Number of logits per token.
    max_model_len : int or None
        Longest sequence that the model was made for, in tokens.
    length_limit : int or None
        Longest sequence that `run` accepts, in tokens. Models with a `rope_type` of "dynamic" or "longrope" change
        their rotary embeddings beyond this length, which invalidates the stored keys.
    checkpoints : StateCheckpoints or None
        Copies of recurrent states. None until `scheduler` is called with a prefix cache.

    Raises
    ------
    TypeError
        `model` is not a `PreTrainedModel`.
    ValueError
        The model cannot run over pages, or a size is out of range. The message has the class of the model and the
        reason.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from pagepool import SchedulerConfig
    >>> config = LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    ...                      num_attention_heads=4, num_key_value_heads=2)
    >>> runner = ModelRunner(LlamaForCausalLM(config).eval(), num_blocks=64)
    >>> scheduler = runner.scheduler(SchedulerConfig())
    >>> request = scheduler.add_request([11, 12, 13], max_new_tokens=4)
    >>> while scheduler.has_work:
    ...     batch = scheduler.schedule()
    ...     scheduler.commit(batch, runner.run(batch).argmax(-1).tolist())
    >>> len(scheduler.drain_finished()[0].output_tokens)
    4
    >>> runner.close()
    """

    def __init__(
        self,
        model: Any,
        *,
        pool_bytes: int | None = None,
        num_blocks: int | None = None,
        dtype: Any = None,
        block_size: int = 16,
        max_sequences: int = 32,
        pack_weights: bool | str = False,
        arithmetic: str = "auto",
        shared: str | int | None = None,
        weights_digest: str | None = None,
        budget: MemoryBudget | None = None,
        weights: str | None = None,
    ) -> None:
        if pack_weights not in (True, False, "only", "auto"):
            raise ValueError(f"pack_weights must be True, False, 'only' or 'auto', not {pack_weights!r}")
        if pool_bytes is not None and num_blocks is not None:
            raise ValueError(f"give pool_bytes, {pool_bytes}, or num_blocks, {num_blocks}, not both")
        max_sequences = integer("max_sequences", max_sequences, 1)
        self._paged_forward = try_out(model)
        require_kind(model, weights)
        self._lock = Lock()
        layout = self._paged_forward.layout
        self.model = model
        self.max_sequences = max_sequences
        self.block_size = block_size
        self.checkpoints: StateCheckpoints | None = None
        self.vocab_size: int = layout.logits.shape[-1]
        config = model.config.get_text_config(decoder=True)
        self.length_limit = rope_limit(config)
        self.max_model_len: int | None = self.length_limit or getattr(config, "max_position_embeddings", None)
        if dtype is None:
            dtype = model.dtype
        if dtype_name("dtype", dtype) == "int4":
            raise ValueError("dtype 'int4' needs channel scales of the keys, and a runner has none: use 'int8'")
        self.arithmetic = chosen_arithmetic(arithmetic, model.dtype, dtype)
        block_bytes = sum(kv.block_bytes for kv in kv_layouts(layout, block_size, dtype))
        if not block_bytes:
            num_blocks = 0
        elif pool_bytes is not None:
            num_blocks = integer("pool_bytes", pool_bytes, block_bytes) // block_bytes
        elif num_blocks is None and budget is not None:
            num_blocks = budget.most_blocks(block_bytes, block_size)
        elif num_blocks is None:
            length = min(self.max_model_len or DEFAULT_LENGTH, DEFAULT_LENGTH)
            num_blocks = max_sequences * len(layout.groups) * -(-length // block_size)
        text = ""
        if shared is not None:
            text = shared_fingerprint(model, block_size, weights_digest, self.arithmetic, weights)
        self._memory = ModelMemory(
            layout, num_blocks, dtype, block_size, max_sequences, self.arithmetic, shared, text, budget
        )
        quantise_linears(model, weights)
        if pack_weights == "auto":
            is_faster = packs(model.dtype) or quantisation_of(model) is not None
            pack_weights = "only" if model.dtype is torch.bfloat16 and is_faster else False
        self._give_back_weights: Any = None
        if pack_weights:
            packed = pack_linears(self._paged_forward, drops=pack_weights == "only")
            if packed is not None:
                self._give_back_weights = weakref.finalize(self, packed.close)
                self._give_back_weights.atexit = False

    @property
    def pool(self) -> KvCachePool | None:
        """The pool of keys and values, or the first one if there are several. None for a model without attention."""
        return self.pools[0] if self.pools else None

    @property
    def groups(self) -> tuple[KvGroup, ...] | None:
        """The groups of layers, each with a block table. None if there is at most one group, without a window."""
        return self._memory.groups

    @property
    def pools(self) -> tuple[KvCachePool, ...]:
        """The pool of each group. Groups with keys and values of the same shape share one pool."""
        return self._memory.pools

    @property
    def states(self) -> SsmStatePool | None:
        """The pool of recurrent states. None for a model without recurrent states."""
        return self._memory.states

    @cached_property
    def takes_drafts(self) -> bool:
        """Whether `forward` computes drafts. The first use runs a model with recurrent states over random tokens.

        True for a model without recurrent states. Otherwise each recurrent layer must call functions of transformers
        that pagepool replaces, and the model must compute the same logits for drafts as for other tokens.
        """
        with self._lock:
            return self.states is None or takes_drafts(self._paged_forward)

    def scheduler(self, config: SchedulerConfig | None = None, prefix_cache: PrefixCache | None = None) -> Scheduler:
        """Return a `Scheduler` over the runner's memory. Pass its batches to `run`.

        Parameters
        ----------
        config : SchedulerConfig or None
            Limits of the scheduler. None: `SchedulerConfig()`.
        prefix_cache : PrefixCache or None
            A cache from `new_prefix_cache`. With a cache, recurrent states are saved in `checkpoints`, which all
            schedulers of this runner share.

        Raises
        ------
        ValueError
            `Scheduler` refuses an argument.
        """
        config = SchedulerConfig() if config is None else config
        pool: Any = self.pool
        checkpoints = None
        if prefix_cache is not None:
            if pool is None:
                pool = prefix_cache.allocator
            if self.checkpoints is None:
                self.checkpoints = self._memory.new_checkpoints()
            checkpoints = self.checkpoints
        return Scheduler(config, pool, prefix_cache, groups=self.groups, states=self.states, checkpoints=checkpoints)

    def open_store(self, path: str | Path, max_bytes: int, weights: str | None = None) -> PrefixStore:
        """Return a `PrefixStore` for the pages of this model. The caller closes it.

        Parameters
        ----------
        path
            Directory of the store. Several models may share it.
        max_bytes
            Limit in bytes of the directory, over all models.
        weights
            A digest of the weights, such as `weights_digest` returns. None: every weight is read.

        Raises
        ------
        ValueError
            As `PrefixStore`.
        OSError
            As `PrefixStore`.
        """
        return PrefixStore(path, self.fingerprint(weights), max_bytes)

    def fingerprint(self, weights: str | None = None) -> Fingerprint:
        """Return the fingerprint of this model's pages, for stores and sessions.

        Parameters
        ----------
        weights
            A digest of the weights, such as `weights_digest` returns. None: every weight is read.
        """
        memory = self._memory
        return model_fingerprint(
            self.model,
            memory.all_pools,
            self.block_size,
            weights,
            packed=self._paged_forward.hooks.packed,
            states=memory.state_layout,
            arithmetic=self.arithmetic,
        )

    def new_prefix_cache(self, max_events: int = 0, store: PrefixStore | None = None) -> PrefixCache:
        """Return a new `PrefixCache` over the pool.

        For a model without attention, the cache has a separate allocator of empty blocks. They record which prefixes
        were computed, and `checkpoints` holds the states.

        Parameters
        ----------
        max_events : int
            As in `PrefixCache`.
        store : PrefixStore or None
            A store from `open_store`.
        """
        allocator = None if self.pool is None else self.pool.allocator
        if allocator is None:
            allocator = BlockAllocator(self.max_sequences * STATE_TOKENS // self.block_size)
        return PrefixCache(allocator, block_size=self.block_size, max_events=max_events, store=store)

    def run(self, batch: ScheduledBatch) -> torch.Tensor:
        """Run one step of a scheduler.

        Calls from several threads run one after another. For a model with recurrent states, each batch must be run
        exactly once, because a run changes the states.

        Parameters
        ----------
        batch : ScheduledBatch
            Result of `schedule` of a scheduler that `scheduler` returned.

        Returns
        -------
        torch.Tensor
            float32 (n, vocab_size): logits of the n sequences with a true `wants_token`, in the order of the batch.

        Raises
        ------
        ValueError
            The batch has slots for drafts: give the tokens and the drafts to `forward`.
        """
        if any(batch.lookahead):
            raise ValueError(f"a batch with {sum(batch.lookahead)} slots for drafts needs the drafts: use forward")
        keep = [int(wants) for wants in batch.wants_token]
        return self.forward(batch.tokens, batch.states, keep)

    def forward(self, tokens: Sequence[Sequence[int]], sequences: Sequence[Any], keep: Sequence[int]) -> torch.Tensor:
        """Run the last tokens of sequences, and store their keys, values and states.

        Parameters
        ----------
        tokens : sequence of sequence of int
            For each sequence, the ids of its last tokens. They have slots and are not computed yet.
        sequences : sequence
            As `ScheduledBatch.states`.
        keep : sequence of int
            For each sequence, the number of last tokens to return logits for.

        Returns
        -------
        torch.Tensor
            float32 (sum of keep, vocab_size): logits, sequence after sequence.

        Raises
        ------
        ValueError
            A sequence is longer than `length_limit`. Nothing is stored.
        """
        return self._logits(tokens, sequences, keep).float()

    def logits(self, tokens: Sequence[Sequence[int]], sequences: Sequence[Any], keep: Sequence[int]) -> Any:
        """Run the last tokens of sequences as `forward`, without the conversion of logits in bfloat16.

        Parameters
        ----------
        tokens, sequences, keep : sequence
            As for `forward`.

        Returns
        -------
        ndarray, shape (sum of keep, vocab_size)
            uint16 with the bits of bfloat16 for a model in bfloat16, otherwise float32.

        Raises
        ------
        ValueError
            As `forward`.
        """
        rows = self._logits(tokens, sequences, keep)
        return rows.view(torch.uint16).numpy() if rows.dtype is torch.bfloat16 else rows.float().numpy()

    def _logits(self, tokens: Sequence[Sequence[int]], sequences: Sequence[Any], keep: Sequence[int]) -> torch.Tensor:
        longest = max((sequence.len for sequence in sequences), default=0)
        if self.length_limit is not None and longest > self.length_limit:
            raise ValueError(
                f"a sequence has {longest} tokens, and beyond {self.length_limit} {type(self.model).__name__} computes "
                "other keys for tokens that are stored already"
            )
        with self._lock, torch.inference_mode():
            return self._paged_forward(self._memory, tokens, sequences, keep)

    def new_sequence(self, label: int | None = None) -> Any:
        """Return a new sequence for `forward`: a `PagedSeqState`, or a `HybridSequence` for windows or states.

        The caller appends tokens to it and closes it. Raises PoolExhausted if no state slot is free.
        """
        return self._memory.sequence(label)

    def close(self) -> None:
        """Free the memory, and restore weights of the model that the runner has replaced.

        Raises BufferError while views of the pages exist.
        """
        self.checkpoints = None
        self._memory.close()
        if self._give_back_weights is not None:
            self._paged_forward.hooks.use(None)
            self._give_back_weights()


def chosen_arithmetic(arithmetic: str, dtype: Any, page_dtype: Any) -> str:
    """Return the arithmetic of attention for a model and pages of these dtypes. Raises ValueError if it cannot be."""
    if arithmetic not in ("exact", "bf16x2", "bf16", "auto"):
        raise ValueError(f"arithmetic must be 'exact', 'bf16x2', 'bf16' or 'auto', not {arithmetic!r}")
    if arithmetic == "auto":
        return auto_arithmetic(dtype, page_dtype)
    pages = dtype_name("dtype", page_dtype)
    if arithmetic != "exact" and pages not in ("bfloat16", "float16"):
        raise ValueError(f"arithmetic {arithmetic!r} is for pages of bfloat16 or float16, not {pages}")
    return arithmetic


def rope_limit(config: Any) -> int | None:
    """Return the longest sequence for which rotary embeddings do not depend on its length; None if unlimited."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(kind for kind in parameters.values() if isinstance(kind, dict))]
    limits = [
        kind.get("original_max_position_embeddings") or config.max_position_embeddings
        for kind in kinds
        if kind.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(limits, default=None)
