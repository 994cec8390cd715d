"""get_include and get_library_dir, in a checkout and in an installed package."""

from pathlib import Path

import pytest

import pagepool
from pagepool import _paths
from pagepool.cli import main


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


def test_the_command_prints_the_flags_of_both(capsys):
    compile_flags, link_flags = f"-I{pagepool.get_include()}", f"-L{pagepool.get_library_dir()} -lpagepool -lm -pthread"
    for options, printed in {
        ("--cflags",): compile_flags,
        ("--libs",): link_flags,
        ("--cflags", "--libs"): f"{compile_flags} {link_flags}",
        (): f"{compile_flags} {link_flags}",
    }.items():
        assert main(["config", *options]) == 0
        assert capsys.readouterr().out == f"{printed}\n"


def test_the_command_names_missing_files_and_quotes_folders(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(_paths, "_PACKAGE", str(tmp_path / "a b"))
    assert main(["config", "--libs"]) == 2
    assert "libpagepool.a" in capsys.readouterr().err
    (tmp_path / "a b" / "lib").mkdir(parents=True)
    (tmp_path / "a b" / "lib" / "libpagepool.a").touch()
    assert main(["config", "--libs"]) == 0
    assert capsys.readouterr().out.startswith(f"'-L{tmp_path}/a b/lib' ")
