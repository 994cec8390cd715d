"""OpenAI's completions and chat completions: read and check the requests, build the JSON of the answers."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagepool.engine.generation import Generation, Token
from pagepool.engine.sampling import SamplingParams
from pagepool.serve.token_texts import TokenTexts

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "Answer",
    "ChatAnswer",
    "Request",
    "RequestError",
    "TokenizeRequest",
    "error_object",
    "read_body",
    "read_detokenize",
    "read_request",
    "read_tokenize",
]

MAX_CHOICES = 128
MAX_REPORTED = 512  # maximum number of log probabilities at one token position, over all n choices
LEAST_LOGPROB = -9999.0  # replaces -inf, which JSON does not have
DEFAULT_MAX_TOKENS = 16  # for completions, as in OpenAI and vLLM; chats have no default limit
# Parameters that only label a request.
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
# Parameters that are not supported, with the values that change nothing. These values and null are accepted, all other
# values are refused. First the parameters of OpenAI, then of vLLM, then of llama-server.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "parallel_tool_calls": (True, False),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "watermarking": (False,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "structured_outputs": (),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "include_reasoning": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "repeat_penalty": (1,),
    "typical_p": (1,),
    "top_n_sigma": (-1,),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "n_probs": (0,),
    "n_keep": (0,),
    "id_slot": (-1,),
    "grammar": ("",),
    "return_tokens": (False,),
    "timings_per_token": (False,),
}
# Parameters that are passed to `SamplingParams` unchanged.
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
COMMON = {
    *SAMPLING,
    *("model", "max_tokens", "n", "seed", "stream", "logit_bias", "bad_words"),
    *("stream_options", "logprobs", "prompt_logprobs", "priority", "cache_salt", "ignore_eos", "min_tokens"),
}
KNOWN = {False: {*COMMON, "prompt", "echo"}, True: {*COMMON, "messages", "max_completion_tokens", "top_logprobs"}}


class RequestError(Exception):
    """A refused request.

    Parameters
    ----------
    status : int
        HTTP status.
    message : str
        One sentence for the client.
    code, param : str, optional
        `code` and `param` of OpenAI's error object.
    may_retry : bool
        For status 429 and 503: tell the client that it may send the request again.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, *, may_retry: bool = True
    ) -> None:
        super().__init__(message)
        self.may_retry = may_retry
        self.status, self.message, self.code, self.param = status, message, code, param


