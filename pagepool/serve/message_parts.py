"""Split the text of a message into what the model thinks, its answer, and its calls of tools."""

from __future__ import annotations

from typing import Any

from pagepool.serve.reasoning import Reasoning
from pagepool.serve.tools import ToolCalls

__all__ = ["MessageParts"]


class MessageParts:
    """The parts of one message, which arrives in pieces. Each call returns what is new, as OpenAI's delta.

    Parameters
    ----------
    reasoning : Reasoning, optional
        Finds thoughts. Default: the whole text is the answer.
    calls : ToolCalls, optional
        Finds calls in the answer. Default: the whole answer is text.
    include_reasoning : bool
        Return the thoughts.

    Examples
    --------
    >>> parts = MessageParts(Reasoning())
    >>> parts.add("<think>Well"), parts.add("</think>\\nYes"), parts.end()
    ({'reasoning_content': 'Well'}, {'content': 'Yes'}, {})
    """

    def __init__(
        self, reasoning: Reasoning | None = None, calls: ToolCalls | None = None, include_reasoning: bool = True
    ) -> None:
        self._reasoning, self._calls, self._include_reasoning = reasoning, calls, include_reasoning

    @property
    def is_call(self) -> bool:
        """True if the message ends with complete calls."""
        return self._calls is not None and self._calls.is_complete

    def add(self, text: str) -> dict[str, Any]:
        """Add a piece of the text."""
        return self._delta(*(("", text) if self._reasoning is None else self._reasoning.add(text)))

    def end(self) -> dict[str, Any]:
        """Return what was held back. Called at the end of the text."""
        return self._delta(*(("", "") if self._reasoning is None else self._reasoning.flush()), is_end=True)

    def _delta(self, thought: str, answer: str, is_end: bool = False) -> dict[str, Any]:
        calls: list[dict[str, Any]] = []
        if self._calls is not None:
            answer, calls = self._calls.add(answer)
            answer += self._calls.flush() if is_end else ""
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
