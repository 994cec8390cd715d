"""Calls of tools: how a model writes them, the grammar that makes it write them so, and their parser.

How a model writes calls is read from its chat template, from what that writes for the calls of an earlier message. The
grammar allows exactly this, with JSON as `json.dumps` writes it. So the next prompt repeats the tokens of the answer,
and finds them in the prefix cache.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from pagepool.engine.grammar_check import INSIDE, NEXT, OPTIONS, check_schema

__all__ = ["CallDeltas", "Form", "ToolCalls", "form_of", "grammar_of", "schema_error", "special_tokens"]

# As `json.dumps`, which templates use: other white space would give other tokens in the next prompt.
JSON_OPTIONS = {**OPTIONS, "item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
del JSON_OPTIONS["whitespace_pattern"]
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
VALUES = {"enum", "const", "default", "examples"}  # keywords of a schema with values in them, not schemas
MAPS = {"properties", "patternProperties", "$defs", "definitions"}  # keywords with a schema for each name
NOTES = {"description", "title", "$comment"}
LACKING = {  # keywords that llguidance does not have
    *("uniqueItems", "contains", "minContains", "maxContains", "not", "if", "then", "else", "propertyNames"),
    *("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"),
}
TAG = re.compile(r"\s*(<[^\s<>]+>|\[[A-Z_]+\])")
ID = re.compile(r'(?:, "id": "|\[CALL_ID\])callid00\d"?')  # not written by the model
MARK = "\ufdd0"


@dataclass(frozen=True)
class Form:
    """How a model writes the calls of a message: `begin` NAME `middle` JSON, `between` NAME `middle` JSON, ..., `end`.

    Attributes
    ----------
    begin, middle, end : str
        The texts around the names of functions and their arguments.
    between : str or None
        The text between two calls. None: a message has one call at most.
    tag : str
        The part of `begin` that makes a text a call wherever it occurs. Empty: the text must begin with `begin`.
    gap : str
        White space between a text and the tag. It belongs to neither.
    special : tuple of (str, int)
        Special tokens of the tokenizer, with their ids.
    """

    begin: str
    middle: str
    between: str | None
    end: str
    tag: str
    gap: str
    special: tuple[tuple[str, int], ...] = ()

    @property
    def trigger(self) -> str:
        """The text that begins calls."""
        return self.tag or self.begin

    @property
    def rest(self) -> str:
        """The text between the trigger and the first name."""
        return self.begin[self.begin.find(self.trigger) + len(self.trigger) :]

    @property
    def is_in_channels(self) -> bool:
        """True if a call is a message in a channel, as in gpt-oss."""
        return self.middle.startswith("<|channel|>") and "<|channel|>" in dict(self.special)

    @property
    def has_special(self) -> bool:
        """True if calls have special tokens, which a tokenizer usually leaves out of a text."""
        texts = self.begin + self.middle + (self.between or "") + self.end
        return any(text in texts for text, _ in self.special)


def form_of(tokenizer: Any) -> Form:
    """Return how a model writes calls. Raises ValueError if this does not follow from its chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("the model's tokenizer has no chat template")
    special = special_tokens(tokenizer)
    try:
        prompt = _written(tokenizer, add_generation_prompt=True)
        plain = _written(tokenizer, {"role": "assistant", "content": MARK})
        one, marked = _with_calls(tokenizer, 1), _with_calls(tokenizer, 1, MARK)
    except Exception as error:  # a template may raise any exception
        raise ValueError(f"the chat template refuses a call of a tool: {str(error)[:200]}") from None
    if "name_1" not in prompt:
        raise ValueError("the chat template does not write the tools")
    # `one` is the prompt, `begin`, the name, `middle`, the arguments, `end`, and the end of the message.
    arguments, _, tail = one.partition(_arguments(1))
    head, found, middle = arguments.rpartition("name_1")
    start, gap = _begin_of_message(prompt, one, marked)
    if not tail or not found or not 0 <= start <= len(head):
        raise ValueError("the chat template does not write a call as the name of its function and JSON after it")
    begin, end = head[start:], _end_of_calls(tail, plain.partition(MARK)[2].strip(), special)
    if not begin.strip() or not middle or any("callid" in text or "name_" in text for text in (begin, middle, end)):
        raise ValueError("the chat template does not write the name of a function and its arguments apart")
    tag = TAG.match(begin)
    gap = gap or begin[: len(begin) - len(begin.lstrip())]
    between = _between_calls(tokenizer, head, middle, end)
    return Form(begin, middle, between, end, tag[1] if tag else "", gap, tuple(special.items()))


