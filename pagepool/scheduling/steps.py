"""Steps that must all be taken, whatever becomes of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable

__all__ = ["run_all"]


def run_all(functions: Iterable[Callable[[], object]]) -> None:
    """Calls all of them, then raises what the first that failed raised."""
    failure = None
    for function in functions:
        try:
            function()
        except BaseException as error:
            failure = failure or error
    if failure is not None:
        raise failure
