"""Check grammars in a process of its own: llguidance can need minutes, hundreds of GB or a stack without end for one.

`pagepool.engine.structured` runs this file as a script, which ends with its standard input. It reads dicts in the form
of `marshal`. For each one it forks a process with limits on time and memory, and writes a pair: the exit status of that
process, and the grammar in llguidance's form or a message. A start of Python for each grammar would take 4 times as
long as the check. The file imports nothing of pagepool and little of Python.
"""

from __future__ import annotations

import json
import marshal
import os
import resource
import sys
from math import ceil, floor

TYPE_CHECKING = False  # without an import of `typing`
if TYPE_CHECKING:
    from typing import Any

# llguidance's options for a JSON Schema. They come after the schema's own "x-guidance", which could make it ignore
# keywords.
OPTIONS = {
    "coerce_one_of": False,
    "lenient": False,
    "item_separator": ",",
    "key_separator": ":",
    # As in llama.cpp, because a model could write spaces without end.
    "whitespace_pattern": r" |\n{1,2}[ \t]{0,20}",
    # Without "u": the name of a property written with escapes would be another name for llguidance. Not in version 1.6.
    "json_allowed_escapes": 'nrbtf\\"',
}
BOUNDS = {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"}
ALTERNATIVES = {"$ref", "anyOf", "oneOf"}
LOST = {chr(code) for code in (*range(8), 11, *range(14, 32), 127)}  # llguidance drops them from a text that is given
ANNOTATIONS = {"$schema", "$id", "$defs", "definitions", "title", "description", "default", "examples"}
# Answers in channels, as in gpt-oss.
FINAL = "<|channel|>final<|message|>"  # before the text of the last message
NEXT = "<|end|><|start|>assistant"  # between two messages
# The text of a message, in Lark. If ordinary tokens could spell NEXT, a call or an answer that no grammar has checked
# could follow.
INSIDE = r"/(?s:.*)/ & ~/(?s:.*)<\|end\|><\|start\|>assistant(?s:.*)/"
REFUSED, FAILED = 3, 4  # exit statuses


class Bytes:
    """A tokenizer for llguidance: the special tokens of the model, and one token for each byte."""

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, special: dict[int, str], stop: int) -> None:
        found = {token: text.encode() for token, text in special.items()}
        self.tokens = [found.get(token, b"") for token in range(max(found) + 1)] + [bytes([one]) for one in range(256)]
        self.eos_token_id, self.special_token_ids = stop, sorted(found)

    def __call__(self, text: str) -> list[int]:
        begin = len(self.tokens) - 256
        return [begin + byte for byte in text.encode()]


def main(folder: str) -> None:
    """Check the grammars of standard input, with the llguidance of `folder`."""
    try:  # runs only where the threads of the model leave a CPU idle
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        os.nice(19)
    sys.path.append(folder)
    library: Any = __import__("_lib")  # without the package around it, which takes 5 times as long to import
    while True:
        try:
            asked = marshal.load(sys.stdin.buffer)
        except EOFError:
            return
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os._exit(check(library, asked, write))
        os.close(write)
        with open(read, "rb") as file:
            answer = file.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        marshal.dump((status, answer), sys.stdout.buffer)
        sys.stdout.buffer.flush()


