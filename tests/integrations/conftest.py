"""Engines of vLLM that do not outlive a test, and names of tiers whose memory does not."""

import os

import pytest
from vllm_engine import VllmEngine, files_of


@pytest.fixture
def start():
    """Return a function that starts an engine."""
    engines = []

    def started(*arguments, **options):
        engines.append(VllmEngine(*arguments, **options))
        return engines[-1]

    yield started
    for engine in engines:
        engine.kill()


@pytest.fixture
def name():
    chosen = f"test-{os.getpid()}-{os.urandom(4).hex()}"
    yield chosen
    for path in files_of(chosen):
        path.unlink()
