"""Compare pagepool with llama.cpp on one GGUF file: first token, tokens per second, memory and perplexity.

    python bench/weights.py FILE.gguf [--side pagepool,llama,int8,int4] [--users 1,8,32] [--prompt 128] [--new 32]
                            [--threads 2] [--rounds 3] [--text TEXT_FILE ...] [--peers build/peers]
    python bench/weights.py FILE.gguf --convert BF16 OTHER.gguf

`pagepool` keeps the file's bits. `int8` and `int4` are pagepool's own quantisation of the file's weights, so give them
a BF16 or F32 file. `llama` runs in its own environment (bench/peers.py). Each side has its own process. Sides take
turns, round by round, after a warm-up. A round generates one token for new random prompts, and then all tokens for
other ones; tokens/s counts those after the first. Generation is greedy and goes on at the end of a text.

`--text` compares perplexities instead. A text is cut into windows of 512 tokens, and the last 256 tokens of each are
predicted from those before them.

`--convert` writes the same model with matrices of another type: BF16, F16, Q8_0, Q4_0 or Q4_1.
"""

import argparse
import importlib
import json
import math
import os
import random
import sys
import time
from pathlib import Path
from statistics import median

WINDOW, SCORED = 512, 256  # tokens of a window, and those of them that are predicted
LEAST, MOST = 200, 30_000  # random tokens of prompts


class Pagepool:
    """`Engine.from_gguf`."""

    def __init__(self, file, threads, weights=None):
        import torch

        from pagepool import SchedulerConfig
        from pagepool.engine import Engine

        torch.set_num_threads(threads)
        config = SchedulerConfig(max_batch_sequences=32, max_batch_tokens=2048, max_prefill_tokens=2048)
        self.engine = Engine.from_gguf(file, weights=weights, pool_bytes=1 << 30, config=config)

    def tokens_of(self, text):
        return self.engine.tokenizer(text, add_special_tokens=False)["input_ids"]

    def generate(self, prompts, new):
        from pagepool.engine import SamplingParams

        running = [self.engine.submit(prompt, SamplingParams(new, ignore_eos=True)) for prompt in prompts]
        return [one.result().token_ids for one in running]

    def nats(self, window):
        from pagepool.engine import SamplingParams

        found = self.engine.submit(window, SamplingParams(0, prompt_logprobs=0)).result().prompt_logprobs
        return -sum(token.logprob for token in found[-SCORED:])


class Llama:
    """`llama_decode` of llama.cpp over one batch of all sequences."""

    def __init__(self, file, threads):
        import llama_cpp
        import numpy as np

        self.np, self.api = np, llama_cpp
        self.quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.quiet, None)
        llama_cpp.llama_backend_init()
        about = llama_cpp.llama_model_default_params()
        about.use_mmap = False
        self.model = llama_cpp.llama_model_load_from_file(file.encode(), about)
        about = llama_cpp.llama_context_default_params()
        about.n_ctx, about.n_batch, about.n_ubatch, about.n_seq_max = 32 * 1024, 2048, 512, 32
        about.n_threads = about.n_threads_batch = threads
        about.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(self.model, about)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(2048, 0, 1)

    def logits(self, rows):
        """Run (token, position, sequence, has_logits) for each row, at most 2,048. Return the wanted rows of logits."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, is_wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, is_wanted
        if status := self.api.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        as_array = self.np.ctypeslib.as_array
        wanted = [i for i, row in enumerate(rows) if row[3]]
        return [as_array(self.api.llama_get_logits_ith(self.context, i), (self.vocabulary,)) for i in wanted]

    def clear(self):
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def generate(self, prompts, new):
        self.clear()
        rows = [
            (token, place, number, place == len(prompt) - 1)
            for number, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        found = []
        for begin in range(0, len(rows), 2048):
            found += [[int(row.argmax())] for row in self.logits(rows[begin : begin + 2048])]
        for step in range(new - 1):
            rows = [(own[-1], len(prompts[i]) + step, i, True) for i, own in enumerate(found)]
            for own, row in zip(found, self.logits(rows), strict=True):
                own.append(int(row.argmax()))
        return found

    def nats(self, window):
        self.clear()
        first = len(window) - SCORED
        rows = self.logits([(token, i, 0, first - 1 <= i < len(window) - 1) for i, token in enumerate(window)])
        total = 0.0
        for row, token in zip(rows, window[first:], strict=True):
            wide = row.astype(self.np.float64)
            most = wide.max()
            total += most + math.log(self.np.exp(wide - most).sum()) - wide[token]
        return total


SIDES = {
    "pagepool": Pagepool,
    "llama": Llama,
    "int8": lambda *about: Pagepool(*about, weights="int8"),
    "int4": lambda *about: Pagepool(*about, weights="int4"),
}


def resident():
    """Return the resident memory of this process that no file backs, in bytes."""
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024


def work(about):
    """Answer questions on standard input, one line each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    importlib.import_module("llama_cpp" if about["side"] == "llama" else "pagepool.integrations.transformers.runner")
    before = resident()
    side = SIDES[about["side"]](about["file"], about["threads"])
    loaded = resident() - before
    for line in sys.stdin:
        asked = json.loads(line)
        if "text" in asked:
            answer = {"tokens": side.tokens_of(asked["text"])}
        elif "windows" in asked:
            answer = {"nats": sum(map(side.nats, asked["windows"]))}
        else:
            answer = timed(side, **asked) | {"bytes": loaded}
        print(json.dumps(answer), file=answers, flush=True)


