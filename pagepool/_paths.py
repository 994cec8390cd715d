"""Finds the C headers and the static library for callers that compile against them."""

from __future__ import annotations

import os.path

__all__ = ["get_include", "get_library_dir"]

_PACKAGE = os.path.dirname(os.path.realpath(__file__))


def _first(candidates: list[str], name: str, what: str) -> str:
    """Return the first folder that contains the file `name`. Raises FileNotFoundError with all folders."""
    for folder in candidates:
        if os.path.isfile(os.path.join(folder, name)):
            return folder
    raise FileNotFoundError(f"{what} of pagepool are not installed: {name} is not in {' and '.join(candidates)}")


def get_include() -> str:
    """Return the folder to pass to the compiler with `-I`. It contains `pagepool/*.h`.

    The folder is part of an installed package. In a checkout or an editable install it is next to the package.

    Returns
    -------
    str
        Path of the folder.

    Raises
    ------
    FileNotFoundError
        If the headers are missing.

    Examples
    --------
    >>> from pathlib import Path
    >>> (Path(get_include()) / "pagepool" / "layout.h").is_file()
    True
    """
    folders = [os.path.join(folder, "include") for folder in (_PACKAGE, os.path.dirname(_PACKAGE))]
    return _first(folders, "pagepool/pagepool.h", "the headers")


def get_library_dir() -> str:
    """Return the folder to pass to the linker with `-L`. It contains `libpagepool.a`.

    Link with `-lpagepool -lm -pthread`.

    Returns
    -------
    str
        Path of the folder.

    Raises
    ------
    FileNotFoundError
        If the library was not built.

    Examples
    --------
    >>> from pathlib import Path
    >>> (Path(get_library_dir()) / "libpagepool.a").is_file()
    True
    """
    return _first([os.path.join(_PACKAGE, "lib")], "libpagepool.a", "the static library")
