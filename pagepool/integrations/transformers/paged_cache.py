"""PagedCache: the cache object for transformers' `generate`, with a sequence of pages for each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from pagepool.integrations.transformers.runner import ModelRunner
from pagepool.memory.hybrid import HybridSequence
from pagepool.prefix.cache import PrefixCache

__all__ = ["PagedCache"]

KEPT = 256  # number of tokens that can be cropped from a sequence with windows, for drafts in `generate`


class Row:
    """One row of a batch: its sequence, and its tokens without padding."""

    __slots__ = ("is_right", "sequence", "tokens")

    def __init__(self, sequence: Any, tokens: list[int], is_right: bool = True) -> None:
        self.sequence = sequence
        self.tokens = tokens
        self.is_right = is_right  # false after NaN or an infinite largest logit: its pages may have NaN

    def fork(self) -> Row:
        """Return a new row with the same tokens, on the same pages."""
        return Row(self.sequence.fork(), list(self.tokens), self.is_right)


def says_something(value: Any) -> bool:
    """Return whether an argument of a forward is set: not None, not False, and not a dict of such values."""
    return (
        any(map(says_something, value.values()))
        if isinstance(value, dict)
        else value is not None and value is not False
    )


class PagedCache(Cache):
    """The cache of transformers' `generate`: rows of a batch, each with a sequence of pages.

    Padding takes no slots. Rows with equal tokens are computed once, and beams share blocks until their tokens differ.
    `close` frees the memory, and so does garbage collection of the cache.

    Parameters
    ----------
    runner : ModelRunner
        The runner that owns the memory.
    prefix_cache : PrefixCache or None
        A `PrefixCache` over the runner's pool. Its unused blocks are evicted if the rows need them. For models without
        windows and recurrent states, rows reuse cached blocks of their tokens, and `close` caches their full blocks.
    """

    def __init__(self, runner: ModelRunner, prefix_cache: PrefixCache | None = None) -> None:
        super().__init__(layers=[])
        self._runner = runner
        self._prefix_cache = prefix_cache
        self._shares = prefix_cache is not None and runner.groups is None and runner.states is None
        self._rows: list[Row] = []
        self._width = 0  # tokens of each row, padding included
        self._keep = 0
        self._epoch = 0  # `PrefixCache.epoch` before the first forward

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        logits_to_keep: int = 0,
        inputs_embeds: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = True,
        use_cache: bool | None = True,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Run one forward of the model for `generate`.

        Parameters
        ----------
        input_ids : torch.Tensor
            int64 (batch, tokens): the new tokens of each row.
        attention_mask : torch.Tensor or None
            (batch, cached tokens + new tokens): 0 marks padding, which must be on the left.
        position_ids : torch.Tensor or None
            (batch, tokens), or (3, batch, tokens) for multimodal models. Must count up from 0 without the padding.
        logits_to_keep : int
            Number of last tokens to return logits for. 0: all tokens.
        return_dict, use_cache
            Ignored.

        Returns
        -------
        CausalLMOutputWithPast
            `logits` has the shape (batch, kept tokens, vocab_size). Logits of padding are zeros.

        Raises
        ------
        ValueError
            Padding is not on the left, positions do not match the tokens, or the call asks for embeddings, images,
            attention weights or hidden states.
        """
        if input_ids is None or inputs_embeds is not None:
            raise ValueError("generation over pages begins with input_ids, not with inputs_embeds")
        unknown = [name for name, value in others.items() if says_something(value)]
        if unknown:
            raise ValueError(f"generation over pages takes tokens, and no {', '.join(unknown)}")
        if output_attentions or output_hidden_states:
            raise ValueError("generation over pages gives logits, and neither attentions nor hidden states")
        batch, count = input_ids.shape
        if self._rows and batch != len(self._rows):
            raise ValueError(f"input_ids has {batch} rows, and the cache has {len(self._rows)}")
        counts = self._count_tokens(attention_mask, batch, count)
        self._check_positions(position_ids, counts, count)
        tokens = [row[count - own :] for row, own in zip(input_ids.tolist(), counts, strict=True)]
        keep = [min(own, logits_to_keep or own) for own in counts]
        if not self._rows:
            logits = self._begin(tokens, keep)
        else:
            logits = self._step(self._rows, tokens, keep)
        self._width += count
        out = logits[0].new_zeros((batch, min(logits_to_keep or count, count), self._runner.vocab_size))
        for row, of_row in enumerate(logits):
            out[row, out.shape[1] - of_row.shape[0] :] = of_row
        return CausalLMOutputWithPast(logits=out, cache=self)

    def _count_tokens(self, mask: torch.Tensor | None, batch: int, count: int) -> list[int]:
        """Return the number of new tokens of each row, without padding. ValueError unless padding is on the left."""
        if mask is None:
            return [count] * batch
        if tuple(mask.shape) != (batch, self._width + count):
            shape = tuple(mask.shape)
            raise ValueError(f"attention_mask must have the shape {(batch, self._width + count)}, not {shape}")
        seen = mask.bool()
        if bool((seen[:, :-1] & ~seen[:, 1:]).any()):
            raise ValueError("attention_mask must have its zeros on the left: generation over pages needs left padding")
        counts: list[int] = seen[:, self._width :].sum(1).tolist()
        return counts

    def _check_positions(self, positions: torch.Tensor | None, counts: Sequence[int], count: int) -> None:
        if positions is None:
            return
        starts = [row.sequence.len for row in self._rows] or [0] * len(counts)
        for axis in positions if positions.ndim == 3 else [positions]:  # time, height and width: equal for text
            for row, (start, own) in enumerate(zip(starts, counts, strict=True)):
                of_row = axis[row if axis.shape[0] > 1 else 0, count - own :].tolist()
                if of_row != list(range(start, start + own)):
                    raise ValueError(
                        f"position_ids of row {row} are {of_row[0]} to {of_row[-1]}, and its tokens are numbers "
                        f"{start} to {start + own - 1}: pages have no other positions"
                    )

    def _begin(self, tokens: list[list[int]], keep: list[int]) -> list[torch.Tensor]:
        """Run the first forward. Rows with equal tokens are computed once and forked."""
        first: dict[tuple[int, ...], int] = {}
        places = [first.setdefault(tuple(row), len(first)) for row in tokens]
        firsts = [places.index(place) for place in range(len(first))]
        self._rows = [Row(self._runner.new_sequence(number + 1), []) for number in range(len(firsts))]
        self._epoch = 0 if self._prefix_cache is None else self._prefix_cache.epoch
        self.activate_past_recording(self._keep)
        rest = [self._adopt(row, tokens[number], keep[number]) for row, number in zip(self._rows, firsts, strict=True)]
        logits = self._step(self._rows, rest, [keep[number] for number in firsts])
        self._take(places)
        return [logits[place] for place in places]

    def _adopt(self, row: Row, tokens: list[int], keep: int) -> list[int]:
        """Start a row with its cached prefix, which may end within a block. Return the remaining tokens."""
        if self._prefix_cache is None or not self._shares:
            return tokens
        with self._prefix_cache.match_tokens(tokens[: len(tokens) - keep]) as match:
            count: int = match.num_tokens
            row.sequence.adopt(match)
        row.tokens = tokens[:count]
        return tokens[count:]

    def _step(self, rows: list[Row], tokens: list[list[int]], keep: list[int]) -> list[torch.Tensor]:
        """Compute tokens. Return for each row the logits of its last `keep` tokens."""
        self._make_room(rows, tokens)
        fed = [number for number, new in enumerate(tokens) if new]
        try:
            for number in fed:
                rows[number].sequence.append(len(tokens[number]))
            logits = self._runner.forward(
                [tokens[number] for number in fed],
                [rows[number].sequence for number in fed],
                [keep[number] for number in fed],
            )
        except BaseException:
            self.close()  # some rows have slots for tokens without computed keys and values
            raise
        parts = list(logits.split(keep))
        for row, new, part in zip(rows, tokens, parts, strict=True):
            row.tokens += new
            row.is_right &= not new or bool(part[-1].max().isfinite())
        return parts

    def _make_room(self, rows: list[Row], tokens: list[list[int]]) -> None:
        """Evict cached blocks until the new tokens have room. A row may need one more, to copy a shared block."""
        if self._prefix_cache is None:
            return
        size, allocator = self._prefix_cache.block_size, self._prefix_cache.allocator
        short = -allocator.free_count
        for row, new in zip(rows, tokens, strict=True):
            for table in getattr(row.sequence, "kv", [row.sequence]):
                short += -(-(table.len + len(new)) // size) - -(-table.len // size) + (table.len % size > 0)
        if short > 0:
            self._prefix_cache.evict(short)

    def _take(self, indices: list[int]) -> None:
        """Replace row i by row `indices[i]`. Rows that occur more than once are forked, and unused rows are closed."""
        rows = self._rows
        for number in set(range(len(rows))) - set(indices):
            rows[number].sequence.close()
        taken: set[int] = set()
        self._rows = []
        for number in indices:
            self._rows.append(rows[number].fork() if number in taken else rows[number])
            taken.add(number)

    def close(self) -> None:
        """Cache full blocks in the prefix cache and free the rest. A second call does nothing.

        If the model returned NaN for a row, the cache forgets the blocks that the row has read or written.
        """
        rows, self._rows = self._rows, []
        for row in rows:
            if self._prefix_cache is not None and self._shares:
                if row.is_right:
                    self._prefix_cache.cache_blocks(row.tokens, row.sequence.blocks, epoch=self._epoch)
                else:
                    self._prefix_cache.discard(row.sequence.blocks)
            row.sequence.close()

    def reset(self) -> None:
        """Close all rows, so that the cache can be used for another batch."""
        self.close()
        self._width = 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace row i by row `beam_idx[i]`. Beams share blocks until their tokens differ."""
        self._take(beam_idx.tolist())

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Replace each row by `repeats` rows with the same tokens."""
        self._take([row for row in range(len(self._rows)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of each row, which were drafts. ValueError if positive."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be 0 or less, not {tokens_to_remove}")
        if not tokens_to_remove:
            return
        for row in self._rows:
            row.sequence.truncate(row.sequence.len + tokens_to_remove)
            del row.tokens[tokens_to_remove:]
        self._width += tokens_to_remove

    def activate_past_recording(self, keep: int = KEPT) -> None:
        """Keep the blocks of the last `keep` tokens, even outside of the window, so that `crop` works for them."""
        self._keep = keep
        for row in self._rows:
            if isinstance(row.sequence, HybridSequence):
                row.sequence.keep = keep

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens of each row, including padding."""
        return self._width

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: the length is unlimited."""
        return -1

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` works. Recurrent states cannot be cropped."""
        return self._runner.states is None

    @property
    def is_linear(self) -> list[bool]:
        """One entry that represents all layers: False, because the cache has a length, which `generate` asks for."""
        return [False]
