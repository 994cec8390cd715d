"""`pagepool record`: make a trace from JSON lines with token ids of prompts, as benchmarks and engines write them."""

from __future__ import annotations

import argparse
import lzma
import os
import tempfile
from pathlib import Path
from typing import Any

from pagepool.cli.usage import UsageError
from pagepool.replay.ptrace import Fault, JsonLines, parse, short
from pagepool.scheduling.recorder import MAX_BLOCK, TraceRecorder

__all__ = ["add_arguments", "run"]

PROMPTS = ("input_tok_ids", "prompt_token_ids", "input_ids", "prompt_tokens", "tokens")
OUTPUTS = ("output_tok_ids", "output_token_ids", "output_ids", "output_tokens", "output_toks", "output_len")
# Seconds per unit of each key.
ARRIVALS = {
    "arrival_time_ns": 1e-9,
    "arrival_us": 1e-6,
    "arrival_ms": 1e-3,
    "timestamp": 1e-3,
    "arrival_time": 1.0,
    "arrival": 1.0,
}
SALTS = ("cache_salt", "tenant")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pagepool record`."""
    add = parser.add_argument
    add("input", metavar="JSONL", help="one JSON object per line with the token ids of a prompt; plain or .xz")
    add("output", metavar="TRACE", help="new ptrace-1 file; compressed if its name ends with .xz; must not exist")
    add(
        "--block",
        type=int,
        default=16,
        metavar="N",
        help="tokens per prefix block; 0: record no prefix blocks; default: 16",
    )
    add("--name", default=None, help="name of the trace; default: the name of the input")
    add("--licence", default="unknown", help="licence of the trace; default: unknown")
    parser.epilog = (
        f"The prompt is the first of these keys of the object: {', '.join(PROMPTS)}. The output is the first of "
        f"{', '.join(OUTPUTS)}: token ids or their number; default 0. The arrival is the first of "
        f"{', '.join(ARRIVALS)}; default 0. timestamp is in milliseconds, the last two are in seconds. Prompts with "
        f"different {' or '.join(SALTS)} share no blocks. The trace contains no token ids."
    )


def run(options: argparse.Namespace) -> int:
    """Convert the file and return the number of requests.

    If this raises `TraceError`, `UsageError` or `OSError`, no output file is left.
    """
    target = Path(options.output)
    if not 0 <= options.block <= MAX_BLOCK:
        raise UsageError(f"--block must be from 0 to {MAX_BLOCK}, not {options.block}")
    if target.exists():
        raise UsageError(f"{target} already exists: give another name")
    name = options.name or Path(options.input).name.split(".")[0] or "recorded"
    if not all(len(text) <= 200 and text.isprintable() for text in (name, options.licence)):
        raise UsageError("--name and --licence must be printable texts of at most 200 characters")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pagepool-record-") as folder:
        plain = Path(folder) / "plain"
        with TraceRecorder(plain, options.block, name=name, licence=options.licence) as recorder:
            with JsonLines(options.input) as lines:
                for line in lines:
                    _request(recorder, parse(line))
        if not recorder.num_requests:
            raise UsageError(f"{options.input}: the file has no requests")
        if target.suffix == ".xz":
            packed = Path(folder) / "packed"
            with lzma.open(packed, "wb") as stream:
                stream.write(plain.read_bytes())
            plain = packed
        # If another process has made the target meanwhile, a link fails. A rename would replace that file.
        os.link(plain, target)
    return recorder.num_requests


def _request(recorder: TraceRecorder, request: Any) -> None:
    if not isinstance(request, dict):
        raise Fault(f"a request must be an object, not {short(request)}")
    prompt = _first(request, PROMPTS)
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise Fault(f"the prompt must be a list of token ids under one of the keys {', '.join(PROMPTS)}")
    output = _first(request, OUTPUTS) or 0
    if isinstance(output, list):
        output = len(output)
    if type(output) is not int:
        raise Fault(f"the output must be a list of token ids or their number, not {short(output)}")
    key = next((key for key in ARRIVALS if request.get(key) is not None), None)
    arrival = 0 if key is None else request[key]
    if type(arrival) not in (int, float):
        raise Fault(f"the arrival must be a number, not {short(arrival)}")
    salt = _first(request, SALTS)
    try:
        recorder.record(prompt, output, arrival * ARRIVALS[key] if key else 0.0, cache_salt=salt)
    except (TypeError, ValueError, OverflowError) as error:
        raise Fault(str(error)) from None


def _first(request: dict[str, Any], keys: tuple[str, ...]) -> Any:
    return next((request[key] for key in keys if request.get(key) is not None), None)
