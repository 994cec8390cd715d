"""Compiles bench/nogil.pyx in a temporary folder, as a foreign package would, and imports it."""

import importlib.util
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

import pagepool


@cache
def nogil():
    """The compiled module."""
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension

    root = Path(pagepool.__file__).parent.parent
    with tempfile.TemporaryDirectory(prefix="pagepool-bench-") as folder:
        source = shutil.copy(Path(__file__).parent / "nogil.pyx", folder)
        extension = Extension(
            "nogil", [source], include_dirs=[pagepool.get_include()], extra_compile_args=["-O3", "-w"]
        )
        modules = cythonize([extension], include_path=[str(root)], language_level=3, build_dir=folder, quiet=True)
        command = Distribution({"ext_modules": modules}).get_command_obj("build_ext")
        command.build_lib = command.build_temp = folder
        command.ensure_finalized()
        command.run()
        spec = importlib.util.spec_from_file_location("nogil", command.get_ext_fullpath("nogil"))
        module = importlib.util.module_from_spec(spec)
        sys.modules["nogil"] = module
        spec.loader.exec_module(module)
    return module
