"""What all tests share: the choice of cases, building Cython modules, and a check that no import turns the GIL on."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import zlib
from collections import defaultdict
from pathlib import Path

import fork_with_asan  # noqa: F401
import pytest
from share import SHARE, WHOLE

import pagepool

SETUP = """
import os
import sys

from Cython.Build import cythonize
from setuptools import Extension, setup

name, include, library = (sys.argv.pop() for _ in range(3))
# How the library was built, if in a way that its users must share: ThreadSanitizer does not see locks taken elsewhere.
sanitize = os.environ.get("PAGEPOOL_SANITIZE")
flags = ["-g1", f"-fsanitize={sanitize}"] if sanitize else []
extension = Extension(
    name,
    [f"{name}.pyx"],
    include_dirs=[include],
    library_dirs=[library],
    libraries=["pagepool"],
    extra_compile_args=["-std=c11", "-O1", "-pthread", *flags],
    extra_link_args=["-pthread", *flags],
)
directives = {"language_level": 3, "boundscheck": False, "wraparound": False, "cdivision": True}
directives["freethreading_compatible"] = True
setup(name=name, ext_modules=cythonize([extension], compiler_directives=directives, quiet=True))
"""


def pytest_collection_modifyitems(config, items):
    """Leave out what tests/share.py says, but never all cases of a function. The choice is the same in each run."""
    functions = defaultdict(list)
    for item in items:
        if WHOLE or item.get_closest_marker("slow") is None:
            functions[item.nodeid.partition("[")[0]].append(item)
    chosen = set()
    for cases in functions.values():
        mark = cases[0].get_closest_marker("one_in")
        share = SHARE or (mark.args[0] if mark else 1)
        cases.sort(key=lambda item: zlib.crc32(item.name.encode()))
        chosen.update(cases[: -(-len(cases) // share)])
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


@pytest.fixture(autouse=True)
def no_gil_comes_back():
    """Without the declaration freethreading_compatible, an extension module turns the GIL on permanently."""
    yield
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        assert not sys._is_gil_enabled(), "an extension module has turned the GIL on"


@pytest.fixture(scope="session")
def build_foreign(tmp_path_factory):
    """Return a function that builds a .pyx file against the imported pagepool and returns the module."""
    built = {}

    def build(source):
        if source not in built:
            folder = tmp_path_factory.mktemp(source.stem)
            shutil.copy(source, folder)
            (folder / "setup.py").write_text(SETUP)
            path = os.pathsep.join([str(Path(pagepool.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
            # Without LD_PRELOAD: a preloaded sanitizer would only slow down Cython and the compiler.
            environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
            places = [pagepool.get_library_dir(), pagepool.get_include(), source.stem]
            done = subprocess.run(
                [sys.executable, "setup.py", "-q", "build_ext", "--inplace", *places],
                cwd=folder,
                capture_output=True,
                text=True,
                env={**environment, "PYTHONPATH": path.rstrip(os.pathsep)},
            )
            assert done.returncode == 0, done.stdout + done.stderr
            [library] = folder.glob(f"{source.stem}*.so")
            spec = importlib.util.spec_from_file_location(source.stem, library)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            built[source] = module
        return built[source]

    return build
