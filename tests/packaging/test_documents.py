"""The Python, Cython and C examples of README.md and docs/ run unchanged.

The blocks of a document form one program, in order: a later block can use names of an earlier one. A ```text block
directly after an example is its output. An example without such a block prints nothing.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pagepool

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(path for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")] if path.is_file())
if not DOCUMENTS:
    pytest.skip("needs README.md or docs/ of a checkout", allow_module_level=True)
EXAMPLE = re.compile(r"^```(python|cython|c)\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
COMPILER = next(filter(shutil.which, ["gcc", "cc", "clang"]), None)
SETUP = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CC = re.compile(r"^    cc (.*)$", re.MULTILINE)


# Dependencies of a document's examples other than NumPy.
NEEDS = {"engine.md": "transformers", "transformers.md": "transformers"}


def examples_of(path, *languages):
    """Return (language, source, expected output) of each example of a document, in order."""
    found = EXAMPLE.findall(path.read_text(encoding="utf-8"))
    return [example for example in found if example[0] in languages]


def with_examples(*languages):
    paths = [path for path in DOCUMENTS if examples_of(path, *languages)]
    return pytest.mark.parametrize("path", paths, ids=lambda path: str(path.relative_to(ROOT)))


def run(command, folder):
    paths = os.pathsep.join(
        map(os.path.abspath, filter(None, [".", *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
    )
    # The child process imports the package under test from any folder.
    home = str(Path(pagepool.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([home, paths])}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compile_cython(path, source, folder):
    """Build the module `example` with the setup.py of the document, and import it."""
    (folder / "example.pyx").write_text(source)
    (folder / "setup.py").write_text(*SETUP.findall(path.read_text(encoding="utf-8")))
    run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], folder)
    run([sys.executable, "-c", "import example"], folder)


@with_examples("python")
def test_python_and_cython_examples_print_the_documented_output(path, tmp_path):
    need = NEEDS.get(path.name)
    if need is not None and importlib.util.find_spec(need) is None:
        pytest.skip(f"{need} is not installed")
    program, wanted = [], ""
    for number, (language, source, printed) in enumerate(examples_of(path, "python", "cython")):
        if language == "cython":
            compile_cython(path, source, tmp_path)
            name = re.search(r"^def (\w+)", source, re.MULTILINE).group(1)
            refuses_none = f"import example, pytest; pytest.raises(TypeError, example.{name}, None, 3)"
            run([sys.executable, "-c", refuses_none], tmp_path)
            continue
        program += [source, f"print('end of example {number}')\n"]
        wanted += f"{printed}end of example {number}\n"
    (tmp_path / "program.py").write_text("\n".join(program))
    assert run([sys.executable, "-W", "error", "program.py"], tmp_path) == wanted


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="needs docs/ of a checkout")
def test_the_engine_of_the_first_guide_survives_cancelled_requests_and_a_model_that_fails():
    examples = examples_of(ROOT / "docs/guide/getting-started.md", "python")
    names = {}
    exec("".join(source for _, source, _ in examples).partition("system_prompt =")[0], names)
    scheduler, cache, run, forward = (names[name] for name in ("scheduler", "cache", "run", "forward"))
    scheduler.cancel(scheduler.add_request([1, 2, 3], max_tokens=8))
    assert run() == {1: []}
    prompt = list(range(40))
    seq_id = scheduler.add_request(prompt, max_tokens=44)
    wanted = run()[seq_id]
    cache.reset_prefix_cache()

    def fails_once(tokens):
        names["forward"] = forward
        names["pool"].append(0, names["tables"].slot_mapping, *np.full((2, len(tokens), 2, 64), np.nan, np.float32))
        raise OSError("a device hiccup")

    names["forward"] = fails_once
    failed, waiting = (scheduler.add_request(prompt, max_tokens=44) for _ in range(2))
    assert run() == {waiting: wanted} and scheduler.get_sequence(failed) is None
    scheduler.check()
    cache.check()
    names["pool"].allocator.check()
    assert names["pool"].allocator.in_use == cache.num_cached == 2


@with_examples("c")
@pytest.mark.skipif(COMPILER is None, reason="no C compiler is installed")
def test_c_examples_compile_and_print_the_documented_output(path, tmp_path):
    commands = CC.findall(path.read_text(encoding="utf-8"))
    for (_, source, printed), command in zip(examples_of(path, "c"), commands, strict=True):
        (tmp_path / "example.c").write_text(source)
        command = command.replace("pagepool config", f"{sys.executable} -m pagepool config")
        run(["sh", "-c", f"{COMPILER} -Wall -Wextra -Werror {command}"], tmp_path)
        assert run([str(tmp_path / "example")], tmp_path) == printed


@pytest.mark.slow  # tests/foreign compiles the same engine
def test_the_setup_of_the_guide_builds_a_whole_engine(tmp_path):
    guide, engine = ROOT / "docs/guide/c-and-cython.md", ROOT / "tests/foreign/engine.pyx"
    if not guide.is_file() or not engine.is_file():
        pytest.skip("needs docs/ and tests/foreign of a checkout")
    compile_cython(guide, engine.read_text(), tmp_path)


@pytest.mark.skipif(not (ROOT / "README.md").is_file(), reason="needs README.md of a checkout")
def test_the_example_of_the_readme_is_short():
    ((_, source, _),) = examples_of(ROOT / "README.md", "python")
    assert len([line for line in source.splitlines() if line.strip()]) <= 20
