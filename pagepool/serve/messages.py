"""Anthropic's Messages API: its requests as requests for a chat completion, and the answers to them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pagepool.serve.errors import RequestError, error_object
from pagepool.serve.fields import COUNT_TOKENS, MESSAGES, read_fields
from pagepool.serve.protocol import Request, TokenizeRequest, read_request, read_tokenize, required
from pagepool.serve.translation import Item, Kinds, TranslatedAnswer, object_of, parts_of, renamed, word_of

__all__ = ["MessagesAnswer", "read_count", "read_messages"]

TEXT: Kinds = {"text": {"text": str}}
CONTENTS: dict[str, Kinds] = {
    "system": TEXT,
    "user": {**TEXT, "tool_result": {"tool_use_id": str}},
    "assistant": {**TEXT, "thinking": {"thinking": str}, "tool_use": {"id": str, "name": str, "input": dict}},
}
# Claude Code puts a text that changes with each request before everything else. It would make each prefix a new one.
BILLING = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n?")
# Clients do not send thoughts back without a signature.
SIGNATURE = "none"
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
THINKING = {"enabled": True, "adaptive": True, "disabled": False}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Names of a chat's fields, in errors.
NAMES = {"stop": "stop_sequences", "response_format": "output_config", "chat_template_kwargs": "output_config"}
SAME = (  # fields that a chat has too
    *("model", "max_tokens", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty"),
    *("priority", "cache_salt"),
)


def read_messages(body: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Request:
    """Check the body of a request for a message, like `read_request`. Raises `RequestError`."""
    found = read_fields(body, MESSAGES)
    required(found, "max_tokens")
    chat = {**_chat_of(found), "stream_options": {"include_usage": True}}
    chat |= {name: found[name] for name in SAME if name in found}
    if "stop_sequences" in found:
        chat["stop"] = found["stop_sequences"]
    if found.get("thinking", {}).get("display") == "omitted":
        chat["include_reasoning"] = False
    if form := found.get("output_config", {}).get("format"):
        if word_of(object_of("output_config.format", form), "type") != "json_schema":
            raise RequestError(400, "output_config.format.type must be json_schema", param="output_config")
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    with renamed(NAMES):
        request = read_request(chat, True, defaults)
    request.cuts_length = True  # clients must send a limit, and send the largest one of Anthropic's models
    if request.structured_field is not None:
        request.structured_field = NAMES.get(request.structured_field, request.structured_field)
    return request


def read_count(body: Mapping[str, Any]) -> TokenizeRequest:
    """Check the body of a request for the number of tokens. Raises `RequestError`."""
    found = read_fields(body, COUNT_TOKENS)
    chat = {name: value for name, value in _chat_of(found).items() if name in ("messages", "tools")}
    with renamed(NAMES):
        return read_tokenize({**chat, "chat_template_kwargs": _variables(found), "model": found.get("model")})


def _chat_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat that make its prompt. A message of the system stays where it is."""
    messages = []
    system = _text("system", found.get("system", ""))
    if system := BILLING.sub("", system, count=1) if BILLING.match(system) else system:
        messages.append({"role": "system", "content": system})
    for number, message in enumerate(required(found, "messages")):
        messages += _chat_messages(f"messages[{number}]", message)
    if messages and messages[-1]["role"] == "assistant":
        sentence = "the last message must not be the assistant's: the server does not continue a message"
        raise RequestError(400, sentence, "unsupported_parameter", "messages")
    chat: dict[str, Any] = {"messages": messages, "chat_template_kwargs": _variables(found)}
    if "tools" in found:
        chat["tools"] = [_tool(number, tool) for number, tool in enumerate(found["tools"])]
    if choice := found.get("tool_choice"):
        kind = word_of(choice, "type")
        if kind == "tool":
            chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
        elif kind in CHOICES:
            chat["tool_choice"] = CHOICES[kind]
        else:
            raise RequestError(400, "tool_choice.type must be auto, any, tool or none", param="tool_choice")
        if choice.get("disable_parallel_tool_use"):
            chat["parallel_tool_calls"] = False
    return chat


def _text(place: str, content: Any) -> str:
    return "".join(part["text"] for part in parts_of(place, content, TEXT))


def _chat_messages(place: str, message: Any) -> list[dict[str, Any]]:
    """Return a message as messages of a chat. Each result of a tool is one, at its place between the texts."""
    role = word_of(object_of(place, message), "role")
    if role not in CONTENTS:
        raise RequestError(400, f"the role of {place} must be user, assistant or system", param="messages")
    parts = parts_of(f"{place}.content", message.get("content"), CONTENTS[role])
    if role == "assistant":
        joined = {name: "".join(part[name] for part in parts if part["type"] == name) for name in ("text", "thinking")}
        found = {"role": role, "content": joined["text"]}
        if joined["thinking"]:
            found["reasoning_content"] = joined["thinking"]
        calls = [_call(part) for part in parts if part["type"] == "tool_use"]
        return [{**found, "tool_calls": calls} if calls else found]
    messages: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        if part["type"] == "tool_result":
            text = _text(f"{place}.content[{number}].content", part.get("content") or "")
            messages.append({"role": "tool", "tool_call_id": part["tool_use_id"], "content": text})
        elif messages and messages[-1]["role"] == role:
            messages[-1]["content"] += part["text"]
        else:
            messages.append({"role": role, "content": part["text"]})
    return messages or [{"role": role, "content": ""}]


