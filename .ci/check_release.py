"""Checks the files of a release before they are published: `check_release.py TAG DIST`."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("cp310-cp310", "cp311-cp311", "cp312-cp312", "cp313-cp313", "cp314-cp314", "cp314-cp314t")
MACHINES = ("x86_64", "aarch64")


def problems(tag, names, version, changelog, project):
    """What is wrong with the release, one sentence each."""
    if "[project.urls]" not in project:
        yield "pyproject.toml has no [project.urls]"
    if tag != f"v{version}":
        yield f"the tag is {tag}, the version is {version}"
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d{{2}}-\d{{2}}$", changelog, re.MULTILINE):
        yield f"CHANGELOG.md has no heading '## [{version}] - YYYY-MM-DD'"
    wanted = {f"pagepool-{version}.tar.gz"}
    missing = wanted - set(names)
    for python in PYTHONS:
        for machine in MACHINES:
            pattern = rf"pagepool-{re.escape(version)}-{python}-manylinux[\w.]*_2_28_{machine}\.whl"
            found = [name for name in names if re.fullmatch(pattern, name)]
            wanted.update(found)
            if not found:
                missing.add(f"the wheel of {python} for manylinux_2_28_{machine}")
    if missing:
        yield f"missing: {', '.join(sorted(missing))}"
    if strange := sorted(set(names) - wanted):
        yield f"unexpected: {', '.join(strange)}"


def main():
    tag, dist = sys.argv[1:]
    version = re.search(r'__version__ = "([^"]+)"', (ROOT / "pagepool/_version.py").read_text())[1]
    names = sorted(path.name for path in Path(dist).iterdir())
    changelog, project = (ROOT / name for name in ("CHANGELOG.md", "pyproject.toml"))
    found = list(problems(tag, names, version, changelog.read_text("utf-8"), project.read_text("utf-8")))
    if found:
        sys.exit("\n".join(f"check_release: {sentence}" for sentence in found))
    print(f"{len(names)} files of version {version} are complete")


if __name__ == "__main__":
    main()
