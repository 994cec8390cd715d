"""First tokens of vLLM on the CPU with `PagepoolConnector`: cold, without the connector, and after a restart.

    python bench/vllm_connector.py --model DIR [--tokens 4000] [--rounds 3]

Each round starts three engines one after another: one without the connector, one whose tier is empty, and one after it
on the same tier. Each gets prompts that it has not seen, one at a time. The rounds alternate, so that a slow minute of
the machine does not count for one of them.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONNECTOR = "PagepoolConnector"


def measure(options, prompts):
    """Return the time to the first token of each prompt in s, and the cached tokens."""
    command = [sys.executable, __file__, "--child", json.dumps(options)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, input=json.dumps(prompts), capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def child(options):
    from time import perf_counter

    from vllm import LLM, SamplingParams

    llm = LLM(**options)
    parameters = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    warm = [3] * 500
    llm.generate([{"prompt_token_ids": warm}], parameters, use_tqdm=False)
    found = []
    for tokens in json.load(sys.stdin):
        begin = perf_counter()
        [output] = llm.generate([{"prompt_token_ids": tokens}], parameters, use_tqdm=False)
        found.append([perf_counter() - begin, output.num_cached_tokens])
    print(json.dumps(found))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bytes", default="1G")
    parser.add_argument("--store", help="a directory: the tier is removed before the restart, and its store is read")
    options = parser.parse_args()
    name = f"bench-{os.getpid()}"
    base = {"model": options.model, "skip_tokenizer_init": True, "max_model_len": options.tokens + 64}
    base |= {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}
    tier = {"name": name, "bytes": options.bytes}
    if options.store:
        tier |= {"store": options.store, "store_bytes": "4G"}
    transfer = {"kv_connector": CONNECTOR, "kv_connector_module_path": "pagepool.integrations.vllm"}
    transfer |= {"kv_role": "kv_both", "kv_connector_extra_config": tier}
    connected = {**base, "kv_transfer_config": transfer}
    times = {"without": [], "cold": [], "restart": []}
    try:
        for number in range(options.rounds):
            source = random.Random(number)
            prompts = [[source.randrange(3, 40_000) for _ in range(options.tokens)] for _ in range(options.prompts)]
            times["without"] += measure(base, prompts)
            times["cold"] += measure(connected, prompts)
            if options.store:
                remove(name)
            times["restart"] += measure(connected, prompts)
    finally:
        remove(name)
    cold = statistics.median(seconds for seconds, _ in times["without"])
    for kind, rows in times.items():
        seconds = statistics.median(time for time, _ in rows)
        print(
            f"{kind:8} {seconds * 1e3:8.1f} ms  {seconds / cold:.3f}  {min(cached for _, cached in rows)} tokens cached"
        )


def remove(name):
    for path in Path("/dev/shm").glob(f"pagepool[-.]*{name}*"):
        path.unlink()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
    else:
        main()
