"""Turn prompts and chats into token ids, and generated tokens into text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from copy import deepcopy
from functools import cached_property
from threading import Semaphore
from typing import Any

from pagepool._arguments import integer, wrong
from pagepool.engine.chat_text import ChatText
from pagepool.errors import RequestRejected

__all__ = ["MAX_TOKENIZERS", "TOO_LONG", "Detokenizer", "Encoder", "stop_token_ids_of"]

TOO_LONG = "context_length_exceeded"
MAX_TOKENIZERS = 2  # number of prompts that are tokenized at the same time, each with its own tokenizer object

# Tokenizers may decode a token differently at the beginning of a text. So the first generated token is decoded together
# with the last tokens of the prompt.
CONTEXT = 6
REPLACEMENT = "\ufffd"  # decoders return it for an incomplete character
MAX_INCOMPLETE = 3  # tokens of an incomplete character, at most: characters have up to 4 bytes, tokens at least 1


class Encoder:
    """Turns prompts into token ids. Any thread may call it.

    Up to `MAX_TOKENIZERS` threads tokenize at the same time. When a second thread needs a tokenizer, it is copied, and
    the copy is kept.

    Parameters
    ----------
    tokenizer : object or None
        A tokenizer of transformers. None: prompts must be token ids.
    vocab_size : int
        Number of tokens in the model's vocabulary.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self._free = [tokenizer]
        self._room = Semaphore(MAX_TOKENIZERS)

    def encode(self, prompt: str | Iterable[int], max_tokens: int | None = None, **options: Any) -> list[int]:
        """Return the token ids of a prompt, as a new list.

        Parameters
        ----------
        prompt : str or iterable of int
            A text, or token ids.
        max_tokens : int, optional
            Refuse a text before tokenizing it if its number of characters already implies more tokens. The result may
            still have more tokens than this.
        **options
            Arguments of the tokenizer, such as `add_special_tokens`.

        Returns
        -------
        list of int
            Token ids.

        Raises
        ------
        RequestRejected
            If the prompt is empty or too long, has an unknown token, or cannot be encoded as UTF-8.
        TypeError
            If the prompt has a wrong type, or is a text without a tokenizer.

        Examples
        --------
        >>> Encoder(None, vocab_size=100).encode(range(3))
        [0, 1, 2]
        """
        if isinstance(prompt, str):
            self._check_size(len(prompt), max_tokens)
            tokens = self._tokens_of(prompt, options)
        else:
            if isinstance(prompt, bytes | bytearray | memoryview | Mapping | Set):
                raise wrong("prompt", "a str or a sequence of token ids", prompt)
            tokens = list(prompt)
        if not tokens:
            raise RequestRejected("the prompt must have at least 1 token, not 0")
        # The check of a list of plain ints takes 20 ns for each token, `integer` 300 ns.
        if set(map(type, tokens)) != {int} or min(tokens) < 0 or max(tokens) >= self.vocab_size:
            try:
                tokens = [integer("a token of the prompt", token, 0, self.vocab_size - 1) for token in tokens]
            except ValueError as error:
                raise RequestRejected(str(error)) from None
        return tokens

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int | None = None,
        *,
        special_tokens_in_texts: bool = False,
        template_options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Return the token ids of a chat, including the header of the assistant's next message.

        Text in a message that looks like a control token, such as `<|im_end|>`, becomes ordinary tokens.

        Parameters
        ----------
        messages : sequence of mappings
            Messages for the tokenizer's chat template, each with "role" and "content".
        max_tokens : int, optional
            As in `encode`.
        special_tokens_in_texts : bool
            Let such text become control tokens, so that the author of a message can write turns of others.
        template_options : mapping, optional
            Variables of the chat template, such as `enable_thinking`. Text in them is treated as in a message.
        tools : sequence of mappings, optional
            Functions that the model may call, in OpenAI's form. Text in them is treated as in a message.

        Returns
        -------
        list of int
            Token ids.

        Raises
        ------
        RequestRejected
            If the tokenizer has no chat template, the template refuses the messages, or `encode` refuses the text.
        """
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise RequestRejected("the model's tokenizer has no chat template")
        self._check_size(sum(len(one.get("content") or ()) for one in messages), max_tokens)
        mark, options = None, dict(template_options or {}) | ({"tools": tools} if tools else {})
        if not special_tokens_in_texts:
            (*messages, variables), mark = self._chat_text.mark([*messages, {"role": "", "options": options}])
            options = variables["options"]
        try:
            with self._own_tokenizer() as tokenizer:
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        except ImportError:
            raise
        except Exception as error:  # a template may raise any exception
            raise RequestRejected(f"the chat template refuses the messages: {str(error)[:200]}") from error
        if mark is None:
            return self.encode(text, max_tokens, add_special_tokens=False)
        self._check_size(len(text), max_tokens)
        check_unicode(text)
        with self._room:
            return self.encode(self._chat_text.encode(text, mark))

    @cached_property
    def _chat_text(self) -> ChatText:
        return ChatText(self.tokenizer)

    def _tokens_of(self, prompt: str, options: dict[str, Any]) -> list[int]:
        if self.tokenizer is None:
            raise TypeError("the prompt must be token ids without a tokenizer, not str")
        check_unicode(prompt)
        with self._own_tokenizer() as tokenizer:
            found: list[int] = tokenizer(prompt, **options)["input_ids"]
        return found

    @contextmanager
    def _own_tokenizer(self) -> Iterator[Any]:
        """Reserve a tokenizer for the calling thread."""
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
        """Number of characters of the longest token, or None if the tokenizer does not list its tokens."""
        vocabulary: dict[str, int] = getattr(self.tokenizer, "get_vocab", dict)()
        return max(map(len, vocabulary), default=None)

    def _check_size(self, length: int, max_tokens: int | None) -> None:
        """Raise `RequestRejected` if a text of `length` characters must have more than `max_tokens` tokens."""
        if max_tokens is None or length <= max_tokens or self._longest_token is None:
            return
        least = -(-length // self._longest_token)
        if least > max_tokens:
            sentence = f"the prompt is too long: {length} characters are at least {least} tokens"
            raise RequestRejected(f"{sentence}, the limit is {max_tokens}", TOO_LONG)


def check_unicode(text: str) -> None:
    """Raise `RequestRejected` if a text cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestRejected(f"the prompt is not valid Unicode: character {error.start} is a surrogate") from None


