"""Exceptions. Every error that pagepool defines is a `PoolError`. A failed call changes nothing."""

from __future__ import annotations

from typing import NoReturn

__all__ = [
    "EngineClosed",
    "InvalidBlock",
    "InvalidSlot",
    "PoolError",
    "PoolExhausted",
    "RequestRejected",
    "StaleHandle",
    "TransferError",
]


class PoolError(Exception):
    """Base class of all errors that pagepool defines."""


class PoolExhausted(PoolError, MemoryError):
    """Fewer blocks, pages or slots are free than were asked for."""


class InvalidBlock(PoolError, ValueError):
    """A block or page id is out of range, not allocated, or freed too often."""


class InvalidSlot(PoolError, ValueError):
    """A slot is out of range, not allocated, or released twice; or a pool does not have the requested kind."""


class StaleHandle(PoolError, ValueError):
    """A handle or a sequence is used after it was released. Its block or slot may have another owner now."""


class TransferError(PoolError):
    """A peer cannot be reached, or its pages or pool differ from the ticket."""


class RequestRejected(PoolError, ValueError):
    """An engine can never run this request: its prompt is too long or empty, or has unknown tokens.

    Also the error of a generation whose parameters leave no token that the model can choose.

    Attributes
    ----------
    code : str or None
        "context_length_exceeded" if the prompt is too long.
    param : str or None
        The field of `SamplingParams` that is refused.
    """

    def __init__(self, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


class EngineClosed(PoolError, RuntimeError):
    """The engine accepts no more requests: it was closed, it drains, or its model or scheduler has failed."""


def refuse_copy(holder: object) -> NoReturn:
    """The `__reduce__` of classes that own memory or ids: a copy would free the memory of the original."""
    raise TypeError(f"a {type(holder).__name__} cannot be pickled or copied: it owns memory or ids")
