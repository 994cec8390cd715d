"""`refuses`: the type of an error and the names and numbers in its message, so that its wording can improve."""

import re
from contextlib import contextmanager

import pytest


def _has(message, word):
    """Whether the message has this word whole: neither 3 in 30, -3 or 3.5, nor `block` in `block_size`."""
    return re.search(rf"(?<![\w\-])(?<!\d\.){re.escape(str(word))}(?!\.?\w)", message) is not None


@contextmanager
def refuses(error, *words, unchanged=None):
    """The body raises exactly `error`, whose message has each word whole.

    `unchanged()` describes what the call could have changed: it must return the same afterwards.
    """
    before = unchanged and unchanged()
    with pytest.raises(error) as caught:
        yield caught
    assert caught.type is error, f"{caught.type.__name__} and not {error.__name__}: {caught.value}"
    missing = [word for word in words if not _has(str(caught.value), word)]
    assert not missing, f"{missing} not in: {caught.value}"
    assert before == (unchanged and unchanged())
