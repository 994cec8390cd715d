"""Project rules for every file of the checkout. Each test lists all violations at once."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if not (ROOT / "setup.py").is_file():
    pytest.skip("needs the files of a checkout", allow_module_level=True)

PACKAGE = ROOT / "pagepool"
FOLDERS = ("pagepool", "include", "tests", "bench", "docs", ".ci")
SOURCES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".pyx", ".pxd", ".pyi", ".c", ".h", ".cpp"}
)
TEXT = {path: path.read_text(encoding="utf-8") for path in SOURCES}
COMPILED = [path for path in SOURCES if PACKAGE in path.parents and path.suffix in {".pyx", ".pxd"}]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(ROOT.glob("docs/**/*.md"))]
UNFINISHED = re.compile(r"\b(?:TO" + "DO|FIX" + "ME|XX" + r"X|HA" + r"CK)\b")
LONGEST = 740  # "about 700" lines: a much longer file contains more than one idea
IMPORT = re.compile(
    r"^\s*(?:from\s+(pagepool[\w.]*)\s+c?import\s+\(?([\w ,]+)|c?import\s+(pagepool[\w.]*))", re.MULTILINE
)
EXAMPLE = re.compile(r"^\s*(?:>>>|\.\.\.).*$", re.MULTILINE)


def name_of(path):
    return str(path.relative_to(ROOT))


def layers():
    """Return the names in each layer from the table of pyproject.toml, lowest layer first."""
    [table] = re.findall(r"^layers = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    return [re.findall(r"\w+", line) for line in reversed(re.findall(r'"(.*?)"', table))]


def imports_of(path):
    """Yield the pagepool modules that a file imports or cimports, without imports in docstring examples."""
    for source, names, plain in IMPORT.findall(EXAMPLE.sub("", TEXT[path])):
        children = [f"{source}.{name.split()[0]}" for name in names.split(",") if name.split()]
        for name in [plain] if plain else children:
            place = ROOT.joinpath(*name.split("."))
            found = place.is_dir() or any(place.with_suffix(suffix).is_file() for suffix in (".py", ".pyx", ".pxd"))
            yield name if found else source


def test_compiled_modules_import_from_lower_layers():
    """import-linter checks the .py files with the same table; this test checks .pyx and .pxd files."""
    level = {name: number for number, names in enumerate(layers()) for name in names}
    wrong, graph = [], {}
    for path in COMPILED:
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        for module in imports_of(path):
            other = module.split(".")[1] if "." in module else "pagepool"
            if parts[0] != "__init__" and other != parts[0] and not level.get(other, 99) < level[parts[0]]:
                wrong.append(f"{name_of(path)} imports {module}")
            if path.suffix == ".pyx":
                graph.setdefault(".".join(["pagepool", *parts]), set()).add(module)
    assert not wrong
    while leaves := {name for name, others in graph.items() if not others & graph.keys() - {name}}:
        graph = {name: others for name, others in graph.items() if name not in leaves}
    assert not graph, "these modules make a circle"


def test_documents_quote_the_table_of_layers():
    wrong = []
    for document in ("CONTRIBUTING.md", "docs/design/index.md"):
        rows = re.findall(r"^\| \d+ \| (.*?) \|", (ROOT / document).read_text(), re.MULTILINE)
        if [re.findall(r"`(\w+)/?`", row) for row in rows] != layers()[::-1]:
            wrong.append(document)
    assert not wrong


def test_rows_of_tables_in_documents_are_single_lines():
    wrong = []
    for path in DOCUMENTS:
        text = re.sub(r"^```.*?^```$", lambda code: "\n" * code[0].count("\n"), path.read_text(), flags=re.M | re.S)
        for number, line in enumerate(text.splitlines(), 1):
            if line.startswith("|") and not line.endswith("|"):
                wrong.append(f"{name_of(path)}:{number} is a row that does not end with |")
    assert not wrong


def test_c_includes_our_headers_and_the_system_and_never_python():
    wrong = []
    for path in SOURCES:
        if path.suffix not in {".c", ".h"}:
            continue
        for ours, system in re.findall(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)', TEXT[path], re.MULTILINE):
            public = ROOT / "include" in path.parents and ours and not ours.startswith("pagepool/")
            known = not ours or (ROOT / "include" / ours).is_file() or (path.parent / ours).is_file()
            if public or not known or system.startswith("Python"):
                wrong.append(f"{name_of(path)} includes {ours or system}")
    assert not wrong


def test_files_are_short_and_finished():
    wrong = []
    for path, text in TEXT.items():
        lines = text.splitlines()
        if PACKAGE in path.parents and path.suffix in {".py", ".pyx"} and len(lines) > LONGEST:
            wrong.append(f"{name_of(path)} has {len(lines)} lines: it holds two ideas")
        if text and not text.endswith("\n"):
            wrong.append(f"{name_of(path)} does not end its last line")
        wide = [number for number, line in enumerate(lines, 1) if len(line) > 120 or line != line.rstrip()]
        wrong += [f"{name_of(path)}:{number} passes column 120 or ends in blanks" for number in wide]
        words = [
            word for word in ("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK") if re.search(rf"\b{word}\b", text)
        ]
        wrong += [f"{name_of(path)} says {word}: finish it or file an issue" for word in words]
    assert not wrong


def test_each_compiled_module_has_a_stub_in_its_folder():
    stubs = [path for path in SOURCES if PACKAGE in path.parents and path.suffix == ".pyi"]
    assert not [name_of(path) for path in stubs if not path.with_suffix(".pyx").is_file()]


def test_no_test_is_skipped_without_a_reason():
    wrong = []
    for path in SOURCES:
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(TEXT[path])):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                given = node.args or node.keywords
                if name == "pytest.mark.skipif":
                    given = any(keyword.arg == "reason" for keyword in node.keywords)
                if name in {"pytest.skip", "pytest.mark.skip", "pytest.xfail", "pytest.mark.skipif"} and not given:
                    wrong.append(f"{name_of(path)}:{node.lineno}")
    assert not wrong


def test_files_of_tests_have_different_names():
    """pytest imports a test file by its name, without its folder."""
    names = Counter(path.name for path in SOURCES if path.name.startswith("test_"))
    assert not [name for name, count in names.items() if count > 1]


def test_the_version_is_in_one_place():
    version = re.search(r'__version__ = "([^"]+)"', (PACKAGE / "_version.py").read_text()).group(1)
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(), "CHANGELOG.md has no heading for this version"
    named = f'"{version}"'
    assert [
        name_of(path) for path in [*SOURCES, ROOT / "setup.py", ROOT / "pyproject.toml"] if named in path.read_text()
    ] == ["pagepool/_version.py"]


def test_the_commands_and_files_that_a_document_names_exist():
    wrong = []
    makefile = (ROOT / "Makefile").read_text()
    sessions = re.search(r"^SESSIONS := ((?:.*\\\n)*.*)", makefile, re.MULTILINE).group(1)
    targets = {*re.findall(r"^([\w-]+):", makefile, re.MULTILINE), *re.findall(r"[\w-]+", sessions)}
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        code = "\n".join(re.findall(r"`[^`\n]+`|^    .+$", text, re.MULTILINE))
        wrong += [f"{name_of(path)}: make {name}" for name in set(re.findall(r"\bmake ([a-z][\w-]*)", code)) - targets]
        files = re.findall(r"`((?:pagepool|include|tests|bench|docs)/[\w./-]+)`", text)
        wrong += [f"{name_of(path)}: {file}" for file in files if not (ROOT / file).exists()]
    assert not wrong
