"""Answers in channels, as gpt-oss writes them: each thought, text and call of a tool is a message with a header.

<|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant<|channel|>final<|message|>TEXT<|return|>
<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pagepool.engine.grammar_check import NEXT
from pagepool.errors import RequestRejected
from pagepool.serve.tools import CallDeltas, special_tokens

__all__ = ["Channels", "has_channels", "stop_tokens", "with_thinking"]

MESSAGE, END = "<|message|>", "<|end|>"
TOKENS = {"<|start|>", "<|channel|>", "<|constrain|>", MESSAGE, END}
BEGINS = ("<|channel|>", " to=")  # of a header
ENDS = ("<|return|>", "<|call|>")  # of an answer
FUNCTION = re.compile(r"\bto=functions\.([^\s<]+)")
TEXT = re.compile(r"(?!.*\bto=).*<\|channel\|>(final|commentary)\b", re.DOTALL)


class Channels:
    """Splits an answer that arrives in pieces. The result does not depend on the cuts between the pieces.

    The channel `final` and a commentary without recipient are text. A commentary to a function is a call. All else
    are thoughts. A newline is put between two thoughts and between two texts. The channel `final`, or an answer without
    a header, go on to the end: they may spell special tokens.

    Parameters
    ----------
    finds_calls : bool
        Report calls. Otherwise they are thoughts.

    Examples
    --------
    >>> channels = Channels()
    >>> pieces = ("<|chan", "nel|>analysis<|message|>Well<|e", "nd|><|start|>assistant<|channel|>final<|message|>Yes")
    >>> [channels.add(piece) for piece in pieces], channels.flush()
    ([('', '', []), ('Well', '', []), ('', 'Yes', [])], ('', '', []))
    """

    def __init__(self, finds_calls: bool = False) -> None:
        self._finds_calls, self._held, self._state = finds_calls, "", "header"
        self._seen: set[str] = set()  # thought, text
        self._calls = CallDeltas()

    @property
    def is_complete(self) -> bool:
        """True if there are calls, and all of them have ended."""
        return self._calls.count > 0 and self._state == "after"

    def add(self, piece: str) -> tuple[str, str, list[dict[str, Any]]]:
        """Add a piece; return the thought and the text that are final now, and the new parts of calls."""
        self._held += piece
        found: dict[str, str] = {"thought": "", "text": ""}
        calls: list[dict[str, Any]] = []
        while self._step(found, calls):
            pass
        return found["thought"], found["text"], calls

    def flush(self) -> tuple[str, str, list[dict[str, Any]]]:
        """Return what was held back. Called at the end of the answer."""
        is_text = self._state == "text" or (self._state == "header" and not self._seen and not self._begins())
        held = "" if self._held.startswith(END) else self._take(len(self._held))
        return (held if self._state == "thought" else ""), (held if is_text else ""), []

    def _step(self, found: dict[str, str], calls: list[dict[str, Any]]) -> bool:
        """Read on. Return false if this needs more text."""
        held = self._held
        if self._state == "header":
            return self._read_header(found, calls)
        if self._state == "call":
            end = self._calls.end_of_arguments(held)
            self._calls.grow(self._take(len(held) if end < 0 else end), calls)
            self._state = "call" if end < 0 else "after"
            return end >= 0
        if self._state == "final":
            found["text"] += self._take(len(held))
            return False
        place = held.find(NEXT)
        size = place if place >= 0 else len(held) - _size_of_part(held)
        found[self._state] = found.get(self._state, "") + self._take(size)
        if place >= 0:
            self._state = "header"
            self._take(len(NEXT))
        return place >= 0

    def _read_header(self, found: dict[str, str], calls: list[dict[str, Any]]) -> bool:
        held = self._held
        place = held.find(MESSAGE)
        if not any(held.startswith(begin) or begin.startswith(held) for begin in BEGINS):
            self._enter("text", found)
            self._state = "final"
            return True
        if place < 0:
            return False
        header = self._take(place)
        self._take(len(MESSAGE))
        called = FUNCTION.search(header) if self._finds_calls else None
        if called is None:
            match = TEXT.match(header)
            self._enter("thought" if match is None else "text", found)
            self._state = "final" if match and match[1] == "final" else self._state
            return True
        calls.append(self._calls.begin(called[1]))
        self._state = "call"
        return True

    def _begins(self) -> bool:
        return self._held.startswith(BEGINS)

    def _enter(self, state: str, found: dict[str, str]) -> None:
        found[state] += "\n" if state in self._seen else ""
        self._state = state
        self._seen.add(state)

    def _take(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        return taken


def _size_of_part(text: str) -> int:
    """Return the size of the end of a text that may be a part of NEXT."""
    return next(size for size in range(len(NEXT) - 1, -1, -1) if text.endswith(NEXT[:size]))


def has_channels(tokenizer: Any) -> bool:
    """Return true if the chat template of a tokenizer writes messages in channels, with special tokens."""
    template = str(getattr(tokenizer, "chat_template", None))
    return "<|channel|>" in template and special_tokens(tokenizer).keys() >= TOKENS


def stop_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer in channels. A model's own list of stop tokens may lack them."""
    return frozenset(token for text, token in special_tokens(tokenizer).items() if text in ENDS)


def with_thinking(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages as gpt-oss's chat template reads them.

    Thoughts are `thinking`. A message with a call has no text, so that its text joins the thoughts. Raises
    `RequestRejected` if a message has several calls: the template writes the first one only.
    """
    found: list[Mapping[str, Any]] = []
    for number, message in enumerate(messages):
        thought, calls = message.get("reasoning_content"), message.get("tool_calls") or ()
        if len(calls) > 1:
            sentence = f"the chat template writes 1 call in a message, and messages[{number}] has {len(calls)}"
            raise RequestRejected(sentence)
        if message.get("role") == "assistant" and isinstance(thought, str) and thought:
            message = {name: value for name, value in message.items() if name != "reasoning_content"}
            message["thinking"] = thought
            if calls and message.get("content"):
                message |= {"thinking": f"{thought}\n{message['content']}", "content": ""}
        found.append(message)
    return found
