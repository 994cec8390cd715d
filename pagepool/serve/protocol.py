"""OpenAI's completions and chat completions: read and check the requests, build the JSON of the answers."""

from __future__ import annotations

import json
import math
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagepool.engine.generation import Generation, Token
from pagepool.engine.sampling import SamplingParams
from pagepool.engine.token_texts import TokenTexts
from pagepool.serve.errors import RequestError, error_object, quoted
from pagepool.serve.fields import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE, read_fields
from pagepool.serve.message_parts import MessageParts

__all__ = [
    "MAX_ECHOED",
    "Answer",
    "ChatAnswer",
    "Request",
    "TokenizeRequest",
    "read_body",
    "read_detokenize",
    "read_request",
    "read_tokenize",
]

MAX_REPORTED = 512  # maximum number of log probabilities at one token position, over all n choices
MAX_ECHOED = 1 << 18  # tokens of the prompts that an answer repeats, over all n choices
LEAST_LOGPROB = -9999.0  # replaces -inf, which JSON does not have
DEFAULT_MAX_TOKENS = 16  # for completions, as in OpenAI and vLLM; chats have no default limit
# Fields that are passed to `SamplingParams` unchanged.
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "seed", "min_tokens", "ignore_eos"),
    *("skip_special_tokens",),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words"),
)
# Fields that give a grammar. A request has at most one of them.
STRUCTURED = ("response_format", "structured_outputs", "json_schema", "grammar")
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass
class Request:
    """A checked request for completions or a chat completion.

    Attributes
    ----------
    prompts : list
        Texts or lists of token ids. For a chat: one entry, the list of its messages.
    is_chat : bool
        A chat completion.
    model : str or None
        The requested model.
    prompt_field : str
        The field with the prompt.
    n : int
        Number of choices for each prompt.
    stream : bool
        Answer with server-sent events.
    include_usage : bool
        End the stream with the usage.
    echo : bool
        Begin each choice with its prompt.
    shows_prompt_logprobs : bool
        Report the log probabilities of the prompt's tokens in each choice.
    cuts_length : bool
        Reduce `params.max_new_tokens` if the model or the pool has less room, instead of refusing the request.
    params : SamplingParams
        Sampling parameters and stop conditions.
    structured_field : str or None
        The field that `params.structured` comes from.
    template_options : dict
        Variables of the chat template.
    tools : list of dict
        Functions that the chat template describes to the model.
    tool_choice : str or tuple of str
        "none", "auto", "required", or the name of the function that must be called. "none" without tools.
    parallel_tool_calls : bool
        Allow several calls.
    new_parts : callable
        Returns a splitter for the text of a choice of a chat.
    include_reasoning : bool
        Report what the model thinks, if its chat template knows this.
    options : dict
        `priority` and `cache_salt` for `Engine.submit`, if the request has them.
    repeated : dict
        Fields that the answer repeats from the body.
    """

    prompts: list[Any]
    is_chat: bool
    model: str | None
    prompt_field: str = "messages"
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    shows_prompt_logprobs: bool = False
    cuts_length: bool = False
    structured_field: str | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    template_options: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str | tuple[str] = "none"
    parallel_tool_calls: bool = True
    new_parts: Callable[[], MessageParts] = MessageParts
    include_reasoning: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    repeated: dict[str, Any] = field(default_factory=dict)


