"""ModelRunner: a causal language model of transformers whose layers read and write pages and slots of states."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from pagepool._arguments import integer
from pagepool.config import SchedulerConfig
from pagepool.integrations.transformers.linear import packs
from pagepool.integrations.transformers.memory import ModelMemory, kv_layouts
from pagepool.integrations.transformers.storing import model_fingerprint
from pagepool.integrations.transformers.trial import pack_linears, try_out
from pagepool.memory.allocator import BlockAllocator
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

DEFAULT_LENGTH = 2048  # tokens that a pool of no given size has room for, of each sequence
STATE_TOKENS = 65_536  # the same of a prefix cache for a model without attention, whose blocks hold nothing


class ModelRunner:
    """A causal language model of transformers, on the CPU, whose layers keep what they keep in pagepool's memory.

    To see what the model keeps, and that it computes the same over pages, it is run over about a dozen random tokens
    five times, with recurrent states up to a dozen times, in float32. The model itself is not changed: outside of `run`
    it behaves as before.

    `length_limit` is the longest sequence that `run` takes, or None. Beyond it models with a `rope_type` of "dynamic"
    or "longrope" would compute other keys for tokens that are stored already.

    `model`, `pool` (a `KvCachePool`, or None for a model without attention), `pools` (the pool of each group),
    `groups` (a tuple of `KvGroup`, or None where one block table does), `states` (an `SsmStatePool` or None),
    `checkpoints` (`StateCheckpoints` of them, once a scheduler has a prefix cache, or None), `block_size`,
    `vocab_size`, and `max_model_len`, the longest sequence that the model was made for, or None, are attributes.

    Raises ValueError, with the name of the class and the reason, for a model that cannot run over pages, and for sizes
    out of range; TypeError for what is no model.

    Parameters
    ----------
    model
        A `PreTrainedModel` that can generate, in eval mode.
    pool_bytes
        Bytes of the pages; or.
    num_blocks
        How many blocks there are. Without either there is room for `max_sequences` of 2,048 tokens, or of the
        model's own maximum where that is less; pages that are never used take no memory.
    dtype
        Of the pages, as in `KvLayout`; by default that of the model's keys.
    block_size
        Tokens per block.
    max_sequences
        How many sequences may run at a time: as many recurrent states there are.
    pack_weights : bool or str
        Whether linear layers run over weights that oneDNN has packed, and layers with one input as one layer. True:
        beside their own weights, which takes the memory of the weights twice. "only": instead of their own weights,
        which come back at `close`; until then the model runs in this runner alone. "auto": "only" for a model in
        bfloat16 on a CPU with instructions for it, else False.

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
    ) -> None:
        if pack_weights not in (True, False, "only", "auto"):
            raise ValueError(f"pack_weights must be True, False, 'only' or 'auto', not {pack_weights!r}")
        if pool_bytes is not None and num_blocks is not None:
            raise ValueError(f"give pool_bytes, {pool_bytes}, or num_blocks, {num_blocks}, not both")
        max_sequences = integer("max_sequences", max_sequences, 1)
        self._paged_forward = try_out(model)
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
        block_bytes = sum(kv.block_bytes for kv in kv_layouts(layout, block_size, dtype))
        if not block_bytes:
            num_blocks = 0
        elif pool_bytes is not None:
            num_blocks = integer("pool_bytes", pool_bytes, block_bytes) // block_bytes
        elif num_blocks is None:
            length = min(self.max_model_len or DEFAULT_LENGTH, DEFAULT_LENGTH)
            num_blocks = max_sequences * len(layout.groups) * -(-length // block_size)
        self._memory = ModelMemory(layout, num_blocks, dtype, block_size, max_sequences)
        if pack_weights == "auto":
            pack_weights = "only" if model.dtype is torch.bfloat16 and packs(model.dtype) else False
        self._give_back_weights: Any = None
        if pack_weights:
            packed = pack_linears(self._paged_forward, drops=pack_weights == "only")
            if packed is not None:
                self._give_back_weights = weakref.finalize(self, packed.close)
                self._give_back_weights.atexit = False

    @property
    def pool(self) -> KvCachePool | None:
        """The pool of keys and values, the first where there are several; None for a model without attention."""
        return self.pools[0] if self.pools else None

    @property
    def groups(self) -> tuple[KvGroup, ...] | None:
        """The groups of layers with a block table each; None where there is one, of full attention, or none."""
        return self._memory.groups

    @property
    def pools(self) -> tuple[KvCachePool, ...]:
        """The pool of each group: one for all layers that store keys and values of one shape."""
        return self._memory.pools

    @property
    def states(self) -> SsmStatePool | None:
        """The pool of recurrent states, None for a model without."""
        return self._memory.states

    def scheduler(self, config: SchedulerConfig | None = None, prefix_cache: PrefixCache | None = None) -> Scheduler:
        """Returns a `Scheduler` over the runner's memory, whose batches `run` takes.

        Raises ValueError for a config with drafted tokens, and as `Scheduler`.

        Parameters
        ----------
        prefix_cache
            One of `new_prefix_cache`, or None. Recurrent states are then kept in `checkpoints`, for all schedulers
            of this runner.
        """
        config = SchedulerConfig() if config is None else config
        if config.lookahead:
            raise ValueError(f"a lookahead of {config.lookahead} needs a draft model, and run takes no drafts")
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
        """Returns a `PrefixStore` for the pages of this model. The caller closes it.

        Parameters
        ----------
        path
            Directory of the store. Several models may share it.
        max_bytes
            The most bytes that the store takes for this model.
        weights
            A digest of the weights, such as `weights_digest` returns. None: every weight is read.

        Raises
        ------
        ValueError
            The model has recurrent states, which a store does not keep; or as `PrefixStore`.
        OSError
            As `PrefixStore`.
        """
        return PrefixStore(path, self.fingerprint(weights), max_bytes)

    def fingerprint(self, weights: str | None = None) -> Fingerprint:
        """Returns what the pages of this model depend on, for stores and sessions.

        Parameters
        ----------
        weights
            A digest of the weights, such as `weights_digest` returns. None: every weight is read.

        Raises
        ------
        ValueError
            The model has recurrent states, which stores and sessions do not keep.
        """
        if self.states is not None or not self.pools:
            name = type(self.model).__name__
            raise ValueError(f"{name} has recurrent states, and stores and sessions keep keys and values only")
        packed = self._paged_forward.hooks.packed
        return model_fingerprint(self.model, self._memory.all_pools, self.block_size, weights, packed)

    def new_prefix_cache(self, max_events: int = 0, store: PrefixStore | None = None) -> PrefixCache:
        """Returns a new `PrefixCache` over the pool.

        For a model without attention it has blocks of its own, which hold nothing: they say which tokens were seen, and
        `checkpoints` has the states.

        Parameters
        ----------
        max_events
            As in `PrefixCache`.
        store
            A store of `open_store`, or None.
        """
        allocator = None if self.pool is None else self.pool.allocator
        if allocator is None:
            allocator = BlockAllocator(self.max_sequences * STATE_TOKENS // self.block_size)
        return PrefixCache(allocator, block_size=self.block_size, max_events=max_events, store=store)

    def run(self, batch: ScheduledBatch) -> torch.Tensor:
        """Runs the step of a scheduler; returns the logits of the sequences that want a token.

        Returns float32 (sequences whose `wants_token` is True, vocab_size), in the order of the batch. One call runs at
        a time; another thread's waits. Batches of a model with recurrent states must be run once each.

        Parameters
        ----------
        batch
            What `schedule` returned, of a scheduler that `scheduler` made.
        """
        keep = [int(wants) for wants in batch.wants_token]
        return self.forward(batch.tokens, batch.states, keep)

    def forward(self, tokens: Sequence[Sequence[int]], sequences: Sequence[Any], keep: Sequence[int]) -> torch.Tensor:
        """Runs the last tokens of sequences and stores what the model keeps of them.

        Returns float32 (sum of keep, vocab_size), sequence after sequence. Raises ValueError for a sequence beyond
        `length_limit`; then nothing is stored.

        Parameters
        ----------
        tokens
            For each sequence the ids of its last tokens, which have slots and are not computed yet.
        sequences
            As `ScheduledBatch.states`.
        keep
            For each sequence of how many of its last tokens logits are wanted.
        """
        longest = max((sequence.len for sequence in sequences), default=0)
        if self.length_limit is not None and longest > self.length_limit:
            raise ValueError(
                f"a sequence has {longest} tokens, and beyond {self.length_limit} {type(self.model).__name__} computes "
                "other keys for tokens that are stored already"
            )
        with self._lock, torch.inference_mode():
            return self._paged_forward(self._memory, tokens, sequences, keep)

    def new_sequence(self, label: int | None = None) -> Any:
        """Returns a new sequence for `forward`: a `PagedSeqState`, or a `HybridSequence` for windows or states.

        The caller appends tokens to it and closes it. Raises PoolExhausted when no slot is free for its state.
        """
        return self._memory.sequence(label)

    def close(self) -> None:
        """Frees the memory, and gives the model weights back that only the runner had.

        Raises BufferError while views of the pages are held.
        """
        self.checkpoints = None
        self._memory.close()
        if self._give_back_weights is not None:
            self._paged_forward.hooks.packed = None
            self._give_back_weights()


def rope_limit(config: Any) -> int | None:
    """The length up to which rotary embeddings do not depend on how long a sequence is; None for any length."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(kind for kind in parameters.values() if isinstance(kind, dict))]
    limits = [
        kind.get("original_max_position_embeddings") or config.max_position_embeddings
        for kind in kinds
        if kind.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(limits, default=None)