def error_object(error: RequestError) -> dict[str, Any]:
    """Return the error object that OpenAI's clients read."""
    kinds = {404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


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
        `params.max_new_tokens` is the default, so it is reduced if the model or the pool has less room.
    params : SamplingParams
        Sampling parameters and stop conditions.
    options : dict
        `priority` and `cache_salt` for `Engine.submit`, if the request has them.
    """

    prompts: list[Any]
    is_chat: bool
    model: str | None
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    shows_prompt_logprobs: bool = False
    cuts_length: bool = False
    params: SamplingParams = field(default_factory=SamplingParams)
    options: dict[str, Any] = field(default_factory=dict)


def read_body(body: bytes) -> dict[str, Any]:
    """Parse the body of a request. Raises `RequestError` if it is not a JSON object in UTF-8."""
    try:
        found = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RequestError(400, f"the body is not UTF-8: byte {error.start} is invalid") from None
    except ValueError as error:
        raise RequestError(400, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise RequestError(400, "the body cannot be parsed: its JSON is nested too deeply") from None
    if not isinstance(found, dict):
        raise RequestError(400, f"the body must be a JSON object, not {type(found).__name__}")
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
        `Engine.submit` checks its prompts later.

    Raises
    ------
    RequestError
        If a parameter is missing, wrong, unknown or not supported.
    """
    given = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    for tools, choice in (("tools", "tool_choice"), ("functions", "function_call")):
        if given.get(choice) == "none":
            given.pop(tools, None)
    # The tokenizer adds special tokens to a prompt. The chat template adds them to a chat.
    neutral = {**UNSUPPORTED, "add_special_tokens": (not is_chat,)}
    if is_chat:
        neutral["echo"] = (False,)
    for name, nothing in neutral.items():
        if name in given and given.pop(name) not in nothing:
            raise RequestError(400, f"{name} is not supported", "unsupported_parameter", name)
    unknown = sorted(given.keys() - KNOWN[is_chat])
    if unknown:
        raise RequestError(400, f"unknown parameter: {', '.join(unknown)}", "unknown_parameter", unknown[0])
    options = _typed(given, "stream_options", dict, {})
    _typed(options, "continuous_usage_stats", bool, False)  # only the type is checked: usage is sent once, at the end
    request = Request(
        prompts=[_messages(given)] if is_chat else _prompts(given),
        is_chat=is_chat,
        model=_typed(given, "model", str, None),
        n=_typed(given, "n", int, 1),
        stream=_typed(given, "stream", bool, False),
        include_usage=_typed(options, "include_usage", bool, False),
        echo=_typed(given, "echo", bool, False),
        shows_prompt_logprobs="prompt_logprobs" in given,
    )
    if not 1 <= request.n <= MAX_CHOICES:
        raise RequestError(400, f"n must be from 1 to {MAX_CHOICES}, not {request.n}", param="n")
    if request.stream and request.shows_prompt_logprobs:
        raise RequestError(400, "prompt_logprobs is not supported with stream", param="prompt_logprobs")
    limit = _max_tokens(given, is_chat, may_be_0=request.echo or request.shows_prompt_logprobs)
    request.cuts_length = not is_chat and limit is None
    if request.cuts_length:
        limit = DEFAULT_MAX_TOKENS
    least = _typed(given, "min_tokens", int, 0)
    if limit is not None and least > limit:
        sentence = f"min_tokens must be at most max_tokens ({limit}), not {least}"
        raise RequestError(400, sentence, param="min_tokens")
    sampling = {"temperature": 1.0, **(defaults or {}), **{name: given[name] for name in SAMPLING if name in given}}
    logprobs = _logprobs(given, is_chat)
    of_prompt = _prompt_logprobs(given, request.echo, logprobs, limit)
    sampling |= {"seed": _typed(given, "seed", int, None), "logprobs": logprobs, "prompt_logprobs": of_prompt}
    sampling |= {"logit_bias": _logit_bias(given), "bad_words": _bad_words(given)}
    sampling |= {"min_tokens": least, "ignore_eos": _typed(given, "ignore_eos", bool, False)}
    try:
        request.params = SamplingParams(limit, **sampling)
    except (TypeError, ValueError) as error:
        named = (word for word in str(error).split() if word in given)
        raise RequestError(400, str(error), param=next(named, None)) from None
    reported = request.n * (max(logprobs or 0, of_prompt or 0) + 1)
    if reported > MAX_REPORTED:
        sentence = f"n times (logprobs + 1) must be at most {MAX_REPORTED}, not {reported}"
        raise RequestError(400, sentence, param="n")
    if "priority" in given:
        request.options["priority"] = _typed(given, "priority", int, 0)
    if "cache_salt" in given:
        request.options["cache_salt"] = _typed(given, "cache_salt", str, None)
    return request


@dataclass
class TokenizeRequest:
    """A checked request of `/tokenize`. `prompt` is a text or the messages of a chat."""

    prompt: Any
    is_chat: bool
    model: str | None
    add_special_tokens: bool


def read_tokenize(body: Mapping[str, Any]) -> TokenizeRequest:
    """Check the body of a `/tokenize` request. Raises `RequestError`."""
    is_chat = "messages" in body
    names = {"messages", "model"} if is_chat else {"prompt", "model", "add_special_tokens"}
    neutral = {"return_token_strs": False, "add_generation_prompt": True}
    if is_chat:
        neutral["add_special_tokens"] = False
    for name in sorted(body.keys() - names):
        if name not in neutral or body[name] not in (None, neutral[name]):
            raise RequestError(400, f"{name} is not supported", "unsupported_parameter", name)
    special = _typed(body, "add_special_tokens", bool, True)
    model = _typed(body, "model", str, None)
    if is_chat:
        return TokenizeRequest(_messages(body), True, model, False)
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise RequestError(400, f"prompt must be of type str, not {type(prompt).__name__}", param="prompt")
    return TokenizeRequest(prompt, False, model, special)


def read_detokenize(body: Mapping[str, Any], vocab_size: int) -> tuple[str | None, list[int]]:
    """Check the body of a `/detokenize` request and return its model and token ids. Raises `RequestError`."""
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not _are_ids(tokens):
        raise RequestError(400, "tokens must be a list of token ids", param="tokens")
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise RequestError(400, f"tokens must be from 0 to {vocab_size - 1}, not {token}", param="tokens")
    return _typed(body, "model", str, None), tokens


def _typed(given: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """Return the value of a parameter. Raises `RequestError` if it is not of this type."""
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RequestError(400, f"{name} must be of type {kind.__name__}, not {type(value).__name__}", param=name)
    return value


def _logit_bias(given: Mapping[str, Any]) -> dict[int, Any]:
    """Return the logit bias by token id. The names in a JSON object are strings, so they are converted to int."""
    found = {}
    for name, value in _typed(given, "logit_bias", dict, {}).items():
        if not (name.isascii() and name.isdigit() and len(name) < 20):
            raise RequestError(400, f"logit_bias must have token ids as names, not {name[:40]!r}", param="logit_bias")
        found[int(name)] = value
    return found


def _bad_words(given: Mapping[str, Any]) -> list[str]:
    """Return the words that must not be generated."""
    words: list[Any] = _typed(given, "bad_words", list, [])
    if not all(isinstance(word, str) for word in words):
        raise RequestError(400, "bad_words must be a list of texts", param="bad_words")
    return words


def _logprobs(given: Mapping[str, Any], is_chat: bool) -> int | None:
    """Return how many of the most likely tokens are reported with each token, or None."""
    if not is_chat:
        count: int | None = _typed(given, "logprobs", int, None)
        return count
    top: int = _typed(given, "top_logprobs", int, 0)
    if _typed(given, "logprobs", bool, False):
        return top
    if top:
        raise RequestError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    return None


def _prompt_logprobs(given: Mapping[str, Any], echo: bool, logprobs: int | None, limit: int | None) -> int | None:
    """Return how many of the most likely tokens are reported with each token of the prompt, or None."""
    own: int | None = _typed(given, "prompt_logprobs", int, None)
    counts = [count for count in (own, logprobs if echo else None) if count is not None]
    return max(counts) if counts else 0 if limit == 0 else None


def _max_tokens(given: Mapping[str, Any], is_chat: bool, may_be_0: bool) -> int | None:
    """Return the token limit of the request, or None."""
    name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    limit: int | None = _typed(given, name, int, None)
    if limit is not None and limit < (0 if may_be_0 else 1):
        more = "" if is_chat or limit < 0 else ", or 0 with echo or prompt_logprobs"
        raise RequestError(400, f"{name} must be at least 1{more}, not {limit}", param=name)
    return limit


def _prompts(given: Mapping[str, Any]) -> list[Any]:
    """Return the prompts as a list. The request has a text, a list of token ids, or a list of either."""
    prompt = given.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(type(token) is int for token in prompt):
            return [prompt]
        if all(isinstance(one, str) or (isinstance(one, list) and _are_ids(one)) for one in prompt):
            return prompt
    sentence = "prompt must be a text, a list of token ids, or a list of these; it must not be empty"
    raise RequestError(400, sentence, param="prompt")


def _are_ids(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat. The parts of a message's content are joined to one text."""
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError(400, "messages must be a list of at least 1 message", param="messages")
    found = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(400, f"messages[{number}] must be an object with a role", param="messages")
        content = message.get("content")
        parts: list[Any] = content if isinstance(content, list) else [{"type": "text", "text": content}]
        if not all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in parts
        ):
            sentence = f"the content of messages[{number}] must be text: images and audio are not supported"
            raise RequestError(400, sentence, param="messages")
        found.append({**message, "content": "".join(part["text"] for part in parts)})
    return found


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
    """

    prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"

    def __init__(
        self,
        model: str,
        texts: TokenTexts,
        request: Request,
        prompts: Sequence[str] = (),
        shows_cached_tokens: bool = False,
    ) -> None:
        self._texts, self._prompts, self._shows_cached_tokens = texts, prompts, shows_cached_tokens
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
            choice["finish_reason"] = generation.finish_reason
            if self._request.shows_prompt_logprobs:
                choice["prompt_logprobs"] = self.prompt_logprobs(generation)
            choices.append({**choice, **self.content(prompt + generation.text)})
        return {**self._common, "object": self.whole, "choices": choices, "usage": self.usage(generations)}

    def prompt_of(self, index: int) -> str:
        """Return the prompt's text for a request with `echo`, else an empty text."""
        return self._prompts[index // self._n] if self._request.echo else ""

    def echo(self, index: int, generation: Generation) -> dict[str, Any]:
        """Return the chunk with the prompt. The generation must have the prompt's log probabilities, if requested."""
        logprobs = self.logprobs_of_prompt(generation) if self.has_logprobs else None
        return self.choice(index, self.delta(self.prompt_of(index)), logprobs, None)

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the chunk before the first token of a choice, or None."""
        return None

    def piece(self, index: int, token: Token, offset: int) -> dict[str, Any]:
        """Return the chunk of one token. `offset` is the length of the text before it."""
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
        if self._shows_cached_tokens:
            found["prompt_tokens_details"] = {"cached_tokens": sum(generation.num_cached for generation in prompts)}
        return found

    def choice(self, index: int, delta: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
        """Return a chunk with one choice."""
        choice = {"index": index, **delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self._common, "object": self.chunk, "choices": [choice]}

    def content(self, text: str) -> dict[str, Any]:
        """Return the part of a choice that holds its complete text."""
        return {"text": text}

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

    def all(self, generations: list[Generation], tokens: list[list[Token]]) -> dict[str, Any]:
        found = super().all(generations, tokens)
        if self._request.shows_prompt_logprobs:  # as in vLLM, where a chat's answer has them outside its choices
            found["prompt_logprobs"] = found["choices"][0]["prompt_logprobs"]
            for choice in found["choices"]:
                del choice["prompt_logprobs"]
        return found

    def first(self, index: int) -> dict[str, Any] | None:
        return self.choice(index, {"delta": {"role": "assistant", "content": ""}}, None, None)

    def content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}

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
