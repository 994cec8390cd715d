"""What setup.py says where pagepool cannot be built."""

import importlib.util
import sys
from pathlib import Path

import pytest
from refusals import refuses

SETUP = Path(__file__).parents[2] / "setup.py"
if not SETUP.is_file():
    pytest.skip("setup.py is a file of a checkout", allow_module_level=True)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("platform", "darwin", (64, "Linux", "darwin")), ("maxsize", 2**31 - 1, (64, "32-bit"))],
)
def test_a_platform_without_support_gets_one_sentence(monkeypatch, name, value, words):
    spec = importlib.util.spec_from_file_location("pagepool_setup", SETUP)
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    setup.check_platform()
    monkeypatch.setattr(sys, name, value)
    with refuses(SystemExit, *words):
        setup.check_platform()
