"""Exceptions. Every error of pagepool's own is a `PoolError`; a failed call changes nothing."""

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
    """Base of all errors of pagepool's own."""


class PoolExhausted(PoolError, MemoryError):
    """Fewer blocks, pages or slots are free than were asked for."""


class InvalidBlock(PoolError, ValueError):
    """A block or page id is out of range, not allocated, or freed too often."""


class InvalidSlot(PoolError, ValueError):
    """A slot is out of range, not allocated, or released twice; or a pool lacks the kind asked for."""


class StaleHandle(PoolError, ValueError):
    """A handle or a sequence is used after it was given back; its block or slot may have another owner by now."""


class TransferError(PoolError):
    """A peer has other pages, cannot be reached, or has another pool than the ticket says."""


class RequestRejected(PoolError, ValueError):
    """An engine can never run this request: its prompt is too long, or has no tokens or unknown ones.

    Attributes
    ----------
    code
        "context_length_exceeded" if the prompt is too long, else None.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class EngineClosed(PoolError, RuntimeError):
    """The engine takes no more requests: it was closed, it drains, or its model or scheduler has failed."""


def refuse_copy(holder: object) -> NoReturn:
    """Is the `__reduce__` of classes that own memory or ids: a copy would free what the original holds."""
    raise TypeError(f"a {type(holder).__name__} cannot be pickled or copied: it owns memory or ids")