def timed(side, users, length, new, seed):
    numbers = random.Random(seed)
    one, other = ([[numbers.randrange(LEAST, MOST) for _ in range(length)] for _ in range(users)] for _ in range(2))
    began = time.perf_counter()
    side.generate(one, 1)
    first = time.perf_counter() - began
    began = time.perf_counter()
    found = side.generate(other, new + 1)
    later = time.perf_counter() - began - first
    made = sum(map(len, found)) - users
    return {"first": first, "rate": made / later}


def start(name, options):
    from interleave import Process
    from peers import PEERS, python_of

    python = python_of(PEERS["ggml"], options.peers) if name == "llama" else sys.executable
    environment = {
        "OMP_NUM_THREADS": str(options.threads),
        "PAGEPOOL_NUM_THREADS": str(options.threads),
        "HF_HUB_OFFLINE": "1",
    }
    about = {"side": name, "file": str(options.file), "threads": options.threads}
    return Process(python, json.dumps(about), environment, script=Path(__file__).name, patience=600)


def ask(process, **question):
    process.tell(**question)
    answer = process.answer()
    if "failed" in answer:
        raise SystemExit(answer["failed"])
    return answer


def compare_speed(processes, options):
    print(f"{'users':>5} {'side':10}{'first s':>9}{'tokens/s':>10}{'GiB':>7}")
    for users in options.users:
        found = {name: [] for name in processes}
        for number in range(options.rounds + 1):  # the first one is a warm-up
            for name, process in processes.items():
                new = options.new if number else 4
                answer = ask(process, users=users, length=options.prompt, new=new, seed=number)
                if number:
                    found[name].append(answer)
        for name, rounds in found.items():
            first, rate = (median(one[field] for one in rounds) for field in ("first", "rate"))
            print(f"{users:5} {name:10}{first:9.3f}{rate:10.1f}{rounds[0]['bytes'] / 2**30:7.2f}", flush=True)


def compare_perplexity(processes, options):
    reader = processes.get("pagepool") or next(iter(processes.values()))
    for file in options.text:
        tokens = ask(reader, text=file.read_text())["tokens"]
        windows = [tokens[at : at + WINDOW] for at in range(0, len(tokens) - WINDOW + 1, WINDOW)]
        if not windows:
            raise SystemExit(f"{file} must have at least {WINDOW} tokens, not {len(tokens)}")
        for name, process in processes.items():
            nats = ask(process, windows=windows)["nats"]
            perplexity = math.exp(nats / len(windows) / SCORED)
            print(f"{file.name:20} {len(windows):4} windows {name:10} {perplexity:9.4f}", flush=True)


def convert(file, kind, to):
    import gguf

    kind = getattr(gguf.GGMLQuantizationType, kind)
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(to, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            of = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], of)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(*map(int, tensor.shape[::-1]))
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    from interleave import counts, names

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("file", type=Path)
    parser.add_argument("--side", type=names(SIDES), default="pagepool,llama")
    parser.add_argument("--users", type=counts, default="1,8,32")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=32, help="generated tokens of a request after the first one")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--text", type=Path, nargs="+", help="compare the perplexity of these files")
    parser.add_argument("--peers", type=Path, default=Path("build/peers"), help="folder of the peers' environments")
    parser.add_argument("--convert", nargs=2, metavar=("TYPE", "FILE"))
    options = parser.parse_args()
    if options.convert:
        convert(options.file, *options.convert)
        return
    processes = {name: start(name, options) for name in options.side}
    (compare_perplexity if options.text else compare_speed)(processes, options)
    for process in processes.values():
        process.quit()


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        work(json.loads(sys.argv[1]))
    else:
        main()
