"""Every docstring example runs, also in compiled modules, and every public name has a docstring."""

import ast
import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import warnings
from pathlib import Path

import pytest

import pagepool

GENERATED = {"pagepool._cyutility"}
NAMES = sorted(
    module.name
    for module in pkgutil.walk_packages(pagepool.__path__, "pagepool.")
    if module.name not in GENERATED and not module.name.endswith("__main__")
)


# Modules with an optional dependency; tests skip them without it.
NEEDS = {
    "pagepool.integrations.transformers": "transformers",
    "pagepool.integrations.kv_events": "zmq",
    "pagepool.integrations.vllm": "vllm",
    "pagepool.cluster.door": "uvicorn",
    "pagepool.cluster.ray.deployments": "ray",
    "pagepool.cluster.ray.routing": "ray",
    "pagepool.serve.access": "starlette",
    "pagepool.serve.app": "starlette",
    "pagepool.serve.connections": "uvicorn",
    "pagepool.serve.http": "starlette",
    "pagepool.serve.loading": "starlette",
    "pagepool.serve.metrics": "prometheus_client",
    "pagepool.serve.places": "starlette",
    "pagepool.serve.runs": "starlette",
}


def module_file(thing):
    """Return the file of an object's module, or "" for objects without one."""
    return getattr(importlib.import_module(getattr(thing, "__module__", "sys")), "__file__", "") or ""


@pytest.mark.parametrize("name", ["pagepool", *NAMES])
def test_examples_run(name):
    missing = [need for part, need in NEEDS.items() if name.startswith(part) and not importlib.util.find_spec(need)]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    with warnings.catch_warnings():
        if any(name.startswith(part) for part in NEEDS):
            warnings.simplefilter("ignore", DeprecationWarning)  # warnings of dependencies, such as Ray's pydantic
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


def parameters_of(function):
    """Return {parameter: whether it is required} for a function of a stub."""
    args = function.args
    positional = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    required = {name: i < len(positional) - len(args.defaults) for i, name in enumerate(positional)}
    required |= {arg.arg: default is None for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)}
    return {name: must for name, must in required.items() if name not in ("self", "cls")}


def stub_of(thing):
    """Return the parameters in the stub of a compiled function or of each method of a class; overloads are merged."""
    compiled = Path(module_file(thing))
    stub = compiled.with_name(compiled.name.partition(".")[0] + ".pyi")
    (node,) = [node for node in ast.parse(stub.read_text()).body if getattr(node, "name", None) == thing.__name__][:1]
    found = {}
    for function in node.body if inspect.isclass(thing) else [node]:
        decorators = [getattr(decorator, "id", None) for decorator in getattr(function, "decorator_list", ())]
        if isinstance(function, ast.FunctionDef) and "property" not in decorators:
            given = parameters_of(function)
            found[function.name] = {
                name: found.get(function.name, given)[name] and must for name, must in given.items()
            }
    return found


COMPILED = [getattr(pagepool, name) for name in pagepool.__all__ if ".so" in module_file(getattr(pagepool, name))]


@pytest.mark.parametrize("thing", COMPILED, ids=lambda thing: thing.__name__)
def test_compiled_names_have_the_signatures_of_their_stubs(thing):
    for name, wanted in stub_of(thing).items():
        if name.startswith("__") and name != "__new__":
            continue
        shown = inspect.signature(getattr(thing, name, thing) if name != "__new__" else thing).parameters.values()
        assert {each.name: each.default is each.empty for each in shown if each.name != "self"} == wanted, name


def test_all_is_sorted_and_complete():
    assert list(pagepool.__all__) == sorted(pagepool.__all__)
    assert [name for name in pagepool.__all__ if not hasattr(pagepool, name)] == []
