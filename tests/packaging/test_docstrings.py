"""Every example in a docstring runs, in compiled modules too, and every public name has a docstring."""

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import warnings

import pytest

import pagepool

GENERATED = {"pagepool._cyutility"}
NAMES = sorted(
    module.name
    for module in pkgutil.walk_packages(pagepool.__path__, "pagepool.")
    if module.name not in GENERATED and not module.name.endswith("__main__")
)


# Modules that are imported by those alone who have what they need.
NEEDS = {
    "pagepool.integrations.transformers": "transformers",
    "pagepool.cluster.ray.deployments": "ray",
    "pagepool.cluster.ray.routing": "ray",
    "pagepool.serve.app": "starlette",
    "pagepool.serve.metrics": "prometheus_client",
}


@pytest.mark.parametrize("name", ["pagepool", *NAMES])
def test_examples_run(name):
    missing = [need for part, need in NEEDS.items() if name.startswith(part) and not importlib.util.find_spec(need)]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    with warnings.catch_warnings():
        if any(name.startswith(part) for part in NEEDS):
            warnings.simplefilter("ignore", DeprecationWarning)  # of what they need, such as Ray's pydantic
        module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples of {name} failed"


@pytest.mark.parametrize("name", [name for name in pagepool.__all__ if name != "__version__"])
def test_public_names_are_documented(name):
    thing = getattr(pagepool, name)
    assert inspect.getdoc(thing), f"{name} has no docstring"
    if not inspect.isclass(thing) or issubclass(thing, (BaseException, int)):
        return
    bare = [
        member
        for member, value in vars(thing).items()
        if not member.startswith("_") and (callable(value) or isinstance(value, property)) and not inspect.getdoc(value)
    ]
    assert not bare, f"{name} has members without a docstring: {', '.join(bare)}"


def test_all_is_sorted_and_complete():
    assert list(pagepool.__all__) == sorted(pagepool.__all__)
    assert [name for name in pagepool.__all__ if not hasattr(pagepool, name)] == []
