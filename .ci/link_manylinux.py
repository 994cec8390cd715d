"""Links a shared object with the symbols of glibc 2.28, by zig's linker: `LDSHARED="python link_manylinux.py -shared"`.

gcc compiles the objects, so that the code of the kernels is the same as in a local build. Only the start function of a
module is visible: zig's linker has no --exclude-libs, and two modules must not share the static library's symbols.
"""

import os
import sys
import tempfile

TARGET = f"{os.uname().machine}-linux-gnu.2.28"


def main():
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("-Wl,--exclude-libs")]
    with tempfile.NamedTemporaryFile("w", suffix=".map") as exports:
        exports.write("{ global: PyInit_*; local: *; };\n")
        exports.flush()
        command = [sys.executable, "-m", "ziglang", "cc", "-target", TARGET]
        sys.exit(os.spawnv(os.P_WAIT, sys.executable, [*command, f"-Wl,--version-script={exports.name}", *arguments]))


if __name__ == "__main__":
    main()
