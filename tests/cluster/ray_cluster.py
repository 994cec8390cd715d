"""Shared by the tests of a cluster on Ray: the model and the filters for Ray's own warnings."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("RAY_worker_niceness", "0")  # with Ray's 15, other work can keep workers from starting

MODEL = Path(__file__).parents[2] / "bench" / "tiny_llama"

# Warnings of Ray and its dependencies. Warnings of pagepool stay errors.
MARKS = [
    pytest.mark.filterwarnings("default::ResourceWarning"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("default::FutureWarning"),
    pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning"),
]
