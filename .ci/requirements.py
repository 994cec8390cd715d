"""Prints what pyproject.toml asks for, one requirement a line: `requirements.py build run test lint`."""

import sys
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10 has none, but its pip brings one
    from pip._vendor import tomli as tomllib

tables = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
groups = {
    "build": tables["build-system"]["requires"],
    "run": tables["project"]["dependencies"],
    **tables["project"]["optional-dependencies"],
}
for name in sys.argv[1:]:
    print("\n".join(groups[name]))
