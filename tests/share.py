"""Which part of the tests runs, by PAGEPOOL_TEST_SHARE; tests/conftest.py chooses the cases.

unset  `make test`: without the tests marked `slow`, with a part of the cases of those marked `one_in`
1      `make test-all`: everything
n      an nth of the cases of each test function, and of the random programs
"""

import os

SHARE = int(os.environ.get("PAGEPOOL_TEST_SHARE", "0"))
WHOLE = SHARE == 1


def examples(count, **more):
    """Return hypothesis's settings for `count` examples, or for 20 times as many in `make test-all`."""
    from hypothesis import settings

    return settings(max_examples=20 * count if WHOLE else -(-count // max(SHARE, 1)), deadline=None, **more)
