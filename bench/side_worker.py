"""Worker process of one side of a comparison: python side_worker.py MODULE[:CLASS], with a module of sides/

Reads lines of JSON until the input ends, and answers each with a line of JSON:

    {"prepare": [shape, dtype, folder], "threads": [1, 2]}  ->  {"errors": {threads: {way: error}}}
    {"round": threads, "seconds": s}                        ->  {"seconds": {way: median}}

An error is answered with {"failed": "sentence"}, and the worker reads the next line.
"""

import gc
import importlib
import json
import os
import sys
from pathlib import Path
from statistics import median

sys.path[0] = str(Path(__file__).resolve().parent)
MOST = 20_000  # maximum calls per round


class Worker:
    def __init__(self, module):
        self.common = importlib.import_module("sides.common")
        module, _, kind = module.partition(":")
        self.make = getattr(importlib.import_module(f"sides.{module}"), kind or "Side")
        self.side, self.calls, self.turn = None, {}, 0

    def prepare(self, case, threads):
        self.side, self.calls = None, {}
        gc.collect()  # free the previous case's memory before the next case is allocated
        case = self.common.Case(*case)
        self.side = self.make(case)
        errors = {}
        for count in threads:
            self.side.use(count)
            self.calls[count] = self.side.calls(count)
            errors[count] = {
                way: self.common.error_of(call.output(call.run(0)), case.right)
                for way, call in self.calls[count].items()
            }
        return {"errors": errors}

    def round(self, threads, seconds):
        self.side.use(threads)
        result = {}
        for way, call in self.calls[threads].items():
            times, self.turn = self.common.times_of(call.run, self.turn, seconds, most=MOST)
            result[way] = median(times)
        return {"seconds": result}


def main(module):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    worker = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            worker = worker or Worker(module)
            if "prepare" in question:
                answer = worker.prepare(question["prepare"], question["threads"])
            else:
                answer = worker.round(question["round"], question["seconds"])
        except Exception as error:
            sentence = " ".join(str(error).split())
            answer = {"failed": f"{type(error).__name__}: {sentence[:300]}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