def read_body(body: bytes) -> dict[str, Any]:
    """Parse the body of a request.

    Raises `RequestError` if it is not a JSON object in UTF-8, if a text in it is not valid Unicode, or if a number in
    it is not finite.
    """
    strange = []

    def read_float(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            strange.append(value)
        return value

    try:
        found = json.loads(body.decode("utf-8"), parse_float=read_float, parse_constant=read_float)
    except UnicodeDecodeError as error:
        raise RequestError(400, f"the body is not UTF-8: byte {error.start} is invalid") from None
    except ValueError as error:
        raise RequestError(400, f"the body is not JSON: {quoted(str(error))}") from None
    except RecursionError:
        raise RequestError(400, "the body cannot be parsed: its JSON is nested too deeply") from None
    if not isinstance(found, dict):
        raise RequestError(400, f"the body must be a JSON object, not {type(found).__name__}")
    if strange or SURROGATE.search(body):
        for name, value in found.items():
            try:
                json.dumps([name, value], ensure_ascii=False, allow_nan=False).encode()
            except RecursionError:
                raise RequestError(400, f"{quoted(name)} is nested too deeply", param=name) from None
            except UnicodeEncodeError:
                sentence = f"{quoted(name)} is not valid Unicode: it has half of a surrogate pair"
                raise RequestError(400, sentence, param=name) from None
            except ValueError:
                sentence = f"{quoted(name)} has a number that is NaN, infinite or above 1.8e308: JSON has none"
                raise RequestError(400, sentence, param=name) from None
    return found


def read_request(body: Mapping[str, Any], is_chat: bool, defaults: Mapping[str, Any] | None = None) -> Request:
    """Check the body of a request for completions or a chat completion.

    Parameters
    ----------
    body : mapping
        The JSON object.
    is_chat : bool
        A chat completion.
    defaults : mapping, optional
        Defaults of sampling parameters that replace OpenAI's.

    Returns
    -------
    Request
        The engine checks its prompts and token ids later.

    Raises
    ------
    RequestError
        If a parameter is missing, wrong, unknown or not supported.
    """
    unread = {"functions"} if body.get("function_call") == "none" else set()
    unread |= {"tools"} if body.get("tool_choice") == "none" and not is_chat else set()
    body = {name: value for name, value in body.items() if name not in unread}
    found = read_fields(body, CHAT if is_chat else COMPLETIONS)
    options = found.get("stream_options", {})
    request = Request(
        prompts=[required(found, "messages")] if is_chat else required(found, "prompt"),
        is_chat=is_chat,
        model=found.get("model"),
        prompt_field="messages" if is_chat else "prompt",
        n=found.get("n", 1),
        stream=found.get("stream", False),
        include_usage=options.get("include_usage") is True,
        echo=found.get("echo", False),
        shows_prompt_logprobs="prompt_logprobs" in found,
        template_options=found.get("chat_template_kwargs", {}),
        tools=found.get("tools", []),
        parallel_tool_calls=found.get("parallel_tool_calls", True),
        include_reasoning=found.get("include_reasoning", True),
        options={name: found[name] for name in ("priority", "cache_salt") if name in found},
    )
    if request.stream and request.shows_prompt_logprobs:
        raise RequestError(400, "prompt_logprobs is not supported with stream", param="prompt_logprobs")
    limit = _max_tokens(found, is_chat, may_be_0=request.echo or request.shows_prompt_logprobs)
    request.cuts_length = not is_chat and limit is None
    if request.cuts_length:
        limit = DEFAULT_MAX_TOKENS
    least = found.get("min_tokens", 0)
    if limit is not None and least > limit:
        sentence = f"min_tokens must be at most max_tokens ({limit}), not {least}"
        raise RequestError(400, sentence, param="min_tokens")
    logprobs = found.get("top_logprobs", 0) if is_chat else found.get("logprobs")
    if is_chat and not found.get("logprobs", False):
        if logprobs:
            raise RequestError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        logprobs = None
    of_prompt = _prompt_logprobs(found, request.echo, logprobs, limit)
    given = [name for name in STRUCTURED if found.get(name) is not None]
    if len(given) > 1:
        raise RequestError(400, f"a request must have {given[0]} or {given[1]}, not both", param=given[1])
    request.structured_field = given[0] if given else None
    structured = found[given[0]] if given else None
    request.tool_choice = _tool_choice(found, request.tools)
    if request.tool_choice != "none":
        if given:
            raise RequestError(400, f"a request must have tools or {given[0]}, not both", param=given[0])
        request.structured_field = "tools"
    sampling = {"temperature": 1.0, **(defaults or {}), **{name: found[name] for name in SAMPLING if name in found}}
    try:
        sampling["structured"] = structured
        request.params = SamplingParams(limit, logprobs=logprobs, prompt_logprobs=of_prompt, **sampling)
    except (TypeError, ValueError) as error:
        named = (word for word in str(error).split() if word in found)
        raise RequestError(400, str(error), param=next(named, None)) from None
    reported = request.n * (max(logprobs or 0, of_prompt or 0) + 1)
    if reported > MAX_REPORTED:
        sentence = f"n times (logprobs + 1) must be at most {MAX_REPORTED}, not {reported}"
        raise RequestError(400, sentence, param="n")
    return request


@dataclass
class TokenizeRequest:
    """A checked request of `/tokenize`. `prompt` is a text or the messages of a chat."""

    prompt: Any
    is_chat: bool
    model: str | None
    add_special_tokens: bool
    template_options: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)


