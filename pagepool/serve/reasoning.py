"""Separate what a model thinks, between `<think>` and `</think>`, from its answer."""

from __future__ import annotations

from typing import Any

__all__ = ["CLOSE", "Reasoning", "begins_open", "thinks"]

OPEN, CLOSE = "<think>", "</think>"
TAIL = 16  # tokens of the prompt that are decoded to find an open `<think>`


class Reasoning:
    """Splits a text that arrives in pieces. The result does not depend on the cuts between the pieces.

    A text that begins with `<think>` after white space thinks up to `</think>`; any other text is all answer. The tags
    and the newlines beside them are dropped: chat templates write them again. Text that may be a part of a tag is held
    back until this is decided.

    Parameters
    ----------
    is_open : bool
        The prompt ends with `<think>`, so the text begins inside.

    Examples
    --------
    >>> reasoning = Reasoning()
    >>> [reasoning.add(piece) for piece in ("<thi", "nk>\\nwell", "\\n</thin", "k>\\n\\nyes")], reasoning.flush()
    ([('', ''), ('well', ''), ('', ''), ('', 'yes')], ('', ''))
    """

    def __init__(self, is_open: bool = False) -> None:
        self._held, self._state = "", "thinking" if is_open else "begin"
        self._skips = is_open  # newlines behind a tag

    def add(self, text: str) -> tuple[str, str]:
        """Add a piece; return what is thought and answered in the text that is final now."""
        self._held += text
        thought = answered = ""
        if self._state == "begin":
            begun = self._held.lstrip()
            if begun.startswith(OPEN):
                self._enter("thinking", begun[len(OPEN) :])
            elif not OPEN.startswith(begun):
                self._enter("answer", self._held, skips=False)
        if self._state == "thinking":
            self._skip()
            end = self._held.find(CLOSE)
            if end >= 0:
                thought, rest = self._held[:end].rstrip("\n"), self._held[end + len(CLOSE) :]
                self._enter("answer", rest)
            else:
                part = next(size for size in range(len(CLOSE) - 1, -1, -1) if self._held.endswith(CLOSE[:size]))
                thought = self._held[: len(self._held) - part].rstrip("\n")
                self._held = self._held[len(thought) :]
        if self._state == "answer":
            self._skip()
            answered, self._held = self._held, ""
        return thought, answered

    def flush(self) -> tuple[str, str]:
        """Return the text that was held back. Called at the end of the text."""
        held, self._held = self._held, ""
        return (held, "") if self._state == "thinking" else ("", held)

    def _enter(self, state: str, rest: str, skips: bool = True) -> None:
        self._state, self._held, self._skips = state, rest, skips

    def _skip(self) -> None:
        if self._skips:
            self._held = self._held.lstrip("\n")
            self._skips = not self._held


def thinks(tokenizer: Any) -> bool:
    """Return true if the chat template of a tokenizer knows what models think."""
    return CLOSE in str(getattr(tokenizer, "chat_template", None))


def begins_open(tokenizer: Any, prompt: list[int]) -> bool:
    """Return true if a prompt ends with `<think>`."""
    end: str = tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False)
    return end.rstrip().endswith(OPEN)
