"""`import pagepool` loads NumPy and few other modules, and no module that only some calls need."""

import os
import subprocess
import sys
from pathlib import Path

import pagepool

# Modules that are slow to import and rarely needed: for type annotations, traces, plots.
NOT_AT_ONCE = {
    "Cython",
    "hashlib",
    "json",
    "matplotlib",
    "ml_dtypes",
    "numpy.typing",
    "pathlib",
    "prometheus_client",
    "sqlite3",
    "statistics",
    "tempfile",
    "torch",
    "transformers",
}


def modules_after(statement):
    environment = {**os.environ, "PYTHONPATH": str(Path(pagepool.__file__).parents[1])}
    command = [sys.executable, "-c", f"{statement}; import sys; print(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split())


def test_importing_pagepool_loads_what_every_user_needs():
    ours = modules_after("import pagepool") - modules_after("import numpy")
    assert not ours & NOT_AT_ONCE
    assert not {name for name in ours if name.startswith(("pagepool.replay", "pagepool.reference", "pagepool.cli"))}
    assert len({name for name in ours if not name.startswith("pagepool")}) <= 35, sorted(ours)


def test_about_twenty_extension_modules():
    package = Path(pagepool.__file__).parent
    assert 15 <= len(list(package.rglob("*.so"))) <= 32
