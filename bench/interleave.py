"""Measure competing implementations ("sides") in alternating rounds, with the machine's rates measured in each round.

Each side runs in its own process.
"""

import argparse
import json
import os
import select
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median

from machine import CHUNK_WAYS, RATES, Machine, cpu_name
from shapes import ITEM_BYTES, SHAPES, copies_of, flops, kv_bytes, page_bytes, target
from sides.common import write_case

HERE = Path(__file__).resolve().parent
PATIENCE = 240  # timeout in seconds: a side without an answer counts as failed
CHUNKS = (2048, 4096, 8192, 65536)
PAUSE = 0.008  # seconds between turns: idle OpenMP threads spin for about 5 ms


def bound_of(module, environment):
    """Return the name of the compute rate that limits a side. The default is "fma", with the CPU's longest vectors."""
    forced = {**os.environ, **environment}.get("PAGEPOOL_ISA")
    return "fma_of_8" if module == "ours" and forced == "avx2" else "fma"


class Process:
    """A worker script run by the interpreter `python`. After one missing answer it stays failed."""

    def __init__(self, python, argument, environment, script="side_worker.py", patience=PATIENCE):
        self.patience = patience
        self.process = subprocess.Popen(
            [str(python), str(HERE / script), argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **environment},
        )
        self.gone = ""

    def tell(self, **question):
        if not self.gone:
            try:
                print(json.dumps(question), file=self.process.stdin, flush=True)
            except BrokenPipeError:
                self.gone = f"its process ended with status {self.process.wait()}"

    def answer(self):
        if not self.gone and not select.select([self.process.stdout], [], [], self.patience)[0]:
            self.process.kill()
            self.gone = f"no answer within {self.patience} seconds"
        line = "" if self.gone else self.process.stdout.readline()
        if not line and not self.gone:
            self.gone = f"its process ended with status {self.process.wait()}"
        return json.loads(line) if line else {"failed": self.gone}

    def quit(self):
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            self.gone = self.gone or "its process ended"
        self.process.wait()


class Comparison:
    """`sides`: {name: (python, module, environment)}. Use as a context."""

    def __init__(self, sides, options, say=print):
        self.threads, self.rounds, self.seconds = options.threads, options.rounds, options.seconds
        self.say = say
        self.machine = Machine()
        self.bounds = {name: bound_of(module, environment) for name, (_, module, environment) in sides.items()}
        # libgomp and friends make as many threads as the largest count; large allocations come on huge pages
        common = {
            "OMP_NUM_THREADS": str(max(self.threads)),
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        self.processes = {
            name: Process(python, module, {**common, **environment})
            for name, (python, module, environment) in sides.items()
        }

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.quit()
        self.machine.close()

    def shape(self, shape, dtypes):
        """Return the rows of a shape: one for each dtype and number of threads."""
        shared_memory = Path("/dev/shm")
        with tempfile.TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else None) as folder:
            write_case(shape, Path(folder))
            for dtype in dtypes:
                yield from self.cells(shape, dtype, folder)

    def cells(self, shape, dtype, folder):
        for process in self.processes.values():
            process.tell(prepare=[shape, dtype, folder], threads=self.threads)
        errors, absent = {}, {}
        for name, process in self.processes.items():
            answer = process.answer()
            if "failed" in answer:
                absent[name] = answer["failed"]
                self.say(f"{shape} {dtype}: {name} is left out: {absent[name]}")
            else:
                errors[name] = answer["errors"]
        for threads in self.threads:
            yield self.cell(shape, dtype, threads, errors, absent)

    def cell(self, shape, dtype, threads, errors, absent):
        size, copies = kv_bytes(shape, dtype), copies_of(shape, dtype)
        calls = max(2, min(5_000, int(self.seconds / 3 * 20e9 / size)))
        stream, pages = [], []
        spent, rates = {name: [] for name in errors}, {name: [] for name in errors}
        for _ in range(self.rounds):
            time.sleep(PAUSE)
            stream.append(self.machine.stream(size, copies, threads, calls))
            pages.append(min(self.machine.chunks(size, copies, page_bytes(shape, dtype), threads, calls)))
            before = self.rates(threads)
            for name in spent:
                time.sleep(PAUSE)
                self.processes[name].tell(round=threads, seconds=self.seconds)
                answer = self.processes[name].answer()
                spent[name].append(answer.get("seconds"))
                after = self.rates(threads)
                rates[name].append({kind: max(before[kind], after[kind]) for kind in before})
                before = after
        work, every = flops(shape), [rate["fma"] for side in rates.values() for rate in side] or [float("nan")]
        fma = work / median(every)
        binds = "fma" if fma > median(stream) else "stream"
        return {
            "shape": shape,
            "dtype": dtype,
            "threads": threads,
            "stream_ms": 1e3 * median(stream),
            "stream_gb_per_s": size / median(stream) / 1e9,
            "pages_ms": 1e3 * median(pages),
            "fma_ms": 1e3 * fma,
            "best_fma_ms": 1e3 * (work / max(every)),
            "binds": binds,
            "target": target(shape, dtype, threads, binds),
            "bounds": self.bounds,
            "sides": {
                name: result(times, self.compute(name, work, rates[name]), stream, errors[name][str(threads)])
                for name, times in spent.items()
                if None not in times
            },
            "absent": absent | {name: "it failed in a round" for name, times in spent.items() if None in times},
        }

    def rates(self, threads):
        """Measure the compute rate of `threads` cores now: on shared machines it changes within milliseconds."""
        return {kind: self.machine.rate(kind, threads, 0.005) for kind in {"fma", *self.bounds.values()}}

    def compute(self, name, work, rates):
        """Return the seconds that the arithmetic of a side takes at the rates of each round."""
        return [work / (rate[self.bounds[name]] or rate["fma"]) for rate in rates]


