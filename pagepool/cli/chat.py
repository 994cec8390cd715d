"""`pagepool generate --chat`: chat with a model in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from time import monotonic
from typing import TYPE_CHECKING

from pagepool.cli.model_options import require
from pagepool.cli.output import STDOUT, written_to
from pagepool.cli.usage import UsageError

if TYPE_CHECKING:
    from pagepool.cli.session import SessionFile
    from pagepool.engine import Engine
    from pagepool.engine.generation import Generation

__all__ = ["Chat"]

RESET = "/reset"


class Chat:
    """Reads one message per line and streams the answers.

    Parameters
    ----------
    engine : Engine
        Runs the model.
    submit : callable
        Submits the tokens of a conversation to the engine. Raises ValueError if the engine refuses them.
    name : str
        Name of the model, for messages.
    system : str or None
        Text of the system message.
    new_tokens : int
        Room for an answer, in tokens. Older turns are dropped to make this room.
    special_tokens_in_texts : bool
        As in `Encoder.encode_chat`.
    session : SessionFile or None
        Where the conversation was saved. It is saved there again when the input ends.
    """

    def __init__(
        self,
        engine: Engine,
        submit: Callable[[list[int]], Generation],
        name: str,
        system: str | None,
        new_tokens: int,
        special_tokens_in_texts: bool = False,
        session: SessionFile | None = None,
    ) -> None:
        require("--chat", "transformers", "jinja2")
        if getattr(engine.tokenizer, "chat_template", None) is None:
            raise UsageError(f"{name}: --chat needs a tokenizer with a chat template")
        self._encode = partial(engine.encoder.encode_chat, special_tokens_in_texts=special_tokens_in_texts)
        self._engine, self._submit, self._name, self._new_tokens = engine, submit, name, new_tokens
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[list[dict[str, str]]] = []  # pairs: the user's message and the answer
        self._session, self._tokens = session, [] if session is None else session.tokens
        if session is not None and session.tokens:
            self._turns = session.note["turns"]
            if system is None:
                self._system = session.note["system"]

    def run(self) -> None:
        """Answer messages until the input ends, then save the session."""
        try:
            self._talk()
        finally:
            if self._session is not None:
                self._session.save(self._tokens, {"system": self._system, "turns": self._turns})

    def _talk(self) -> None:
        if sys.stdin.isatty():
            with suppress(ImportError):  # gives `input` line editing and a history
                import_module("readline")
            say(f"{self._name}. Ctrl-C ends an answer, Ctrl-D ends the chat, {RESET} forgets the conversation.")
        while (line := self._read()) is not None:
            if line.strip() == RESET:
                self._turns, self._tokens = [], []
                say("the conversation is forgotten")
            elif line.strip():
                self._answer(line)

    def _read(self) -> str | None:
        """Return the next line of standard input, or None at its end."""
        if not sys.stdin.isatty():
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        try:
            return input("> ")
        except EOFError:
            print()
            return None

    def _answer(self, line: str) -> None:
        message = {"role": "user", "content": line}
        began = monotonic()
        try:
            turns, tokens = self._fit(message)
            generation = self._submit(tokens)
        except ValueError as error:
            say(str(error))
            return
        with written_to(STDOUT):
            try:
                for token in generation:
                    print(token.text, end="", flush=True)
            except KeyboardInterrupt:
                generation.cancel()
                with suppress(RuntimeError):  # its text is kept, whatever ended it
                    generation.result()
            except RuntimeError as error:
                say(str(error))
                return
            print(flush=True)
        if dropped := len(self._turns) - len(turns):
            say(f"the context is full: the oldest {dropped} of {len(self._turns)} turns are forgotten")
        self._turns = [*turns, [message, {"role": "assistant", "content": generation.text}]]
        self._tokens = [*tokens, *generation.token_ids]
        seconds, count = monotonic() - began, len(generation.token_ids)
        say(
            f"{count} tokens, {count / seconds:,.1f} tokens/s, first after "
            f"{generation.time_to_first_token or seconds:.3f} s; {generation.num_cached} of "
            f"{generation.num_prompt_tokens} prompt tokens cached"
        )

    def _fit(self, message: dict[str, str]) -> tuple[list[list[dict[str, str]]], list[int]]:
        """Drop old turns until the answer has room. Returns the kept turns and the tokens of the conversation."""
        room = self._engine.max_new_tokens(0) - self._new_tokens
        turns = self._turns
        while True:
            messages = [*self._system, *(one for turn in turns for one in turn), message]
            tokens = self._encode(messages)
            if len(tokens) <= room or not turns:
                return turns, tokens
            turns = turns[1:]


def say(line: str) -> None:
    """Print a message of the program itself on standard error."""
    print(f"pagepool: {line}", file=sys.stderr, flush=True)
