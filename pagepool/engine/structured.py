"""Structured output: a grammar masks the logits, so that each token continues a valid text.

Needs the extra `structured`: llguidance compiles the grammars and computes the masks, in threads that release the GIL.
"""

from __future__ import annotations

import json
import marshal
import os
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from time import thread_time
from typing import Any, cast

import numpy as np

from pagepool._arguments import wrong
from pagepool.engine import grammar_check
from pagepool.engine.token_texts import TokenTexts
from pagepool.errors import RequestRejected

__all__ = ["MAX_CHOICES", "MAX_GRAMMAR_LENGTH", "Grammar", "Grammars", "Matcher", "Structured"]

MAX_GRAMMAR_LENGTH = 1 << 17  # characters of a schema or grammar
MAX_CHOICES = 1024
MAX_COMPILING = 2  # grammars that are compiled at the same time
MAX_GRAMMARS = 16  # compiled grammars that are kept
CHECK_CPU_SECONDS, CHECK_SECONDS, CHECK_BYTES = 1, 10.0, 128 << 20  # limits of the process that checks a grammar
COMPILE_NICE = 10  # of the thread that compiles a grammar after its check
# llguidance recurses once for each link of a chain of rules or `$ref`s. The check has 8 MiB, so this is enough.
STACK_BYTES = 32 << 20
MASK_SECONDS = 0.02  # CPU time for one token. It is 0.0003 usually, and up to 0.006 with 151,000 tokens
MAX_MESSAGE = 300  # characters of a message of llguidance in an error
REPLACEMENT = "\ufffd".encode()
LIMITS = {"step_lexer_fuel": 100_000, "max_lexer_states": 50_000, "verbose_errors": False}


@dataclass(frozen=True)
class Structured:
    """A constraint on the text of a request, for `SamplingParams.structured`. Give one of the first five fields.

    Parameters
    ----------
    json_schema : dict, bool or str, optional
        The text is JSON that this JSON Schema accepts. Stored as JSON text.
    json_object : bool
        The text is a JSON object.
    regex : str, optional
        The whole text matches this regular expression, in the syntax of Rust's `regex`.
    choice : sequence of str
        The text is one of these texts, at most 1,024.
    grammar : str, optional
        The text follows this grammar: GBNF of llama.cpp, or Lark with llguidance's extensions.
    after : str
        Any text that ends with this one comes first, such as "</think>". Default: none.

    Raises
    ------
    TypeError, ValueError
        If a field has a wrong type, is larger than 131,072 characters, or not exactly one of them is given. Whether
        the grammar itself is supported is checked by `Engine.submit`.

    Examples
    --------
    >>> Structured(choice=["yes", "no"]).choice
    ('yes', 'no')
    >>> Structured(json_schema={"type": "integer"}).json_schema
    '{"type": "integer"}'
    """

    json_schema: Any = None
    json_object: bool = False
    regex: str | None = None
    choice: Any = ()
    grammar: str | None = None
    after: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.after, str):
            raise wrong("after", "a str", self.after)
        if not isinstance(self.json_object, bool):
            raise wrong("json_object", "a bool", self.json_object)
        if isinstance(self.json_schema, Mapping | bool):
            try:
                text = json.dumps(self.json_schema, ensure_ascii=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"json_schema cannot be written as JSON: {error}") from None
            object.__setattr__(self, "json_schema", text)
        if not isinstance(self.choice, Iterable) or isinstance(self.choice, str | Mapping):
            raise wrong("choice", "a sequence of texts", self.choice)
        choice = tuple(self.choice)
        object.__setattr__(self, "choice", choice)
        if len(choice) > MAX_CHOICES:
            raise ValueError(f"choice must have at most {MAX_CHOICES} texts, not {len(choice)}")
        texts = {name: getattr(self, name) for name in ("json_schema", "regex", "grammar")}
        given = [name for name, text in texts.items() if text is not None]
        given += ["json_object"] * self.json_object + ["choice"] * bool(choice)
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"structured must have 1 of json_schema, json_object, regex, choice, grammar, not {found}")
        for name in given:
            for text in choice if name == "choice" else [texts[name]] if name in texts else ():
                if not isinstance(text, str):
                    raise wrong(name, "a str", text)
                if name == "choice" and not text:
                    raise ValueError("a text of choice must have at least 1 character, not 0")
        length = len(self.after) + sum(map(len, choice)) + sum(len(text) for text in texts.values() if text is not None)
        if length > MAX_GRAMMAR_LENGTH:
            raise ValueError(f"{given[0]} must have at most {MAX_GRAMMAR_LENGTH} characters, not {length}")

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        texts = ("json_schema", "regex", "grammar")
        return next(
            (name for name in texts if getattr(self, name) is not None), "choice" if self.choice else "json_object"
        )


