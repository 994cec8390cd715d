"""The examples in the docstrings of pagepool.memory run."""

import doctest
import importlib
import pkgutil

import pytest

import pagepool.memory

MODULES = [module.name for module in pkgutil.iter_modules(pagepool.memory.__path__, "pagepool.memory.")]
WITHOUT = {"audit", "dlpack", "ids", "tensor", "token_rows"}  # nothing there is called from Python


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert (result.attempted == 0) == (name.rpartition(".")[2] in WITHOUT)
