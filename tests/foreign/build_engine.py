"""Compile engine.pyx as a user's module against the importable pagepool: `build_engine.py FOLDER`."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parent / "engine.pyx"


def compile_engine(folder):
    """Build the extension in `folder` with the headers, library and .pxd files of the installed package."""
    from Cython.Build import cythonize
    from setuptools import Extension, setup

    import pagepool

    # PAGEPOOL_SANITIZE names the library's sanitizers, which programs that link it need as well.
    sanitize = os.environ.get("PAGEPOOL_SANITIZE")
    flags = [f"-fsanitize={sanitize}"] if sanitize else []
    extension = Extension(
        "engine",
        ["engine.pyx"],
        include_dirs=[pagepool.get_include()],
        library_dirs=[pagepool.get_library_dir()],
        libraries=["pagepool", "m"],
        extra_compile_args=["-O2", *flags],
        extra_link_args=["-pthread", *flags],
    )
    os.chdir(folder)
    directives = {"language_level": 3, "boundscheck": False, "wraparound": False, "initializedcheck": False}
    directives["freethreading_compatible"] = True
    setup(
        name="engine",
        ext_modules=cythonize([extension], compiler_directives=directives, quiet=True),
        script_args=["-q", "build_ext", "--inplace"],
    )


def load_engine(folder):
    """Compile the engine module in `folder` in a separate process and import it."""
    import pagepool

    folder = Path(folder)
    (folder / SOURCE.name).write_bytes(SOURCE.read_bytes())
    home = str(Path(pagepool.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([home, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(Path(__file__).resolve()), str(folder.resolve())]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"engine.pyx does not compile:\n{done.stdout}{done.stderr}")
    spec = importlib.util.spec_from_file_location("engine", next(folder.glob("engine.*.so")))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    compile_engine(sys.argv[1])
