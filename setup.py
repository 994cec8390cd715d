"""Builds libpagepool.a from pagepool/csrc and links it into every extension module; ships it with the headers.

Environment: CC chooses the compiler. PAGEPOOL_DEBUG=1 builds with assertions and makes warnings of our C errors.
PAGEPOOL_SANITIZE=address,undefined (or thread) adds sanitizers. Each variant has its own folder below build/.
CFLAGS=-O0 compiles the extension modules, not the library, in a quarter of the time.
Flags stay at the ABI floor: the kernels choose their instruction set at run time, by target pragmas.
"""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_clib import build_clib
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.modified import newer_group

DEBUG = os.environ.get("PAGEPOOL_DEBUG", "") not in ("", "0")
SANITIZE = os.environ.get("PAGEPOOL_SANITIZE", "")
CC = Path(os.environ.get("CC", "").split(" ")[0]).name
VARIANT = "-".join(filter(None, ["debug" if DEBUG else "", SANITIZE.replace(",", "-"), CC]))
JOBS = min(8, os.cpu_count() or 1)

COMMON = ["-std=c11", "-fvisibility=hidden", "-ffp-contract=off", "-pthread", "-fPIC"]
# -g1 names the lines of a report; -g doubles the time that kernels take to compile.
OPTIMISE = ["-O1", "-g1", "-UNDEBUG"] if DEBUG or SANITIZE else ["-O3", "-g0", "-DNDEBUG"]
OWN_LEVEL = re.search(r"(^| )-O", os.environ.get("CFLAGS", "")) is not None
WARN = ["-Wall", "-Wextra", *(["-Werror"] if DEBUG else [])]
SAN = [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer"] if SANITIZE else []
# Each module keeps its copy of the library to itself, so that two of them in one process never mix.
LINK = ["-pthread", *SAN, "-Wl,--exclude-libs,libpagepool.a"]
# What Cython writes is not ours to mend: its own unused functions and signed comparisons stay quiet.
CYTHON_QUIET = ["-Wno-unused-function", "-Wno-sign-compare", "-Wno-unused-parameter", "-Wno-missing-field-initializers"]

C_SOURCES = sorted(str(path) for path in Path("pagepool/csrc").glob("**/*.c"))
C_FOLDERS = sorted({str(Path(source).parent) for source in C_SOURCES})
# Kernels are in headers: every header that may be included counts, and setup.py for its flags.
C_DEPENDS = [str(path) for folder in ("include/pagepool", "pagepool/csrc") for path in Path(folder).glob("**/*.h")]
C_DEPENDS = sorted([*C_DEPENDS, "setup.py"])
INCLUDE = ["include", "pagepool/csrc"]
ARCHIVE = "libpagepool.a"

CYTHON_BUILD = Path("build/cython")
# Memoryview code is compiled once, in this module, and not in every one that uses it.
SHARED = "pagepool._cyutility"
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "cdivision": True,
    "embedsignature": False,
    "freethreading_compatible": True,  # CPython without a GIL leaves it off when these modules are imported
}


def check_platform():
    """Ends with one sentence where the C cannot be compiled."""
    bits = 64 if sys.maxsize > 2**32 else 32
    if sys.platform != "linux" or bits != 64:
        sys.exit(f"pagepool needs 64-bit Linux, and this is a {bits}-bit Python on {sys.platform}")


class Build(build):
    """build that keeps the files of each variant apart."""

    def initialize_options(self):
        super().initialize_options()
        self.build_base = str(Path("build", VARIANT))


class BuildPy(build_py):
    """build_py that ships include/pagepool/*.h as pagepool/include/pagepool/*.h."""

    def headers(self):
        target = Path(self.build_lib, "pagepool", "include", "pagepool")
        return {str(target / path.name): str(path) for path in sorted(Path("include/pagepool").glob("*.h"))}

    def run(self):
        super().run()
        if not self.editable_mode:
            for target, source in self.headers().items():
                self.mkpath(str(Path(target).parent))
                self.copy_file(source, target)

    def get_outputs(self, include_bytecode=True):
        return super().get_outputs(include_bytecode) + ([] if self.editable_mode else list(self.headers()))


