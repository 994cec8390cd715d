"""Every path of the server and every field of a request, with its limit.

The checks of requests, the routes and the tables of `docs/guide/server.md` come from `PATHS` and `FIELDS`.
A field that is not in the table is refused. To add a field: a row in `FIELDS`, with a kind that checks its value.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagepool.engine.sampling import (
    MAX_BAD_LENGTH,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_REPETITION_PENALTY,
    MAX_STOP,
    MAX_STOP_IDS,
    MAX_STOP_LENGTH,
    MIN_REPETITION_PENALTY,
)
from pagepool.engine.structured import MAX_GRAMMAR_LENGTH, Structured
from pagepool.serve.errors import RequestError, quoted

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "COUNT_TOKENS",
    "DETOKENIZE",
    "FIELDS",
    "MAX_BODY_BYTES",
    "MAX_PARTS",
    "MESSAGES",
    "PATHS",
    "RESPONSES",
    "TOKENIZE",
    "Kind",
    "check_count",
    "read_fields",
]

MAX_BODY_BYTES = 16 << 20
MAX_CHOICES = 128
MAX_INTEGER = (1 << 31) - 1
MAX_SEED = (1 << 64) - 1
MAX_PRIORITY = 1 << 30
MAX_NAME = 256  # characters of a model's name or a salt
MAX_PROMPTS = 2048
MAX_MESSAGES = 2048  # as OpenAI
MAX_PARTS = 2048  # parts of the content of one message
MAX_TOOLS = 128  # as OpenAI; also calls in one message
MAX_DETOKENIZED = 1 << 17
MAX_VARIABLES = 64
MAX_VARIABLES_LENGTH = 1 << 16
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
# Arguments of `apply_chat_template` other than variables, and names that have a field of their own.
RESERVED = (
    *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs", "self"),
)
# A role may be part of the text of a chat, so it must not contain control tokens.
ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
TOKEN = re.compile(r"[0-9]{1,10}")
FUNCTION = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Kind(ABC):
    """Type and limit of a field. `limit` describes them in the guide."""

    limit: str
    is_read = True  # False: the value is checked and then dropped

    @abstractmethod
    def read(self, name: str, value: Any) -> Any:
        """Return the checked value of the field `name`. Raises `RequestError`. `value` is never None."""


def wrong(name: str, wanted: str, value: Any) -> RequestError:
    """Return the error for a value that is not what is `wanted`."""
    kind = type(value).__name__
    shown = f"{value!r}" if isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1e30) else kind
    return RequestError(400, f"{name} must be {wanted}, not {shown}", param=name)


@dataclass(frozen=True)
class Integer(Kind):
    """A whole number from `low` to `high`."""

    low: int
    high: int

    @property
    def limit(self) -> str:  # type: ignore[override]
        return f"whole number from {self.low:,} to {self.high:,}"

    def read(self, name: str, value: Any) -> int:
        if type(value) is not int or not self.low <= value <= self.high:
            raise wrong(name, f"a whole number from {self.low} to {self.high}", value)
        return value


@dataclass(frozen=True)
class Number(Kind):
    """A finite number from `low` to `high`, or above `low`."""

    low: float
    high: float | None = None
    is_above: bool = False

    @property
    def limit(self) -> str:  # type: ignore[override]
        if self.high is None:
            return f"number, {self.low:g} or more"
        begin, end = ("above ", ", up") if self.is_above else ("from ", "")
        return f"number {begin}{self.low:g}{end} to {self.high:g}"

    def read(self, name: str, value: Any) -> float:
        most = float("inf") if self.high is None else self.high
        is_finite = type(value) in (int, float) and abs(value) <= 1.7e308  # false for NaN
        if not is_finite or not self.low <= value <= most or (self.is_above and value == self.low):
            raise wrong(name, f"a {self.limit}", value)
        return float(value)


@dataclass(frozen=True)
class Flag(Kind):
    """True or false."""

    limit = "true or false"

    def read(self, name: str, value: Any) -> bool:
        if type(value) is not bool:
            raise wrong(name, self.limit, value)
        return value


@dataclass(frozen=True)
class Text(Kind):
    """A text of at most `most` characters."""

    most: int

    @property
    def limit(self) -> str:  # type: ignore[override]
        return f"text, up to {self.most:,} characters"

    def read(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise wrong(name, "a text", value)
        if len(value) > self.most:
            raise RequestError(400, f"{name} must have at most {self.most} characters, not {len(value)}", param=name)
        return value


@dataclass(frozen=True)
class Texts(Kind):
    """A list of at most `most` texts with `length` characters together, none empty; or one text."""

    most: int
    length: int
    or_one: bool = True

    @property
    def limit(self) -> str:  # type: ignore[override]
        one = "text, or " if self.or_one else ""
        return f"{one}up to {self.most:,} texts, {self.length:,} characters together"

    def read(self, name: str, value: Any) -> list[str]:
        texts = [value] if self.or_one and isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise wrong(name, "a text or a list of texts" if self.or_one else "a list of texts", value)
        check_count(name, texts, self.most, "texts")
        length = sum(map(len, texts))
        if length > self.length:
            raise RequestError(400, f"{name} must have at most {self.length} characters, not {length}", param=name)
        if not all(text.strip() if not self.or_one else text for text in texts):
            raise RequestError(400, f"{name} must have no empty text", param=name)
        return texts


@dataclass(frozen=True)
class Tokens(Kind):
    """A list of at most `most` token ids. The engine checks that they are in the vocabulary."""

    most: int

    @property
    def limit(self) -> str:  # type: ignore[override]
        return f"up to {self.most:,} token ids of the vocabulary"

    def read(self, name: str, value: Any) -> list[int]:
        if not isinstance(value, list) or not are_ids(value):
            raise wrong(name, "a list of token ids", value)
        check_count(name, value, self.most, "token ids")
        return value


@dataclass(frozen=True)
class Biases(Kind):
    """A mapping of at most `most` token ids to numbers."""

    most: int

    @property
    def limit(self) -> str:  # type: ignore[override]
        return f"up to {self.most:,} token ids of the vocabulary, with numbers; beyond -100 to 100 they are clipped"

    def read(self, name: str, value: Any) -> dict[int, float]:
        if not isinstance(value, dict):
            raise wrong(name, "an object", value)
        check_count(name, value, self.most, "token ids")
        found = {}
        for token, bias in value.items():
            if not TOKEN.fullmatch(token):
                raise RequestError(400, f"{name} must have token ids as names, not {quoted(token)!r}", param=name)
            if type(bias) not in (int, float) or bias != bias:
                raise wrong(name, "an object with numbers as values", bias)
            found[int(token)] = float(max(-100, min(100, bias)))
        return found


class Prompts(Kind):
    """The prompts of a completion: a text, a list of token ids, or several of them. The value is a list."""

    limit = f"text, token ids, or up to {MAX_PROMPTS:,} such prompts; each up to --max-prompt-tokens"

    def read(self, name: str, value: Any) -> list[Any]:
        if isinstance(value, str):
            return [value]
        if isinstance(value, list) and value:
            if are_ids(value):
                return [value]
            check_count(name, value, MAX_PROMPTS, "prompts")
            if all(isinstance(one, str) or (isinstance(one, list) and are_ids(one)) for one in value):
                return value
        raise wrong(name, "a text, a list of token ids, or a list of such prompts, and not empty", value)


class Messages(Kind):
    """The messages of a chat. The parts of a message's content are joined to one text, and arguments are read."""

    limit = (
        f"1 to {MAX_MESSAGES:,} messages; role: up to 64 ASCII letters, digits and `_.-`; "
        f"content: text, or up to {MAX_PARTS:,} texts; tool_calls: up to {MAX_TOOLS}"
    )

    def read(self, name: str, value: Any) -> list[dict[str, Any]]:
        if not isinstance(value, list) or not value:
            raise wrong(name, "a list of at least 1 message", value)
        check_count(name, value, MAX_MESSAGES, "messages")
        return [self._message(f"{name}[{number}]", name, message) for number, message in enumerate(value)]

    def _message(self, place: str, name: str, message: Any) -> dict[str, Any]:
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str):
            raise RequestError(400, f"{place} must be an object with a role", param=name)
        if not ROLE.fullmatch(role):
            sentence = f"the role of {place} must be up to 64 ASCII letters, digits and _.-, not {quoted(role)!r}"
            raise RequestError(400, sentence, param=name)
        calls = message.get("tool_calls")
        if "tool_calls" in message:
            message = {field: value for field, value in message.items() if field != "tool_calls" or value}
        if calls:
            message |= {"tool_calls": self._calls(f"{place}.tool_calls", name, calls)}
        content = message.get("content", "" if calls else None)
        content = "" if calls and content is None else content
        parts: list[Any] = content if isinstance(content, list) else [{"type": "text", "text": content}]
        check_count(name, parts, MAX_PARTS, f"parts in {place}")
        if not all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in parts
        ):
            sentence = f"the content of {place} must be text: images and audio are not supported"
            raise RequestError(400, sentence, param=name)
        return {**message, "content": "".join(part["text"] for part in parts)}

    def _calls(self, place: str, name: str, calls: Any) -> list[dict[str, Any]]:
        """Return calls with their arguments as objects, which chat templates expect."""
        if not isinstance(calls, list):
            raise RequestError(400, f"{place} must be a list", param=name)
        check_count(name, calls, MAX_TOOLS, f"calls in {place}")
        found = []
        for number, call in enumerate(calls):
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise RequestError(400, f"{place}[{number}] must be a call of a function with a name", param=name)
            arguments = function.get("arguments")
            try:
                arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            except (ValueError, RecursionError):
                arguments = None
            if not isinstance(arguments, dict):
                raise RequestError(400, f"the arguments of {place}[{number}] must be a JSON object", param=name)
            known = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
            found.append(known | ({"id": call["id"]} if isinstance(call.get("id"), str) else {}))
        return found


