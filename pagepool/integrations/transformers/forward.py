"""PagedForward: runs a model's own forward with pages and slots of recurrent states."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator, Sequence
from itertools import accumulate
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

RECURRENT = "recurrent_states.0"  # name of the recurrent state in a Mamba-2 layer


class PagedForward:
    """The forward of a model that stores keys, values and recurrent states in a `ModelMemory`.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    hooks : Hooks
        Switches the model's attention and linear layers.
    layout : ModelLayout
        The keys, values and states that the model stores.
    takes_chunks : bool
        Whether recurrent layers can continue from a state with several tokens in one forward.
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
        """Run the last tokens of sequences.

        Parameters
        ----------
        memory : ModelMemory
            Pages and states of the sequences.
        tokens : sequence of sequence of int
            Token ids to compute for each sequence.
        sequences : sequence
            Sequences from `ModelMemory.sequence`, with slots for `tokens`.
        keep : sequence of int
            For each sequence, the number of last tokens to return logits for.
        seen : int or None
            Number of earlier tokens that is passed to the model. None: the largest number of any sequence.

        Raises
        ------
        ValueError
            A sequence with a recurrent state has another number of drafts than tokens after its first one. Nothing has
            changed.

        Returns
        -------
        torch.Tensor
            (sum of keep, vocab_size), in the model's dtype: logits, sequence after sequence.
        """
        counts = [len(row) for row in tokens]
        starts = [sequence.len - count for sequence, count in zip(sequences, counts, strict=True)]
        tables = memory.fill(sequences, counts)
        seen = max(starts) if seen is None else seen
        with self.hooks.over_pages():
            if memory.states is None:
                return self._run_flat(memory, tables, tokens, starts, keep, seen)
            slots = [[slot.index for slot in (sequence.state, *sequence.drafts)] for sequence in sequences]
            for count, of_row in zip(counts, slots, strict=True):
                if 1 < len(of_row) != count:
                    raise ValueError(f"a sequence with {len(of_row) - 1} drafts has {count} tokens to compute")
            return self._run_in_turn(memory, tables, tokens, starts, keep, seen, slots)

    def _run_in_turn(
        self,
        memory: ModelMemory,
        tables: Sequence[Tables],
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        keep: Sequence[int],
        seen: int,
        slots: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        """Run several forwards, because a recurrent layer needs rows with equal numbers of tokens.

        A token that decodes is a row, and so is a draft. `slots[i]` has the slots of sequence i and of its drafts.
        """
        counts = [len(row) for row in tokens]
        found: list[list[torch.Tensor]] = [[] for _ in tokens]
        decodes = [row for row, of_row in enumerate(slots) if counts[row] == len(of_row) and starts[row]]
        if decodes:
            ends = [counts[row] for row in decodes]
            ids = [[token] for row in decodes for token in tokens[row]]
            first = [starts[row] + place for row in decodes for place in range(counts[row])]
            of_rows = [slot for row in decodes for slot in slots[row]]
            part = [cut(one, decodes, 0, ends, counts) for one in tables]
            logits = self._run_states(memory, part, ids, first, of_rows, 1, seen, turns(ends))
            for row, of_row in zip(decodes, logits[:, 0].split(ends), strict=True):
                found[row].append(of_row[len(of_row) - keep[row] :])
        for row, begin, end in self._chunks(counts, starts, decodes):
            part = [cut(one, [row], begin, [end], counts) for one in tables]
            ids, first = [list(tokens[row][begin:end])], [starts[row] + begin]
            of_row = self._run_states(memory, part, ids, first, [slots[row][0]], max(1, keep[row]), seen)[0]
            wanted = min(max(keep[row] - (counts[row] - end), 0), end - begin)
            found[row].append(of_row[of_row.shape[0] - wanted :])
        return torch.cat([part for parts in found for part in parts])

    def _run_flat(
        self,
        memory: ModelMemory,
        tables: Sequence[Tables],
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        keep: Sequence[int],
        seen: int,
    ) -> torch.Tensor:
        """Run the tokens of all sequences in one forward, concatenated in one row."""
        ids = torch.tensor([[token for row in tokens for token in row]])
        positions = np.concatenate(
            [np.arange(start, start + len(row)) for start, row in zip(starts, tokens, strict=True)]
        )
        ends = np.cumsum([len(row) for row in tokens])
        wanted = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, keep, strict=True)])
        cache = Cache(layers=[self._paged_layer(number) for number in range(len(self.layout.states))])
        step = Step(memory.pools, tables, seen, self.layout.borrowed, arithmetic=memory.arithmetic)
        # The model must compute logits of at least one token.
        rows = torch.from_numpy(wanted) if len(wanted) else torch.tensor([0])
        logits = self._call(step, ids, torch.from_numpy(positions)[None], cache, rows)[0]
        return logits[: len(wanted)]

    def _run_states(
        self,
        memory: ModelMemory,
        tables: Sequence[Tables],
        tokens: list[list[int]],
        starts: list[int],
        slots: list[int],
        keep: int,
        seen: int,
        drafts: Sequence[Sequence[int]] = (),
    ) -> torch.Tensor:
        """Run equal numbers of tokens as rows of a batch. Either all are new or all have a state."""
        ids = torch.tensor(tokens)
        positions = torch.tensor(starts)[:, None] + torch.arange(ids.shape[1])
        step = Step(memory.pools, tables, seen, self.layout.borrowed, slots, memory.arithmetic, drafts)
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
        """Call the model's own forward. Returns logits (batch, kept tokens, vocab_size)."""
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
        """Return the cache layer for layer `number` of the model."""
        attention = self.layout.by_cache_layer.get(number)
        if states:
            if attention is None:
                return StateLayer(states, has_previous_state)
            return PagedStateLayer(attention, states, has_previous_state)
        return DummyLayer() if attention is None else PagedLayer(attention)

    @property
    def takes_drafts(self) -> bool:
        """Whether every recurrent layer computes all of its states for drafts."""
        known = self.hooks.takes_drafts
        kinds = [{name.rpartition(".")[0] for name in states} for states in self.layout.states]
        return all(of_layer <= known.get(number, set()) for number, of_layer in enumerate(kinds))

    def _chunks(
        self, counts: Sequence[int], starts: Sequence[int], decodes: Container[int]
    ) -> Iterator[tuple[int, int, int]]:
        """Yield (sequence, begin, end) for each forward that is not of `decodes`.

        A prompt chunk runs alone. It runs token by token if the model cannot continue from a state with several tokens.
        """
        for row, count in enumerate(counts):
            if row in decodes:
                continue
            if starts[row] and not self.takes_chunks:
                yield from ((row, place, place + 1) for place in range(count))
            else:
                yield row, 0, count


