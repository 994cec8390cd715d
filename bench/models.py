"""Compare five text generators on whole models: tokens per second, time of a decode step, and memory.

    python bench/models.py [--model llama,llama-1.4b,mistral,gemma3,bamba] [--dtype bfloat16,float32]
                           [--workload short,eight,one,long,shared]
                           [--side pagepool,generate,generate_batch,vllm,vllm-compiled]
                           [--rounds 1] [--peers build/peers] [--threads 2] [--json FILE]

Needs torch and transformers (`pip install pagepool[transformers]`). vLLM has its own environment (see peers.py) and
is skipped if that is missing. Models have random weights and about 125 million parameters, or 1.4 billion. Each side
runs in its own process. For each workload, every side first runs prompts of the same shape as a warm-up. Then the
sides alternate, round by round, and each round is printed.

A round has two runs with new prompts of the same lengths. The first run generates one token, which gives the time
until all sequences have their first token. The second run generates all tokens and stamps each step. The time of a
decode step is the median of the last half of these steps. It is not the difference of the two runs, which depends on
how disturbed the first run was. `cpu` is the CPU time of the process in such a step: use it with `--threads 1` beside
other load. All figures are medians of the rounds. Generation is greedy and ignores stop tokens.
`equal` counts the sequences of the last round with the same tokens as `generate`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from interleave import Process
from machine import cpu_name
from peers import PEERS, python_of

MODELS = ("llama", "llama-1.4b", "mistral", "gemma3", "bamba")
SIDES = ("pagepool", "generate", "generate_batch", "vllm", "vllm-compiled")
DTYPES = ("bfloat16", "float32")
PATIENCE = 1800  # timeout of a workload in seconds
# Fields of a workload: number of sequences, shared tokens, own tokens, new tokens.
WORKLOADS = {
    "short": (32, 0, 128, 128),
    "eight": (8, 0, 128, 128),
    "one": (1, 0, 128, 128),
    "long": (8, 0, 4096, 128),
    "shared": (32, 2048, 32, 128),
}


def absent(side, model, peers):
    """Return the reason why a side cannot run a model, or None."""
    if not side.startswith("vllm"):
        return None
    if not model.startswith("llama"):
        return "it is measured with llama alone"
    if not python_of(PEERS["vllm"], peers).exists():
        return f"its environment is missing in {peers}"
    return None


def start(side, folder, dtype, options):
    """Start the process of a side."""
    python = python_of(PEERS["vllm"], options.peers) if side.startswith("vllm") else sys.executable
    environment = {
        "OMP_NUM_THREADS": str(options.threads),
        "PAGEPOOL_NUM_THREADS": str(options.threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    argument = json.dumps({"side": side, "folder": str(folder), "dtype": dtype, "threads": options.threads})
    return Process(python, argument, environment, script="model_worker.py", patience=PATIENCE)


def rows_of(model, dtype, options, say):
    """Return the results of a model: a dict for each workload and side."""
    with tempfile.TemporaryDirectory() as folder:
        worker = Path(__file__).with_name("model_worker.py")
        subprocess.run([sys.executable, str(worker), "--make", model, folder, dtype], check=True)
        processes = {}
        for side in options.side:
            reason = absent(side, model, options.peers)
            if reason is None:
                processes[side] = start(side, folder, dtype, options)
            else:
                say(f"{model} {dtype}: {side} is left out: {reason}")
        for workload in options.workload:
            found = {}
            for number in [None, *range(options.rounds)]:
                for side, process in processes.items():
                    process.tell(workload=WORKLOADS[workload], round=number)
                    answer = process.answer()
                    if "failed" in answer:
                        say(f"{model} {dtype} {workload}: {side} failed: {answer['failed']}")
                    elif number is not None:
                        found.setdefault(side, []).append(answer)
                        say(line_of(row_of(model, dtype, workload, side, {side: [answer]})))
            yield from (row_of(model, dtype, workload, side, found) for side in found)
        for process in processes.values():
            process.quit()


def row_of(model, dtype, workload, side, found):
    sequences, shared, own, new = WORKLOADS[workload]
    answers, plain = found[side], found.get("generate")
    every, first, step, cpu = (median(answer[name] for answer in answers) for name in ("all", "first", "step", "cpu"))
    tokens = answers[-1]["tokens"]
    turns = [answer["turns"] for answer in answers if answer["turns"] is not None]
    return {
        "model": model,
        "dtype": dtype,
        "workload": workload,
        "side": side,
        "rounds": len(answers),
        "tokens_per_s": sequences * new / every,
        "prefill_per_s": sequences * (shared + own) / first,
        "step_ms": step * 1e3,
        "cpu_ms": cpu * 1e3,
        "first_s": first,
        "gib": max(answer["bytes"] for answer in answers) / 2**30,
        "equal": None if plain is None else sum(map(list.__eq__, tokens, plain[-1]["tokens"])),
        "of": sequences,
        **({"later_over_first": median(turns)} if turns else {}),
    }


def heading():
    return (
        f"{'model':10} {'dtype':9} {'workload':8} {'side':15}{'rounds':>7}"
        f"{'tokens/s':>9}{'prefill/s':>10}{'step ms':>9}{'cpu ms':>8}{'first s':>9}{'GiB':>6}"
        f"{'equal':>7}{'later/first':>12}"
    )


def line_of(row):
    equal = "" if row["equal"] is None else f"{row['equal']}/{row['of']}"
    later = f"{row['later_over_first']:.3f}" if "later_over_first" in row else ""
    return (
        f"{row['model']:10} {row['dtype']:9} {row['workload']:8} {row['side']:15}{row['rounds']:7}"
        f"{row['tokens_per_s']:9.1f}{row['prefill_per_s']:10.0f}{row['step_ms']:9.1f}{row['cpu_ms']:8.1f}"
        f"{row['first_s']:9.2f}{row['gib']:6.2f}{equal:>7}{later:>12}"
    )


def choices(known):
    def read(text):
        chosen = text.split(",")
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"must be among {', '.join(known)}, got {name!r}")
        return chosen

    return read


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="bench/README.md has results", allow_abbrev=False
    )
    parser.add_argument("--model", type=choices(MODELS), default=list(MODELS))
    parser.add_argument("--dtype", type=choices(DTYPES), default=list(DTYPES))
    parser.add_argument("--workload", type=choices(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--side", type=choices(SIDES), default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peers", type=Path, default=Path("build/peers"), help="folder of the peers' environments")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows = []
    print(heading())
    for model in options.model:
        for dtype in options.dtype:
            for row in rows_of(model, dtype, options, print):
                rows.append(row)
                print(line_of(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"cpu": cpu_name(), "threads": options.threads, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
