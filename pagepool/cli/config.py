"""`pagepool config`: compiler flags for pagepool's headers and its static library."""

from __future__ import annotations

import argparse
import shlex

from pagepool._paths import get_include, get_library_dir
from pagepool.cli.output import STDOUT, written_to

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pagepool config`."""
    parser.add_argument("--cflags", action="store_true", help="print the flags for compiling")
    parser.add_argument("--libs", action="store_true", help="print the flags for linking")


def run(options: argparse.Namespace) -> None:
    """Print the requested flags, quoted for a shell. Without an option, print all flags."""
    both = not (options.cflags or options.libs)
    flags = [f"-I{get_include()}"] if options.cflags or both else []
    if options.libs or both:
        flags += [f"-L{get_library_dir()}", "-lpagepool", "-lm", "-pthread"]
    with written_to(STDOUT):
        print(shlex.join(flags))