def check(library: Any, asked: dict[str, Any], output: int) -> int:
    """Check a grammar within its limits, and write the answer to the file descriptor `output`. Return the status."""
    try:
        with open("/proc/self/statm") as file:  # Python itself, and on some systems 200 MB of locales
            used = int(file.read().split()[0]) * resource.getpagesize()
        for what, limit in ((resource.RLIMIT_AS, used + asked["memory"]), (resource.RLIMIT_CPU, asked["seconds"])):
            resource.setrlimit(what, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        message, source = answer_of(library, asked)
        status = REFUSED if message else 0
    except BaseException as error:  # for example no memory in Python
        status, message, source = FAILED, f"{type(error).__name__} {error}", ""
    with open(output, "wb") as file:
        file.write((message or source).encode(errors="replace"))
    return status


def answer_of(library: Any, asked: dict[str, Any]) -> tuple[str, str]:
    """Return a message, or "" and the grammar in llguidance's form."""
    matcher, source, message = library.LLMatcher, "", ""
    try:
        sources = [source_of(matcher, asked["kind"], asked["value"])]
        if asked["after"]:  # its first mask is of the text before the grammar
            sources.append(behind(sources[0], asked["after"], asked["special"]))
        tokenizer = library.LLTokenizer(Bytes(asked["special"], asked["stop"]))
        for source in sources:
            state = matcher(tokenizer, source, log_level=0, limits=library.LLParserLimits(**asked["limits"]))
            if not state.is_error():
                state.compute_bitmask()
            message = state.get_error() if state.is_error() else "".join(state.get_grammar_warnings()[:1])
            if message:
                break
    except (ValueError, RecursionError) as error:
        message = str(error)
    return message, source


def source_of(matcher: Any, kind: str, value: Any) -> str:
    """Return the grammar in llguidance's form. Raises ValueError or RecursionError."""
    if kind == "regex":
        return str(matcher.grammar_from_regex(value))
    if kind == "choice":
        return str(
            matcher.grammar_from_lark("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value))
        )
    if kind == "grammar":
        to_lark: Any = __import__("gbnf_to_lark")
        try:
            return str(matcher.grammar_from_lark(to_lark.any_to_lark(value)))
        except Exception as error:  # llguidance raises plain exceptions here
            raise ValueError(str(error)) from error
    schema = '{"type": "object"}' if kind == "json_object" else value.strip()
    check_schema(schema)
    if schema in ("true", "false"):  # llguidance reads options in an object
        schema = f'{{"anyOf": [{schema}]}}'
    return str(matcher.grammar_from_json_schema(schema, overrides=OPTIONS))


def behind(source: str, after: str, special: dict[int, str]) -> str:
    """Return the grammar of any text that ends with `after`, and then a text of `source`.

    Before FINAL there are only thoughts, in messages of their own.
    """
    body = json.loads(source)["grammars"][0] if source.startswith("{") else {"lark_grammar": source}
    ids = {text: f"<[{token}]>" for token, text in special.items()}
    channel, message, end, start = (ids.get(f"<|{name}|>") for name in ("channel", "message", "end", "start"))
    if after == FINAL and channel and message and end and start:
        begin = f'begin: (thought)* {channel} "final" {message}\nTHOUGHT: {INSIDE}\n'
        begin += f'thought: {channel} "analysis" {message} THOUGHT {end} {start} "assistant"'
    else:
        begin = f"begin: /(?s:.*)/ {ids[after]}" if after in ids else f"begin[suffix={json.dumps(after)}]: /(?s:.*)/"
    head = f"start: begin gap @body\n{begin}\ngap: /[ \\n]{{0,4}}/\n"
    return json.dumps({"grammars": [{"lark_grammar": head}, {**body, "name": "body"}]})


def check_schema(schema: str) -> None:
    """Raise ValueError if llguidance would accept a text that the schema excludes.

    Two properties that are not in `properties` may have the same name, and `minProperties` would count both. And the
    whole number e is accepted with exclusiveMinimum e if the maximum is above e and below e + 1. An exclusiveMaximum
    has the same fault. If the schema joins parts of it, each bound is compared with all others. Numbers are rounded to
    floats and the bounds of whole numbers then to 64 bits. Some control characters in texts and patterns are dropped.
    """
    found: list[dict[str, set[float]]] = []
    has_joins, values = False, [json.loads(schema)]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            found.append({name: {value[name]} for name in BOUNDS & value.keys() if type(value[name]) in (int, float)})
            for name, (bound,) in found[-1].items():
                if not is_exact(name, bound):
                    raise ValueError(f"{name} {bound} is not supported: numbers are rounded there")
            enum, patterns = value.get("enum"), value.get("patternProperties")
            check_constants("const", [value.get("const")])
            check_constants("enum", enum if isinstance(enum, list) else [])
            check_constants("pattern", [value.get("pattern")])
            check_constants("patternProperties", list(patterns) if isinstance(patterns, dict) else [])
            least, required = value.get("minProperties"), value.get("required")
            if type(least) is int and least > 1 + len(required if isinstance(required, list) else ()):
                sentence = f"minProperties {least} is not supported with fewer than {least - 1} required properties"
                raise ValueError(sentence)
            has_alternatives = bool(ALTERNATIVES & value.keys() and value.keys() - ALTERNATIVES - ANNOTATIONS)
            has_joins |= "allOf" in value or "patternProperties" in value or has_alternatives
        values.extend(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
    if has_joins:
        found = [{name: set[float]().union(*(one.get(name, ()) for one in found)) for name in BOUNDS}]
    for bounds in found:
        none = set[float]()
        lows = bounds.get("minimum", none) | bounds.get("exclusiveMinimum", none)
        highs = bounds.get("maximum", none) | bounds.get("exclusiveMaximum", none)
        below = {floor(limit) for limit in highs if limit != floor(limit)}
        above = {ceil(limit) for limit in lows if limit != ceil(limit)}
        for name, neighbours in (("exclusiveMinimum", below), ("exclusiveMaximum", above)):
            if wrong := bounds.get(name, none) & neighbours:
                raise ValueError(f"{name} {min(wrong)} is not supported with another bound less than 1 away")


def is_exact(name: str, bound: float) -> bool:
    """Return true if llguidance keeps to a bound of this size."""
    if abs(bound) < 1 << 53:
        return True
    is_exclusive = name.startswith("exclusive")
    if (bound if name.lower().endswith("maximum") else -bound) >= (1 << 63) - (not is_exclusive):
        return True  # no number that it can write is beyond
    return abs(bound) < 1 << 63 and not is_exclusive and float(bound) == bound


def check_constants(name: str, values: list[Any]) -> None:
    """Raise ValueError if llguidance would write another text or number than one of these, or inside of one."""
    values = list(values)
    while values:
        value = values.pop()
        if isinstance(value, str) and (lost := LOST.intersection(value)):
            raise ValueError(f"{name} with the control character {min(lost)!r} is not supported")
        if type(value) is int and abs(value) > 1 << 53:
            raise ValueError(f"{name} {value} is not supported: whole numbers above 2**53 are rounded")
        values.extend(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())


if __name__ == "__main__":
    main(sys.argv[1])
