"""What the commands have in common: the error of bad arguments, and the types of some of them for argparse."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

__all__ = ["UsageError", "between", "file_name", "size_in_bytes"]

MAX_BYTES = 1 << 50


class UsageError(ValueError):
    """Arguments contradict one another, or name a file that cannot be used."""


def between(low: int, high: int) -> Callable[[str], int]:
    """A parser of whole numbers from `low` to `high`.

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
    """A name that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("the name of a file is empty")
    return text


def size_in_bytes(text: str) -> int:
    """Bytes, with k, M, G or T for powers of 1,024.

    >>> size_in_bytes("512k")
    524288
    """
    match = re.fullmatch(r"([0-9]{1,12})([kMGT]?)", text)
    if match is None or not 1 <= (size := int(match[1]) << 10 * " kMGT".index(match[2] or " ")) <= MAX_BYTES:
        raise argparse.ArgumentTypeError(f"{text[:24]!r} is no size such as 4096, 512k, 16M or 2G, up to {MAX_BYTES}")
    return size