class Grammars:
    """Compiles the grammars of one tokenizer and keeps the last ones. Any thread may call it.

    Parameters
    ----------
    tokenizer : object or None
        A tokenizer of transformers.
    vocab_size : int
        Number of tokens in the model's vocabulary.
    stop_token_ids : iterable of int
        Tokens that end every text of the model.

    Attributes
    ----------
    giving_way : callable
        Returns a context manager for work that takes CPU time from the model.
    """

    giving_way: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(self, tokenizer: Any, vocab_size: int, stop_token_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size, self._stop_token_ids = tokenizer, vocab_size, sorted(stop_token_ids)
        self._opening = threading.Lock()  # guards the next three
        self._vocabulary: Any = None
        self._special: dict[int, str] = {}
        self._masks: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()  # guards the next three
        self._kept: OrderedDict[Structured, Grammar] = OrderedDict()
        self._checkers: list[subprocess.Popen[bytes]] = []  # without work
        self._is_closed = False
        self._compiling = threading.BoundedSemaphore(MAX_COMPILING)

    def compiled(self, structured: Structured) -> Grammar:
        """Return the compiled grammar.

        A new one is first checked in another process, with a limit of 1 s of CPU time and 128 MiB of memory. This
        process has the lowest priority, so that it takes no CPU from the model.

        Raises
        ------
        RequestRejected
            If the grammar is wrong, not supported or too large, or llguidance is not installed.
        """
        found = self.kept(structured) or self._new(structured)
        found.check()
        return found

    def _new(self, structured: Structured) -> Grammar:
        self.open()
        with self._compiling, self.giving_way():
            found = self.kept(structured)  # another thread may have compiled it meanwhile
            if found is not None:
                return found
            source = self._checked(structured)
            with ThreadPoolExecutor(1, "pagepool-grammar") as executor:
                with _large_stacks():
                    future = executor.submit(self._compiled, structured.kind, source)
                found = future.result()
            with self._lock:
                self._kept[structured] = found
                while len(self._kept) > MAX_GRAMMARS:
                    self._kept.popitem(last=False)
        return found

    def kept(self, structured: Structured) -> Grammar | None:
        """Return the compiled grammar if it is kept. Does not wait."""
        with self._lock:
            found = self._kept.get(structured)
            if found is not None:
                self._kept.move_to_end(structured)
        return found

    def close(self) -> None:
        """Stop the processes that check grammars, and the thread of the masks after its last job."""
        self._end_checkers()
        with self._opening:
            if self._masks is not None:
                self._masks.shutdown(wait=True)

    def __del__(self) -> None:
        self._end_checkers()

    def _end_checkers(self) -> None:
        with self._lock:
            self._is_closed, checkers = True, self._checkers
            self._checkers = []
        for checker in checkers:
            _end(checker)

    def open(self) -> None:
        """Make the vocabulary and the thread of the masks, once: it takes some 5 microseconds for each token.

        Raises `RequestRejected` if the model has no tokenizer or stop token, or llguidance is not installed.
        """
        with self._opening:
            if self._vocabulary is not None:
                return
            if self._tokenizer is None or not self._stop_token_ids:
                missing = "a tokenizer" if self._tokenizer is None else "a stop token"
                raise RequestRejected(f"structured needs a model with {missing}", param="structured")
            try:
                from llguidance import LLTokenizer, TokenizerWrapper

                tokens = _Tokens(self._tokenizer, self._vocab_size, self._stop_token_ids)
                tokens.found = LLTokenizer(TokenizerWrapper(tokens))
            except ImportError:
                sentence = "structured needs llguidance: pip install 'pagepool[structured]'"
                raise RequestRejected(sentence, param="structured") from None
            self._special = {token: tokens.tokens[token].decode(errors="replace") for token in tokens.special_token_ids}
            self._vocabulary = tokens.found
            with _large_stacks():
                self._masks = ThreadPoolExecutor(1, "pagepool-masks")
                self._masks.submit(int)  # starts the thread

    def _checked(self, structured: Structured) -> str:
        """Check a grammar in another process and return it in llguidance's form. Raises `RequestRejected`."""
        kind, value = structured.kind, getattr(structured, structured.kind)
        asked = {"kind": kind, "value": value, "after": structured.after, "limits": LIMITS}
        asked |= {"special": self._special, "stop": self._stop_token_ids[0]}
        asked |= {"memory": CHECK_BYTES, "seconds": CHECK_CPU_SECONDS}
        try:
            status, answer = self._answer(asked)
        except TimeoutError:
            raise _refusal(kind, f"takes more than {CHECK_SECONDS:g} s to compile") from None
        except (OSError, EOFError) as error:
            raise _refusal(kind, "cannot be checked: the process that checks grammars has ended") from error
        message = answer.decode(errors="replace")
        if status == 0:
            return message
        if status in (-signal.SIGXCPU, -signal.SIGKILL):
            message = f"takes more than {CHECK_CPU_SECONDS} s to compile"
        elif status < 0:
            message = f"is nested too deeply, or needs more than {CHECK_BYTES >> 20} MiB to compile"
        elif status != grammar_check.REFUSED:
            message = f"cannot be checked: {message}"
        raise _refusal(kind, message)

    def _answer(self, asked: dict[str, Any]) -> tuple[int, bytes]:
        """Let a checker check a grammar: one that is idle, or a new one. Raises as `_ask`."""
        with self._lock:
            checker = self._checkers.pop() if self._checkers else None
        if checker is not None and checker.poll() is not None:  # somebody has killed it
            _end(checker)
            checker = None
        checker = checker or _new_checker()
        is_idle = False
        try:
            answer = _ask(checker, asked)
            with self._lock:
                is_idle = not self._is_closed
                if is_idle:
                    self._checkers.append(checker)
            return answer
        finally:
            if not is_idle:
                _end(checker)

    def _compiled(self, kind: str, source: str) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        assert self._masks is not None
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILE_NICE)  # this thread ends with the call
        try:
            state = LLMatcher(self._vocabulary, source, log_level=0, limits=LLParserLimits(**LIMITS))
        except BaseException as error:  # a panic of llguidance is not an Exception
            raise _refusal(kind, error) from error
        return Grammar(Matcher(kind, state, np.empty(self._vocab_size, np.float32), self._stop_token_ids, self._masks))