def _begin_of_message(prompt: str, one: str, marked: str) -> tuple[int, str]:
    """Return the place where the message with a call begins, or -1, and white space between its text and the call.

    `marked` has MARK as the text of the message. Some templates leave this text out, and some open the thoughts in
    the prompt of a new message.
    """
    place = marked.find(MARK)
    if 0 <= place < marked.find(_arguments(1)) and one.startswith(marked[:place]):
        behind = marked[place + 1 :]
        return place, behind[: len(behind) - len(behind.lstrip())]
    return (len(prompt) if one.startswith(prompt) else -1), ""


def _end_of_calls(tail: str, end: str, special: dict[str, int]) -> str:
    """Return the begin of `tail`, up to the end of an ordinary message or else to the first special token."""
    places = [tail.find(text) for text in ([end] if end and end in tail else special) if text in tail]
    if not places or MARK in tail[: min(places)]:
        raise ValueError("the chat template does not write where a call ends")
    return tail[: min(places)].rstrip()


def _between_calls(tokenizer: Any, head: str, middle: str, end: str) -> str | None:
    """Return the text between two calls, or None if the template does not write several calls in the same way."""
    try:
        three = _with_calls(tokenizer, 3)
    except Exception:  # the template refuses several calls
        return None
    first, second, third = (re.escape(f"name_{number}{middle}{_arguments(number)}") for number in (1, 2, 3))
    found = re.fullmatch(f"{re.escape(head)}{first}(.+){second}(.+){third}(.*)", three, re.DOTALL)
    return found[1] if found and found[1] == found[2] and found[3].startswith(end) else None


def _written(tokenizer: Any, *messages: dict[str, Any], **options: Any) -> str:
    """Return a chat with three tools and these messages behind one of the user, without ids of calls."""
    schema = {"type": "object", "properties": {"argument": {"type": "integer", "description": "a number"}}}
    functions = [{"name": f"name_{number}", "description": "a tool", "parameters": schema} for number in (1, 2, 3)]
    tools = [{"type": "function", "function": function} for function in functions]
    chat = [{"role": "user", "content": "hi"}, *messages]
    return ID.sub("", tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, **options))


def _with_calls(tokenizer: Any, count: int, content: str = "") -> str:
    """Return a chat with a message of `count` calls, and their results."""
    ids = {number: f"callid00{number}" for number in range(1, count + 1)}
    functions = {number: {"name": f"name_{number}", "arguments": {"argument": number}} for number in ids}
    calls = [{"id": ids[number], "type": "function", "function": functions[number]} for number in ids]
    results = [{"role": "tool", "tool_call_id": one, "content": MARK * 2} for one in ids.values()]
    return _written(tokenizer, {"role": "assistant", "content": content, "tool_calls": calls}, *results)


def _arguments(number: int) -> str:
    return f'{{"argument": {number}}}'


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the special tokens of a tokenizer, with their ids."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(one): token for token, one in added.items() if getattr(one, "special", True)}


def grammar_of(
    form: Form,
    tools: Sequence[dict[str, Any]],
    choice: str | tuple[str] = "auto",
    is_parallel: bool = True,
    may_think: bool = False,
) -> str:
    """Return the grammar of a message, in Lark. The line of each tool has its number.

    Parameters
    ----------
    form : Form
        How the model writes calls.
    tools : sequence of dict
        Tools of the request.
    choice : str or tuple of str
        "auto": any text, or a text and then calls. "required": calls. A tuple: one call of the function with this name.
        "none": no call, if calls are in channels.
    is_parallel : bool
        Allow several calls.
    may_think : bool
        The message may begin with `<think>`, up to `</think>`.

    Raises
    ------
    ValueError
        If a schema is not supported. Most such schemas are found when the grammar is compiled.
    """
    lines = []
    for number, tool in enumerate(tools):
        function = tool["function"]
        try:
            schema = _schema_of(function.get("parameters"), function.get("strict") is True)
        except ValueError as error:
            raise ValueError(f"the parameters of the function {function['name']}: {error}") from None
        lines.append(f"tool_{number}: {_heading(form, function['name'])} %json {schema}")
    named = [number for number, tool in enumerate(tools) if choice in ("auto", "required", (tool["function"]["name"],))]
    call = "(" + " | ".join(f"tool_{number}" for number in named) + ")"
    if form.is_in_channels:
        return "\n".join([*lines, *_in_channels(form, call if named else "", choice in ("auto", "none")), ""])
    may_repeat = is_parallel and form.between is not None and not isinstance(choice, tuple)
    again = f"({_literal(form, form.between)} {call})*" if may_repeat else ""
    calls = f"{_literal(form, form.rest)} {call} {again} {_literal(form, form.end)}"
    trigger = _literal(form, form.trigger)
    pattern = re.escape(form.trigger).replace("/", r"\/")
    thought = r" & ~/\s*<think>(?s:.*)/" if may_think else ""
    if choice != "auto":
        body = f"{trigger} {calls}"
    elif not form.tag:
        body = f"TEXT | {trigger} {calls}"
        lines.append(f"TEXT: /(?s:.*)/ & ~/{pattern}(?s:.*)/{thought}")
    elif form.tag in dict(form.special):
        body = f"TEXT ({trigger} {calls})?"
        lines.append(f"TEXT: /(?s:.*)/{thought}")
    else:
        body = f"TEXT | tagged {calls}"
        lines.append(f"TEXT: /(?s:.*)/ & ~/(?s:.*){pattern}(?s:.*)/{thought}")
        lines += ["tagged[lazy]: TAGGED", f"TAGGED: /(?s:.*){pattern}/{thought}"]
    if may_think:
        lines.append(r'think[suffix="</think>"]: /\s*<think>(?s:.*)/')
        body = rf"(think /\n{{0,2}}/)? ({body})"
    return "\n".join([*lines, f"start: {body}", ""])


