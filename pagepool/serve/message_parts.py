"""Split the text of a message into what the model thinks, its answer, and its calls of tools."""

from __future__ import annotations

from typing import Any

from pagepool.serve.channels import Channels
from pagepool.serve.reasoning import Reasoning
from pagepool.serve.tools import ToolCalls

__all__ = ["MessageParts", "Tags"]


class Tags:
    """Splits an answer with tags: thoughts in `<think>`, and calls in the rest. The methods are those of `Channels`."""

    def __init__(self, reasoning: Reasoning | None = None, calls: ToolCalls | None = None) -> None:
        self._reasoning, self._calls = reasoning, calls

    @property
    def is_complete(self) -> bool:
        return self._calls is not None and self._calls.is_complete

    def add(self, piece: str) -> tuple[str, str, list[dict[str, Any]]]:
        thought, answer = ("", piece) if self._reasoning is None else self._reasoning.add(piece)
        return (thought, answer, []) if self._calls is None else (thought, *self._calls.add(answer))

    def flush(self) -> tuple[str, str, list[dict[str, Any]]]:
        thought, answer = ("", "") if self._reasoning is None else self._reasoning.flush()
        if self._calls is None:
            return thought, answer, []
        answer, calls = self._calls.add(answer)
        return thought, answer + self._calls.flush(), calls


class MessageParts:
    """The parts of one message, which arrives in pieces. Each call returns what is new, as OpenAI's delta.

    Parameters
    ----------
    splitter : Tags or Channels, optional
        Finds thoughts and calls. Default: the whole message is text.
    include_reasoning : bool
        Return the thoughts.

    Examples
    --------
    >>> parts = MessageParts(Tags(Reasoning()))
    >>> parts.add("<think>Well"), parts.add("</think>\\nYes"), parts.end()
    ({'reasoning_content': 'Well'}, {'content': 'Yes'}, {})
    """

    def __init__(self, splitter: Tags | Channels | None = None, include_reasoning: bool = True) -> None:
        self._splitter, self._include_reasoning = splitter or Tags(), include_reasoning

    @property
    def is_call(self) -> bool:
        """True if the message ends with complete calls."""
        return self._splitter.is_complete

    def add(self, text: str) -> dict[str, Any]:
        """Add a piece of the text."""
        return self._delta(*self._splitter.add(text))

    def end(self) -> dict[str, Any]:
        """Return what was held back. Called at the end of the text."""
        return self._delta(*self._splitter.flush())

    def _delta(self, thought: str, answer: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        thought = thought if self._include_reasoning else ""
        parts = {"reasoning_content": thought, "content": answer, "tool_calls": calls}
        return {name: part for name, part in parts.items() if part}

    def whole(self, text: str) -> dict[str, Any]:
        """Return the message with this text, as OpenAI's message."""
        first, last = self.add(text), self.end()
        texts = {name: first.get(name, "") + last.get(name, "") for name in ("content", "reasoning_content")}
        message: dict[str, Any] = {"role": "assistant", "content": texts["content"], "refusal": None}
        if texts["reasoning_content"]:
            message["reasoning_content"] = texts["reasoning_content"]
        calls: list[dict[str, Any]] = []
        for call in (*first.get("tool_calls", ()), *last.get("tool_calls", ())):
            if call["index"] == len(calls):
                calls.append({name: value for name, value in call.items() if name != "index"})
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        return message
