"""Engines of vLLM that do not outlive a test, and names of tiers whose memory does not."""

import pytest
from tier_names import tier_name
from vllm_engine import VllmEngine


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
    with tier_name() as chosen:
        yield chosen
