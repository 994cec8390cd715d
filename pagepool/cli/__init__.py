"""The command line, `pagepool` and `python -m pagepool`: arguments and output of all commands."""

from pagepool.cli.commands import main

__all__ = ["main"]
