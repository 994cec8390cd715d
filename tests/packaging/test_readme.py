"""The examples of the README run as they stand: Python, Cython and C."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pagepool

README = Path(__file__).parents[2] / "README.md"
if not README.is_file():
    pytest.skip("README.md is not beside these tests", allow_module_level=True)
TEXT = README.read_text(encoding="utf-8")


def examples(language):
    found = re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert found, f"the README has no {language} example"
    return found


def run(command, folder):
    paths = os.pathsep.join(
        map(os.path.abspath, filter(None, [".", *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
    )
    # The folder of the package under test, wherever the child runs.
    home = str(Path(pagepool.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([home, paths])}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_python_examples_print_what_the_text_says(tmp_path):
    for number, source in enumerate(examples("python")):
        path = tmp_path / f"example{number}.py"
        path.write_text(source)
        printed = run([sys.executable, "-W", "error", str(path)], tmp_path)
        assert f"`{printed}`" in TEXT


def test_the_example_is_short():
    lines = [line for line in examples("python")[0].splitlines() if line.strip()]
    assert len(lines) <= 20


def test_cython_example_compiles_and_runs_without_the_gil(tmp_path):
    (tmp_path / "example.pyx").write_text(examples("cython")[0])
    (tmp_path / "setup.py").write_text(
        "import pagepool\n"
        "from Cython.Build import cythonize\n"
        "from setuptools import Extension, setup\n"
        "extension = Extension('example', ['example.pyx'], include_dirs=[pagepool.get_include()])\n"
        "setup(name='example', ext_modules=cythonize([extension], language_level=3))\n"
    )
    run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], tmp_path)
    use = "from example import *; from pagepool import BlockAllocator as A; a = A(3); print(take_and_give_back(a, 10))"
    assert run([sys.executable, "-c", f"{use}; a.check(); assert a.free_count == 3"], tmp_path) == "10"
    use = "import example, pytest; pytest.raises(TypeError, example.take_and_give_back, None, 3)"
    run([sys.executable, "-c", use], tmp_path)


def test_c_example_compiles_and_runs(tmp_path):
    tool = next(filter(shutil.which, ["gcc", "cc", "clang"]), None)
    if tool is None:
        pytest.skip("no C compiler is installed")
    (tmp_path / "example.c").write_text(examples("c")[0])
    paths = [f"-I{pagepool.get_include()}", f"-L{pagepool.get_library_dir()}"]
    libraries = ["-lpagepool", "-lm", "-pthread"]
    run([tool, "-std=c11", "-Wall", "-Wextra", "-Werror", *paths, "example.c", *libraries, "-o", "example"], tmp_path)
    assert run([str(tmp_path / "example")], tmp_path).endswith(": 2.0")
