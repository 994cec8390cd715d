import os

import pytest
from canonical_answers import FOLDER


@pytest.fixture(scope="session", autouse=True)
def answers(tmp_path_factory):
    """Set the folder of canonical_answers: a given one, or a new one for this process and its child processes."""
    if FOLDER in os.environ:
        yield
        return
    os.environ[FOLDER] = str(tmp_path_factory.mktemp("answers"))
    yield
    del os.environ[FOLDER]
