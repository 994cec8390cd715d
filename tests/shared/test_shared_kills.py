"""kills.c with the C of shared pools, and with faults in it that the program must find."""

import shutil
import subprocess
from pathlib import Path

import pytest

import pagepool

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
if not (ROOT / "pagepool" / "csrc" / "shared" / "pool.c").is_file():
    pytest.skip("needs the files of a checkout", allow_module_level=True)
CC = next(filter(shutil.which, ["gcc", "cc", "clang"]), None)
if CC is None:
    pytest.skip("needs a C compiler", allow_module_level=True)


def build(target, source=None):
    """Compile kills.c with csrc/shared, or with a changed copy of it."""
    folder = [f"-I{source}"] if source else []
    command = [CC, "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", *folder]
    command += [f"-I{pagepool.get_include()}", f"-I{ROOT / 'pagepool' / 'csrc'}", str(HERE / "kills.c")]
    command += ['-DPOOL_SOURCE="shared/pool.c"']
    command += [f"{pagepool.get_library_dir()}/libpagepool.a", "-lm", "-pthread", "-o", str(target)]
    subprocess.run(command, check=True, timeout=120)
    return target


def run(program, *arguments):
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def kills(tmp_path_factory):
    return build(tmp_path_factory.mktemp("kills") / "kills")


@pytest.mark.parametrize(
    "arguments, least", [(["stores"], 200), (["recovery", "41"], 50), (["instructions", "1009"], 10)]
)
def test_no_block_is_lost_wherever_a_process_is_killed(kills, arguments, least):
    done = run(kills, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) >= least


FAULTS = {
    "the sweep clears no bits": ("drop_everywhere(view, (uint64_t)1 << i);", ""),
    "the slot is freed before the sweep": (
        "    drop_everywhere(view, (uint64_t)1 << i);\n",
        "    STORE(&slot->state, FREE);\n    PP_STEP();\n    drop_everywhere(view, (uint64_t)1 << i);\n",
    ),
    "a slot is taken without a sweep": ("if (LOAD(&slot->state) != FREE) sweep(view, i);", ""),
    "a refused call keeps its blocks": ("while (i > 0) drop_one(view, blocks[--i]);", ""),
    "a search sees half of the blocks": (
        "for (int64_t i = 0; i < limit; i++) {",
        "for (int64_t i = 0; i < limit / 2; i++) {",
    ),
    "memory in use is returned": ("while (b < end && claim(view, b)) b++;", "while (b < end) b++;"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_recovery_is_found(tmp_path, fault):
    before, after = FAULTS[fault]
    (tmp_path / "shared").mkdir()
    text = (ROOT / "pagepool" / "csrc" / "shared" / "pool.c").read_text()
    assert text.count(before) == 1
    text = text.replace(before, after).replace('"../os/os.h"', '"os/os.h"')
    (tmp_path / "shared" / "pool.c").write_text(text)
    shutil.copy(ROOT / "pagepool" / "csrc" / "shared" / "pool.h", tmp_path / "shared")
    program = build(tmp_path / "kills", tmp_path)
    found = [run(program, *arguments) for arguments in (["stores"], ["recovery", "41"])]
    assert any(done.returncode for done in found), "the kill test has not found it"
