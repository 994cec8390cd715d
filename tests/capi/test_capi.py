"""C and C++ programs, compiled against the installed headers and the static library as a user would."""

import functools
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from share import WHOLE

import pagepool

HERE = Path(__file__).parent
C_FLAGS = ["-std=c11", "-D_POSIX_C_SOURCE=200809L"]
CXX_FLAGS = ["-std=c++17"]
STRICT = ["-O1", "-Wall", "-Wextra", "-Werror", "-pedantic"]
ISAS = pagepool.cpu_info()["available"]
# Where a program takes long, `make test` runs it on the best set, one that nearly every CPU has, and baseline.
FEW = [isa for isa in ISAS if WHOLE or isa in (ISAS[0], *ISAS[-2:])]
HEADERS = sorted((Path(pagepool.get_include()) / "pagepool").glob("*.h"))


def compiler(variable, names):
    """Return the compiler that the environment names, or the first of `names` on this machine."""
    found = os.environ.get(variable) or next(filter(shutil.which, names), None)
    if found is None:
        pytest.skip(f"none of {', '.join(names)} is installed")
    return found.split()


def run(command, **environment):
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


def build(source, target, *more, beside=()):
    """Compile and link one program, with the sources `beside` it, as CONTRIBUTING.md and README.md describe.

    Warnings are errors.
    """
    cxx = source.suffix == ".cpp"
    tool = compiler("CXX", ["g++", "c++", "clang++"]) if cxx else compiler("CC", ["gcc", "cc", "clang"])
    paths = [f"-I{pagepool.get_include()}", f"-L{pagepool.get_library_dir()}"]
    flags = [*(CXX_FLAGS if cxx else C_FLAGS), *STRICT, *paths]
    run([*tool, *flags, str(source), *map(str, beside), "-o", str(target), "-lpagepool", "-lm", "-pthread", *more])
    return target


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    """Return a function that compiles a source of this folder, once, and returns the path of the program."""
    folder = tmp_path_factory.mktemp("capi")

    @functools.cache
    def compiled(name, *beside):
        return build(
            HERE / name, folder / "-".join([name, *beside, "program"]), beside=[HERE / each for each in beside]
        )

    return compiled


@pytest.fixture(scope="session")
def run_on(program):
    """Return a function that runs a program on an instruction set, once, and returns its sum of bits."""

    @functools.cache
    def said(isa, name, *arguments, beside=()):
        command = [str(program(name, *beside)), *map(str, arguments)]
        words = run(command, PAGEPOOL_ISA=isa).split()
        assert words[:2] == ["ok", isa]
        return words[-1]

    return said


PROGRAMS = {
    "program.c": "a program agrees with a double loop",
    "prefill.c": "scratch of prefill grows with threads alone, and more threads wait for it",
    "merge.c": "merged states are right and bad ones are refused",
    "modes.c": "no bit depends on how threads round and flush",
    "cascade.c": "shared prefixes are units of their own with the bits of lone sequences",
    "stack.c": "units run on a small stack with any layout",
}


@pytest.mark.parametrize("name", PROGRAMS, ids=PROGRAMS.values())
def test_on_instruction_sets(name, run_on):
    for isa in ISAS if name == "program.c" else FEW:
        run_on(isa, name)


@pytest.mark.parametrize("isa", FEW)
def test_every_variant_is_right_and_reads_nothing_past_the_end_of_a_mapping(isa, run_on):
    """Only baseline, whose fma is software, has other bits than the best set."""
    step = 1 if WHOLE else 16 if isa == "baseline" else 3
    bits = run_on(isa, "variants.c", step)
    assert isa == "baseline" or bits == run_on(ISAS[0], "variants.c", step)


@pytest.mark.skipif(
    "avx512_bf16" not in Path("/proc/cpuinfo").read_text(), reason="kernels of AMX use AVX512_BF16, too"
)
@pytest.mark.skipif("amx" in ISAS, reason="this CPU has AMX: the test above runs the instructions")
def test_instructions_of_amx_have_the_bits_of_vectors(run_on):
    """Runs the AMX instructions, which a handler of SIGILL emulates."""
    step = 1 if WHOLE else 8
    emulated = run_on("amx", "variants.c", step, beside=("emulated_amx.c",))
    assert emulated == run_on(ISAS[0], "variants.c", step)


@pytest.mark.parametrize("isa", ISAS)
def test_every_pair_of_dtypes_is_right_with_the_same_bits_wherever_there_is_fma(isa, run_on):
    step = 1 if WHOLE else 4
    bits = run_on(isa, "quantised.c", step)
    assert isa == "baseline" or bits == run_on(ISAS[0], "quantised.c", step)


@pytest.mark.parametrize("isa", FEW)
def test_plans_at_random_give_the_bits_of_one_thread_and_refusals_change_nothing(isa, run_on):
    run_on(isa, "plans.c", 120 if WHOLE else 40)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86 measures the width of its units")
def test_the_width_of_vector_units_is_measured_right_on_a_busy_machine(program):
    assert run([str(program("wide_units.c"))]).split() == ["ok"]


OTHERS = {
    "program.cpp": "a C++ program shares a plan among its threads",
    "stress.c": "threads that share a pool get the bits of one thread",
    "threads.c": "every unit runs once whether workers spin, sleep or share a CPU",
    "no_threads.c": "where no thread can be made the caller does all",
    "races.c": "concurrent changes of slots and ids cause no access outside of the pool",
    "workspace.c": "a thread keeps the scratch of its last decode",
}


@pytest.mark.parametrize("name", OTHERS, ids=OTHERS.values())
def test_on_one_instruction_set(name, program):
    assert run([str(program(name)), *["5"] * (name == "stress.c")]).startswith("ok")


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
@pytest.mark.parametrize("language", ["c", "c++"])
def test_each_header_compiles_alone(header, language, tmp_path):
    source = tmp_path / f"one.{'c' if language == 'c' else 'cpp'}"
    source.write_text(f'#include "pagepool/{header.name}"\n#include "pagepool/{header.name}"\nextern int unit;\n')
    tool = compiler("CC", ["gcc", "cc"]) if language == "c" else compiler("CXX", ["g++", "c++"])
    flags = C_FLAGS if language == "c" else CXX_FLAGS
    run([*tool, *flags, *STRICT, f"-I{pagepool.get_include()}", "-fsyntax-only", str(source)])


def test_the_library_needs_no_python(program):
    symbols = run(["nm", "--undefined-only", str(program("program.c"))])
    assert "pthread_create" in symbols and "Py" not in symbols
