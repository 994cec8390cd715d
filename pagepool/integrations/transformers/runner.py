"""ModelRunner: a causal language model of transformers whose layers read and write pages and slots of states."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DummyLayer

from pagepool.arguments import integer
from pagepool.config import SchedulerConfig
from pagepool.integrations.transformers.attention import Hooks
from pagepool.integrations.transformers.cache import PagedLayer, PagedStateLayer, StateLayer
from pagepool.integrations.transformers.layout import ModelLayout, Unsupported, read_layout
from pagepool.integrations.transformers.memory import ModelMemory, kv_layouts
from pagepool.integrations.transformers.step import Step, Tables, running
from pagepool.memory.hybrid import KvGroup
from pagepool.memory.kv_pool import KvCachePool
from pagepool.memory.ssm_pool import SsmStatePool
from pagepool.prefix.cache import PrefixCache
from pagepool.scheduling.batch import ScheduledBatch
from pagepool.scheduling.scheduler import Scheduler

__all__ = ["ModelRunner"]

DEFAULT_LENGTH = 2048  # tokens that a pool of no given size has room for, of each sequence
PROBE_LENGTHS = (14, 9)  # tokens of the sequences with which a model is tried, run in two chunks each
PROBE_CHUNKS = (9, 8)


class ModelRunner:
    """A causal language model of transformers, on the CPU, whose layers keep what they keep in pagepool's memory.

    model          a `PreTrainedModel` that can generate, in eval mode
    pool_bytes     bytes of the pages; or
    num_blocks     how many blocks there are. Without either there is room for `max_sequences` of 2,048 tokens, or of
                   the model's own maximum where that is less; pages that are never used take no memory
    dtype          of the pages, as in `KvLayout`; by default that of the model's keys
    block_size     tokens per block
    max_sequences  how many sequences may run at a time: as many recurrent states there are

    To see what the model keeps, and that it computes the same over pages, it is run five times over about a dozen
    random tokens. The model itself is not changed: outside of `run` it behaves as before.

    `length_limit` is the longest sequence that `run` takes, or None. Beyond it models with a `rope_type` of "dynamic"
    or "longrope" would compute other keys for tokens that are stored already.

    `model`, `pool` (a `KvCachePool`, or None for a model without attention), `pools` (the pool of each group),
    `groups` (a tuple of `KvGroup`, or None where one block table does), `states` (an `SsmStatePool` or None),
    `vocab_size`, and `max_model_len`, the longest sequence that the model was made for, or None, are attributes.

    Raises ValueError, with the name of the class and the reason, for a model that cannot run over pages, and for sizes
    out of range; TypeError for what is no model.

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
    ) -> None:
        if pool_bytes is not None and num_blocks is not None:
            raise ValueError(f"give pool_bytes, {pool_bytes}, or num_blocks, {num_blocks}, not both")
        max_sequences = integer("max_sequences", max_sequences, 1)
        require_causal_lm(model)
        self.model = model
        self.max_sequences = max_sequences
        config = model.config.get_text_config(decoder=True)
        self.length_limit = rope_limit(config)
        self.max_model_len: int | None = self.length_limit or getattr(config, "max_position_embeddings", None)
        self._hooks = Hooks(model)
        self._parameters = set(inspect.signature(model.forward).parameters)
        self._lock = Lock()
        try:
            self._layout, self._is_chunked = self._try_out()
        except Unsupported as error:
            raise ValueError(f"{type(model).__name__} cannot run over pages: {error}") from error
        except Exception as error:  # whatever the code of a model raises that is not run as it expects
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ValueError(f"{type(model).__name__} cannot run over pages: its forward raised {reason}") from error
        self.vocab_size: int = self._layout.logits.shape[-1]
        if dtype is None:
            dtype = model.dtype
        block_bytes = sum(layout.block_bytes for layout in kv_layouts(self._layout, block_size, dtype))
        if not block_bytes:
            num_blocks = 0
        elif pool_bytes is not None:
            num_blocks = integer("pool_bytes", pool_bytes, block_bytes) // block_bytes
        elif num_blocks is None:
            length = min(self.max_model_len or DEFAULT_LENGTH, DEFAULT_LENGTH)
            num_blocks = max_sequences * len(self._layout.groups) * -(-length // block_size)
        self._memory = ModelMemory(self._layout, num_blocks, dtype, block_size, max_sequences)

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
        """
        config = SchedulerConfig() if config is None else config
        if config.lookahead:
            raise ValueError(f"a lookahead of {config.lookahead} needs a draft model, and run takes no drafts")
        return Scheduler(config, self.pool, prefix_cache, groups=self.groups, states=self.states)

    def new_prefix_cache(self) -> PrefixCache | None:
        """Returns a new `PrefixCache` over the pool; None for a model with windows or recurrent states."""
        if self.pool is None or self.groups is not None or self.states is not None:
            return None
        return PrefixCache(self.pool.allocator, block_size=self.pool.block_size)

    def run(self, batch: ScheduledBatch) -> torch.Tensor:
        """Runs the step of a scheduler; returns the logits of the sequences that want a token.

        batch  what `schedule` returned, of a scheduler that `scheduler` made

        Returns float32 (sequences whose `wants_token` is True, vocab_size), in the order of the batch. One call runs at
        a time; another thread's waits. Batches of a model with recurrent states must be run once each.
        """
        keep = [int(wants) for wants in batch.wants_token]
        return self.forward(batch.tokens, batch.states, keep)

    def forward(self, tokens: Sequence[Sequence[int]], sequences: Sequence[Any], keep: Sequence[int]) -> torch.Tensor:
        """Runs the last tokens of sequences and stores what the model keeps of them.

        tokens     for each sequence the ids of its last tokens, which have slots and are not computed yet
        sequences  as `ScheduledBatch.states`
        keep       for each sequence of how many of its last tokens logits are wanted

        Returns float32 (sum of keep, vocab_size), sequence after sequence. Raises ValueError for a sequence beyond
        `length_limit`; then nothing is stored.
        """
        longest = max((sequence.len for sequence in sequences), default=0)
        if self.length_limit is not None and longest > self.length_limit:
            raise ValueError(
                f"a sequence has {longest} tokens, and beyond {self.length_limit} {type(self.model).__name__} computes "
                "other keys for tokens that are stored already"
            )
        with self._lock, torch.inference_mode(), self._hooks.over_pages():
            return self._forward(self._memory, tokens, sequences, keep)

    def new_sequence(self, label: int | None = None) -> Any:
        """Returns a new sequence for `forward`: a `PagedSeqState`, or a `HybridSequence` for windows or states.

        The caller appends tokens to it and closes it. Raises PoolExhausted when no slot is free for its state.
        """
        return self._memory.sequence(label)

    def close(self) -> None:
        """Frees the memory. Raises BufferError while views of the pages are held."""
        self._memory.close()

    def _forward(
        self, memory: ModelMemory, tokens: Sequence[Sequence[int]], sequences: Sequence[Any], keep: Sequence[int]
    ) -> torch.Tensor:
        counts = [len(row) for row in tokens]
        starts = [sequence.len - count for sequence, count in zip(sequences, counts, strict=True)]
        tables = memory.fill(sequences, counts)
        if memory.states is None:
            return self._run_flat(memory, tables, tokens, starts, keep)
        found: list[list[torch.Tensor]] = [[] for _ in tokens]
        slots = [sequence.state.index for sequence in sequences]
        for rows, begin, end in self._in_turn(counts, starts):
            ids = [list(tokens[row][begin:end]) for row in rows]
            first = [starts[row] + begin for row in rows]
            part = [cut(one, rows, begin, end, counts) for one in tables]
            most = max(keep[row] for row in rows)
            logits = self._run_states(memory, part, ids, first, [slots[row] for row in rows], max(most, 1))
            for row, of_row in zip(rows, logits, strict=True):
                wanted = min(max(keep[row] - (counts[row] - end), 0), end - begin)
                found[row].append(of_row[of_row.shape[0] - wanted :])
        return torch.cat([part for parts in found for part in parts]).float()

    def _run_flat(
        self,
        memory: ModelMemory,
        tables: Sequence[Tables],
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        keep: Sequence[int],
    ) -> torch.Tensor:
        """All tokens of all sequences one behind the other, as one row."""
        ids = torch.tensor([[token for row in tokens for token in row]])
        positions = np.concatenate(
            [np.arange(start, start + len(row)) for start, row in zip(starts, tokens, strict=True)]
        )
        ends = np.cumsum([len(row) for row in tokens])
        wanted = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, keep, strict=True)])
        cache = Cache(layers=[self._paged_layer(number) for number in range(len(self._layout.states))])
        step = Step(memory.pools, tables, max(starts), self._layout.borrowed)
        # A model computes logits of at least one token.
        rows = torch.from_numpy(wanted) if len(wanted) else torch.tensor([0])
        logits = self._call(step, ids, torch.from_numpy(positions)[None], cache, rows)[0]
        return logits[: len(wanted)].float()

    def _run_states(
        self,
        memory: ModelMemory,
        tables: Sequence[Tables],
        tokens: list[list[int]],
        starts: list[int],
        slots: list[int],
        keep: int,
    ) -> torch.Tensor:
        """Sequences of as many tokens each, as rows of a batch; all of them are new, or none is."""
        ids = torch.tensor(tokens)
        positions = torch.tensor(starts)[:, None] + torch.arange(ids.shape[1])
        step = Step(memory.pools, tables, max(starts), self._layout.borrowed)
        layers: list[Any] = []
        for number, views in enumerate(memory.views):
            states = {name: rows_of(view, slots) for name, view in views.items()}
            layers.append(self._paged_layer(number, states, starts[0] > 0))
        logits = self._call(step, ids, positions, Cache(layers=layers), keep)
        for layer, views in zip(layers, memory.views, strict=True):
            for name, view in views.items():
                kind, _, index = name.rpartition(".")
                store_rows(view, slots, getattr(layer, kind)[int(index)])
        return logits

    def _call(self, step: Step, ids: torch.Tensor, positions: torch.Tensor, cache: Cache, keep: Any) -> torch.Tensor:
        """Logits (batch, tokens that are kept, vocab_size) of the model's own forward."""
        kwargs: dict[str, Any] = {"input_ids": ids, "cache": cache, "use_cache": True}
        if "position_ids" in self._parameters:
            kwargs["position_ids"] = positions
        if "logits_to_keep" in self._parameters:
            kwargs["logits_to_keep"] = keep
        with running(step):
            logits: torch.Tensor = self.model(**kwargs).logits
        if "logits_to_keep" not in self._parameters:
            logits = logits[:, -keep:] if isinstance(keep, int) else logits[:, keep]
        return logits

    def _paged_layer(
        self, number: int, states: dict[str, torch.Tensor] | None = None, has_previous_state: bool = False
    ) -> Any:
        """The layer of transformers' cache for layer `number` of the model."""
        attention = self._layout.by_cache_layer.get(number)
        if states:
            if attention is None:
                return StateLayer(states, has_previous_state)
            return PagedStateLayer(attention, states, has_previous_state)
        return DummyLayer() if attention is None else PagedLayer(attention)

    def _in_turn(self, counts: Sequence[int], starts: Sequence[int]) -> Iterator[tuple[list[int], int, int]]:
        """Which sequences a model with recurrent states runs together, and which of their tokens.

        Sequences that go on with one token each run as one batch, and a chunk of a prompt runs alone: token by token if
        the model cannot go on with several.
        """
        decodes = [row for row, count in enumerate(counts) if count == 1 and starts[row]]
        if decodes:
            yield decodes, 0, 1
        for row, count in enumerate(counts):
            if count == 1 and starts[row]:
                continue
            if starts[row] and not self._is_chunked:
                yield from (([row], place, place + 1) for place in range(count))
            else:
                yield [row], 0, count

    def _try_out(self) -> tuple[ModelLayout, bool]:
        """Reads the model's layout and compares its logits with those over pages."""
        random = np.random.default_rng(0)
        vocabulary = self.model.get_input_embeddings().num_embeddings
        prompts = [random.integers(0, vocabulary, length).tolist() for length in PROBE_LENGTHS]
        with torch.inference_mode():
            layout = read_layout(self.model, self._hooks, torch.tensor(prompts[:1]))
            other = read_layout(self.model, self._hooks, torch.tensor(prompts[1:]))
            self._layout = layout
            own = torch.cat((layout.logits, other.logits))
            for self._is_chunked in (True, False) if layout.has_states else (True,):
                error = self._error_over_pages(layout, prompts, own)
                if error <= tolerance(self.model):
                    return layout, self._is_chunked
        raise Unsupported(f"its logits over pages differ from its own by {error:.1e} of the largest")

    def _error_over_pages(self, layout: ModelLayout, prompts: list[list[int]], own: torch.Tensor) -> float:
        """How far logits over pages are off, as a share of the largest: of all tokens the median, or the most."""
        memory = ModelMemory(layout, 4 * max(1, len(layout.groups)), "float32", max_sequences=2)
        sequences = [memory.sequence() for _ in prompts]
        parts: list[list[torch.Tensor]] = [[], []]
        with self._hooks.over_pages():
            for chunk in (0, 1):
                tokens = [
                    prompt[:cut] if chunk == 0 else prompt[cut:]
                    for prompt, cut in zip(prompts, PROBE_CHUNKS, strict=True)
                ]
                counts = [len(row) for row in tokens]
                for sequence, count in zip(sequences, counts, strict=True):
                    sequence.append(count)
                logits = self._forward(memory, tokens, sequences, counts)
                for row, part in enumerate(logits.split(counts)):
                    parts[row].append(part)
        over_pages = torch.cat([part for of_row in parts for part in of_row])
        for sequence in sequences:
            sequence.close()
        errors = (over_pages - own).abs().amax(1) / own.abs().amax()
        return float(errors.max())


def require_causal_lm(model: Any) -> None:
    """Raises TypeError, or ValueError with the reason, for what can be no causal language model on the CPU."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a PreTrainedModel of transformers, not {type(model).__name__}")
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} cannot run over pages: it is an encoder-decoder")
    if not model.can_generate():
        raise ValueError(f"{name} cannot run over pages: it has no head that generates tokens")
    if model.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"{name} cannot run over pages: its weights are {model.dtype}, not a dtype that pages have")
    devices = {str(parameter.device) for parameter in model.parameters()} - {"cpu"}
    if devices:
        raise ValueError(f"{name} cannot run over pages: its weights are on {', '.join(sorted(devices))}, not the cpu")


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


def tolerance(model: Any) -> float:
    """How far logits may be off, as a share of the largest: rounding, in the model's dtype."""
    return 1e-3 if model.dtype == torch.float32 else 0.1


def cut(tables: Tables, rows: Sequence[int], begin: int, end: int, counts: Sequence[int]) -> Tables:
    """The tables of a forward of tokens `begin` to `end` of what `rows` feed, all other sequences left out."""
    first = tables.query_start_loc
    lens = [tables.seq_lens[row] - counts[row] + end for row in rows]
    slots = np.concatenate([tables.slot_mapping[first[row] + begin : first[row] + end] for row in rows])
    starts = np.arange(len(rows) + 1, dtype=np.int32) * (end - begin)
    return Tables(tables.block_tables[list(rows)], np.array(lens, np.int32), slots, starts)


def rows_of(view: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """The states of these slots: where they lie, if they are neighbours, else a copy."""
    if slots == list(range(slots[0], slots[0] + len(slots))):
        return view[slots[0] : slots[0] + len(slots)]
    return view[slots]


def store_rows(view: torch.Tensor, slots: list[int], states: torch.Tensor) -> None:
    """Writes states to their slots, unless they lie there."""
    if states.data_ptr() != view[slots[0]].data_ptr():
        view[slots] = states
