"""The rules of the house, for every file of the checkout: floors, sizes, neighbours, words."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if not (ROOT / "setup.py").is_file():
    pytest.skip("house rules are about the files of a checkout", allow_module_level=True)

PACKAGE = ROOT / "pagepool"
FOLDERS = ("pagepool", "include", "tests", "bench", "docs", ".ci")
SOURCES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".pyx", ".pxd", ".pyi", ".c", ".h", ".cpp"}
)
PYTHON = [path for path in SOURCES if path.suffix in {".py", ".pyi"}]
MODULES = [path for path in SOURCES if PACKAGE in path.parents and path.suffix in {".py", ".pyx", ".pxd", ".pyi"}]

# The table of CONTRIBUTING.md. A file imports from floors below its own or from its own folder; `pagepool` itself, the
# front, is above the floors that it gathers, and only what people start imports it.
FLOORS = {
    "_paths": 0,
    "_version": 0,
    "_arguments": -1,
    "config": 0,
    "csrc": 0,
    "errors": 0,
    "memory": 1,
    "attention": 2,
    "prefix": 3,
    "scheduling": 4,
    "transfer": 5,
    "integrations": 5,
    "cluster": 9,
    "engine": 6,
    "front": 7,
    "replay": 9.5,
    "serve": 8,
    "cli": 10,
    "__main__": 11,
    "reference": 1,
}
MAY_USE_REFERENCE = {"reference", "replay"}
# "About 700": a file near the limit is still one idea, one well past it holds two.
LONGEST = {".pyx": 740, ".py": 740}
IMPORT = re.compile(
    r"^\s*(?:from\s+(pagepool[\w.]*)\s+c?import\s+\(?([\w ,]+)|c?import\s+(pagepool[\w.]*))", re.MULTILINE
)
EXAMPLE = re.compile(r"^\s*(?:>>>|\.\.\.).*$", re.MULTILINE)


def name_of(path):
    return str(path.relative_to(ROOT))


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def component(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "front"


def is_module(name):
    place = ROOT.joinpath(*name.split("."))
    return place.is_dir() or any(place.with_suffix(suffix).is_file() for suffix in (".py", ".pyx", ".pxd"))


def imports_of(path):
    """The modules of pagepool that a file imports or cimports, examples in docstrings left out."""
    for source, names, plain in IMPORT.findall(EXAMPLE.sub("", path.read_text(encoding="utf-8"))):
        if plain:
            yield plain
            continue
        children = [f"{source}.{name.split()[0]}" for name in names.split(",") if name.split()]
        yield from (child if is_module(child) else source for child in children or [source])


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_come_from_floors_below(path):
    own = component(module_of(path))
    assert own in FLOORS, f"give {own} a floor here and in CONTRIBUTING.md"
    for module in imports_of(path):
        other = component(module)
        assert other in FLOORS, f"{module} is on no floor"
        if other == "reference":
            assert own in MAY_USE_REFERENCE, f"{module} is for tests, bench and replay --reference"
        assert other == own or FLOORS[other] < FLOORS[own], f"{own} must not import {module}"


def test_imports_make_no_circle():
    graph = {}
    for path in MODULES:
        if path.suffix in {".py", ".pyx"}:
            graph.setdefault(module_of(path), set()).update(imports_of(path))
    done = set()

    def visit(module, trail):
        assert module not in trail, " -> ".join([*trail[trail.index(module) :], module])
        if module not in done:
            for other in sorted(graph.get(module, ())):
                if other != module:
                    visit(other, [*trail, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])


@pytest.mark.parametrize("path", [path for path in SOURCES if path.suffix in {".c", ".h"}], ids=name_of)
def test_c_includes_our_headers_and_the_system_and_never_python(path):
    for ours, system in re.findall(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)', path.read_text(), re.MULTILINE):
        assert not system.startswith("Python")
        if ROOT / "include" in path.parents:
            assert not ours or ours.startswith("pagepool/"), f"a public header must not include {ours}"
        assert not ours or (ROOT / "include" / ours).is_file() or (path.parent / ours).is_file(), f"{ours} is not ours"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_are_short_and_finished(path):
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    if PACKAGE in path.parents and path.suffix in LONGEST:
        assert len(lines) <= LONGEST[path.suffix], f"{len(lines)} lines: it holds two ideas"
    assert not text or text.endswith("\n")
    for word in ("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"):
        assert not re.search(rf"\b{word}\b", text), f"{word}: finish it or file an issue"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_lines_end_by_column_120(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    wide = [number for number, line in enumerate(lines, 1) if len(line) > 120 or line != line.rstrip()]
    assert not wide, f"lines {wide} pass column 120 or end in blanks"


@pytest.mark.parametrize("path", [path for path in MODULES if path.suffix == ".pyi"], ids=name_of)
def test_a_stub_lies_beside_its_module(path):
    assert path.with_suffix(".pyx").is_file()


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_no_error_is_swallowed_and_no_test_skipped_without_a_reason(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ExceptHandler):
            optional = (
                node.type is not None and ast.unparse(node.type) == "ImportError"
            )  # a package that may be missing
            swallowed = all(isinstance(line, ast.Pass) for line in node.body)
            assert optional or not swallowed, f"line {node.lineno}: except: pass"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"pytest.skip", "pytest.mark.skip", "pytest.xfail"}:
            assert node.args or node.keywords, f"line {node.lineno}: a skip without a reason"
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.skipif":
            assert "reason=" in path.read_text(encoding="utf-8"), "a skipif without a reason"


def test_the_version_is_in_one_place():
    version = re.search(r'__version__ = "([^"]+)"', (PACKAGE / "_version.py").read_text()).group(1)
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(), "CHANGELOG.md has no heading for this version"
    named = f'"{version}"'
    assert [
        name_of(path) for path in [*SOURCES, ROOT / "setup.py", ROOT / "pyproject.toml"] if named in path.read_text()
    ] == ["pagepool/_version.py"]


def test_warnings_are_errors_in_tests():
    assert 'filterwarnings = ["error"]' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")], ids=name_of
)
def test_the_commands_and_files_that_a_document_names_exist(path):
    text = path.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z][\w-]*)", "\n".join(re.findall(r"`[^`\n]+`|^    .+$", text, re.MULTILINE))))
    assert named <= targets, f"the Makefile has no {', '.join(sorted(named - targets))}"
    for file in re.findall(r"`((?:pagepool|include|tests|bench|docs)/[\w./-]+)`", text):
        assert (ROOT / file).exists(), f"{file} is not there"
