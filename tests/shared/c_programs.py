"""Compiles the C programs of this folder with csrc/shared, or with a copy of it that has a fault."""

import shutil
import subprocess
from pathlib import Path

import pytest

import pagepool

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCES = ROOT / "pagepool" / "csrc" / "shared"
if not (SOURCES / "pool.c").is_file():
    pytest.skip("needs the files of a checkout", allow_module_level=True)
CC = next(filter(shutil.which, ["gcc", "cc", "clang"]), None)
if CC is None:
    pytest.skip("needs a C compiler", allow_module_level=True)


def build(name, target, source=None):
    """Compile a program with csrc/shared, or with the changed copy in a folder; return its path."""
    folder = [f"-I{source}", "-Wno-error"] if source else []
    command = [CC, "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", *folder]
    command += [f"-I{pagepool.get_include()}", f"-I{ROOT / 'pagepool' / 'csrc'}", str(HERE / name)]
    command += ['-DPOOL_SOURCE="shared/pool.c"', '-DINDEX_SOURCE="shared/index.c"']
    command += [f"{pagepool.get_library_dir()}/libpagepool.a", "-lm", "-pthread", "-o", str(target)]
    subprocess.run(command, check=True)
    return target


def build_faulty(name, folder, *changes):
    """Compile a program with changes, each a file, a text in it, and what replaces the text; return its path."""
    (folder / "shared").mkdir()
    for source in SOURCES.iterdir():
        text = source.read_text().replace('#include "../', '#include "')
        for file, before, after in changes:
            if source.name == file:
                assert text.count(before) == 1
                text = text.replace(before, after)
        (folder / "shared" / source.name).write_text(text)
    return build(name, folder / "program", folder)


def run(program, *arguments):
    return subprocess.run([str(program), *arguments], capture_output=True, text=True)
