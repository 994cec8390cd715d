"""The command line: `pagepool` and `python -m pagepool`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from pagepool._version import __version__
from pagepool.cli import config, generate, pool, prove, record, replay, replay_options, serve, store, top
from pagepool.cli.output import STDOUT, check_writable, drop_output, is_closed, written_to
from pagepool.cli.settings import with_settings
from pagepool.cli.usage import UsageError
from pagepool.errors import PoolError
from pagepool.replay.driver import ReplayFailed
from pagepool.replay.ptrace import TraceError

__all__ = ["main"]

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130


class OneLineParser(argparse.ArgumentParser):
    """Reports an error in one line that points to --help. argparse would print the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"pagepool: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Errors are printed as one line on stderr.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: `sys.argv[1:]`.

    Returns
    -------
    int
        Exit code: 0 for success, 1 if the command failed, 2 for bad input, 130 for Ctrl-C.

    Raises
    ------
    SystemExit
        For --help, --version and options that argparse refuses.
    """
    if sys.stderr is None or is_closed(sys.stderr):
        sys.stderr = open(os.devnull, "w")  # the parent process has closed it; print would write to stdout instead
    if sys.stdout is not None:  # None if the parent process has closed it: no tables are printed then
        try:
            check_writable(STDOUT)
        except UsageError as error:
            return _fail(BAD_INPUT, str(error))
    parser = OneLineParser(prog="pagepool", description="Paged memory for LLM engines on CPU.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"pagepool {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    summary = "Replay recorded LLM traffic through the pool and the scheduler, under a virtual clock."
    replay_options.add_arguments(commands.add_parser("replay", help=summary, description=summary, allow_abbrev=False))
    summary = "Make a trace from prompts with token ids. The trace holds no token ids."
    record.add_arguments(commands.add_parser("record", help=summary, description=summary, allow_abbrev=False))
    summary = "Generate text from prompts, or chat, with a model of transformers over pagepool's pages."
    generate.add_arguments(commands.add_parser("generate", help=summary, description=summary, allow_abbrev=False))
    summary = "Serve a model of transformers over pagepool's pages to OpenAI clients."
    serve.add_arguments(commands.add_parser("serve", help=summary, description=summary, allow_abbrev=False))
    summary = "List, show, remove and limit the shared pools of this user."
    pool.add_arguments(commands.add_parser("pool", help=summary, description=summary, allow_abbrev=False))
    summary = "List, show, remove and verify the stores of cached prefixes in a directory."
    store.add_arguments(commands.add_parser("store", help=summary, description=summary, allow_abbrev=False))
    summary = "Ask an OpenAI endpoint whether it serves the keys of another prompt."
    prove.add_arguments(commands.add_parser("prove", help=summary, description=summary, allow_abbrev=False))
    summary = "Show requests, tokens and memory of a running server, pagepool's or vLLM's."
    top.add_arguments(commands.add_parser("top", help=summary, description=summary, allow_abbrev=False))
    summary = "Print the compiler flags for C and Cython programs that use pagepool."
    config.add_arguments(commands.add_parser("config", help=summary, description=summary, allow_abbrev=False))
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["serve"]:
        try:
            given[1:] = with_settings(commands.choices["serve"], "PAGEPOOL_SERVE_", given[1:], os.environ)
        except UsageError as error:
            return _fail(BAD_INPUT, str(error))
    chosen, unknown = parser.parse_known_args(given)
    if unknown:
        commands.choices[chosen.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    with _every_name_printable():
        return _run(chosen)


@contextmanager
def _every_name_printable() -> Iterator[None]:
    """Print characters that the terminal's encoding lacks as escapes, as Python does on stderr."""
    stream = sys.stdout if isinstance(sys.stdout, io.TextIOWrapper) else None
    before = None
    if stream is not None:
        before = stream.errors
        stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        if stream is not None and before is not None:
            with suppress(OSError, ValueError):
                stream.reconfigure(errors=before)


def _run(chosen: argparse.Namespace) -> int:
    try:
        if chosen.command == "record":
            made = f"{record.run(chosen):,} requests in {chosen.output}"
            with written_to(STDOUT):
                print(made)
        elif chosen.command == "generate":
            return generate.run(chosen)
        elif chosen.command == "serve":
            return serve.run(chosen)
        elif chosen.command == "pool":
            pool.run(chosen)
        elif chosen.command == "store":
            store.run(chosen)
        elif chosen.command == "prove":
            return prove.run(chosen)
        elif chosen.command == "top":
            top.run(chosen)
        elif chosen.command == "config":
            config.run(chosen)
        else:
            replay.run(chosen)
        return 0
    except KeyboardInterrupt:
        return _fail(INTERRUPTED, "interrupted")
    except BrokenPipeError:
        drop_output()  # the reader of the pipe has closed it
        return FAILED
    except (TraceError, UsageError, OSError) as error:
        return _fail(BAD_INPUT, str(error))
    except (ReplayFailed, PoolError, MemoryError) as error:
        return _fail(FAILED, str(error) or "out of memory")


def _fail(code: int, message: str) -> int:
    print(f"pagepool: {message}", file=sys.stderr)
    return code