def read_tokenize(body: Mapping[str, Any]) -> TokenizeRequest:
    """Check the body of a `/tokenize` request. Raises `RequestError`."""
    found = read_fields(body, TOKENIZE)
    is_chat = "messages" in found
    if is_chat and "prompt" in found:
        raise RequestError(400, "a request must have a prompt or messages, not both", param="prompt")
    special = found.get("add_special_tokens", not is_chat)
    if is_chat and special:
        raise RequestError(400, "add_special_tokens is not supported with messages", param="add_special_tokens")
    prompt = required(found, "messages" if is_chat else "prompt")
    more = {name: found[name] for name in ("chat_template_kwargs", "tools") if found.get(name)}
    for name in more if not is_chat else ():
        raise RequestError(400, f"{name} needs messages", param=name)
    options, tools = more.get("chat_template_kwargs", {}), more.get("tools", [])
    return TokenizeRequest(prompt, is_chat, found.get("model"), special, options, tools)


def read_detokenize(body: Mapping[str, Any]) -> tuple[str | None, list[int]]:
    """Check the body of a `/detokenize` request and return its model and token ids. Raises `RequestError`."""
    found = read_fields(body, DETOKENIZE)
    return found.get("model"), required(found, "tokens")


def required(found: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field that a request must have. Raises `RequestError`."""
    if name not in found:
        raise RequestError(400, f"{name} is missing", param=name)
    return found[name]


def _prompt_logprobs(found: Mapping[str, Any], echo: bool, logprobs: int | None, limit: int | None) -> int | None:
    """Return how many of the most likely tokens are reported with each token of the prompt, or None."""
    own: int | None = found.get("prompt_logprobs")
    counts = [count for count in (own, logprobs if echo else None) if count is not None]
    return max(counts) if counts else 0 if limit == 0 else None


def _tool_choice(found: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> str | tuple[str]:
    """Return `Request.tool_choice`. Raises `RequestError`."""
    choice: str | tuple[str] = found.get("tool_choice", "auto")
    if not tools and choice not in ("none", "auto"):
        raise RequestError(400, "tool_choice needs tools", param="tool_choice")
    if isinstance(choice, tuple) and choice[0] not in {tool["function"]["name"] for tool in tools}:
        raise RequestError(400, f"tool_choice names {quoted(choice[0])!r}, which is not in tools", param="tool_choice")
    return choice if tools else "none"


def _max_tokens(found: Mapping[str, Any], is_chat: bool, may_be_0: bool) -> int | None:
    """Return the token limit of the request, or None."""
    name = "max_completion_tokens" if "max_completion_tokens" in found else "max_tokens"
    limit: int | None = found.get(name)
    if limit == 0 and not may_be_0:
        more = "" if is_chat else ", or 0 with echo or prompt_logprobs"
        raise RequestError(400, f"{name} must be at least 1{more}, not 0", param=name)
    return limit


class Answer:
    """Builds the JSON objects that answer a request for completions.

    Parameters
    ----------
    model : str
        Name of the model.
    texts : TokenTexts
        Texts of single tokens.
    request : Request
        The request that is answered.
    prompts : sequence of str
        The texts of its prompts, if the request has `echo`.
    shows_cached_tokens : bool
        Report cached prompt tokens in the usage.
    shows_misses : bool
        Report them, and why the other prompt tokens were not cached.
    """

    prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"
    end = "data: [DONE]\n\n"  # of a stream

    def __init__(
        self,
        model: str,
        texts: TokenTexts,
        request: Request,
        prompts: Sequence[str] = (),
        shows_cached_tokens: bool = False,
        shows_misses: bool = False,
    ) -> None:
        self._texts, self._prompts = texts, prompts
        self._shows_cached_tokens, self._shows_misses = shows_cached_tokens, shows_misses
        self._request, self._n = request, request.n
        self.has_logprobs, self.begins_with_prompt = request.params.logprobs is not None, request.echo
        self._common = {"id": f"{self.prefix}{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def all(self, generations: list[Generation], tokens: list[list[Token]]) -> dict[str, Any]:
        """Return the complete answer, given the tokens of each choice."""
        choices = []
        for index, (generation, row) in enumerate(zip(generations, tokens, strict=True)):
            prompt = self.prompt_of(index)
            logprobs = None
            if self.has_logprobs:
                logprobs = self.logprobs(row, len(prompt))
                if self._request.echo:
                    before = self.logprobs_of_prompt(generation)
                    logprobs = {name: before[name] + logprobs[name] for name in before}
            choice: dict[str, Any] = {"index": index, "logprobs": logprobs}
            choice |= self.content(prompt + generation.text, generation.finish_reason)
            if self._request.shows_prompt_logprobs:
                choice["prompt_logprobs"] = self.prompt_logprobs(generation)
            choices.append(choice)
        return {**self._common, "object": self.whole, "choices": choices, "usage": self.usage(generations)}

    def prompt_of(self, index: int) -> str:
        """Return the prompt's text for a request with `echo`, else an empty text."""
        return self._prompts[index // self._n] if self._request.echo else ""

    def echo(self, index: int, generation: Generation) -> dict[str, Any]:
        """Return the chunk with the prompt. The generation must have the prompt's log probabilities, if requested."""
        logprobs = self.logprobs_of_prompt(generation) if self.has_logprobs else None
        return self.choice(index, self.delta(self.prompt_of(index)), logprobs, None)

    def event(self, data: dict[str, Any]) -> str:
        """Return a chunk as a server-sent event."""
        return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"

    def event_of(self, error: RequestError) -> str:
        """Return an error as the last event of a stream."""
        return self.event(error_object(error))

    def first(self, index: int, generation: Generation) -> dict[str, Any] | None:
        """Return the chunk before the first token of a choice, or None."""
        return None

    def piece(self, index: int, token: Token, offset: int) -> dict[str, Any] | None:
        """Return the chunk of one token, or None. `offset` is the length of the text before it."""
        logprobs = self.logprobs([token], offset) if self.has_logprobs else None
        return self.choice(index, self.delta(token.text), logprobs, None)

    def last(self, index: int, reason: str | None) -> dict[str, Any]:
        """Return the chunk that ends a choice."""
        return self.choice(index, self.delta(None), None, reason)

    def total(self, generations: list[Generation]) -> dict[str, Any]:
        """Return the chunk with the usage of all choices."""
        return {**self._common, "object": self.chunk, "choices": [], "usage": self.usage(generations)}

    def usage(self, generations: list[Generation]) -> dict[str, Any]:
        """Return the token counts. Each prompt counts once, even with several choices."""
        prompts = generations[:: self._n]
        prompt = sum(generation.num_prompt_tokens for generation in prompts)
        completion = sum(len(generation.token_ids) for generation in generations)
        found: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
        found["total_tokens"] = prompt + completion
        if self._shows_cached_tokens or self._shows_misses:
            found["prompt_tokens_details"] = {"cached_tokens": sum(generation.num_cached for generation in prompts)}
        misses = [miss for generation in prompts if (miss := generation.miss) is not None]
        if self._shows_misses and len(misses) == len(prompts):
            parts = [part for miss in misses for part in miss.without_other_keys().as_dicts()]
            found["prompt_tokens_details"]["miss"] = parts
        accepted = sum(generation.num_accepted for generation in generations)
        rejected = sum(generation.num_rejected for generation in generations)
        if accepted or rejected:
            names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
            found["completion_tokens_details"] = dict(zip(names, (accepted, rejected), strict=True))
        return found

    def choice(self, index: int, delta: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
        """Return a chunk with one choice."""
        choice = {"index": index, **delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self._common, "object": self.chunk, "choices": [choice]}

    def content(self, text: str, reason: str | None) -> dict[str, Any]:
        """Return the part of a choice that holds its complete text and its finish reason."""
        return {"text": text, "finish_reason": reason}

    def delta(self, text: str | None) -> dict[str, Any]:
        """Return the part of a chunk that holds a piece of text. None marks the end of the text."""
        return {"text": text or ""}

    def logprobs(self, tokens: list[Token], offset: int) -> dict[str, Any]:
        """Return the log probabilities of tokens, in the format of completions."""
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        return {
            "tokens": [self._texts.text_of(token.token_id) for token in tokens],
            "token_logprobs": [_clamped(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def logprobs_of_prompt(self, generation: Generation) -> dict[str, Any]:
        """Return the log probabilities of the prompt's tokens, in the format of completions. The first one is None."""
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        offset, count = 0, self._request.params.logprobs or 0
        for token_id, token in zip(generation.prompt_token_ids, generation.prompt_logprobs or (), strict=True):
            text = self._texts.text_of(token_id)
            top = None
            if token is not None:
                likely = dict(list(token.top_logprobs.items())[:count])
                top = self._top(Token(token_id, text, token.logprob, likely))
            found["tokens"].append(text)
            found["token_logprobs"].append(None if token is None else _clamped(token.logprob))
            found["top_logprobs"].append(top)
            found["text_offset"].append(offset)
            offset += len(text)
        return found

    def prompt_logprobs(self, generation: Generation) -> list[dict[str, Any] | None]:
        """Return the log probabilities of the prompt's tokens, in vLLM's format. The first one is None."""
        found: list[dict[str, Any] | None] = []
        for token in generation.prompt_logprobs or ():
            if token is None:
                found.append(None)
                continue
            values = {token.token_id: (token.logprob, token.rank)}
            for place, (other, logprob) in enumerate(token.top_logprobs.items()):
                values.setdefault(other, (logprob, place + 1))
            entries = {}
            for other, (logprob, rank) in values.items():
                text = self._texts.text_of(other)
                entries[str(other)] = {"logprob": _clamped(logprob), "rank": rank, "decoded_token": text}
            found.append(entries)
        return found

    def _top(self, token: Token) -> dict[str, float | None]:
        """Return the log probabilities of the most likely tokens and of the sampled token, by text.

        If several tokens have the same text, the sampled token is kept, else the most likely one.
        """
        found: dict[str, float | None] = {}
        for other, value in token.top_logprobs.items():
            found.setdefault(self._texts.text_of(other), _clamped(value))
        found[self._texts.text_of(token.token_id)] = _clamped(token.logprob)
        return found


class ChatAnswer(Answer):
    """Builds the JSON objects that answer a request for a chat completion."""

    prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._parts: dict[int, MessageParts] = {}  # of the choices of a stream

    def all(self, generations: list[Generation], tokens: list[list[Token]]) -> dict[str, Any]:
        found = super().all(generations, tokens)
        if self._request.shows_prompt_logprobs:  # as in vLLM, where a chat's answer has them outside its choices
            found["prompt_logprobs"] = found["choices"][0]["prompt_logprobs"]
            for choice in found["choices"]:
                del choice["prompt_logprobs"]
        return found

    def first(self, index: int, generation: Generation) -> dict[str, Any] | None:
        return self.choice(index, {"delta": {"role": "assistant", "content": ""}}, None, None)

    def content(self, text: str, reason: str | None) -> dict[str, Any]:
        parts = self._request.new_parts()
        return {"message": parts.whole(text), "finish_reason": self._reason(parts, reason)}

    def delta(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}

    def piece(self, index: int, token: Token, offset: int) -> dict[str, Any] | None:
        if index not in self._parts:
            self._parts[index] = self._request.new_parts()
        delta = self._parts[index].add(token.text)
        if not delta and not self.has_logprobs:
            return None
        logprobs = self.logprobs([token], offset) if self.has_logprobs else None
        return self.choice(index, {"delta": delta}, logprobs, None)

    def last(self, index: int, reason: str | None) -> dict[str, Any]:
        parts = self._parts.pop(index, None)
        if parts is None:
            return super().last(index, reason)  # no token has come
        return self.choice(index, {"delta": parts.end()}, None, self._reason(parts, reason))

    @staticmethod
    def _reason(parts: MessageParts, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and parts.is_call else reason

    def logprobs(self, tokens: list[Token], offset: int) -> dict[str, Any]:
        content = []
        for token in tokens:
            top = token.top_logprobs
            if top and token.token_id not in top and token.logprob is not None:
                top = {**top, token.token_id: token.logprob}
            others = [self._entry(other, value) for other, value in top.items()]
            content.append({**self._entry(token.token_id, token.logprob), "top_logprobs": others})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        texts = self._texts
        return {"token": texts.text_of(token_id), "logprob": _clamped(logprob), "bytes": list(texts.bytes_of(token_id))}


def _clamped(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)
