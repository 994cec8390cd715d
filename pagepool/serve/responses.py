"""OpenAI's Responses API without stored state: its requests as requests for a chat completion, and the answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pagepool.serve.errors import RequestError, error_object, quoted
from pagepool.serve.fields import RESPONSES, read_fields
from pagepool.serve.protocol import Request, read_request, required
from pagepool.serve.translation import Item, Kinds, TranslatedAnswer, object_of, parts_of, renamed, word_of

__all__ = ["ResponsesAnswer", "read_response"]

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
INPUT: Kinds = {"input_text": {"text": str}}
CONTENT: Kinds = {**INPUT, "output_text": {"text": str}}
THOUGHT: Kinds = {"reasoning_text": {"text": str}}
# Codex declares these with every request. A model that is not told of them works without.
LEFT_OUT = ("custom", "image_generation", "local_shell", "namespace", "tool_search", "web_search")
# The answer repeats these fields as they were given.
REPEATED = ("instructions", "metadata", "reasoning", "text", "tool_choice", "tools")
MAX_DEPTH = 100  # levels of objects and lists in a field that is repeated
PREFIXES = {"thought": "rs_", "text": "msg_", "call": "fc_"}
# Names of a chat's fields, in errors.
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "chat_template_kwargs": "reasoning",
}
SAME = (  # fields that a chat has too
    *("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty"),
    *("priority", "cache_salt", "parallel_tool_calls"),
)


def read_response(body: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Request:
    """Check the body of a request for a response, like `read_request`. Raises `RequestError`."""
    found = read_fields(body, RESPONSES)
    chat: dict[str, Any] = {"messages": _messages(found), "stream_options": {"include_usage": True}}
    chat |= {name: found[name] for name in SAME if name in found}
    if "max_output_tokens" in found:
        chat["max_completion_tokens"] = found["max_output_tokens"]
    effort = word_of(found.get("reasoning", {}), "effort")
    variables: dict[str, Any] = {"reasoning_effort": effort} if effort else {}
    if effort == "none":
        variables = {"enable_thinking": False}
    chat["chat_template_kwargs"] = {**variables, **found.get("chat_template_kwargs", {})}
    if form := found.get("text", {}).get("format"):
        kind = word_of(object_of("text.format", form), "type")
        schema = {"json_schema": {"schema": form.get("schema")}} if kind == "json_schema" else {}
        chat["response_format"] = {"type": kind, **schema}
    if "tools" in found:
        tools = [_tool(number, tool) for number, tool in enumerate(found["tools"])]
        chat["tools"] = [tool for tool in tools if tool is not None]
    if choice := found.get("tool_choice"):
        if isinstance(choice, dict):
            if word_of(choice, "type") != "function":
                raise RequestError(400, "tool_choice.type must be function", "unsupported_parameter", "tool_choice")
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = choice
    with renamed(NAMES):
        request = read_request(chat, True, defaults)
    request.prompt_field = "input"
    request.repeated = {name: body[name] for name in REPEATED if body.get(name) is not None}
    for name, value in request.repeated.items():
        _check_depth(name, value)
    if request.structured_field is not None:
        request.structured_field = NAMES.get(request.structured_field, request.structured_field)
    return request


def _check_depth(name: str, value: Any) -> None:
    """Raise `RequestError` if `value` is nested so deeply that the encoder of the answer could fail."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [one for each in level if isinstance(each, dict | list) for one in _inside(each)]
    if level:
        raise RequestError(400, f"{name} is nested too deeply: it may have at most {MAX_DEPTH} levels", param=name)


