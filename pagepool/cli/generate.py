"""`pagepool generate`: generate text from prompts, or chat, with a model over pagepool's pages."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from pagepool.cli.chat import Chat
from pagepool.cli.model_options import add_model_arguments, memory_of, model_directory, open_engine
from pagepool.cli.output import STDOUT, check_writable, written_to
from pagepool.cli.session import SessionFile
from pagepool.cli.usage import UsageError, between, file_name

if TYPE_CHECKING:  # imported late: other commands start faster without them
    from pagepool.engine import Engine, Structured
    from pagepool.engine.generation import Generation

__all__ = ["add_arguments", "run"]

DEFAULT_NEW_TOKENS = 128
MAX_NEW_TOKENS = 1 << 24
PROGRESS_SECONDS = 2.0
FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pagepool generate`."""
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="texts to continue; all of them run in one batch")
    add("--file", type=file_name, metavar="FILE", help="more prompts, one per line, in UTF-8; -: standard input")
    add("--chat", action="store_true", help="chat with the model, one message per line; needs a chat template")
    add("--system", metavar="TEXT", help="system message of the conversation, with --chat")
    add(
        "--session",
        type=file_name,
        metavar="FILE",
        help="continue the text or chat in this file without computing it again, and save it there",
    )
    add(
        "--max-new-tokens",
        type=between(1, MAX_NEW_TOKENS),
        metavar="N",
        help=f"maximum number of tokens of a text; default: {DEFAULT_NEW_TOKENS}, or fewer if the model has less room",
    )
    add("--temperature", type=float, default=0.0, metavar="T", help="0 (default): always the most likely token")
    add("--top-k", type=between(0, MAX_NEW_TOKENS), default=0, metavar="K", help="sample from the K most likely tokens")
    add("--top-p", type=float, default=1.0, metavar="P", help="sample from the most likely tokens with total share P")
    add("--seed", type=between(0, 2**63), metavar="N", help="seed for all prompts; default: a new seed each time")
    add("--stop", action="append", default=[], metavar="TEXT", help="end the text before TEXT; may be repeated")
    add("--json-schema", type=file_name, metavar="FILE", help="write only JSON of the JSON Schema in this file")
    add("--grammar", type=file_name, metavar="FILE", help="write only texts of the grammar in this file: GBNF or Lark")
    add("--json", type=file_name, metavar="FILE", help="write texts and figures as JSON; -: standard output")
    add_model_arguments(parser)
    parser.epilog = "Texts go to standard output, progress and figures to standard error."


def run(options: argparse.Namespace) -> int:
    """Generate or chat. Returns 1 if a prompt failed, else 0. Raises `UsageError` if the options cannot be used."""
    if options.chat and (options.prompts or options.file or options.json):
        raise UsageError("--chat reads messages from standard input: it cannot be used with prompts, --file or --json")
    if options.system is not None and not options.chat:
        raise UsageError("--system needs --chat")
    options.structured = read_structured(options.json_schema, options.grammar)
    prompts = [] if options.chat else read_prompts(options.prompts, options.file)
    if options.session is not None and len(prompts) > 1:
        raise UsageError(f"--session needs exactly one prompt, not {len(prompts)}")
    for file in (options.json, options.session):
        if file:
            check_writable(file)
    with open_engine(options, "pagepool generate") as engine:
        session = None if options.session is None else SessionFile(engine, options)
        if options.chat:
            name = str(options.model or model_directory(None).name)
            new_tokens = options.max_new_tokens or DEFAULT_NEW_TOKENS
            answer = partial(submit, engine, options=options)
            in_texts = options.special_tokens_in_texts
            Chat(engine, answer, name, options.system, new_tokens, in_texts, session).run()
            return 0
        began = monotonic()
        outputs = generate(engine, prompts, options, session)
        numbers = figures(engine, outputs, monotonic() - began, options)
    if options.json:
        with written_to(options.json):
            text = json.dumps(numbers, indent=2) + "\n"
            sys.stdout.write(text) if options.json == STDOUT else Path(options.json).write_text(text, encoding="utf-8")
    report(numbers)
    return FAILED if any(output["error"] for output in outputs) else 0


def read_prompts(prompts: list[str], file: str | None) -> list[str]:
    """Return the prompts of the command line and the file.

    Raises `UsageError` without a prompt, for an empty prompt, and for a file that cannot be read or is not UTF-8.
    """
    found = list(prompts)
    if file is not None:
        try:
            data = sys.stdin.buffer.read() if file == STDOUT else Path(file).read_bytes()
        except OSError as error:
            raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
        for number, line in enumerate(data.splitlines(), 1):
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UsageError(f"{file}: line {number} is not UTF-8: byte {error.start} is invalid") from None
            if text:
                found.append(text)
    if not found:
        raise UsageError(f"{file}: the file has no prompts" if file else "no prompt: give one, --file or --chat")
    for number, prompt in enumerate(found, 1):
        if not prompt:
            raise UsageError(f"prompt {number} is empty")
    return found


def read_structured(json_schema: str | None, grammar: str | None) -> Structured | None:
    """Return the constraint of `--json-schema` or `--grammar`. Raises `UsageError` if its file cannot be used."""
    from pagepool.engine import Structured

    if json_schema is not None and grammar is not None:
        raise UsageError("--json-schema and --grammar cannot be used together")
    file = json_schema or grammar
    if file is None:
        return None
    try:
        text = Path(file).read_text(encoding="utf-8")
        return Structured(grammar=text) if grammar else Structured(json_schema=text)
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{file}: {error}") from None


