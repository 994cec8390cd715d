"""From texts and conversations to tokens, and from tokens, as they come, to text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cached_property
from threading import Semaphore
from typing import Any

from pagepool._arguments import integer
from pagepool.errors import RequestRejected

__all__ = ["MAX_TOKENIZERS", "TOO_LONG", "Detokenizer", "Encoder", "stop_token_ids_of"]

TOO_LONG = "context_length_exceeded"
MAX_TOKENIZERS = 2  # prompts that are tokenized at the same time, each by a tokenizer of its own

# A tokenizer may write a token differently at the beginning of a text: decode it behind this many tokens of the prompt.
CONTEXT = 6
REPLACEMENT = "\ufffd"  # decoders write it for an incomplete character
MAX_INCOMPLETE = 3  # tokens that an incomplete character may have: it has up to 4 bytes, each token at least 1


class Encoder:
    """Turns prompts into tokens. Any thread may call it.

    Up to `MAX_TOKENIZERS` threads tokenize at the same time. The second one makes a copy of the tokenizer, which is
    kept.

    tokenizer   one of transformers, or None: prompts are token ids then
    vocab_size  how many tokens the model knows
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self._free = [tokenizer]
        self._room = Semaphore(MAX_TOKENIZERS)

    def encode(self, prompt: str | Iterable[int], max_tokens: int | None = None, **options: Any) -> list[int]:
        """Return the token ids of a prompt, as a new list.

        max_tokens  a text with so many characters that it must have more tokens is refused before it is tokenized. A
                    text that passes may still have more tokens
        options     of the tokenizer's call, such as `add_special_tokens`

        Raises TypeError for a text without a tokenizer and for a prompt of a wrong type, `RequestRejected` for a
        prompt without tokens, a text that is too long, a text that UTF-8 cannot encode and a token that the model does
        not know.

        >>> Encoder(None, vocab_size=100).encode(range(3))
        [0, 1, 2]
        """
        if isinstance(prompt, str):
            self._check_size(prompt, max_tokens)
            tokens = self._tokens_of(prompt, options)
        else:
            tokens = list(prompt)
        try:
            for token in tokens:
                integer("a token of the prompt", token, 0, self.vocab_size - 1)
        except ValueError as error:
            raise RequestRejected(str(error)) from None
        if not tokens:
            raise RequestRejected("a prompt needs at least 1 token, got 0")
        return tokens

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], max_tokens: int | None = None) -> list[int]:
        """The token ids of a conversation, up to where the assistant's next message begins.

        messages    each has "role" and "content", as the tokenizer's chat template wants them
        max_tokens  as in `encode`

        Raises `RequestRejected` where the tokenizer has no chat template, and for messages that it does not take.
        """
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise RequestRejected("the model's tokenizer has no chat template")
        try:
            with self._own_tokenizer() as tokenizer:
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except ImportError:
            raise
        except Exception as error:  # whatever the template raises
            raise RequestRejected(f"the chat template does not take these messages: {error}") from error
        return self.encode(text, max_tokens, add_special_tokens=False)

    def _tokens_of(self, prompt: str, options: dict[str, Any]) -> list[int]:
        if self.tokenizer is None:
            raise TypeError("a prompt must be token ids, not str: there is no tokenizer")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RequestRejected(f"the prompt is not valid Unicode: character {error.start} is a surrogate") from None
        with self._own_tokenizer() as tokenizer:
            found: list[int] = tokenizer(prompt, **options)["input_ids"]
        return found

    @contextmanager
    def _own_tokenizer(self) -> Iterator[Any]:
        """A tokenizer that no other thread calls meanwhile."""
        with self._room:
            try:
                tokenizer = self._free.pop()
            except IndexError:
                tokenizer = deepcopy(self.tokenizer)
            try:
                yield tokenizer
            finally:
                self._free.append(tokenizer)

    @cached_property
    def _longest_token(self) -> int | None:
        """Characters of the longest token, or None where the tokenizer does not list its tokens."""
        vocabulary: dict[str, int] = getattr(self.tokenizer, "get_vocab", dict)()
        return max(map(len, vocabulary), default=None)

    def _check_size(self, prompt: str, max_tokens: int | None) -> None:
        if max_tokens is None or len(prompt) <= max_tokens or self._longest_token is None:
            return
        least = -(-len(prompt) // self._longest_token)
        if least > max_tokens:
            sentence = f"the prompt is too long: {len(prompt)} characters are at least {least} tokens"
            raise RequestRejected(f"{sentence}, the limit is {max_tokens}", TOO_LONG)


class Detokenizer:
    """Turns the tokens of one request into text, piece by piece.

    tokenizer  has `decode(ids, skip_special_tokens=True)`, like a tokenizer of transformers; None: all text is empty
    prompt     the tokens before
    stop       strings that end the text

    A character that comes in several tokens is returned with its last one; tokens that cannot complete one become
    U+FFFD. Text that may be the beginning of a stop string is held back until that is decided. While `may_stop` is
    False no stop string is looked for. Raises TypeError for stop strings without a tokenizer.

    >>> class Letters:
    ...     def decode(self, ids, skip_special_tokens):
    ...         return "".join(map(chr, ids))
    >>> detokenizer = Detokenizer(Letters(), [], stop=("end",))
    >>> [detokenizer.add(ord(letter)) for letter in "been end"]
    ['b', '', 'e', '', 'en ', '', '', '']
    >>> detokenizer.stopped
    True
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: tuple[str, ...] = ()) -> None:
        if stop and tokenizer is None:
            raise TypeError(f"stop needs a tokenizer: {stop[0]!r} is text")
        self.stopped, self.may_stop = False, True
        self._tokenizer = tokenizer
        self._stop = sorted(stop)
        self._held = ""
        # First the tokens with known text, then the tokens of an incomplete character; `_known` is the known text.
        self._ids = list(prompt[-CONTEXT:]) if tokenizer is not None else []
        self._num_known = len(self._ids)
        self._known = self._decode(self._ids)

    def add(self, token: int) -> str:
        """Take the next token and return the text that is certain now; sets `stopped` when a stop string has come."""
        if self._tokenizer is None:
            return ""
        self._ids.append(token)
        text, end = self._decode(self._ids), len(self._ids)
        if text.endswith(REPLACEMENT) or len(text) < len(self._known):  # a character is not complete
            end -= MAX_INCOMPLETE
            if end <= self._num_known:
                return ""
            text = self._decode(self._ids[:end])
        new = text[len(self._known) :]
        self._ids = self._ids[self._num_known :]
        self._num_known = end - self._num_known
        self._known = self._decode(self._ids[: self._num_known])
        return self._up_to_stop(new)

    def flush(self) -> str:
        """The text that was held back, when no more tokens come."""
        rest = self._decode(self._ids)[len(self._known) :] if self._tokenizer is not None else ""
        text = self._up_to_stop(rest) + self._held
        self._held, self._ids, self._num_known, self._known = "", [], 0, ""
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True) if ids else ""

    def _up_to_stop(self, new: str) -> str:
        """Return the text that was held back and `new`, up to where a stop string is or may begin."""
        if not self._stop or self.stopped or not self.may_stop:
            return "" if self.stopped else new
        text, held = self._held + new, len(self._held)
        found = [place for stop in self._stop if (place := text.find(stop, max(0, held - len(stop) + 1))) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        # What is held begins where it did before or later, so that each place is left once.
        begin = next((place for place in range(len(text)) if self._may_begin(text[place:])), len(text))
        self._held = text[begin:]
        return text[:begin]

    def _may_begin(self, text: str) -> bool:
        """Whether a stop string begins with `text`."""
        place = bisect_left(self._stop, text)
        return place < len(self._stop) and self._stop[place].startswith(text)


def stop_token_ids_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end every text of the model, as it or else its tokenizer says."""
    config = getattr(model, "generation_config", None)
    found = getattr(config, "eos_token_id", None)
    if found is None:
        found = getattr(tokenizer, "eos_token_id", None)
    return frozenset([found] if isinstance(found, int) else found or ())