class Tools(Kind):
    """Functions that the model may call."""

    limit = (
        f"up to {MAX_TOOLS} functions; name: up to 64 ASCII letters, digits, `_` and `-`; "
        "parameters: a JSON Schema of an object"
    )

    def read(self, name: str, value: Any) -> list[dict[str, Any]]:
        if not isinstance(value, list):
            raise wrong(name, "a list of functions", value)
        check_count(name, value, MAX_TOOLS, "functions")
        seen = set()
        for number, tool in enumerate(value):
            place = f"{name}[{number}]"
            function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
            if not isinstance(function, dict):
                raise RequestError(400, f"{place} must be an object with type function and a function", param=name)
            called = function.get("name")
            if not isinstance(called, str) or not FUNCTION.fullmatch(called) or called in seen:
                sentence = f"the name of {place} must be up to 64 ASCII letters, digits, _ and -, and no other's"
                raise RequestError(400, sentence, param=name)
            seen.add(called)
            for one, kind in (("parameters", dict), ("description", str)):
                if not isinstance(function.get(one), kind | None):
                    raise RequestError(400, f"the {one} of {place} must be of type {kind.__name__}", param=name)
        return value


class ToolChoice(Kind):
    """How tools are used: "none", "auto", "required", or a tuple with the name of one function."""

    limit = '`"none"`, `"auto"`, `"required"`, or a function: `{"type": "function", "function": {"name": ...}}`'

    def read(self, name: str, value: Any) -> str | tuple[str]:
        if value in ("none", "auto", "required"):
            return str(value)
        function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
        called = function.get("name") if isinstance(function, dict) else None
        if not isinstance(called, str):
            raise wrong(name, "none, auto, required, or an object with a function and its name", value)
        return (called,)


