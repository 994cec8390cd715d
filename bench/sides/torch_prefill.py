"""torch's scaled_dot_product_attention of a whole prompt, in a process of its own: reads a line of JSON, answers with
one, as side_worker.py does. Of the ways to share a KV head among query heads the fastest counts: `enable_gqa`, and K
and V that were repeated before.
"""

import json
import sys
import time

import torch

torch.set_grad_enabled(False)


def made(heads, kv_heads, dim, length, dtype):
    """The calls of a prompt, by way."""
    q, k, v = (torch.randn(1, count, length, dim).to(getattr(torch, dtype)) for count in (heads, kv_heads, kv_heads))
    attend = torch.nn.functional.scaled_dot_product_attention
    group = heads // kv_heads
    repeated = [x.repeat_interleave(group, dim=1) for x in (k, v)]
    return {
        "enable_gqa": lambda: attend(q, k, v, is_causal=True, enable_gqa=True),
        "repeated": lambda: attend(q, *repeated, is_causal=True),
    }


def seconds_of(run, least):
    calls, begin = 0, time.perf_counter()
    while calls == 0 or time.perf_counter() - begin < least:
        run()
        calls += 1
    return (time.perf_counter() - begin) / calls


def main():
    prompt, calls = None, {}
    for line in sys.stdin:
        question = json.loads(line)
        threads, least = question.pop("threads"), question.pop("seconds")
        try:
            torch.set_num_threads(threads)
            if question != prompt:
                calls = made(**question)
                prompt = question
                for run in calls.values():
                    run()
            answer = {"seconds": min(seconds_of(run, least) for run in calls.values())}
        except RuntimeError as error:
            answer = {"failed": str(error)}
        print(json.dumps(answer), flush=True)


main()
