"""The loop of a worker process that times attention by torch or vLLM, with the protocol of side_worker.py.

The workers run as scripts of this folder.
"""

import json
import sys
import time

import torch


def seconds_of(run, least):
    """Return the mean time of a call, over at least `least` seconds."""
    calls, begin = 0, time.perf_counter()
    while calls == 0 or time.perf_counter() - begin < least:
        run()
        calls += 1
    return (time.perf_counter() - begin) / calls


def answer_questions(made):
    """Answer each question on stdin with the seconds of the fastest of the calls that `made(**question)` returns.

    The question also has the number of threads, which is set before `made`, and the seconds of a measurement.
    """
    before, calls = None, {}
    for line in sys.stdin:
        question = json.loads(line)
        least = question.pop("seconds")
        try:
            if question != before:
                arguments = dict(question)
                torch.set_num_threads(arguments.pop("threads"))
                calls, before = made(**arguments), question
                for run in calls.values():
                    run()
            answer = {"seconds": min(seconds_of(run, least) for run in calls.values())}
        except RuntimeError as error:
            answer = {"failed": str(error)}
        print(json.dumps(answer), flush=True)
