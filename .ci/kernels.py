"""Asks whether the kernels have changed since all of their tests passed: `.ci/kernels.py`, status 0 if they have not.

`make test-kernels` calls `.ci/kernels.py --passed`, which notes a sum of the files and the instruction sets of the CPU
in kernels_passed.txt. A commit that changes kernels takes this file along. If it does not, or if this CPU has a set
that the other one had not, continuous integration runs the tests.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTE = ROOT / ".ci/kernels_passed.txt"
PLACES = ["include", "pagepool/attention", "pagepool/csrc", "setup.py", "tests/attention", "tests/capi"]

sys.path.insert(0, str(ROOT))


def main():
    from pagepool import cpu_info

    names = subprocess.run(["git", "ls-files", "-z", *PLACES], cwd=ROOT, capture_output=True, check=True).stdout
    digest = hashlib.sha256()
    for name in filter(None, names.split(b"\0")):
        digest.update(name + b"\0" + hashlib.sha256(Path(ROOT, name.decode()).read_bytes()).digest())
    found = [digest.hexdigest(), *cpu_info()["available"]]
    if "--passed" in sys.argv:
        NOTE.write_text(" ".join(found) + "\n")
        return 0
    noted = NOTE.read_text().split() if NOTE.exists() else []
    if set(found) <= set(noted):
        print("kernels and their tests are those that passed")
        return 0
    print("kernels or their tests have changed since they passed, or not all instruction sets of this CPU were tested")
    return 1


if __name__ == "__main__":
    sys.exit(main())