def submit(engine: Engine, prompt: str | list[int], options: argparse.Namespace) -> Generation:
    """Submit a prompt to the engine. Raises ValueError if the engine refuses it."""
    from pagepool.engine import SamplingParams

    tokens = engine.encoder.encode(prompt)
    count = options.max_new_tokens
    if count is None:
        count = min(DEFAULT_NEW_TOKENS, engine.max_new_tokens(len(tokens)))
    params = SamplingParams(count, options.temperature, options.top_k, options.top_p, options.seed, options.stop)
    params = params.changed(structured=options.structured)
    return engine.submit(tokens, params)


def generate(
    engine: Engine, prompts: list[str], options: argparse.Namespace, session: SessionFile | None = None
) -> list[dict[str, Any]]:
    """Run all prompts in one batch. Prints their texts in order while they run; returns their results.

    With a session, the one prompt is read behind the tokens of the session, and the session is saved.
    """
    running: list[Generation | str] = []  # a str is the reason why a prompt cannot run
    for prompt in prompts:
        try:
            running.append(submit(engine, prompt if session is None else session.prompt(prompt), options))
        except ValueError as error:
            if len(prompts) == 1:
                raise UsageError(str(error)) from error
            running.append(str(error))
    is_shown = options.json != STDOUT and sys.stdout is not None
    progress = Progress(engine, len(prompts), is_silent=is_shown and sys.stdout.isatty())
    outputs = []
    for number, (prompt, found) in enumerate(zip(prompts, running, strict=True), 1):
        if is_shown and len(prompts) > 1:
            print(f"--- {number} of {len(prompts)}")
        if isinstance(found, str):
            outputs.append({"prompt": prompt, "text": "", "finish_reason": None, "error": found})
        else:
            with written_to(STDOUT):
                for piece in chain([prompt], progress.watch(found), ["\n"]):
                    if is_shown:
                        print(piece, end="", flush=True)
            outputs.append(output_of(prompt, found))
            if session is not None:
                session.save([*session.prompt(prompt), *found.token_ids])
        if outputs[-1]["error"] is not None:
            print(f"pagepool: prompt {number}: {outputs[-1]['error']}", file=sys.stderr)
    return outputs


def output_of(prompt: str, generation: Generation) -> dict[str, Any]:
    """Return the result of a prompt that ran, for JSON."""
    return {
        "prompt": prompt,
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "error": None if generation.error is None else str(generation.error),
        "prompt_tokens": generation.num_prompt_tokens,
        "cached_tokens": generation.num_cached,
        "generated_tokens": len(generation.token_ids),
        "time_to_first_token": generation.time_to_first_token,
    }


class Progress:
    """Print the progress of all prompts on standard error every two seconds, unless a terminal shows their texts."""

    def __init__(self, engine: Engine, total: int, is_silent: bool) -> None:
        self._engine, self._total, self._is_silent = engine, total, is_silent
        self._began = monotonic()
        self._next = self._began + PROGRESS_SECONDS

    def watch(self, generation: Generation) -> Iterator[str]:
        """Yield the texts of the generation's tokens. Ends without an exception if the generation fails."""
        with suppress(RuntimeError):  # `error` has the reason
            for token in generation:
                if not self._is_silent and monotonic() >= self._next:
                    self._next = monotonic() + PROGRESS_SECONDS
                    count = self._engine.stats()["generated_tokens"]
                    done = self._total - self._engine.num_requests
                    speed = count / (monotonic() - self._began)
                    line = f"pagepool: {done} of {self._total} prompts, {count:,} tokens, {speed:,.1f} tokens/s"
                    print(line, file=sys.stderr, flush=True)
                yield token.text


def figures(
    engine: Engine, outputs: list[dict[str, Any]], seconds: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the figures of a run, for JSON."""
    first = sorted(output["time_to_first_token"] for output in outputs if output.get("time_to_first_token") is not None)
    generated = sum(output.get("generated_tokens", 0) for output in outputs)
    return {
        "model": options.model or "bench/tiny_llama",
        "prompts": len(outputs),
        "failed": sum(output["error"] is not None for output in outputs),
        "prompt_tokens": sum(output.get("prompt_tokens", 0) for output in outputs),
        "cached_tokens": sum(output.get("cached_tokens", 0) for output in outputs),
        "generated_tokens": generated,
        "seconds": seconds,
        "tokens_per_second": generated / seconds,
        "time_to_first_token": {"median": first[len(first) // 2], "max": first[-1]} if first else None,
        "memory": memory_of(engine),
        "outputs": outputs,
    }


def report(numbers: dict[str, Any]) -> None:
    """Print the figures as lines on standard error."""
    first, memory = numbers["time_to_first_token"], numbers["memory"]
    lines = [
        f"{numbers['generated_tokens']:,} tokens in {numbers['seconds']:.2f} s, "
        f"{numbers['tokens_per_second']:,.1f} tokens/s; {numbers['prompt_tokens']:,} prompt tokens, "
        f"{numbers['cached_tokens']:,} of them cached",
        f"pages: {memory['pages_peak_bytes'] / 2**20:,.1f} of {memory['pool_bytes'] / 2**20:,.1f} MiB at most; "
        f"process: {memory['process_peak_bytes'] / 2**20:,.0f} MiB",
    ]
    if first is not None:
        lines.insert(1, f"first token after {first['median']:.3f} s (median), {first['max']:.3f} s at most")
    for line in lines:
        print(f"pagepool: {line}", file=sys.stderr)
