"""get_include and get_library_dir, in a checkout and in an installed package alike."""

from pathlib import Path

import pytest

import pagepool
from pagepool import _paths


def test_the_headers_are_found():
    headers = Path(pagepool.get_include()) / "pagepool"
    text = (headers / "pagepool.h").read_text()
    named = {line.split('"')[1] for line in text.splitlines() if line.startswith("#include")}
    assert {f"pagepool/{path.name}" for path in headers.glob("*.h")} == named | {"pagepool/pagepool.h"}


def test_the_library_is_found_and_is_an_archive():
    library = Path(pagepool.get_library_dir()) / "libpagepool.a"
    assert library.read_bytes().startswith(b"!<arch>\n")


def test_missing_files_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(_paths, "_PACKAGE", str(tmp_path / "pagepool"))
    with pytest.raises(FileNotFoundError, match=r"libpagepool.a is not in .*lib"):
        _paths.get_library_dir()
    with pytest.raises(FileNotFoundError, match=r"pagepool/pagepool.h is not in .*include and .*include"):
        _paths.get_include()
