"""Shared by all commands: the error for bad arguments, and argument types for argparse."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

from pagepool.memory.shared_files import path_of

__all__ = ["UsageError", "between", "budget", "file_name", "pool_name", "size_in_bytes"]

MAX_BYTES = 1 << 50


class UsageError(ValueError):
    """Arguments contradict one another, or a file cannot be used."""


def between(low: int, high: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `low` to `high`.

    >>> between(1, 8)("3")
    3
    """

    def parse(text: str) -> int:
        try:
            value = int(text) if len(text) <= 20 else high + 1
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be from {low} to {high}, not {text[:24]}")
        return value

    return parse


def file_name(text: str) -> str:
    """Check that a file name is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("the file name must not be empty")
    return text


def pool_name(text: str) -> str:
    """Check the name of a shared pool or of a memory budget."""
    try:
        path_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def budget(text: str) -> tuple[str, int]:
    """Parse the name and the number of bytes of a memory budget.

    >>> budget("host:2G")
    ('host', 2147483648)
    """
    name, _, size = text.rpartition(":")
    return pool_name(name), size_in_bytes(size)


def size_in_bytes(text: str) -> int:
    """Parse a number of bytes, with k, M, G or T for powers of 1,024.

    >>> size_in_bytes("512k")
    524288
    """
    match = re.fullmatch(r"([0-9]{1,12})([kMGT]?)", text)
    if match is None or not 1 <= (size := int(match[1]) << 10 * " kMGT".index(match[2] or " ")) <= MAX_BYTES:
        sentence = f"must be a size such as 4096, 512k, 16M or 2G, from 1 to {MAX_BYTES} bytes, not {text[:24]!r}"
        raise argparse.ArgumentTypeError(sentence)
    return size
