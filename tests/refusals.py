"""`refuses`: the type of an error and the names and numbers in its message, so that its wording can improve."""

import re


def _has(message, word):
    """Return true if the message contains the whole word: not 3 in 30, -3 or 0.3, and not `block` in `block_size`."""
    return re.search(rf"(?<![\w\-])(?<!\d\.){re.escape(str(word))}(?!\.?\w)", message) is not None


class refuses:
    """Check that the body raises exactly `error` with a message that contains each of the words.

    `unchanged()` describes the state that the call could change: it must return the same afterwards.
    """

    def __init__(self, error, *words, unchanged=lambda: None):
        self.error, self.words, self.unchanged = error, words, unchanged

    def __enter__(self):
        self.before = self.unchanged()
        return self

    def __exit__(self, kind, value, trace):
        assert kind is not None, f"no {self.error.__name__} was raised"
        if not issubclass(kind, self.error):
            return False
        assert kind is self.error, f"{kind.__name__} and not {self.error.__name__}: {value}"
        missing = [word for word in self.words if not _has(str(value), word)]
        assert not missing, f"{missing} not in: {value}"
        assert self.unchanged() == self.before
        self.value = value
        return True
