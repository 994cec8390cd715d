"""`pagepool generate --session FILE`: continues a text or a conversation in a later process."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pagepool.cli.model_options import model_directory, weights_of
from pagepool.cli.usage import UsageError

if TYPE_CHECKING:
    from pagepool.engine import Engine
    from pagepool.prefix.cache import PrefixCache

__all__ = ["SessionFile"]


class SessionFile:
    """The file of a session, and what it contained when it was opened.

    tokens  all tokens of the file; empty for a new session
    note the note that was passed to `save`, or None
    """

    def __init__(self, engine: Engine, options: argparse.Namespace) -> None:
        from pagepool.prefix.session import load_session

        self._engine, self._path = engine, Path(options.session)
        self._cache = cast("PrefixCache", engine.prefix_cache)  # `weights_of` refuses --no-prefix-cache
        self.tokens: list[int] = []
        self.note: Any = None
        try:
            self._fingerprint = engine.runner.fingerprint(weights_of(model_directory(options.model), options))
            if self._path.exists():
                found = load_session(self._path, self._cache, self._fingerprint, **self._memory())
                self.tokens, self.note = found.tokens.tolist(), found.note
                if isinstance(self.note, dict) != options.chat:
                    raise ValueError(f"{self._path}: it has a {'text' if options.chat else 'chat'}, see --chat")
                self._say(f"{len(self.tokens):,} tokens, {found.num_cached:,} of them need no computing")
        except ValueError as error:
            raise UsageError(str(error)) from error

    def prompt(self, text: str) -> list[int]:
        """Return the tokens so far, followed by the tokens of a text."""
        options = {"add_special_tokens": False} if self.tokens else {}
        return [*self.tokens, *self._engine.encoder.encode(text, **options)]

    def save(self, tokens: list[int], note: Any = None) -> None:
        """Write all tokens and their cached pages. Raises OSError if the file cannot be written."""
        from pagepool.prefix.session import save_session

        count = save_session(self._path, self._cache, self._fingerprint, tokens, note=note, **self._memory())
        self._say(f"saved with {len(tokens):,} tokens, {count:,} of them with their pages")

    def _memory(self) -> dict[str, Any]:
        runner = self._engine.runner
        return {"num_groups": len(runner.groups or (0,)), "checkpoints": runner.checkpoints}

    def _say(self, line: str) -> None:
        print(f"pagepool: {self._path}: {line}", file=sys.stderr, flush=True)
