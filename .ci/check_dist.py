"""Checks dist/: the sdist has every file but the tiny model, the wheel what users need. `check_dist.py DIST`."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_SHIPPED = {".gitignore", "bench/tiny_llama/model.safetensors"}


def fail(sentence):
    sys.exit(f"check_dist: {sentence}")


def check_sdist(path):
    with tarfile.open(path) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    missing = sorted(set(listed) - held - NOT_SHIPPED)
    if missing:
        fail(f"{path.name} lacks {', '.join(missing)}")
    built = sorted(name for name in held if name.endswith((".so", ".a", ".o", ".pyc")))
    if built:
        fail(f"{path.name} holds what was built: {', '.join(built)}")
    print(f"{path.name}: {len(held)} entries, every file of the repository but the tiny model")


def check_wheel(path):
    with zipfile.ZipFile(path) as archive:
        held = {info.filename: info.file_size for info in archive.infolist()}
        info = next(name.split("/")[0] for name in held if name.endswith(".dist-info/METADATA"))
        broken = re.findall(r"\]\((?!https?:|#)[^)]*\)", archive.read(f"{info}/METADATA").decode())
    package = ROOT / "pagepool"
    wanted = [*package.rglob("*.pxd"), *package.rglob("*.pyi"), *package.rglob("*.py"), *package.glob("data/*")]
    names = {str(file.relative_to(ROOT)) for file in wanted if file.is_file()}
    names |= {f"pagepool/include/pagepool/{file.name}" for file in (ROOT / "include" / "pagepool").glob("*.h")}
    names |= {"pagepool/py.typed", "pagepool/lib/libpagepool.a"}
    missing = sorted(names - set(held))
    if missing:
        fail(f"{path.name} lacks {', '.join(missing)}")
    for file in package.rglob("*.pyx"):
        stem = str(file.relative_to(ROOT).with_suffix(""))
        if not any(name.startswith(f"{stem}.cpython-") for name in held):
            fail(f"{path.name} lacks the compiled {stem}")
    if broken:
        fail(f"the description in {path.name} has relative links: {', '.join(broken)}")
    strange = [
        name for name in held if name.endswith((".c", ".pyx", ".o")) or name.split("/")[0] not in ("pagepool", info)
    ]
    if strange:
        fail(f"{path.name} holds what it should not: {', '.join(strange)}")
    if not any(name.startswith(f"{info}/licenses/LICENSE") for name in held):
        fail(f"{path.name} lacks the licence")
    print(f"{path.name}: {len(held)} files, {path.stat().st_size // 1024} KiB packed, {sum(held.values()) // 1024} KiB")


def main():
    dist = Path(sys.argv[1])
    sdists, wheels = list(dist.glob("*.tar.gz")), list(dist.glob("*.whl"))
    if len(sdists) != 1 or len(wheels) != 1:
        fail(f"{dist} holds {len(sdists)} sdists and {len(wheels)} wheels, not one of each")
    check_sdist(sdists[0])
    check_wheel(wheels[0])


if __name__ == "__main__":
    main()
