"""vLLM on the CPU with `PagepoolConnector`, without it and with ExampleConnector: first tokens, texts and overhead.

    python bench/vllm_connector.py --model DIR [--tokens 4000] [--rounds 3] [--example]
    python bench/vllm_connector.py --model DIR --tokens 500:4000 --prompts 30 --rounds 1 --new-tokens 16 --bytes 2G

Each round starts engines one after another: without a connector, with an empty tier, and again on this tier. With
`--example`, two more have vLLM's ExampleConnector. All get the same new prompts, which are sent after one another. The
rounds alternate, so that a slow minute of the machine does not count for one kind of engine.

Prints the median time to the first token and its ratio to the engine without a connector, how many tokens were cached,
how many texts are equal to the texts without a connector, and the share of the time in methods of the connector.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLE = "ExampleConnector"
METHODS = {
    "SCHEDULER": ("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "request_finished"),
    "WORKER": ("start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save"),
}


def measure(options, prompts, new_tokens):
    """Return rows of seconds to the first token, cached tokens and new tokens, and the share of the connector."""
    command = [sys.executable, __file__, "--child", json.dumps([options, new_tokens])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the connector's methods can be timed
    done = subprocess.run(command, input=json.dumps(prompts), capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def timed(connector, names, times):
    from time import perf_counter

    def wrapped(method):
        def call(*arguments, **options):
            begin = perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                times.append(perf_counter() - begin)

        return call

    for name in names:
        setattr(connector, name, wrapped(getattr(connector, name)))


def child(options, new_tokens):
    from time import perf_counter

    from vllm import LLM, SamplingParams
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    times, create = [], KVConnectorFactory.create_connector

    def created(*arguments, **named):
        connector = create(*arguments, **named)
        timed(connector, METHODS[connector.role.name], times)
        return connector

    KVConnectorFactory.create_connector = created
    llm = LLM(**options, disable_log_stats=False)
    parameters = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    warm = [3] * 500
    llm.generate([{"prompt_token_ids": warm}], parameters, use_tqdm=False)
    times.clear()
    begin, rows = perf_counter(), []
    for tokens in json.load(sys.stdin):
        [output] = llm.generate([{"prompt_token_ids": tokens}], parameters, use_tqdm=False)
        rows.append([output.metrics.first_token_latency, output.num_cached_tokens, list(output.outputs[0].token_ids)])
    share = sum(times) / (perf_counter() - begin)
    llm.llm_engine.engine_core.shutdown()
    print(json.dumps([rows, share]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", default="4000", help="the length of prompts, or two for random lengths between")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=1)
    parser.add_argument("--bytes", default="1G")
    parser.add_argument("--dtype", default="auto", help="in float32 texts after a hit are equal")
    parser.add_argument("--store", help="a directory: the tier is removed before the restart, and its store is read")
    parser.add_argument("--example", action="store_true", help="also vLLM's ExampleConnector")
    options = parser.parse_args()
    name, folder = f"bench-{os.getpid()}", tempfile.TemporaryDirectory()
    least, most = (int(options.tokens.split(":")[place]) for place in (0, -1))
    base = {"model": options.model, "skip_tokenizer_init": True, "max_model_len": most + 64 + options.new_tokens}
    base |= {"dtype": options.dtype, "enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}
    tier = {"name": name, "bytes": options.bytes}
    if options.store:
        tier |= {"store": options.store, "store_bytes": "4G"}
    ours = {"kv_connector": "PagepoolConnector", "kv_connector_module_path": "pagepool.integrations.vllm"}
    ours = {**base, "kv_transfer_config": {**ours, "kv_role": "kv_both", "kv_connector_extra_config": tier}}
    example = {"kv_connector": EXAMPLE, "kv_role": "kv_both"}
    example["kv_connector_extra_config"] = {"shared_storage_path": folder.name}
    example = {**base, "kv_transfer_config": example}
    runs = {"without": base, "cold": ours, "restart": ours}
    if options.example:
        runs |= {f"{EXAMPLE}, cold": example, f"{EXAMPLE}, restart": example}
    found, shares = {kind: [] for kind in runs}, {kind: [] for kind in runs}
    try:
        for number in range(options.rounds):
            source = random.Random(number)
            lengths = [source.randint(least, most) for _ in range(options.prompts)]
            prompts = [[source.randrange(3, 40_000) for _ in range(length)] for length in lengths]
            for kind, engine in runs.items():
                if kind == "restart" and options.store:
                    remove(name)
                rows, share = measure(engine, prompts, options.new_tokens)
                found[kind] += rows
                shares[kind].append(share)
        saved = sum(path.stat().st_blocks * 512 for path in Path(folder.name).rglob("*"))
    finally:
        remove(name)
        folder.cleanup()
    cold = statistics.median(row[0] for row in found["without"])
    print(f"{sum(map(len, prompts))} tokens in the prompts of a round")
    for kind, rows in found.items():
        seconds = statistics.median(row[0] for row in rows)
        cached = sum(row[1] for row in rows) // options.rounds
        equal = sum(row[2] == other[2] for row, other in zip(rows, found["without"], strict=True))
        share = 100 * statistics.median(shares[kind])
        print(
            f"{kind:25} {seconds * 1e3:8.1f} ms  {seconds / cold:.3f}  {cached:6} cached  "
            f"{equal} of {len(rows)} texts  {share:.2f} % in the connector"
        )
    if options.example:
        print(f"{EXAMPLE} has {saved >> 20} MiB on the disk")


def remove(name):
    for path in Path("/dev/shm").glob(f"pagepool[-.]*{name}*"):
        path.unlink()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*json.loads(sys.argv[2]))
    else:
        main()
