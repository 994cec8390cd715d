"""Time to first token with a prefix store: computed, found in memory, read from the store, and after `kill -9`.

    python bench/store.py [--tokens 4000] [--rounds 7] [--dtype bfloat16] [--threads 2] [--json]

Makes a Llama of 123 million random parameters and 8,192 positions. One engine serves the same prompt in turn from
memory and from the store, whose files are in the page cache. Then `pagepool serve --store` is killed in the middle of
a stream and started again, once with the files in the page cache and once without. Prints milliseconds until the first
token, and whether tokens and log probabilities are those of the first answer. Needs the extras `transformers` and
`serve`.
"""

import argparse
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from pagepool.prefix.store_folder import stores_in
from pagepool.prefix.store_report import describe

TINY = Path(__file__).parent / "tiny_llama"
STORE_BYTES = 1 << 30
PATIENCE = 300
NEW_TOKENS = 16
SIZES = {
    "vocab_size": 1536,  # that of the tokenizer
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 14,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "bos_token_id": 0,
    "eos_token_id": None,
}


def make_model(folder: Path, dtype: str) -> None:
    """Write a model with random weights and the tokenizer of the tiny Llama."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).to(getattr(torch, dtype)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / name)


def prompt_of(tokens: int) -> list[int]:
    """Return random token ids, the same in each call."""
    import torch

    return torch.randint(3, 1500, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()


def in_one_engine(folder: Path, store: Path, options: argparse.Namespace) -> dict:
    """Return times to first token of one engine: computed, and medians of hits in memory and in the store."""
    import torch

    from pagepool.engine import Engine, SamplingParams
    from pagepool.integrations.transformers.pretrained import load_pretrained

    torch.set_num_threads(options.threads)
    prompt, found = prompt_of(options.tokens), {"memory": [], "store": []}
    blocks = 2 * -(-(options.tokens + NEW_TOKENS) // 16)
    with Engine(*load_pretrained(folder), num_blocks=blocks, store=store, store_bytes=STORE_BYTES) as engine:

        def first_token() -> float:
            generation = engine.submit(prompt, SamplingParams(2))
            generation.result()
            return 1000 * generation.time_to_first_token

        engine.submit(prompt[:40], SamplingParams(2)).result()
        computed = first_token()
        first_token()  # found again: written
        engine.prefix_cache.flush()
        for _ in range(options.rounds):
            found["memory"].append(first_token())
            engine.prefix_cache.evict(blocks)
            found["store"].append(first_token())
        stats = engine.store.stats()
    assert stats["found"] == options.rounds * ((options.tokens - 1) // 16), stats
    return {"computed": computed, **{name: median(times) for name, times in found.items()}, "all": found}


class Server:
    """`pagepool serve` in a process."""

    def __init__(self, folder: Path, store: Path, options: argparse.Namespace) -> None:
        place = {"PYTHONPATH": str(Path(__file__).parents[1]), "HF_HUB_OFFLINE": "1"}
        arguments = ["serve", "--model", str(folder), "--port", "0", "--threads", str(options.threads)]
        arguments += ["--store", str(store), "--store-bytes", str(STORE_BYTES), "--name", "model"]
        began = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pagepool", *arguments],
            env={**os.environ, **place},
            stderr=subprocess.PIPE,
            text=True,
        )
        for line in self.process.stderr:
            if found := re.search(r" at (\S+)/v1$", line):
                self.url = urlsplit(found.group(1))
                break
        else:
            raise RuntimeError("the server did not start")
        self.seconds = time.perf_counter() - began

    def ask(self, prompt: list[int], new_tokens: int = NEW_TOKENS, stop_after: int | None = None) -> dict:
        """Return milliseconds to the first token, and the choices of the stream."""
        connection = http.client.HTTPConnection(self.url.hostname, self.url.port, timeout=PATIENCE)
        body = {"model": "model", "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "logprobs": 1}
        began, first, choices = time.perf_counter(), None, []
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(response.read().decode())
        for line in response:
            if line.startswith(b"data: {"):
                choices.append(json.loads(line[6:])["choices"][0]["logprobs"])
                first = first or time.perf_counter() - began
            if stop_after is not None and len(choices) == stop_after:
                break
        connection.close()
        return {"ms": 1000 * first, "choices": choices}

    def kill(self) -> None:
        """End the process as a crash does."""
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait(PATIENCE) == -signal.SIGKILL
        self.process.stderr.close()


def num_stored(store: Path) -> int:
    """Return the number of pages in the store."""
    return sum(describe(path).get("pages", 0) for path in stores_in(store))


def drop_from_page_cache(store: Path) -> None:
    """Write the files of the store to the disk, and let the kernel drop its copies of them."""
    for path in store.glob("*/*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def restarts(folder: Path, store: Path, options: argparse.Namespace) -> dict:
    """Return milliseconds to the first token before and after a `kill -9` in the middle of a stream."""
    prompt = prompt_of(options.tokens)
    full, found, wrong = (len(prompt) - 1) // 16, {}, []
    server = Server(folder, store, options)
    server.ask(prompt_of(40)[::-1])
    cold = server.ask(prompt)
    found["computed"] = cold["ms"]
    found["in memory"] = server.ask(prompt)["ms"]
    began = time.monotonic()
    while num_stored(store) < full and time.monotonic() < began + PATIENCE:
        time.sleep(0.1)
    for kind in ("page cache", "cold disk", "page cache again"):
        server.ask(prompt, 200, stop_after=20)
        server.kill()
        if kind == "cold disk":
            drop_from_page_cache(store)
        server = Server(folder, store, options)
        server.ask(prompt_of(40)[::-1])  # the first forward of a process is slower
        answer = server.ask(prompt)
        found[f"after kill, {kind}"] = answer["ms"]
        if answer["choices"] != cold["choices"]:
            wrong.append(kind)
    server.kill()
    return {**found, "start_seconds": server.seconds, "pages": num_stored(store), "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", help="where the store is made; default: the directory for temporary files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder = Path(place) / "model"
        make_model(folder, options.dtype)
        rows = {
            "one engine": in_one_engine(folder, Path(place) / "store", options),
            "pagepool serve": restarts(folder, Path(place) / "served", options),
        }
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    for name, row in rows.items():
        for kind, value in row.items():
            if isinstance(value, float):
                is_plain = kind in ("computed", "start_seconds")
                part = "" if is_plain else f"  {value / row['computed']:.3f} of computed"
                print(f"{name:15} {kind:32} {value:9.1f}{part}")
    one = rows["one engine"]
    print(f"from the store / in memory: {one['store'] / one['memory']:.2f}")
    print(f"answers that differ: {rows['pagepool serve']['wrong'] or 'none'}")


if __name__ == "__main__":
    main()
