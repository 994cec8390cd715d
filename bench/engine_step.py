"""Overhead of an engine's step outside the model: scheduling, sampling, detokenizing, delivering tokens.

    python bench/engine_step.py

For the tiny Llama and a Llama of 100 million random parameters with a vocabulary of 32,000, with 1 and 32 sequences.
Prints the overhead as a share of the step's time and in microseconds per token. Needs the extra `transformers`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pagepool.engine import Engine, SamplingParams
from pagepool.integrations.transformers.pretrained import load_pretrained

TINY = Path(__file__).parent / "tiny_llama"
SAMPLING = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "top_k 50": {"temperature": 1.0, "top_k": 50},
    "top_p 0.9": {"temperature": 0.3, "top_p": 0.9},
}


def models() -> dict:
    """Return for each model name the model and the number of tokens per request."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
    )
    torch.manual_seed(0)
    return {"tiny, 1.9M": (load_pretrained(TINY)[0], 96), "random, 102M": (LlamaForCausalLM(config).eval(), 24)}


def measure(engine: Engine, sequences: int, tokens: int, sampling: dict) -> dict:
    """Do one run; return the seconds of its steps and the seconds of the model within them."""
    before = engine.stats()
    running = [engine.submit(f"def f{n}(", SamplingParams(tokens, seed=n, **sampling)) for n in range(sequences)]
    count = sum(len(generation.result().token_ids) for generation in running)
    after = engine.stats()
    steps, model = (after[name] - before[name] for name in ("step_seconds", "model_seconds"))
    return {"share": 1 - model / steps, "us_per_token": (steps - model) / count * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each median; default: 5")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer, rows = AutoTokenizer.from_pretrained(TINY), []
    for name, (model, tokens) in models().items():
        with Engine(model, tokenizer, num_blocks=1024, prefix_cache=False) as engine:
            for sequences in (1, 32):
                for kind, sampling in SAMPLING.items():
                    found = [measure(engine, sequences, tokens, sampling) for _ in range(options.rounds)]
                    middle = sorted(found, key=lambda one: one["share"])[len(found) // 2]
                    rows.append({"model": name, "sequences": sequences, "sampling": kind, **middle})
                    if not options.json:
                        row = f"{name:14} {sequences:3} sequences, {kind:14}"
                        print(f"{row} {middle['share']:7.1%} {middle['us_per_token']:8.1f} us/token", flush=True)
    if options.json:
        json.dump(rows, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