class Grammar:
    """A compiled grammar. `first` is the matcher at the begin of a text."""

    def __init__(self, first: Matcher) -> None:
        self._first = first
        first._advance(())  # refuses a grammar without any text

    def check(self) -> None:
        """Raise `RequestRejected` if a token of an earlier request has taken too long: the next one would, too."""
        if self._first._faults:
            raise _refusal(self._first._kind, self._first._faults[0])

    def matcher(self, output: Sequence[int] = ()) -> Matcher:
        """Return the state of a request behind the tokens `output`, which an earlier run of it has generated."""
        return self._first.copied(output)


class Matcher:
    """The state of one request in its grammar.

    `begin` computes the mask of the next token in a thread, while the model runs. Calls must not overlap.
    """

    def __init__(
        self, kind: str, state: Any, bias: Any, stop_token_ids: Sequence[int], masks: ThreadPoolExecutor
    ) -> None:
        self._kind, self._state, self._bias, self._masks = kind, state, bias, masks
        self._stop_token_ids, self._faults = stop_token_ids, list[str]()
        self._bits = np.empty(-(-len(bias) // 32), np.int32)
        self._job: Future[None] | None = None
        self._tokens: list[int] = []  # not taken yet

    def copied(self, output: Sequence[int]) -> Matcher:
        """Return another matcher, behind `output`."""
        state, bias = self._state.deep_copy(), self._bias.copy()
        found = Matcher(self._kind, state, bias, self._stop_token_ids, self._masks)
        found._faults = self._faults
        found._tokens = list(output)
        return found

    def masked(self, logits: Any) -> Any:
        """Return the logits of the next token, with -inf for tokens that the grammar forbids.

        Call it once for each token: the result is in the memory of the mask, until `add`. Raises `RequestRejected` if
        llguidance gives up, because the grammar exceeds its limits at this token.
        """
        if self._tokens:  # `begin` was not called: a draft was right
            self._job, tokens = Future(), self._take()
            try:
                self._advance(tokens)
                self._job.set_result(None)
            except RequestRejected as error:
                self._job.set_exception(error)
        if self._job is not None:
            self._job.result()
        mask = self._bias[: len(logits)]
        return np.add(logits, mask, out=mask)

    def add(self, token: int) -> None:
        """Add a token that the mask allows."""
        self._tokens.append(token)

    def begin(self) -> None:
        """Take the tokens that were added, and compute the next mask. Returns at once."""
        if self._tokens:
            self._job = self._masks.submit(self._advance, self._take())

    def _take(self) -> list[int]:
        tokens, self._tokens = self._tokens, []
        return tokens

    def _advance(self, tokens: Sequence[int]) -> None:
        """Take tokens and compute the next mask."""
        state, bits, began = self._state, self._bits, thread_time()
        try:
            if state.consume_tokens(list(tokens)):
                state.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            message = state.get_error() or "no text is possible" if state.is_error() or not bits.any() else ""
        except BaseException as error:  # a panic of llguidance is not an Exception
            message = str(error)
        if message:
            raise _refusal(self._kind, message)
        if len(tokens) <= 1 and thread_time() - began > MASK_SECONDS:  # the steps of all requests wait for it
            self._faults.append(f"takes more than {MASK_SECONDS:g} s of CPU time for one token")
            raise _refusal(self._kind, self._faults[0])
        allowed = np.unpackbits(bits.view(np.uint8), count=len(self._bias), bitorder="little")
        allowed[self._stop_token_ids] = allowed[self._stop_token_ids[0]]  # llguidance 1.6 knows one of them
        np.take(np.array([-np.inf, 0.0], np.float32), allowed, out=self._bias, mode="clip")


class _Tokens:
    """The object that llguidance reads: the bytes of each token."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, vocab_size: int, stop_token_ids: list[int]) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {token for token, one in added.items() if getattr(one, "special", False)}
        self.eos_token_id, self.special_token_ids = stop_token_ids[0], sorted(special.union(stop_token_ids))
        # Some tokenizers cannot tell the bytes of a part of a character: without a text, it is never allowed.
        found = TokenTexts(tokenizer).all_bytes(vocab_size)
        self.tokens = [data if REPLACEMENT not in data else b"" for data in found]
        self.found: Any = None

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of forced text. Masks do not depend on them."""
        return list(self.found.greedy_tokenize(text))


def _new_checker() -> subprocess.Popen[bytes]:
    """Start a process of `grammar_check`. It has a group of its own, so that Ctrl-C in a terminal does not end it.

    A session of its own would do that as well. But Linux divides the CPUs among sessions, whatever the priorities of
    their processes are ("autogroup" in sched(7)): the checker would take CPU time from the model.
    """
    import llguidance

    command = [sys.executable, "-I", "-S", grammar_check.__file__, os.path.dirname(llguidance.__file__)]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    own_group: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, **own_group)


def _ask(checker: subprocess.Popen[bytes], asked: dict[str, Any]) -> tuple[int, bytes]:
    """Return the answer of a checker: a status and a text.

    Raises OSError or EOFError if its process has ended. Raises TimeoutError after CHECK_SECONDS, and kills it.
    """
    assert checker.stdin is not None and checker.stdout is not None
    is_late = threading.Event()

    def give_up() -> None:
        is_late.set()
        os.killpg(checker.pid, signal.SIGKILL)  # a process without `wait` keeps its number

    limit = threading.Timer(CHECK_SECONDS, give_up)
    limit.daemon = True
    limit.start()
    try:
        marshal.dump(asked, checker.stdin)
        checker.stdin.flush()
        answer = cast(tuple[int, bytes], marshal.load(checker.stdout))
    except (OSError, EOFError):
        if not is_late.is_set():
            raise
    finally:
        limit.cancel()
        limit.join()
    if is_late.is_set():
        raise TimeoutError
    return answer


def _end(checker: subprocess.Popen[bytes]) -> None:
    """Kill a checker, with the check that it runs. In a fork of its owner it goes on, because `poll` returns 0."""
    assert checker.stdin is not None and checker.stdout is not None
    if checker.poll() is None:
        os.killpg(checker.pid, signal.SIGKILL)
        checker.wait()
    checker.stdout.close()
    with suppress(BrokenPipeError):  # what could not be written
        checker.stdin.close()


@contextmanager
def _large_stacks() -> Iterator[None]:
    """Threads that start meanwhile have a stack of STACK_BYTES."""
    with _stack_size:
        before = threading.stack_size(STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)


_stack_size = threading.Lock()  # `threading.stack_size` is a variable of the process


def _refusal(kind: str, message: object) -> RequestRejected:
    """Return the error for a grammar, with the beginning of a message of llguidance."""
    shown = " ".join(str(message).replace("<non-verbose/>", "").split())[:MAX_MESSAGE]
    return RequestRejected(f"{kind}: {shown}", param="structured")
