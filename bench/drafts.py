"""Tokens per second with and without drafts, alternating, for texts that repeat their prompt and for prose.

    python bench/drafts.py MODEL                  one user
    python bench/drafts.py MODEL --users 32

MODEL is a directory or a GGUF file; by default the tiny model of `bench/tiny_llama`. Every text must be the same with
and without drafts: exits 1 if one is not.
"""

import argparse
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))  # fallback: the package of the checkout

from pagepool import Engine, SamplingParams, SchedulerConfig  # noqa: E402
from pagepool.integrations.transformers.pretrained import load_pretrained  # noqa: E402

CODE = '''def parse(line, names, limit=10):
    """Return the fields of a line as a dict."""
    fields = {}
    for number, part in enumerate(line.split(",")):
        if number >= limit:
            raise ValueError("too many fields")
        key, _, value = part.partition("=")
        if key.strip() not in names:
            raise KeyError(key)
        fields[key.strip()] = value.strip()
    return fields


def main(path):
    names = {"host", "port", "user"}
    with open(path) as file:
        for line in file:
            print(parse(line, names))
'''
BEGINNINGS = [
    "The harbour of the old town",
    "My grandmother used to say",
    "In the year 1842 a ship",
    "A good way to learn",
]


def prompt(task, number):
    """An edit: two versions of a text, and the beginning of the third. Prose: the beginning of a text."""
    if task == "prose":
        return f"{BEGINNINGS[number % len(BEGINNINGS)]} {number}"
    names = ("fields", f"result{number}")
    known = "".join(f"### Version {name}\n\n```python\n{CODE.replace('fields', name)}```\n\n" for name in names)
    return known + f"### Version found{number}\n\n```python\ndef parse(line, names, limit=10):\n"


def run(engine, prompts, tokens, temperature, seed):
    """Return the tokens per second and the generations."""
    params = SamplingParams(tokens, temperature=temperature, seed=seed, ignore_eos=True)
    began = perf_counter()
    running = [engine.submit(text, params) for text in prompts]
    found = [generation.result() for generation in running]
    return len(found) * tokens / (perf_counter() - began), found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=HERE / "tiny_llama", type=Path)
    parser.add_argument("--users", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tasks", nargs="+", default=["edit", "prose"])
    options = parser.parse_args()
    config = SchedulerConfig(max_batch_sequences=32)
    engines = [
        Engine(*load_pretrained(options.model, "auto"), num_blocks=4096, config=config, drafts=drafts)
        for drafts in (None, "ngram")
    ]
    differs = 0
    for task in options.tasks:
        ratios, accepted, rejected = [], 0, 0
        for number in range(-1, options.rounds):  # the first round warms up
            prompts = [prompt(task, 100 * (number + 2) + user) for user in range(options.users)]
            order = engines if number % 2 else engines[::-1]
            speeds, found = zip(
                *(run(engine, prompts, options.tokens, 0.8 * (task == "prose"), number + 1) for engine in order),
                strict=True,
            )
            differs += [one.token_ids for one in found[0]] != [one.token_ids for one in found[1]]
            drafted = found[order.index(engines[1])]
            if number >= 0:
                ratios.append(speeds[order.index(engines[1])] / speeds[order.index(engines[0])])
                accepted += sum(one.num_accepted for one in drafted)
                rejected += sum(one.num_rejected for one in drafted)
        print(
            f"{task}, {options.users} users: {median(ratios):.2f} times the tokens/s ({min(ratios):.2f} to "
            f"{max(ratios):.2f}); {accepted:,} drafts accepted, {rejected:,} rejected",
            flush=True,
        )
    print(f"rounds with other texts: {differs}")
    for engine in engines:
        engine.close()
    return int(differs > 0)


if __name__ == "__main__":
    sys.exit(main())
