"""Options of a command from a file and from the environment, by the same parser as the command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pagepool.cli.usage import UsageError

__all__ = ["with_settings"]

ON, OFF = {"1", "true", "yes", "on"}, {"0", "false", "no", "off", ""}


def with_settings(
    parser: argparse.ArgumentParser, prefix: str, given: Sequence[str], environment: Mapping[str, str]
) -> list[str]:
    """Return the arguments of a command line, preceded by the options of a file and of the environment.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        The parser of the command. It has an option `--config`, and no abbreviations.
    prefix : str
        Beginning of the environment's variables.
    given : sequence of str
        The arguments on the command line. An option in them replaces the one of the environment, which replaces the
        one of the file.
    environment : mapping of str to str
        Variables. `PREFIX_MAX_REQUESTS` is the option `--max-requests`. Words separated by spaces are the values of an
        option that may be repeated.

    Raises
    ------
    UsageError
        If the file cannot be read, or a name or value is wrong. The message names file or variable.

    Examples
    --------
    >>> parser = argparse.ArgumentParser()
    >>> _ = [parser.add_argument(name) for name in ("--config", "--port")]
    >>> with_settings(parser, "APP_", ["--name=x"], {"APP_PORT": "8001"})
    ['--port=8001', '--name=x']
    """
    options = {name[2:]: action for action in parser._actions for name in action.option_strings if name[:2] == "--"}
    on_line = {word.partition("=")[0][2:] for word in given if word[:2] == "--"}
    found: dict[str, list[str]] = {}
    of_environment = {}
    for variable, text in environment.items():
        if variable.startswith(prefix):
            name = variable.removeprefix(prefix).lower().replace("_", "-")
            of_environment[name] = (variable, text)
    _, file = of_environment.pop("config", (None, None))
    file = value_of("config", given) or file
    if file is not None:
        for key, value in read_file(file).items():
            name = key.replace("_", "-")
            found[name] = arguments_of(options, name, value, f"{file}: {key}")
    for name, (variable, text) in of_environment.items():
        action = options.get(name)
        value = text.split() if isinstance(action, argparse._AppendAction) else text
        found[name] = arguments_of(options, name, value, variable)
    return [word for name, words in found.items() if name not in on_line for word in words] + list(given)


def value_of(name: str, given: Sequence[str]) -> str | None:
    """Return the value of an option on the command line, or None."""
    found = None
    for word, following in zip_longest(given, given[1:]):
        if word == f"--{name}":
            found = following
        elif word.startswith(f"--{name}="):
            found = word.partition("=")[2]
    return found


def read_file(path: str) -> dict[str, Any]:
    """Return the options in a TOML file. Raises `UsageError`."""
    try:
        toml = import_module("tomllib")  # of Python 3.11 and later
    except ImportError:
        try:
            toml = import_module("tomli")
        except ImportError:
            raise UsageError("--config needs Python 3.11 or tomli: pip install 'pagepool[serve]'") from None
    try:
        return dict(toml.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or not TOML
        raise UsageError(f"{path}: is not TOML: {error}") from None


def arguments_of(options: Mapping[str, argparse.Action], name: str, value: Any, source: str) -> list[str]:
    """Return the command-line arguments for an option. Raises `UsageError` with the source of the value."""
    action = options.get(name)
    if action is None or name in ("help", "config"):
        raise UsageError(f"{source}: there is no option --{name} that could be set here")
    if action.nargs == 0:
        word = str(value).lower()
        if word not in ON | OFF:
            raise UsageError(f"{source}: must be true or false, not {str(value)[:40]!r}")
        return [f"--{name}"] if word in ON else []
    values: Iterable[Any] = value if isinstance(value, list) and isinstance(action, argparse._AppendAction) else [value]
    found = []
    for one in values:
        if isinstance(one, bool) or not isinstance(one, str | int | float):
            raise UsageError(f"{source}: must be a text or a number, not {type(one).__name__}")
        try:
            read = action.type(str(one)) if callable(action.type) else str(one)
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise UsageError(f"{source}: {error}") from None
        if action.choices is not None and read not in action.choices:
            raise UsageError(f"{source}: must be one of {', '.join(action.choices)}, not {str(one)[:40]!r}")
        found.append(f"--{name}={one}")
    return found
