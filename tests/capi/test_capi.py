"""C and C++ programs, compiled against the installed headers and the static library as a user would."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import pagepool

HERE = Path(__file__).parent
C_FLAGS = ["-std=c11", "-D_POSIX_C_SOURCE=200809L"]
CXX_FLAGS = ["-std=c++17"]
STRICT = ["-O1", "-Wall", "-Wextra", "-Werror", "-pedantic"]
ISAS = pagepool.cpu_info()["available"]
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


@pytest.fixture(scope="module")
def c_program(tmp_path_factory):
    return build(HERE / "program.c", tmp_path_factory.mktemp("capi") / "program")


def test_c_program_agrees_with_a_double_loop_on_every_instruction_set(c_program):
    word, chosen, *available = run([str(c_program)]).split()
    assert word == "ok" and chosen in available
    for isa in available:
        assert run([str(c_program)], PAGEPOOL_ISA=isa).split()[:2] == ["ok", isa]


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    return build(HERE / "variants.c", tmp_path_factory.mktemp("capi") / "variants")


@pytest.fixture(scope="module")
def bits_of_variants():
    """Bits of all results of variants.c, on each instruction set with fma that has run it."""
    return set()


@pytest.mark.parametrize("isa", ISAS)
def test_every_variant_is_right_and_reads_nothing_past_the_end_of_a_mapping(isa, variants, bits_of_variants):
    *said, bits = run([str(variants)], PAGEPOOL_ISA=isa).split()
    assert said == ["ok", isa]
    if isa != "baseline":
        bits_of_variants.add(bits)
        assert len(bits_of_variants) == 1


@pytest.mark.skipif("avx512_bf16" not in ISAS, reason="kernels of AMX use AVX512_BF16, too")
@pytest.mark.skipif("amx" in ISAS, reason="this CPU has AMX: the test above runs the instructions")
def test_instructions_of_amx_have_the_bits_of_vectors(variants, bits_of_variants, tmp_path):
    """Runs the AMX instructions, which a handler of SIGILL emulates."""
    emulated = build(HERE / "variants.c", tmp_path / "emulated", beside=[HERE / "emulated_amx.c"])
    *said, bits = run([str(emulated)], PAGEPOOL_ISA="amx").split()
    assert said == ["ok", "amx"]
    bits_of_variants.add(bits)
    bits_of_variants.add(run([str(variants)], PAGEPOOL_ISA="avx512_bf16").split()[-1])
    assert len(bits_of_variants) == 1


def test_every_pair_of_dtypes_is_right_with_the_same_bits_wherever_there_is_fma(c_program, tmp_path):
    program = build(HERE / "quantised.c", tmp_path / "quantised")
    sums = {}
    for isa in run([str(c_program)]).split()[2:]:
        *said, sums[isa] = run([str(program)], PAGEPOOL_ISA=isa).split()
        assert said == ["ok", isa]
    assert len({bits for isa, bits in sums.items() if isa != "baseline"}) <= 1, sums


def test_scratch_of_prefill_grows_with_threads_alone_and_more_threads_wait_for_it(c_program, tmp_path):
    program = build(HERE / "prefill.c", tmp_path / "prefill")
    for isa in run([str(c_program)]).split()[2:]:
        assert run([str(program)], PAGEPOOL_ISA=isa).split() == ["ok", isa]


def test_merged_states_are_right_and_bad_ones_are_refused(c_program, tmp_path):
    program = build(HERE / "merge.c", tmp_path / "merge")
    for isa in run([str(c_program)]).split()[2:]:
        assert run([str(program)], PAGEPOOL_ISA=isa).split() == ["ok"]


@pytest.mark.parametrize("isa", ISAS)
def test_plans_at_random_give_the_bits_of_one_thread_however_prefetched_and_refusals_change_nothing(isa, tmp_path):
    program = build(HERE / "plans.c", tmp_path / "plans")
    sums = set()
    for mode in ("none", "once", "twice"):
        *said, bits = run([str(program), "120"], PAGEPOOL_ISA=isa, PAGEPOOL_PREFETCH=mode).split()
        assert said == ["ok", "120", "rounds", isa]
        sums.add(bits)
    assert len(sums) == 1


def test_no_bit_depends_on_how_threads_round_and_flush(c_program, tmp_path):
    program = build(HERE / "modes.c", tmp_path / "modes")
    for isa in run([str(c_program)]).split()[2:]:
        assert run([str(program)], PAGEPOOL_ISA=isa).split() == ["ok", isa]


def test_shared_prefixes_are_units_of_their_own_with_the_bits_of_lone_sequences(c_program, tmp_path):
    program = build(HERE / "cascade.c", tmp_path / "cascade")
    for isa in run([str(c_program)]).split()[2:]:
        assert run([str(program)], PAGEPOOL_ISA=isa).split() == ["ok", isa]


def test_cpp_program_shares_a_plan_among_its_threads(tmp_path):
    program = build(HERE / "program.cpp", tmp_path / "program")
    assert run([str(program)]).startswith("ok ")


def test_threads_that_share_a_pool_get_the_bits_of_one_thread(tmp_path):
    program = build(HERE / "stress.c", tmp_path / "stress")
    assert run([str(program), "5"]).startswith("ok 5 rounds")


@pytest.mark.parametrize("value", ["none", "once", "twice"])
def test_the_environment_says_how_often_to_prefetch(value, tmp_path):
    program = build(HERE / "prefetch.c", tmp_path / "prefetch")
    assert run([str(program), value]).split() == ["ok", value]


@pytest.mark.parametrize("value", [[], [""], ["thrice"], ["TWICE"]])
def test_twice_where_the_environment_says_nothing_or_nothing_known(value, tmp_path):
    program = build(HERE / "prefetch.c", tmp_path / "prefetch")
    assert run([str(program), *value]).split() == ["ok", "twice"]


def test_every_unit_runs_once_whether_workers_spin_sleep_or_share_a_cpu(tmp_path):
    program = build(HERE / "threads.c", tmp_path / "threads")
    assert run([str(program)]).startswith("ok 200 rounds")


def test_where_no_thread_can_be_made_the_caller_does_all(tmp_path):
    program = build(HERE / "no_threads.c", tmp_path / "no_threads")
    assert run([str(program)]).split() == ["ok"]


def test_concurrent_changes_of_slots_and_ids_cause_no_access_outside_of_the_pool(tmp_path):
    program = build(HERE / "races.c", tmp_path / "races")
    assert run([str(program)]).split() == ["ok"]


def test_units_run_on_a_small_stack_with_any_layout(c_program, tmp_path):
    program = build(HERE / "stack.c", tmp_path / "stack")
    for isa in run([str(c_program)]).split()[2:]:
        assert run([str(program)], PAGEPOOL_ISA=isa).split() == ["ok", isa]


def test_a_thread_keeps_the_scratch_of_its_last_decode(tmp_path):
    program = build(HERE / "workspace.c", tmp_path / "workspace")
    assert run([str(program)]).split() == ["ok"]


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
@pytest.mark.parametrize("language", ["c", "c++"])
def test_each_header_compiles_alone(header, language, tmp_path):
    source = tmp_path / f"one.{'c' if language == 'c' else 'cpp'}"
    source.write_text(f'#include "pagepool/{header.name}"\n#include "pagepool/{header.name}"\nextern int unit;\n')
    tool = compiler("CC", ["gcc", "cc"]) if language == "c" else compiler("CXX", ["g++", "c++"])
    flags = C_FLAGS if language == "c" else CXX_FLAGS
    run([*tool, *flags, *STRICT, f"-I{pagepool.get_include()}", "-fsyntax-only", str(source)])


def test_the_library_needs_no_python(c_program):
    symbols = run(["nm", "--undefined-only", str(c_program)])
    assert "pthread_create" in symbols and "Py" not in symbols