class StreamOptions(Kind):
    """`include_usage` and `continuous_usage_stats`; other names are ignored."""

    limit = "object; `include_usage` and `continuous_usage_stats`: true or false"

    def read(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong(name, "an object", value)
        for one in ("include_usage", "continuous_usage_stats"):
            if value.get(one) is not None:
                try:
                    Flag().read(f"{name}.{one}", value[one])
                except RequestError as error:
                    raise RequestError(400, error.message, param=name) from None
        return value


class Grammar(Kind):
    """A schema or grammar. Each heir reads the arguments of `Structured`, or None for a value that changes nothing."""

    def read(self, name: str, value: Any) -> Structured | None:
        fields = self.fields(name, value)
        try:
            return None if fields is None else Structured(**fields)
        except (TypeError, ValueError) as error:
            raise RequestError(400, f"{name}: {error}", param=name) from None

    @abstractmethod
    def fields(self, name: str, value: Any) -> dict[str, Any] | None:
        """Return the arguments of `Structured`, or None."""


class ResponseFormat(Grammar):
    """OpenAI's `response_format`."""

    limit = "type: `text`, `json_object`, or `json_schema` with `json_schema.schema`"

    def fields(self, name: str, value: Any) -> dict[str, Any] | None:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind == "text":
            return None
        if kind == "json_object":
            schema = value.get("schema")  # llama-server's form
            return {"json_object": True} if schema is None else JsonSchema().fields(f"{name}.schema", schema, name)
        if kind == "json_schema":
            inner = value.get("json_schema")
            schema = inner.get("schema") if isinstance(inner, dict) else None
            return JsonSchema().fields(f"{name}.json_schema.schema", schema, name)
        shown = quoted(kind) if isinstance(kind, str) else type(kind).__name__
        sentence = f"{name}.type must be text, json_object or json_schema, not {shown}"
        raise RequestError(400, sentence, "unsupported_parameter", name)


class JsonSchema(Grammar):
    """A JSON Schema, as an object."""

    limit = f"object, up to {MAX_GRAMMAR_LENGTH:,} characters of JSON"

    def fields(self, name: str, value: Any, param: str | None = None) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise RequestError(400, f"{name} must be an object, not {type(value).__name__}", param=param or name)
        return {"json_schema": value}


class GrammarText(Grammar):
    """A grammar in GBNF or Lark. An empty one changes nothing."""

    limit = f"text, up to {MAX_GRAMMAR_LENGTH:,} characters"

    def fields(self, name: str, value: Any) -> dict[str, Any] | None:
        return {"grammar": Text(MAX_GRAMMAR_LENGTH).read(name, value)} if value != "" else None


VLLM_NAMES = {"json": "json_schema", **{name: name for name in ("json_object", "regex", "choice", "grammar")}}


class StructuredOutputs(Grammar):
    """vLLM's `structured_outputs`."""

    limit = f"object with one of {', '.join(f'`{one}`' for one in VLLM_NAMES)}; up to {MAX_GRAMMAR_LENGTH:,} characters"

    def fields(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong(name, "an object", value)
        given = {one: inner for one, inner in value.items() if inner is not None and inner is not False}
        for one in given:
            if one not in VLLM_NAMES:
                sentence = f"{name}.{quoted(one)} is not supported"
                raise RequestError(400, sentence, "unsupported_parameter", name)
        return {VLLM_NAMES[one]: inner for one, inner in given.items()}


class TemplateOptions(Kind):
    """Variables of the chat template. Arguments of the tokenizer's method, such as another template, are refused."""

    limit = (
        f"object with up to {MAX_VARIABLES:,} names of up to 64 ASCII letters, digits and `_`; "
        f"{MAX_VARIABLES_LENGTH:,} characters as JSON; not {', '.join(f'`{name}`' for name in RESERVED)}"
    )

    def read(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong(name, "an object", value)
        check_count(name, value, MAX_VARIABLES, "names")
        for variable in value:
            if not VARIABLE.fullmatch(variable) or variable in RESERVED:
                raise RequestError(400, f"{name} must not have the name {quoted(variable)!r}", param=name)
        try:
            length = len(json.dumps(value))
        except RecursionError:
            raise RequestError(400, f"{name} is nested too deeply", param=name) from None
        if length > MAX_VARIABLES_LENGTH:
            sentence = f"{name} must have at most {MAX_VARIABLES_LENGTH} characters as JSON, not {length}"
            raise RequestError(400, sentence, param=name)
        return value


@dataclass(frozen=True)
class Nested(Kind):
    """A list or an object that is checked when it is translated."""

    wanted: tuple[Any, ...]
    limit: str

    def read(self, name: str, value: Any) -> Any:
        if not isinstance(value, self.wanted):
            nouns: dict[Any, str] = {str: "a text", list: "a list", dict: "an object"}
            raise wrong(name, " or ".join(nouns[kind] for kind in self.wanted), value)
        if isinstance(value, list):
            check_count(name, value, MAX_MESSAGES, "entries")
        return value


class Only(Kind):
    """A parameter that is not supported. Values that change nothing are accepted."""

    is_read = False

    def __init__(self, *values: Any, why: str = "") -> None:
        self.values, self._why = values, f": {why}" if why else ""
        shown = " or ".join(f"`{json.dumps(value)}`" for value in values)
        self.limit = (f"only {shown}" if shown else "refused") + self._why

    def read(self, name: str, value: Any) -> None:
        if value not in self.values:
            raise RequestError(400, f"{name} is not supported{self._why}", "unsupported_parameter", name)


class Ignored(Kind):
    """A parameter that only labels a request."""

    limit, is_read = "ignored", False

    def read(self, name: str, value: Any) -> None:
        return None


def are_ids(values: list[Any]) -> bool:
    """Return true if all values are integers, no bools."""
    return set(map(type, values)) <= {int}


def check_count(name: str, values: Any, most: int, noun: str) -> None:
    """Raise `RequestError` if there are more than `most` values."""
    if len(values) > most:
        raise RequestError(400, f"{name} must have at most {most} {noun}, not {len(values)}", param=name)


@dataclass(frozen=True)
class Path:
    """A path of the server. `handler` is the method of `Server` that answers.

    `access` is "key": if the server has keys, a client needs one; "open": it needs none; "admin": it needs the admin
    key, or must be on this machine.
    """

    method: str
    handler: str
    limit: str = ""
    access: str = "key"


BODY = f"body of {MAX_BODY_BYTES >> 20} MiB"
COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
MESSAGES, COUNT_TOKENS, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
RESET = "/reset_prefix_cache"
PATHS = {
    COMPLETIONS: Path("POST", "completions", f"{BODY}; prompts times `n`: --max-requests"),
    CHAT: Path("POST", "chat", f"{BODY}; `n`: --max-requests"),
    MESSAGES: Path("POST", "messages", BODY),
    COUNT_TOKENS: Path("POST", "count_tokens", f"{BODY}; counts as 1 of --max-requests"),
    RESPONSES: Path("POST", "responses", BODY),
    TOKENIZE: Path("POST", "tokenize", f"{BODY}; counts as 1 of --max-requests"),
    DETOKENIZE: Path("POST", "detokenize", f"{BODY}; counts as 1 of --max-requests"),
    "/v1/models": Path("GET", "models"),
    "/v1/models/{model:path}": Path("GET", "one_model"),
    "/version": Path("GET", "version"),
    "/metrics": Path("GET", "show_metrics"),
    "/health": Path("GET", "health", "needs no key", "open"),
    "/ready": Path("GET", "ready", "needs no key", "open"),
    RESET: Path("POST", "reset_prefix_cache", "the body is not read; needs the admin key or a local client", "admin"),
}

BOTH = (COMPLETIONS, CHAT)
FOUR = (*BOTH, MESSAGES, RESPONSES)
IN_MESSAGES = (MESSAGES, COUNT_TOKENS)
KEEP_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}
STATELESS = "the server stores no responses, send all items"
# Name, paths, kind.
ROWS: list[tuple[str, tuple[str, ...], Kind]] = [
    ("prompt", (COMPLETIONS,), Prompts()),
    ("prompt", (TOKENIZE,), Text(MAX_BODY_BYTES)),
    ("messages", (CHAT, TOKENIZE), Messages()),
    ("tokens", (DETOKENIZE,), Tokens(MAX_DETOKENIZED)),
    ("model", (*FOUR, COUNT_TOKENS, TOKENIZE, DETOKENIZE), Text(MAX_NAME)),
    ("max_tokens", (*BOTH, MESSAGES), Integer(0, MAX_INTEGER)),
    ("max_completion_tokens", (CHAT,), Integer(0, MAX_INTEGER)),
    ("min_tokens", BOTH, Integer(0, MAX_INTEGER)),
    ("n", BOTH, Integer(1, MAX_CHOICES)),
    ("temperature", FOUR, Number(0.0)),
    ("top_p", FOUR, Number(0.0, 1.0, is_above=True)),
    ("top_k", FOUR, Integer(0, MAX_INTEGER)),
    ("min_p", FOUR, Number(0.0, 1.0)),
    ("seed", FOUR, Integer(0, MAX_SEED)),
    ("presence_penalty", BOTH, Number(-2.0, 2.0)),
    ("frequency_penalty", BOTH, Number(-2.0, 2.0)),
    ("repetition_penalty", FOUR, Number(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)),
    ("logit_bias", BOTH, Biases(MAX_BIASES)),
    ("bad_words", BOTH, Texts(MAX_BAD_WORDS, MAX_BAD_LENGTH, or_one=False)),
    ("stop", BOTH, Texts(MAX_STOP, MAX_STOP_LENGTH)),
    ("stop_token_ids", BOTH, Tokens(MAX_STOP_IDS)),
    ("ignore_eos", BOTH, Flag()),
    ("stream", FOUR, Flag()),
    ("stream_options", BOTH, StreamOptions()),
    ("echo", (COMPLETIONS,), Flag()),
    ("logprobs", (COMPLETIONS,), Integer(0, MAX_LOGPROBS)),
    ("logprobs", (CHAT,), Flag()),
    ("top_logprobs", (CHAT,), Integer(0, MAX_LOGPROBS)),
    ("prompt_logprobs", BOTH, Integer(0, MAX_LOGPROBS)),
    ("priority", FOUR, Integer(-MAX_PRIORITY, MAX_PRIORITY)),
    ("cache_salt", FOUR, Text(MAX_NAME)),
    ("add_special_tokens", (TOKENIZE,), Flag()),
    ("add_special_tokens", (COMPLETIONS,), Only(True)),
    ("add_special_tokens", (CHAT,), Only(False)),
    ("echo", (CHAT,), Only(False)),
    ("add_generation_prompt", (*BOTH, TOKENIZE), Only(True)),
    ("return_token_strs", (TOKENIZE,), Only(False)),
    *((name, BOTH, Ignored()) for name in ("user", "metadata", "store", "service_tier", "safety_identifier")),
    ("prompt_cache_key", BOTH, Ignored()),
    # OpenAI's parameters that are not supported.
    ("best_of", BOTH, Only(1)),
    ("suffix", BOTH, Only("")),
    ("response_format", BOTH, ResponseFormat()),
    ("tools", (CHAT, TOKENIZE), Tools()),
    ("tools", (COMPLETIONS,), Only([])),
    ("tool_choice", (CHAT,), ToolChoice()),
    ("tool_choice", (COMPLETIONS,), Only("none")),
    ("functions", BOTH, Only([])),
    ("function_call", BOTH, Only("none")),
    ("modalities", BOTH, Only(["text"])),
    ("audio", BOTH, Only()),
    ("parallel_tool_calls", (CHAT,), Flag()),
    ("parallel_tool_calls", (COMPLETIONS,), Only(True, False)),
    # vLLM's.
    ("use_beam_search", BOTH, Only(False)),
    ("length_penalty", BOTH, Only(1)),
    ("skip_special_tokens", BOTH, Flag()),
    ("spaces_between_special_tokens", BOTH, Only(True)),
    ("include_stop_str_in_output", BOTH, Only(False)),
    ("watermarking", BOTH, Only(False)),
    ("truncate_prompt_tokens", BOTH, Only()),
    ("allowed_token_ids", BOTH, Only()),
    ("structured_outputs", BOTH, StructuredOutputs()),
    ("return_tokens_as_token_ids", BOTH, Only(False)),
    ("return_token_ids", BOTH, Only(False)),
    ("return_token_offsets", BOTH, Only(False)),
    ("return_prompt_text", BOTH, Only(False)),
    ("include_reasoning", (CHAT,), Flag()),
    ("include_reasoning", (COMPLETIONS,), Only(True)),
    ("continue_final_message", BOTH, Only(False)),
    ("documents", BOTH, Only([])),
    ("chat_template", BOTH, Only()),
    ("chat_template_kwargs", (CHAT, TOKENIZE, *IN_MESSAGES, RESPONSES), TemplateOptions()),
    ("chat_template_kwargs", (COMPLETIONS,), Only({})),
    # llama-server's.
    ("repeat_penalty", BOTH, Only(1)),
    ("typical_p", BOTH, Only(1)),
    ("top_n_sigma", BOTH, Only(-1)),
    ("mirostat", BOTH, Only(0)),
    ("dynatemp_range", BOTH, Only(0)),
    ("xtc_probability", BOTH, Only(0)),
    ("dry_multiplier", BOTH, Only(0)),
    ("n_probs", BOTH, Only(0)),
    ("n_keep", BOTH, Only(0)),
    ("id_slot", BOTH, Only(-1)),
    ("grammar", BOTH, GrammarText()),
    ("json_schema", BOTH, JsonSchema()),
    ("return_tokens", BOTH, Only(False)),
    ("timings_per_token", BOTH, Only(False)),
    # Anthropic's.
    ("messages", IN_MESSAGES, Nested((list,), f"up to {MAX_MESSAGES:,} messages; content: up to {MAX_PARTS:,} parts")),
    ("system", IN_MESSAGES, Nested((str, list), "text, or parts with texts")),
    ("stop_sequences", (MESSAGES,), Texts(MAX_STOP, MAX_STOP_LENGTH)),
    ("thinking", IN_MESSAGES, Nested((dict,), "type: `enabled`, `adaptive` or `disabled`")),
    ("output_config", IN_MESSAGES, Nested((dict,), "`effort`; `format` with type `json_schema`")),
    ("tools", IN_MESSAGES, Nested((list,), f"up to {MAX_MESSAGES:,} tools of type `custom`")),
    ("tool_choice", IN_MESSAGES, Nested((dict,), "type: `auto`, `any`, `tool` or `none`")),
    *((name, IN_MESSAGES, Ignored()) for name in ("cache_control", "metadata", "service_tier", "speed")),
    *((name, IN_MESSAGES, Only()) for name in ("container", "mcp_servers")),
    ("context_management", IN_MESSAGES, Only({"edits": []}, {"edits": [KEEP_THINKING]})),
    # OpenAI's Responses.
    ("input", (RESPONSES,), Nested((str, list), f"text, or up to {MAX_MESSAGES:,} items")),
    ("instructions", (RESPONSES,), Text(MAX_BODY_BYTES)),
    ("max_output_tokens", (RESPONSES,), Integer(1, MAX_INTEGER)),
    ("text", (RESPONSES,), Nested((dict,), "`format` as `response_format`, with its fields beside `type`")),
    ("reasoning", (RESPONSES,), Nested((dict,), "`effort`; other names are ignored")),
    ("tools", (RESPONSES,), Nested((list,), f"up to {MAX_MESSAGES:,} tools")),
    ("tool_choice", (RESPONSES,), Nested((str, dict), "as in chats; type: `function` with `name`")),
    ("parallel_tool_calls", (RESPONSES,), Flag()),
    ("store", (RESPONSES,), Only(False, why=STATELESS)),
    *((name, (RESPONSES,), Only(why=STATELESS)) for name in ("previous_response_id", "conversation", "prompt")),
    ("background", (RESPONSES,), Only(False, why=STATELESS)),
    ("truncation", (RESPONSES,), Only("disabled")),
    ("top_logprobs", (RESPONSES,), Only(0)),
    ("include", (RESPONSES,), Only([], ["reasoning.encrypted_content"])),
    *((name, (RESPONSES,), Ignored()) for name in ("user", "metadata", "service_tier", "safety_identifier")),
    *((name, (RESPONSES,), Ignored()) for name in ("prompt_cache_key", "prompt_cache_retention", "stream_options")),
    *((name, (RESPONSES,), Ignored()) for name in ("max_tool_calls", "client_metadata")),
]
FIELDS: dict[str, dict[str, Kind]] = {
    path: {name: kind for name, paths, kind in ROWS if path in paths}
    for path in (*FOUR, COUNT_TOKENS, TOKENIZE, DETOKENIZE)
}


def read_fields(body: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Check the fields of a request's body.

    Parameters
    ----------
    body : mapping
        The JSON object. Fields that are None are as missing.
    path : str
        A path of `FIELDS`.

    Returns
    -------
    dict
        The value of each field that is given, without fields that change nothing.

    Raises
    ------
    RequestError
        If a field is unknown, not supported, has a wrong type or exceeds its limit. `param` names the field.
    """
    fields = FIELDS[path]
    found = {}
    for name, value in body.items():
        if name not in fields:
            raise RequestError(400, f"unknown parameter: {quoted(name)}", "unknown_parameter", name)
        if value is not None:
            checked = fields[name].read(name, value)
            if fields[name].is_read:
                found[name] = checked
    return found


def tables() -> str:
    """Return the tables of paths and fields in Markdown, for the guide."""
    lines = ["| path | method | limit |", "|---|---|---|"]
    for path, one in PATHS.items():
        lines.append(f"| `{path.replace('{model:path}', 'NAME')}` | {one.method} | {one.limit} |")
    lines += ["", "| field | paths | limit |", "|---|---|---|"]
    for name, paths, kind in ROWS:
        where = {BOTH: "both", FOUR: "all four"}.get(paths) or ", ".join(f"`{path}`" for path in paths)
        lines.append(f"| `{name}` | {where} | {kind.limit} |")
    return "\n".join(lines) + "\n"
