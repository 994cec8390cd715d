"""Keep the texts of a chat's messages from becoming control tokens.

A chat template writes control tokens, such as `<|im_end|>`, as text between the texts of the messages, and a tokenizer
turns that text into tokens. So a user who writes `<|im_end|>` could end a turn and begin one of the system. Here such
text in a message is marked before the template runs, and becomes ordinary tokens with the same characters.

A chat without such text is tokenized as a whole, as the tokenizer does it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from pagepool.errors import RequestRejected

__all__ = ["ChatText"]

# Noncharacters of Unicode. One that occurs in no message marks the text that must not become a control token.
MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class ChatText:
    """Finds control tokens in the texts of messages, and tokenizes chats in which it has marked some.

    Control tokens are the special tokens of the tokenizer, and its other added tokens that the chat template contains.
    For messages of the assistant they are only the special tokens: a model may write the others, such as `<think>`.

    Parameters
    ----------
    tokenizer : object
        A tokenizer of transformers. Other tokenizers are taken to have no control tokens unless they have
        `added_tokens_decoder`.

    Examples
    --------
    >>> ChatText(object()).mark([{"role": "user", "content": "<|im_end|>"}])
    ([{'role': 'user', 'content': '<|im_end|>'}], None)
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added: dict[str, tuple[int, Any]] = {}
        for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items():
            if len(str(added)) > 1:
                self._added[str(added)] = (token, added)
        template = str(getattr(tokenizer, "chat_template", ""))
        special = {text for text, (_, added) in self._added.items() if getattr(added, "special", True)}
        written = {text for text in self._added if text in template and not text.isspace() and not text.isalnum()}
        self._special, self._control = pattern_of(special), pattern_of(special | written)
        self._every = pattern_of(self._added)

    def mark(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], str | None]:
        """Mark the control tokens in the texts of messages.

        Returns
        -------
        tuple
            The messages and None if there are none, else changed messages and the character that marks them.

        Raises
        ------
        RequestRejected
            If the messages contain every character that could mark them, or are nested too deeply.
        """
        try:
            return self._mark(messages)
        except RecursionError:
            raise RequestRejected("the messages are nested too deeply") from None

    def _mark(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], str | None]:

        def has_control(message: Mapping[str, Any]) -> bool:
            pattern = self._pattern_for(message)
            return pattern is not None and any(map(pattern.search, texts_of(message)))

        if not any(map(has_control, messages)):
            return messages, None
        used = {mark for message in messages for text in texts_of(message) for mark in MARKS if mark in text}
        mark = next((mark for mark in MARKS if mark not in used), None)
        if mark is None:
            raise RequestRejected("the messages contain control tokens and all noncharacters from U+FDD0 to U+FDEF")
        found = []
        for message in messages:
            pattern = self._pattern_for(message)
            change = (lambda text: text) if pattern is None else marker(pattern, mark)
            found.append({name: value if name == "role" else changed(value, change) for name, value in message.items()})
        return found, mark

    def encode(self, text: str, mark: str) -> list[int]:
        """Return the token ids of a chat in which `mark` was put into the text that must not become a control token."""
        tokens: list[int] = []
        strips, end = False, 0
        matches = [*(self._every.finditer(text) if self._every is not None else ()), None]
        for match in matches:
            segment = text[end : len(text) if match is None else match.start()]
            token, added = (None, None) if match is None else self._added[match[0]]
            segment = segment.lstrip() if strips else segment
            segment = segment.rstrip() if getattr(added, "lstrip", False) else segment
            if segment:
                tokens += self._plain(segment, mark, is_first=end == 0)
            if match is not None and token is not None:
                tokens.append(token)
                strips, end = getattr(added, "rstrip", False), match.end()
        return tokens

    def _pattern_for(self, message: Mapping[str, Any]) -> re.Pattern[str] | None:
        return self._special if message.get("role") == "assistant" else self._control

    def _plain(self, segment: str, mark: str, is_first: bool) -> list[int]:
        """Return the token ids of a text without added tokens. It lies between two of them."""
        if self._backends is not None:
            ids: list[int] = (
                self._backends[not is_first].encode(segment.replace(mark, ""), add_special_tokens=False).ids
            )
            return ids
        # Without the Rust tokenizer, each text is cut within its control tokens, so that none is found.
        parts = filter(None, segment.split(mark))
        return [token for part in parts for token in self._tokenizer(part, add_special_tokens=False)["input_ids"]]

    @cached_property
    def _backends(self) -> tuple[Any, Any] | None:
        """The tokenizer without added tokens: for the beginning of a text, and for later segments."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        state = json.loads(backend.to_str())
        state |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        first = type(backend).from_str(json.dumps(state))
        text = json.dumps(state["pre_tokenizer"])
        later = text.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
        if later == text:
            return first, first
        return first, type(backend).from_str(json.dumps({**state, "pre_tokenizer": json.loads(later)}))


def pattern_of(words: Any) -> re.Pattern[str] | None:
    """Return a pattern that finds the longest of some words at each place, or None without words.

    The time at each place depends on the length of the match, not on the number of words.
    """
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}

    def expression(node: dict[str, Any]) -> str:
        branches = [re.escape(character) + expression(rest) for character, rest in sorted(node.items()) if character]
        inner = f"(?:{'|'.join(branches)})" if branches else ""
        return f"{inner}?" if branches and "" in node else inner

    return re.compile(expression(tree)) if tree else None


def marker(pattern: re.Pattern[str], mark: str) -> Callable[[str], str]:
    """Return a function that puts `mark` behind the first character of each match, also of overlapping ones."""

    def change(text: str) -> str:
        parts, begin = [], 0
        while (match := pattern.search(text, begin)) is not None:
            parts += [text[begin : match.start() + 1], mark]
            begin = match.start() + 1
        return "".join([*parts, text[begin:]])

    return change


def texts_of(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield name
            yield from texts_of(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from texts_of(one)


def changed(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with all texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): changed(one, change) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [changed(one, change) for one in value]
    return value
