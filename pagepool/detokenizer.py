"""The text of tokens as they come: whole characters only, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["Detokenizer"]

# A tokenizer may write a token differently at the beginning of a text: so many of the prompt's last ones go before.
CONTEXT = 6
REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no whole character


class Detokenizer:
    """Turns the tokens of one request into text, piece by piece.

    tokenizer  has `decode(ids, skip_special_tokens=True)`, as those of transformers; None: all text is empty
    prompt     the tokens before
    stop       strings that end the text

    A character that comes in several tokens is returned with its last one. Text that may be the beginning of a stop
    string is held back until that is decided.

    >>> class Letters:
    ...     def decode(self, ids, skip_special_tokens):
    ...         return "".join(map(chr, ids))
    >>> detokenizer = Detokenizer(Letters(), [], stop=("end",))
    >>> [detokenizer.add(ord(letter)) for letter in "been end"]
    ['b', '', 'e', '', 'en ', '', '', '']
    >>> detokenizer.stopped
    True
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: tuple[str, ...] = ()) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = stop
        self._held = ""
        # Tokens whose text is known, then those whose text is not complete; and the text of the first part.
        self._ids = list(prompt[-CONTEXT:]) if tokenizer is not None else []
        self._num_known = len(self._ids)
        self._known = self._decode(self._ids)

    def add(self, token: int) -> str:
        """Take the next token and return the text that is certain now; sets `stopped` when a stop string has come."""
        if self._tokenizer is None:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT) or len(text) < len(self._known):
            return ""  # a character is not complete
        new = text[len(self._known) :]
        self._ids = self._ids[self._num_known :]
        self._num_known = len(self._ids)
        self._known = self._decode(self._ids)
        return self._up_to_stop(new)

    def flush(self) -> str:
        """The text that was held back, when no more tokens come."""
        rest = self._decode(self._ids)[len(self._known) :] if self._tokenizer is not None else ""
        text = self._up_to_stop(rest) + self._held
        self._held, self._ids, self._num_known, self._known = "", [], 0, ""
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True) if ids else ""

    def _up_to_stop(self, new: str) -> str:
        """`new` behind what was held back, as far as it belongs to the text and no stop string can begin in it."""
        if not self._stop or self.stopped:
            return "" if self.stopped else new
        text = self._held + new
        found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = max(_beginning_at_end(text, stop) for stop in self._stop)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _beginning_at_end(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