def _heading(form: Form, name: str) -> str:
    """Return the text between the trigger of a call and its arguments, in Lark."""
    if not form.is_in_channels:
        return _literal(form, name + form.middle)
    # As in the template, and as gpt-oss usually writes it.
    written = (f"{form.begin}{name}<|channel|>commentary", f"<|channel|>commentary to=functions.{name}")
    return f"({' | '.join(_literal(form, text) for text in written)}) kind {_literal(form, '<|message|>')}"


def _in_channels(form: Form, call: str, may_answer: bool) -> list[str]:
    """Return the lines of a message in channels: thoughts and texts, and then the answer or a call."""
    begin, message, after = (_literal(form, text) for text in ("<|channel|>", "<|message|>", NEXT))
    answer = f'{begin} "final" {message} TEXT'
    ends = [answer] * may_answer + [call] * bool(call)
    return [
        f'kind: (" " {_literal(form, "<|constrain|>")}? "json")?',
        f'other: {begin} ("analysis" | "commentary") {message} TEXT {after}',
        f"TEXT: {INSIDE}",
        f"start: other* ({' | '.join(ends)})",
    ]


def _literal(form: Form, text: str | None) -> str:
    """Return a text in Lark. Special tokens are written by their ids."""
    ids = dict(form.special)
    words = sorted((word for word in ids if word in (text or "")), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, words))})", text or "") if words else [text or ""]
    return " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts if part)


def _schema_of(parameters: Any, is_strict: bool) -> str:
    """Return the schema of a function's arguments, as JSON. Raises ValueError.

    Notes may be most of a schema, and are left out. So are keywords that llguidance lacks, if it is not strict.
    """
    schema = NO_ARGUMENTS if parameters is None else _without(NOTES if is_strict else NOTES | LACKING, parameters)
    kind = schema.get("type", "object")
    if kind != "object":
        raise ValueError(f"type must be object, not {json.dumps(kind)[:100]}")
    schema = {**schema, "type": "object", "x-guidance": JSON_OPTIONS}
    text = json.dumps(schema, ensure_ascii=False)
    check_schema(text)
    return text


