"""Translate requests of other APIs to requests for chat completions, and the answers back."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from pagepool.engine.generation import Generation, Token
from pagepool.serve.errors import RequestError, quoted
from pagepool.serve.fields import MAX_PARTS, check_count
from pagepool.serve.protocol import ChatAnswer

__all__ = ["Item", "Kinds", "TranslatedAnswer", "object_of", "parts_of", "renamed", "word_of"]

NOUNS: dict[Any, str] = {str: "a text", dict: "an object"}
Kinds = Mapping[str, Mapping[str, Any]]  # by type of part: the names and types of its values


def parts_of(place: str, content: Any, kinds: Kinds) -> list[dict[str, Any]]:
    """Check a content: a text, or a list of parts.

    Parameters
    ----------
    place : str
        Where it is in the body. It begins with the name of the field.
    content : object
        The value in the body.
    kinds : mapping
        The types of parts that are supported, with the names and types of their values. The first one is a text's.

    Returns
    -------
    list of dict
        The parts. A text is one part.

    Raises
    ------
    RequestError
        If the content has another form, or a part of another type.
    """
    name = re.match(r"\w*", place)[0]  # type: ignore[index]
    if isinstance(content, str):
        return [{"type": next(iter(kinds)), "text": content}]
    if not isinstance(content, list):
        raise RequestError(400, f"{place} must be a text or a list of parts, not {type(content).__name__}", param=name)
    check_count(name, content, MAX_PARTS, f"parts in {place}")
    for number, part in enumerate(content):
        kind = word_of(object_of(f"{place}[{number}]", part), "type")
        if kind not in kinds:
            sentence = f"{place}[{number}].type must be {' or '.join(kinds)}, not {quoted(kind)!r}"
            raise RequestError(400, sentence, "unsupported_parameter", name)
        for value, wanted in kinds[kind].items():
            if not isinstance(part.get(value), wanted):
                found = type(part.get(value)).__name__
                sentence = f"{place}[{number}].{value} must be {NOUNS[wanted]}, not {found}"
                raise RequestError(400, sentence, param=name)
    return content


def object_of(place: str, value: Any) -> dict[str, Any]:
    """Return a value that must be an object. Raises `RequestError`."""
    if not isinstance(value, dict):
        name = re.match(r"\w*", place)[0]  # type: ignore[index]
        raise RequestError(400, f"{place} must be an object, not {type(value).__name__}", param=name)
    return value


def word_of(found: Mapping[str, Any], name: str) -> str:
    """Return a text of an object. It is empty if the object does not have one."""
    value = found.get(name)
    return value if isinstance(value, str) else ""


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Replace names of a chat's fields by their names in another API, in each `RequestError` of the block."""
    try:
        yield
    except RequestError as error:
        # Other words of a sentence may be ordinary ones.
        found = re.sub(r"^\w+|\w+_\w+", lambda word: names.get(word[0], word[0]), error.message)
        param = None if error.param is None else names.get(error.param, error.param)
        raise RequestError(error.status, found, error.code, param) from error


@dataclass
class Item:
    """A part of an answer: a thought, a text or a call of a tool.

    Attributes
    ----------
    kind : {"thought", "text", "call"}
        What it is.
    index : int
        Its place in the answer.
    text : str
        Its text so far. For a call: the JSON of the arguments.
    call_id, name : str
        The id of a call, and the name of its function.
    id : str
        A name that no other item has.
    """

    kind: str
    index: int
    text: str = ""
    call_id: str = ""
    name: str = ""
    id: str = field(default_factory=lambda: uuid4().hex)


class TranslatedAnswer(ChatAnswer):
    """Builds an answer of another API from the objects of a chat completion with one choice.

    A complete message is read like a delta that has all of it. So a stream and a complete answer have the same items.
    """

    end = ""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.items: list[Item] = []
        self.reason: str | None = None
        self.stop_string: str | None = None

    @abstractmethod
    def begun(self, num_prompt_tokens: int) -> Iterator[dict[str, Any]]:
        """Yield the events at the begin."""

    @abstractmethod
    def opened(self, item: Item) -> Iterator[dict[str, Any]]:
        """Yield the events of a new item, which is empty."""

    @abstractmethod
    def grown(self, item: Item, text: str) -> Iterator[dict[str, Any]]:
        """Yield the events of new text of an item."""

    @abstractmethod
    def closed(self, item: Item) -> Iterator[dict[str, Any]]:
        """Yield the events of a complete item."""

    @abstractmethod
    def ended(self, usage: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events at the end. `usage` is a chat's."""

    @abstractmethod
    def failed(self, error: RequestError) -> dict[str, Any]:
        """Return the event of an error."""

    @abstractmethod
    def complete(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the complete answer. `usage` is a chat's."""

    def all(self, generations: list[Generation], tokens: list[list[Token]]) -> dict[str, Any]:
        found = super().all(generations, tokens)
        self.stop_string = generations[0].stop_string
        (choice,) = found["choices"]
        for _ in self._changes(choice["message"], choice["finish_reason"]):
            pass
        return self.complete(found["usage"])

    def first(self, index: int, generation: Generation) -> dict[str, Any]:
        return {"begun": generation.num_prompt_tokens}

    def total(self, generations: list[Generation]) -> dict[str, Any]:
        self.stop_string = generations[0].stop_string
        return super().total(generations)

    def event(self, data: dict[str, Any]) -> str:
        if "begun" in data:
            events = self.begun(data["begun"])
        elif data["choices"]:
            (choice,) = data["choices"]
            events = self._changes(choice["delta"], choice["finish_reason"])
        else:
            events = self.ended(data["usage"])
        return "".join(f"event: {one['type']}\n{super(TranslatedAnswer, self).event(one)}" for one in events)

    def event_of(self, error: RequestError) -> str:
        return f"event: error\n{super().event(self.failed(error))}"

    def _changes(self, delta: Mapping[str, Any], reason: str | None) -> Iterator[dict[str, Any]]:
        """Yield the events of a delta."""
        names = {"reasoning_content": "thought", "content": "text"}
        parts: list[tuple[str, Any]] = [(kind, delta[name]) for name, kind in names.items() if delta.get(name)]
        parts += [("call", call) for call in delta.get("tool_calls") or ()]
        for kind, part in parts:
            text = part["function"]["arguments"] if kind == "call" else part
            if not self.items or kind != self.items[-1].kind or (kind == "call" and "id" in part):
                if self.items:
                    yield from self.closed(self.items[-1])
                item = Item(kind, len(self.items))
                if kind == "call":
                    item.call_id, item.name = part["id"], part["function"]["name"]
                self.items.append(item)
                yield from self.opened(item)
            if text:
                self.items[-1].text += text
                yield from self.grown(self.items[-1], text)
        if reason is not None:
            self.reason = reason
            if self.items:
                yield from self.closed(self.items[-1])
