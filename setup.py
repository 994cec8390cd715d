"""Builds libpagepool.a from pagepool/csrc once and links it into every extension module.

PAGEPOOL_DEBUG=1 builds with assertions and with warnings as errors; PAGEPOOL_SANITIZE=address,undefined (or thread)
adds sanitizers. Flags stay at the ABI floor: the kernels choose their instruction set at run time, by target pragmas.
"""

import os
import shutil
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_clib import build_clib
from setuptools.command.build_ext import build_ext

DEBUG = os.environ.get("PAGEPOOL_DEBUG", "") not in ("", "0")
SANITIZE = os.environ.get("PAGEPOOL_SANITIZE", "")

COMMON = ["-std=c11", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"]
OPTIMISE = ["-O1", "-g", "-UNDEBUG"] if DEBUG else ["-O3", "-g0", "-DNDEBUG"]
WARN = ["-Wall", "-Wextra"] + (["-Werror"] if DEBUG else [])
SAN = [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer"] if SANITIZE else []
# What Cython writes is not ours to mend: its own unused functions and signed comparisons stay quiet.
CYTHON_QUIET = ["-Wno-unused-function", "-Wno-sign-compare", "-Wno-unused-parameter", "-Wno-missing-field-initializers"]

C_SOURCES = sorted(str(path) for path in Path("pagepool/csrc").glob("*.c"))
C_HEADERS = sorted(str(path) for folder in ("include/pagepool", "pagepool/csrc") for path in Path(folder).glob("*.h"))
INCLUDE = ["include", "pagepool/csrc"]

LIBRARY = (
    "pagepool",
    {
        "sources": C_SOURCES,
        "include_dirs": INCLUDE,
        "cflags": [*COMMON, *OPTIMISE, *WARN, *SAN, "-fPIC"],
        "obj_deps": {"": C_HEADERS},
    },
)


class BuildExt(build_ext):
    """build_ext that builds the static library first, in place too, and ships it as pagepool/lib/libpagepool.a."""

    def run(self):
        clib = self.get_finalized_command("build_clib")
        clib.force = self.force
        clib.run()
        archive = Path(clib.build_clib) / "libpagepool.a"
        self.library_dirs.append(clib.build_clib)
        root = Path() if self.inplace else Path(self.build_lib)
        target = root / "pagepool" / "lib"
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy2(archive, target / archive.name)
        for extension in self.extensions:
            extension.depends.append(str(archive))
        super().run()


def extension(module):
    return Extension(
        module,
        [module.replace(".", "/") + ".pyx"],
        include_dirs=INCLUDE,
        libraries=["pagepool"],
        define_macros=[("CYTHON_CLINE_IN_TRACEBACK", "0")],
        extra_compile_args=[*COMMON, *OPTIMISE, *WARN, *CYTHON_QUIET, *SAN],
        extra_link_args=["-pthread", *SAN, *([] if DEBUG or SANITIZE else ["-Wl,-s"])],
        depends=C_HEADERS,
    )


MODULES = sorted(
    str(path.with_suffix("")).replace("/", ".") for path in Path("pagepool").glob("**/*.pyx")
)

setup(
    libraries=[LIBRARY],
    ext_modules=cythonize(
        [extension(module) for module in MODULES],
        compiler_directives={
            "language_level": 3,
            "boundscheck": False,
            "wraparound": False,
            "initializedcheck": False,
            "cdivision": True,
            "embedsignature": False,
        },
    ),
    cmdclass={"build_clib": build_clib, "build_ext": BuildExt},
)
