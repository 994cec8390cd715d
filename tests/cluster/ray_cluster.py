"""What the tests of a cluster on Ray share: the model and the warnings that are Ray's own."""

from pathlib import Path

import pytest

MODEL = Path(__file__).parents[2] / "bench" / "tiny_llama"

# Of Ray and what it brings; those of pagepool stay errors.
MARKS = [
    pytest.mark.filterwarnings("default::ResourceWarning"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("default::FutureWarning"),
    pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning"),
]
