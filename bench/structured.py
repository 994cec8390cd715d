"""Structured output of a model for random schemas: every finished text must be valid. Needs jsonschema-rs.

    python bench/structured.py MODEL              1,000 schemas with the keywords of JSONSchemaBench
    python bench/structured.py MODEL --beside     steps of other requests beside new and hostile grammars

MODEL is a directory or a GGUF file; by default the tiny model of `bench/tiny_llama`. Exits 1 if a text is not valid.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from threading import Event, Thread

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))  # fallback: the package of the checkout
sys.path.append(str(HERE.parent / "tests"))

import jsonschema_rs  # noqa: E402
from json_schemas import HOSTILE, random_schema  # noqa: E402

from pagepool import Engine, RequestRejected, SamplingParams, Structured  # noqa: E402
from pagepool.integrations.transformers.pretrained import load_pretrained  # noqa: E402

AT_ONCE = 24


def read(options, engine):
    """Generate a text for each schema and print the counts. Return the number of texts that are not valid."""
    counts, reasons, running, invalid = Counter(), Counter(), [], []
    begin = time.monotonic()

    def end(schema, generation):
        try:
            generation.result()
        except RuntimeError as error:
            counts["error"] += 1
            print("error:", str(error)[:200], json.dumps(schema)[:300])
            return
        counts[generation.finish_reason] += 1
        if generation.finish_reason == "stop":
            try:
                is_valid = jsonschema_rs.is_valid(schema, json.loads(generation.text))
            except ValueError:
                is_valid = False
            if not is_valid:
                invalid.append((schema, generation.text))

    for number in range(options.count):
        schema = random_schema(random.Random(options.seed + number))
        prompt = f"A JSON document of this schema: {json.dumps(schema)[:400]}\n\n"
        params = {"temperature": 0.8, "seed": number, "structured": Structured(json_schema=schema)}
        try:
            running.append((schema, engine.submit(prompt, SamplingParams(options.tokens, **params))))
        except RequestRejected as error:
            counts["refused"] += 1
            reasons[str(error).partition(" for ")[0][:70]] += 1
        while len(running) >= AT_ONCE:
            end(*running.pop(0))
    for one in running:
        end(*one)
    print(f"{options.count} schemas in {time.monotonic() - begin:.0f} s:", dict(counts), f"{len(invalid)} not valid")
    for reason, count in reasons.most_common(options.reasons):
        print(f"  {count:4} refused: {reason}")
    for schema, text in invalid:
        print("not valid:", json.dumps(schema), repr(text))
    return len(invalid)


def beside(options, engine):
    """Print the times between two tokens of four requests, beside four others: plain ones, or ones with grammars."""
    hostile = [Structured(**fields) for fields in HOSTILE.values() if fits(fields)]
    times = {"plain": [], "known grammar": [], "new grammars": [], "hostile grammars": []}
    numbers = iter(range(10**9))

    def structured_of(kind, place):
        """Return the grammar of a request: one that 40 tokens do not complete, or a hostile one."""
        if kind == "plain" or (kind == "hostile grammars" and place < 2):
            return None
        if kind == "hostile grammars":
            return random.choice(hostile)
        return Structured(regex=f"[a-z ]{{{2000 if kind == 'known grammar' else 2001 + next(numbers)}}}")

    def ask(kind, place, stopping):
        while not stopping.is_set():
            try:
                params = SamplingParams(40, temperature=0.8, structured=structured_of(kind, place))
                engine.submit("Some JSON: ", params).result()
            except (RequestRejected, RuntimeError):
                continue

    for number in range(options.rounds + 1):
        for kind, found in times.items():
            watched = [engine.submit(f"Number {place}: ", SamplingParams(40, ignore_eos=True)) for place in range(4)]
            stopping = Event()
            threads = [Thread(target=ask, args=(kind, place, stopping)) for place in range(4)]
            for thread in threads:
                thread.start()
            arrived = [time.perf_counter() for _ in watched[0]]
            if number:  # the first round warms up
                found.extend(after - before for before, after in pairwise(arrived))
            stopping.set()
            for thread in threads:
                thread.join()
    for kind, found in times.items():
        ratios = [
            median(found) / median(times["plain"]),
            quantiles(found, n=100)[98] / quantiles(times["plain"], n=100)[98],
        ]
        print(
            f"{kind:18} median {median(found) * 1e3:6.1f} ms, ratios of median and p99: {ratios[0]:.2f} {ratios[1]:.2f}"
        )
    return 0


def fits(fields):
    try:
        Structured(**fields)
    except ValueError:
        return False
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=HERE / "tiny_llama")
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--reasons", type=int, default=12)
    options = parser.parse_args()
    model, tokenizer = load_pretrained(options.model)
    with Engine(model, tokenizer, num_blocks=2048) as engine:
        return 1 if (beside if options.beside else read)(options, engine) else 0


if __name__ == "__main__":
    sys.exit(main())