class BuildClib(build_clib):
    """build_clib that compiles what changed, several files at a time; what it makes serves every Python."""

    def finalize_options(self):
        base = self.get_finalized_command("build").build_base
        self.build_clib = self.build_clib or str(Path(base, "clib"))
        self.build_temp = self.build_temp or str(Path(base, "clib"))
        super().finalize_options()

    def run(self):
        check_platform()
        super().run()

    def build_libraries(self, libraries):
        archive = Path(self.build_clib, ARCHIVE)
        objects = self.compiler.object_filenames(C_SOURCES, output_dir=self.build_temp)
        stale = [
            source
            for source, target in zip(C_SOURCES, objects, strict=True)
            if self.force or newer_group([source, *C_DEPENDS], target)
        ]
        stale.sort(key=lambda source: "avx512_wide" not in source)  # takes as long as all others: it begins first
        with ThreadPoolExecutor(JOBS) as pool:
            list(pool.map(self.compile_one, stale))
        # A folder's own time changes with the set of its files: an archive never keeps an object of a removed one.
        if newer_group([*objects, *C_FOLDERS], str(archive)):
            archive.unlink(missing_ok=True)
            self.compiler.create_static_lib(objects, "pagepool", output_dir=self.build_clib)

    def compile_one(self, source):
        flags = [*COMMON, *OPTIMISE, *WARN, *SAN]
        self.compiler.compile([source], output_dir=self.build_temp, include_dirs=INCLUDE, extra_postargs=flags)


class BuildExt(build_ext):
    """build_ext that builds the static library first and ships it; calls Cython only when it builds."""

    def finalize_options(self):
        super().finalize_options()
        if self.parallel is None:
            self.parallel = JOBS

    def run(self):
        clib = self.get_finalized_command("build_clib")
        clib.force = self.force
        self.run_command("build_clib")  # nothing when `build` ran it
        archive = Path(clib.build_clib, ARCHIVE)
        self.library_dirs.append(clib.build_clib)
        target = Path("" if self.inplace else self.build_lib, "pagepool", "lib", ARCHIVE)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(archive, target)
        self.translate(archive)
        super().run()
        if self.inplace:
            remove_old_modules()
        elif not (DEBUG or SANITIZE):
            self.strip()

    def strip(self):
        """Removes the symbols that only a debugger reads: a wheel is a third of the size without them."""
        if tool := shutil.which("strip"):
            subprocess.run([tool, "--strip-unneeded", *self.get_outputs()], check=True)

    def translate(self, archive):
        """Turns .pyx into .c below build/cython; one whose directives may have changed is written anew."""
        from Cython.Build import cythonize

        for path in CYTHON_BUILD.glob("**/*.c"):
            if newer_group(["setup.py"], str(path)):
                path.unlink()
        done = cythonize(
            [extension(ext.name) for ext in self.extensions],
            nthreads=JOBS,
            build_dir=str(CYTHON_BUILD),
            compiler_directives=DIRECTIVES,
            shared_utility_qualified_name=SHARED,
            force=bool(self.force),
            quiet=True,
        )
        sources = {ext.name: ext.sources for ext in done}
        for ext in self.extensions:
            ext.sources = sources[ext.name]
            ext.depends = [*ext.depends, str(archive)]

    def copy_extensions_to_source(self):
        # Another variant's module in place may be newer than this one's: copy whatever the times say.
        self.force = True
        super().copy_extensions_to_source()


def remove_old_modules():
    """Removes what an earlier state of the checkout has built in place: it could still be imported."""
    for path in Path("pagepool").glob("**/*.so"):
        if ".".join([*path.parent.parts, path.name.split(".")[0]]) not in [*MODULES, SHARED]:
            path.unlink()


def extension(module):
    return Extension(
        module,
        [] if module == SHARED else [module.replace(".", "/") + ".pyx"],
        include_dirs=[*INCLUDE, numpy.get_include()],
        libraries=["pagepool", "m"],
        define_macros=[
            ("CYTHON_CLINE_IN_TRACEBACK", "0"),
            ("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"),
            ("NPY_TARGET_VERSION", "NPY_1_23_API_VERSION"),  # the oldest NumPy that the wheel runs with
        ],
        extra_compile_args=[*COMMON, *OPTIMISE[OWN_LEVEL:], "-Wall", "-Wextra", *CYTHON_QUIET, *SAN],
        extra_link_args=LINK,
        depends=C_DEPENDS,
    )


def description():
    """The README for a package index, which has no other files: relative links become plain text."""
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#)[^)]+\)", r"\1", Path("README.md").read_text(encoding="utf-8"))


MODULES = sorted(str(path.with_suffix("")).replace("/", ".") for path in Path("pagepool").glob("**/*.pyx"))

if __name__ == "__main__":
    setup(
        long_description=description(),
        long_description_content_type="text/markdown",
        libraries=[("pagepool", {"sources": C_SOURCES})],
        ext_modules=[extension(module) for module in [*MODULES, SHARED]],
        cmdclass={"build": Build, "build_py": BuildPy, "build_clib": BuildClib, "build_ext": BuildExt},
    )