def turns(counts: Sequence[int]) -> list[list[int]]:
    """Return the rows of the first drafts, of the second drafts, and so on. `counts` has the rows of each sequence.

    >>> turns([1, 3, 2])
    [[2, 5], [3]]
    """
    begins = [end - count for end, count in zip(accumulate(counts), counts, strict=True)]
    rows = list(zip(begins, counts, strict=True))
    return [[begin + turn for begin, count in rows if turn < count] for turn in range(1, max(counts))]


def cut(tables: Tables, rows: Sequence[int], begin: int, ends: Sequence[int], counts: Sequence[int]) -> Tables:
    """Return the tables for a forward that computes only tokens `begin` to `ends[i]` of each sequence `rows[i]`."""
    first = tables.query_start_loc
    taken = list(zip(rows, ends, strict=True))
    lens = [tables.seq_lens[row] - counts[row] + end for row, end in taken]
    slots = np.concatenate([tables.slot_mapping[first[row] + begin : first[row] + end] for row, end in taken])
    starts = np.array([0, *accumulate(end - begin for end in ends)], np.int32)
    return Tables(tables.block_tables[list(rows)], np.array(lens, np.int32), slots, starts)


def rows_of(view: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """Return the states of slots: a view if the slots are contiguous, otherwise a copy."""
    if slots == list(range(slots[0], slots[0] + len(slots))):
        return view[slots[0] : slots[0] + len(slots)]
    return view[slots]


def store_rows(view: torch.Tensor, slots: list[int], states: torch.Tensor) -> None:
    """Write states to their slots, unless `states` is a view of these slots."""
    if states is not view and states.data_ptr() != view[slots[0]].data_ptr():
        view[slots] = states