def _without(keywords: Set[str], schema: Any) -> Any:
    """Return a schema without these keywords. A property may have the name of a keyword."""
    if isinstance(schema, list):
        return [_without(keywords, one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for name, value in schema.items():
        if name in MAPS and isinstance(value, dict):
            found[name] = {key: _without(keywords, one) for key, one in value.items()}
        elif name not in keywords:
            found[name] = value if name in VALUES else _without(keywords, value)
    return found


def schema_error(message: str, tools: Sequence[dict[str, Any]]) -> str:
    """Return the error of a grammar with the name of the function, which is in the line that the error names."""
    found = re.search(r"\bat (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*?)(?: \d+ \| |$)", message)
    if found is None or not 1 <= int(found[1]) <= len(tools):
        return message
    return f"the parameters of the function {tools[int(found[1]) - 1]['function']['name']}: {found[2]}"


class ToolCalls:
    """Separates calls from the other text of a message that arrives in pieces.

    The result does not depend on the cuts between the pieces. Arguments are passed on as they arrive.

    Parameters
    ----------
    form : Form
        How the model writes calls.

    Attributes
    ----------
    is_complete : bool
        True if there are calls, and all of them have ended.

    Examples
    --------
    >>> calls = ToolCalls(Form('<call>{"name": "', '", "arguments": ', None, "}</call>", "<call>", ""))
    >>> calls.add('Well. <call>{"na')
    ('Well. ', [])
    >>> calls.add('me": "add", "arguments": {"a":')[1][0]["function"]
    {'name': 'add', 'arguments': '{"a":'}
    >>> calls.add(" 1}}</call>"), calls.flush(), calls.is_complete
    (('', [{'index': 0, 'function': {'arguments': ' 1}'}}]), '', True)
    """

    def __init__(self, form: Form) -> None:
        self._form, self._held, self._state = form, "", "text" if form.tag else "start"
        self._gap, self._calls = "", CallDeltas()

    @property
    def is_complete(self) -> bool:
        return self._calls.count > 0 and (self._state == "done" or (self._state == "after" and self._has_ended()))

    def add(self, piece: str) -> tuple[str, list[dict[str, Any]]]:
        """Add a piece; return the text that is final now, and the new parts of calls, as OpenAI's deltas."""
        self._held += piece
        texts: list[str] = []
        calls: list[dict[str, Any]] = []
        while self._step(texts, calls):
            pass
        return "".join(texts), calls

    def flush(self) -> str:
        """Return the text that was held back. Called at the end of the text."""
        return self._take(len(self._held)) if self._state in ("text", "start") else ""

    def _step(self, texts: list[str], calls: list[dict[str, Any]]) -> bool:
        """Read on. Return false if this needs more text."""
        form, held = self._form, self._held
        if self._state == "text":
            place = held.find(form.tag)
            if place >= 0:
                self._gap = form.gap if held.endswith(form.gap, 0, place) else ""
                texts.append(self._take(place - len(self._gap)))
                self._state = "start"
                return True
            wanted = (form.gap + form.tag, form.tag)
            size = max(size for word in wanted for size in range(len(word)) if held.endswith(word[:size]))
            texts.append(self._take(len(held) - size))
            return False
        if self._state == "start":
            begin = self._gap + form.trigger + form.rest
            if held.startswith(begin):
                return self._enter("name", len(begin))
            if not begin.startswith(held):  # ordinary text, after all
                texts.append(self._take(len(self._gap) + len(form.tag)))
                self._state = "text" if form.tag else "done"
                return True
            return False
        if self._state == "name":
            place = held.find(form.middle)
            if place < 0:
                return False
            calls.append(self._calls.begin(self._take(place)))
            return self._enter("arguments", len(form.middle))
        if self._state == "arguments":
            end = self._calls.end_of_arguments(held)
            self._calls.grow(self._take(len(held) if end < 0 else end), calls)
            return end >= 0 and self._enter("after", 0)
        if self._state == "after":
            if form.between is not None and held.startswith(form.between):
                return self._enter("name", len(form.between))
            if form.between is not None and form.between.startswith(held):
                return False
            if self._has_ended():
                return self._enter("done", len(form.end))
            return False
        texts.append(self._take(len(held)))
        return False

    def _has_ended(self) -> bool:
        return self._held.startswith(self._form.end)

    def _enter(self, state: str, taken: int) -> bool:
        self._state = state
        self._take(taken)
        return True

    def _take(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        return taken


class CallDeltas:
    """Writes the calls of a message as OpenAI's deltas, and finds the ends of their arguments, which arrive in pieces.

    Attributes
    ----------
    count : int
        Calls that have begun.
    """

    def __init__(self) -> None:
        self.count = 0
        self._depth, self._in_text, self._is_escaped = 0, False, False  # of the arguments

    def begin(self, name: str) -> dict[str, Any]:
        """Return the first delta of the next call."""
        self._depth, self._in_text, self._is_escaped = 0, False, False
        function = {"name": name, "arguments": ""}
        self.count += 1
        return {"index": self.count - 1, "id": uuid4().hex[:9], "type": "function", "function": function}

    def grow(self, piece: str, deltas: list[dict[str, Any]]) -> None:
        """Add a piece of the arguments of the last call to these deltas."""
        if piece and not (deltas and deltas[-1]["index"] == self.count - 1):
            deltas.append({"index": self.count - 1, "function": {"arguments": ""}})
        if piece:
            deltas[-1]["function"]["arguments"] += piece

    def end_of_arguments(self, piece: str) -> int:
        """Return the place in a piece behind the object that the arguments are, or -1. Each piece is read once."""
        for place, character in enumerate(piece):
            if self._in_text:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_text = False
            elif character == '"':
                self._in_text = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return -1