class Detokenizer:
    """Turns the tokens of one request into text, token by token.

    A character of several tokens is returned with its last token. Tokens that do not form a character become U+FFFD.
    Text that may be the beginning of a stop string is held back until this is decided. While `may_stop` is False, stop
    strings are ignored.

    Parameters
    ----------
    tokenizer : object or None
        Has `decode(ids, skip_special_tokens=True)`, like a tokenizer of transformers. None: all texts are empty.
    prompt : sequence of int
        Tokens of the prompt.
    stop : tuple of str
        Strings that end the text.
    skip_special_tokens : bool
        Leave special tokens of the tokenizer out of the text.

    Raises
    ------
    TypeError
        If there are stop strings but no tokenizer.

    Examples
    --------
    >>> class Letters:
    ...     def decode(self, ids, skip_special_tokens):
    ...         return "".join(map(chr, ids))
    >>> detokenizer = Detokenizer(Letters(), [], stop=("end",))
    >>> [detokenizer.add(ord(letter)) for letter in "been end"]
    ['b', '', 'e', '', 'en ', '', '', '']
    >>> detokenizer.stopped
    True
    """

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], stop: tuple[str, ...] = (), skip_special_tokens: bool = True
    ) -> None:
        if stop and tokenizer is None:
            raise TypeError(f"stop must be empty without a tokenizer, not {stop[0]!r}")
        self.stop_string: str | None = None  # the one that ended the text
        self.may_stop = True
        self.tokenizer, self._skips_special = tokenizer, skip_special_tokens
        self._stop = sorted(stop)
        self._held = ""
        # `_ids` holds `_num_known` tokens with the decoded text `_known`, then the tokens of an incomplete character.
        self._ids = list(prompt[-CONTEXT:]) if tokenizer is not None else []
        self._num_known = len(self._ids)
        self._known = self._decode(self._ids)

    @property
    def stopped(self) -> bool:
        """True behind a stop string."""
        return self.stop_string is not None

    def add(self, token: int) -> str:
        """Add the next token and return the text that is final now. Sets `stop_string` at a stop string."""
        if self.tokenizer is None:
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
        """Return the text that was held back. Called after the last token."""
        rest = self._decode(self._ids)[len(self._known) :] if self.tokenizer is not None else ""
        text = self._up_to_stop(rest) + self._held
        self._held, self._ids, self._num_known, self._known = "", [], 0, ""
        return text

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=self._skips_special) if ids else ""

    def _up_to_stop(self, new: str) -> str:
        """Return the held text and `new`, up to the first place where a stop string begins or may begin."""
        if not self._stop or self.stopped or not self.may_stop:
            return "" if self.stopped else new
        text, held = self._held + new, len(self._held)
        found = [(place, stop) for stop in self._stop if (place := text.find(stop, max(0, held - len(stop) + 1))) >= 0]
        if found:
            (place, self.stop_string), self._held = min(found), ""
            return text[:place]
        # Each place is passed once: the held text never begins earlier than before.
        begin = next((place for place in range(len(text)) if self._may_begin(text[place:])), len(text))
        self._held = text[begin:]
        return text[:begin]

    def _may_begin(self, text: str) -> bool:
        """Return true if a stop string begins with `text`."""
        place = bisect_left(self._stop, text)
        return place < len(self._stop) and self._stop[place].startswith(text)


def stop_token_ids_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end every text of the model, from its `generation_config` or else from its tokenizer."""
    config = getattr(model, "generation_config", None)
    found = getattr(config, "eos_token_id", None)
    if found is None:
        found = getattr(tokenizer, "eos_token_id", None)
    return frozenset([found] if isinstance(found, int) else found or ())