def facts(machine, threads):
    """Measure the machine's rates that depend on no shape, for each number of threads. Takes about 3 seconds."""
    size, mebi = 256 << 20, 1 << 20
    rows = []
    for count in threads:
        chunks = {}
        for chunk in CHUNKS:
            times = machine.chunks(size, 1, chunk, count, 3)
            best = {"plain": times[0]}
            for (_, _, by_sides), taken in zip(CHUNK_WAYS[1:], times[1:], strict=True):
                way = "by_sides" if by_sides else "prefetched"
                best[way] = min(best.get(way, taken), taken)
            chunks[chunk] = {way: size / taken / 1e9 for way, taken in best.items()}
        rows.append(
            {
                "threads": count,
                "stream_gb_per_s": size / machine.stream(size, 1, count, 3) / 1e9,
                "chunks_gb_per_s": chunks,
                "rates_g_per_s": {name: machine.rate(name, count, 0.1) / 1e9 for name in RATES},
            }
        )
    return {"cpu": cpu_name(), "date": time.strftime("%Y-%m-%d"), "buffer_mib": size // mebi, "threads": rows}


def result(rounds, compute, stream, errors):
    """Return the figures of a side's fastest method, the one with the smallest median.

    The limit of a round is the longer of its `compute` and `stream` times in seconds.
    """
    way = min(errors, key=lambda way: median(times[way] for times in rounds))
    times = [times[way] for times in rounds]
    limits = [max(pair) for pair in zip(stream, compute, strict=True)]
    return {
        "ms": 1e3 * median(times),
        "compute_ms": 1e3 * median(compute),
        "share": median(limit / ours for limit, ours in zip(limits, times, strict=True)),
        "stream_share": median(best / ours for best, ours in zip(stream, times, strict=True)),
        "best_share": max(median(stream), min(compute)) / median(times),
        "rounds": [{"ms": 1e3 * ours, "limit_ms": 1e3 * limit} for ours, limit in zip(times, limits, strict=True)],
        "error": errors[way],
        "way": way,
    }


def add_options(parser, shapes="S1,S2,S3,S4,S5", dtypes="bfloat16,float16,float32", rounds=5, seconds=0.1):
    """Add the options that all comparisons share."""
    parser.add_argument("--shape", type=names(SHAPES), default=shapes, help="comma list of " + ", ".join(SHAPES))
    parser.add_argument(
        "--dtype", type=names(ITEM_BYTES), default=dtypes, help="comma list of " + ", ".join(ITEM_BYTES)
    )
    parser.add_argument("--threads", type=counts, default="1,2", help="comma list of numbers")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seconds", type=float, default=seconds, help="of each side per round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to this file")


def names(known):
    """Return a parser of comma-separated known names. An empty text gives no names."""

    def parse(text):
        chosen = [name for name in text.split(",") if name]
        unknown = sorted(set(chosen) - set(known))
        if unknown:
            raise argparse.ArgumentTypeError(f"must be among {', '.join(known)}, got {', '.join(unknown)}")
        return chosen

    return parse


def counts(text):
    return sorted({int(count) for count in text.split(",")})