def _inside(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _messages(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat. Items of the assistant that follow each other are one message."""
    given = required(found, "input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages: list[dict[str, Any]] = []
    if instructions := found.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    for number, item in enumerate(items):
        place = f"input[{number}]"
        kind = word_of(object_of(place, item), "type") or "message"
        if kind not in READERS:
            sentence = f"{place}.type must be {' or '.join(READERS)}, not {quoted(kind)!r}"
            if kind == "item_reference":
                sentence = f"{place} refers to a stored item, but the server stores none: send the item itself"
            raise RequestError(400, sentence, "unsupported_parameter", "input")
        message = READERS[kind](place, item)
        last = messages[-1] if messages else message
        # A message is a thought, a text and calls, in this order; each of them may be missing.
        begins = "reasoning_content" in message or (message["content"] and (last["content"] or "tool_calls" in last))
        if begins or not last["role"] == message["role"] == "assistant" or last is message:
            messages.append(message)
            continue
        last["content"] += message["content"]
        if calls := message.get("tool_calls"):
            last.setdefault("tool_calls", []).extend(calls)
    return messages


def _message(place: str, item: dict[str, Any]) -> dict[str, Any]:
    role = word_of(item, "role")
    if role not in ROLES:
        raise RequestError(400, f"{place}.role must be {' or '.join(ROLES)}, not {quoted(role)!r}", param="input")
    return {"role": ROLES[role], "content": _text(f"{place}.content", item.get("content"), CONTENT)}


def _reasoning(place: str, item: dict[str, Any]) -> dict[str, Any]:
    text = _text(f"{place}.content", item.get("content") or [], THOUGHT)
    return {"role": "assistant", "content": "", "reasoning_content": text}


def _call(place: str, item: dict[str, Any]) -> dict[str, Any]:
    function = {name: _word(place, item, name) for name in ("name", "arguments")}
    call = {"id": _word(place, item, "call_id"), "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _output(place: str, item: dict[str, Any]) -> dict[str, Any]:
    text = _text(f"{place}.output", item.get("output"), INPUT)
    return {"role": "tool", "tool_call_id": _word(place, item, "call_id"), "content": text}


READERS = {"message": _message, "reasoning": _reasoning, "function_call": _call, "function_call_output": _output}


def _text(place: str, content: Any, kinds: Kinds) -> str:
    return "".join(part["text"] for part in parts_of(place, content, kinds))


def _word(place: str, item: dict[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(400, f"{place}.{name} must be a text, not {type(value).__name__}", param="input")
    return value


def _tool(number: int, tool: Any) -> dict[str, Any] | None:
    """Return a tool of a chat, or None for one that is left out."""
    kind = word_of(object_of(f"tools[{number}]", tool), "type")
    if kind in LEFT_OUT:
        return None
    if kind != "function":
        sentence = f"tools[{number}].type must be function, not {quoted(kind)!r}: the server has no tools of its own"
        raise RequestError(400, sentence, "unsupported_parameter", "tools")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


class ResponsesAnswer(TranslatedAnswer):
    """Builds the objects that answer a request for a response. The events of a stream are numbered."""

    prefix = "resp_"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._count = 0

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._count += 1
        return {"type": kind, "sequence_number": self._count - 1, **fields}

    def begun(self, num_prompt_tokens: int) -> Iterator[dict[str, Any]]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress", None))

    def opened(self, item: Item) -> Iterator[dict[str, Any]]:
        shown = _item(item, "in_progress", content=[])
        yield self._event("response.output_item.added", output_index=item.index, item=shown)
        if item.kind != "call":
            yield self._event("response.content_part.added", **_place(item), part=_part(item))

    def grown(self, item: Item, text: str) -> Iterator[dict[str, Any]]:
        yield self._event(f"{_name(item)}.delta", **_place(item), delta=text, **_logprobs(item))

    def closed(self, item: Item) -> Iterator[dict[str, Any]]:
        text = {"arguments" if item.kind == "call" else "text": item.text}
        yield self._event(f"{_name(item)}.done", **_place(item), **text, **_logprobs(item))
        if item.kind != "call":
            yield self._event("response.content_part.done", **_place(item), part=_part(item))
        shown = _item(item, self._status if item is self.items[-1] else "completed")
        yield self._event("response.output_item.done", output_index=item.index, item=shown)

    def ended(self, usage: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield self._event(f"response.{self._status}", response=self.complete(usage))

    def failed(self, error: RequestError) -> dict[str, Any]:
        found = error_object(error)  # clients read it at either place
        return self._event("error", code=error.code, message=error.message, param=error.param, **found)

    def complete(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._response(self._status, usage)

    @property
    def _status(self) -> str:
        return "incomplete" if self.reason == "length" else "completed"

    def _response(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        common, request = self._common, self._request
        last = len(self.items) - 1
        output = [_item(item, status if item.index == last else "completed") for item in self.items]
        return {
            "id": common["id"],
            "object": "response",
            "created_at": common["created"],
            "status": status,
            "model": common["model"],
            "output": output,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": None if usage is None else _usage(usage),
            "instructions": None,
            "metadata": {},
            "max_output_tokens": request.params.max_new_tokens,
            "temperature": request.params.temperature,
            "top_p": request.params.top_p,
            "tools": [],
            "tool_choice": request.tool_choice,
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            **request.repeated,
        }


def _name(item: Item) -> str:
    names = {"thought": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
    return f"response.{names[item.kind]}"


def _place(item: Item) -> dict[str, Any]:
    found = {"item_id": PREFIXES[item.kind] + item.id, "output_index": item.index}
    return found if item.kind == "call" else {**found, "content_index": 0}


def _logprobs(item: Item) -> dict[str, Any]:
    return {"logprobs": []} if item.kind == "text" else {}


def _part(item: Item) -> dict[str, Any]:
    if item.kind == "thought":
        return {"type": "reasoning_text", "text": item.text}
    return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": []}


def _item(item: Item, status: str, content: list[Any] | None = None) -> dict[str, Any]:
    """Return an item of the output. `content` replaces its own."""
    found: dict[str, Any] = {"id": PREFIXES[item.kind] + item.id, "status": status}
    if item.kind == "call":
        called = {"call_id": item.call_id, "name": item.name, "arguments": item.text}
        return {**found, "type": "function_call", **called}
    found["content"] = [_part(item)] if content is None else content
    if item.kind == "thought":
        return {**found, "type": "reasoning", "summary": []}
    return {**found, "type": "message", "role": "assistant"}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Translate the usage of a chat. Tokens of thoughts are not counted apart."""
    details = {"cached_tokens": 0, "cache_write_tokens": 0, **usage.get("prompt_tokens_details", {})}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": details,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
