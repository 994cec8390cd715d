"""PagedForward: a model's own forward, run over pages and slots of states."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DummyLayer

from pagepool.integrations.transformers.attention import Hooks
from pagepool.integrations.transformers.cache import PagedLayer, PagedStateLayer, StateLayer
from pagepool.integrations.transformers.layout import ModelLayout
from pagepool.integrations.transformers.memory import ModelMemory
from pagepool.integrations.transformers.step import Step, Tables, running

__all__ = ["PagedForward"]

RECURRENT = "recurrent_states.0"  # the state that Mamba-2 steps, among those of its layer


class PagedForward:
    """The forward of a model whose layers keep what they keep in a `ModelMemory`.

    hooks         where the model chooses its attention and its linear layers
    layout        what the model keeps
    takes_chunks  whether recurrent layers that have a state already take several tokens at once
    """

    def __init__(self, model: Any, hooks: Hooks, layout: ModelLayout, takes_chunks: bool) -> None:
        self.model = model
        self.layout = layout
        self.takes_chunks = takes_chunks
        self.hooks = hooks
        self._parameters = set(inspect.signature(model.forward).parameters)

    def __call__(
        self,
        memory: ModelMemory,
        tokens: Sequence[Sequence[int]],
        sequences: Sequence[Any],
        keep: Sequence[int],
        seen: int | None = None,
    ) -> torch.Tensor:
        """Runs the last tokens of sequences; returns the logits of the last `keep[i]` of each, in float32.

        `seen` is what the model is told of the tokens that came before: by default the most of any sequence.
        """
        counts = [len(row) for row in tokens]
        starts = [sequence.len - count for sequence, count in zip(sequences, counts, strict=True)]
        tables = memory.fill(sequences, counts)
        seen = max(starts) if seen is None else seen
        with self.hooks.over_pages():
            if memory.states is None:
                return self._run_flat(memory, tables, tokens, starts, keep, seen)
            slots = [sequence.state.index for sequence in sequences]
            return self._run_in_turn(memory, tables, tokens, starts, keep, seen, slots)

    def _run_in_turn(
        self,
        memory: ModelMemory,
        tables: Sequence[Tables],
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        keep: Sequence[int],
        seen: int,
        slots: Sequence[int],
    ) -> torch.Tensor:
        """Several forwards, since a recurrent layer takes rows of as many tokens each."""
        counts = [len(row) for row in tokens]
        found: list[list[torch.Tensor]] = [[] for _ in tokens]
        for rows, begin, end in self._in_turn(counts, starts):
            ids = [list(tokens[row][begin:end]) for row in rows]
            first = [starts[row] + begin for row in rows]
            part = [cut(one, rows, begin, end, counts) for one in tables]
            most = max(1, *(keep[row] for row in rows))
            logits = self._run_states(memory, part, ids, first, [slots[row] for row in rows], most, seen)
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
        seen: int,
    ) -> torch.Tensor:
        """All tokens of all sequences one behind the other, as one row."""
        ids = torch.tensor([[token for row in tokens for token in row]])
        positions = np.concatenate(
            [np.arange(start, start + len(row)) for start, row in zip(starts, tokens, strict=True)]
        )
        ends = np.cumsum([len(row) for row in tokens])
        wanted = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, keep, strict=True)])
        cache = Cache(layers=[self._paged_layer(number) for number in range(len(self.layout.states))])
        step = Step(memory.pools, tables, seen, self.layout.borrowed)
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
        seen: int,
    ) -> torch.Tensor:
        """Sequences of as many tokens each, as rows of a batch; all of them are new, or none is."""
        ids = torch.tensor(tokens)
        positions = torch.tensor(starts)[:, None] + torch.arange(ids.shape[1])
        step = Step(memory.pools, tables, seen, self.layout.borrowed, slots)
        in_place = self.hooks.steps_in_place if starts[0] and ids.shape[1] == 1 else ()
        layers: list[Any] = []
        for number, views in enumerate(memory.views):
            states = {
                name: view if number in in_place and name == RECURRENT else rows_of(view, slots)
                for name, view in views.items()
            }
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
        attention = self.layout.by_cache_layer.get(number)
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
            if starts[row] and not self.takes_chunks:
                yield from (([row], place, place + 1) for place in range(count))
            else:
                yield [row], 0, count


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
    if states is not view and states.data_ptr() != view[slots[0]].data_ptr():
        view[slots] = states