def _call(part: dict[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.dumps(part["input"], ensure_ascii=False)
    except RecursionError:
        raise RequestError(400, "the input of a tool_use is nested too deeply", param="messages") from None
    return {"id": part["id"], "type": "function", "function": {"name": part["name"], "arguments": arguments}}


def _tool(number: int, tool: Any) -> dict[str, Any]:
    if object_of(f"tools[{number}]", tool).get("type") not in (None, "custom"):
        sentence = f"tools[{number}].type must be custom: the server has no tools of its own"
        raise RequestError(400, sentence, "unsupported_parameter", "tools")
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


def _variables(found: Mapping[str, Any]) -> dict[str, Any]:
    """Translate `thinking` and `output_config.effort` to variables of the chat template."""
    variables: dict[str, Any] = {}
    if thinking := found.get("thinking"):
        if word_of(thinking, "type") not in THINKING:
            raise RequestError(400, f"thinking.type must be {' or '.join(THINKING)}", param="thinking")
        variables["enable_thinking"] = THINKING[thinking["type"]]
    if effort := word_of(found.get("output_config", {}), "effort"):
        variables["reasoning_effort"] = effort
    return {**variables, **found.get("chat_template_kwargs", {})}


class MessagesAnswer(TranslatedAnswer):
    """Builds the objects that answer a request for a message."""

    prefix = "msg_"

    def begun(self, num_prompt_tokens: int) -> Iterator[dict[str, Any]]:
        usage = {"input_tokens": num_prompt_tokens, "output_tokens": 0}  # the usage at the end replaces it
        yield {"type": "message_start", "message": self._message([], None, usage)}
        yield {"type": "ping"}

    def opened(self, item: Item) -> Iterator[dict[str, Any]]:
        yield {"type": "content_block_start", "index": item.index, "content_block": _block(item, "", {}, "")}

    def grown(self, item: Item, text: str) -> Iterator[dict[str, Any]]:
        kinds = {"thought": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}
        kind, name = kinds.get(item.kind, ("input_json_delta", "partial_json"))
        yield {"type": "content_block_delta", "index": item.index, "delta": {"type": kind, name: text}}

    def closed(self, item: Item) -> Iterator[dict[str, Any]]:
        if item.kind == "thought":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            yield {"type": "content_block_delta", "index": item.index, "delta": delta}
        yield {"type": "content_block_stop", "index": item.index}

    def ended(self, usage: dict[str, Any]) -> Iterator[dict[str, Any]]:
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self.stop_string}
        yield {"type": "message_delta", "delta": delta, "usage": _usage(usage)}
        yield {"type": "message_stop"}

    def failed(self, error: RequestError) -> dict[str, Any]:
        return error_object(error, MESSAGES)

    def complete(self, usage: dict[str, Any]) -> dict[str, Any]:
        blocks = [_block(item, item.text, _arguments(item), SIGNATURE) for item in self.items]
        return self._message(blocks, self._stop_reason, _usage(usage))

    @property
    def _stop_reason(self) -> str | None:
        return "stop_sequence" if self.stop_string is not None else REASONS.get(str(self.reason))

    def _message(self, content: list[Any], reason: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        found = {"id": self._common["id"], "type": "message", "role": "assistant", "model": self._common["model"]}
        stop = {"stop_reason": reason, "stop_sequence": self.stop_string}
        return {**found, "content": content, **stop, "usage": usage}


def _block(item: Item, text: str, arguments: dict[str, Any], signature: str) -> dict[str, Any]:
    if item.kind == "thought":
        return {"type": "thinking", "thinking": text, "signature": signature}
    if item.kind == "text":
        return {"type": "text", "text": text}
    return {"type": "tool_use", "id": item.call_id, "name": item.name, "input": arguments}


def _arguments(item: Item) -> dict[str, Any]:
    """Return the arguments of a call. Those of a call that the limit of tokens has cut are empty."""
    try:
        found: dict[str, Any] = json.loads(item.text) if item.kind == "call" else {}
    except (ValueError, RecursionError):
        return {}
    return found


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Translate the usage of a chat. Cached tokens are not part of `input_tokens`."""
    found = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
    if details := usage.get("prompt_tokens_details"):
        cached = details["cached_tokens"]
        found |= {"input_tokens": found["input_tokens"] - cached, "cache_read_input_tokens": cached}
        found |= {"cache_creation_input_tokens": 0, "prompt_tokens_details": details}
    return found
