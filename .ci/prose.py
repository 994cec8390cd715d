"""Counts phrases that technical English does not use, in comments, docstrings, errors and Markdown, for each folder.

    prose.py                 the folders above their limit; exit status 1 if any is above
    prose.py --all           every folder with its count and its limit
    prose.py --list PATH...  each sentence with such a phrase, with its file and line

Measured the same way, NumPy, transformers and vLLM have 1.0 to 1.5 such phrases per 1,000 words. `TARGET` is the limit
of every folder that `LIMITS` does not name. Lower a limit when the text of its folder has improved; never raise one.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = 2.0  # phrases per 1,000 words
LIMITS = {
    ".": 7.0,
    ".ci": 7.0,
    "tests/cluster": 5.0,
}
FEWEST_WORDS = 200  # a folder with fewer words is counted with the folder above it

# Each pattern with the advice that is printed with it.
PHRASES = {
    "name the noun": r"\b(?:who|whom|whose|whoever)\b",
    "say 'no thread', 'no caller'": r"\b(?:nobody|no one|somebody|everybody)\b",
    "say 'is not a'": (
        r"\b(?:is|are|was|were|be) (?:none\b(?! \()|no\b(?! longer| more\b|-op))|\b(?:as|for|of|by) none\b(?! \()"
    ),
    "name the thing instead of 'what is'": (
        r"(?:^|[,;:(] ?|\b(?:of|for|to|by|from|in|on|with|and|or|as|than) )[Ww]hat "
        r"(?:is|are|was|were|has|have|had|can|could|lies|stands|comes|goes|takes|wants|needs|a|the|it|they|he)\b"
    ),
    "repeat the noun": r"\b(?:of (?:which|those|that|these|whom)|(?:that|those) of)\b",
    "say 'at most' or give the number": r"\b(?:so many|so much|as far as)\b",
    "say 'is stored', 'is next to'": r"\b(?:stands?|lies|lie|beside)\b",
    "say 'is freed', 'is removed'": r"\b(?:gives? way|g(?:ive|ives|ave|iven) back|gone|is there|are there already)\b",
    "begin with the subject": r"(?:^|[.;] )(?:Else|Of|None but|Nothing but|Whatever)\b",
    "say 'also'": r"(?:, too\b|, that (?:is|are|has|have)\b)",
    "say 'needs', 'permanently', 'at once'": (
        r"\b(?:wants? (?:no|a|an|the|more)|for good|at a time|in its place|any more)\b"
    ),
}


def markdown(source):
    """(line, text) of each paragraph and table outside code blocks."""
    line, fenced = 1, False
    for part in source.split("\n\n"):
        marks = part.count("```")
        if not fenced and not marks and not part.lstrip("\n").startswith("    "):
            yield line, re.sub(r"[|`-]+", " ", part) if part.lstrip().startswith("|") else part
        fenced ^= marks % 2 == 1
        line += part.count("\n") + 2


def python(source):
    """(line, text) of each run of comments, docstring and message of a `raise` statement."""
    run = []
    for token in [*tokenize.generate_tokens(io.StringIO(source).readline), None]:
        if token is not None and token.type == tokenize.COMMENT and (not run or token.start[0] == run[-1][0] + 1):
            run.append((token.start[0], token.string.lstrip("#: ")))
        elif run and (token is None or token.type == tokenize.COMMENT):
            yield run[0][0], " ".join(text for _, text in run)
            run = [(token.start[0], token.string.lstrip("#: "))] if token is not None else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if text := ast.get_docstring(node):
                yield getattr(node, "lineno", 1), text
        elif isinstance(node, ast.Raise) and node.exc is not None:
            strings = [part.value for part in ast.walk(node.exc) if isinstance(part, ast.Constant)]
            yield node.lineno, " ".join(text for text in strings if isinstance(text, str))


def cython(source):
    """(line, text) of each comment, docstring and message of a `raise` statement of a .pyx, .pxd or .pyi file."""
    for pattern in (r"(?:^[ ]*#[^\n]*\n)+", r'"""(.*?)"""', r"raise \w+\(\s*(f?\"[^\n]*)", r"\S[ ]+# ([^\n]*)"):
        for found in re.finditer(pattern, source, re.DOTALL | re.MULTILINE):
            text = found[found.lastindex or 0]
            yield source.count("\n", 0, found.start()) + 1, re.sub(r"^\s*#\s?", "", text, flags=re.MULTILINE)


def c(source):
    """(line, text) of each comment of C."""
    for found in re.finditer(r"/\*(.*?)\*/|//([^\n]*)", source, re.DOTALL):
        yield source.count("\n", 0, found.start()) + 1, re.sub(r"\n\s*\*", "\n", found[1] or found[2] or "")


READERS = {".md": markdown, ".py": python, ".pyx": cython, ".pxd": cython, ".pyi": cython, ".c": c, ".h": c}


def sentences(path):
    """(line, text) of all prose of a file, without code, examples and directives."""
    for line, text in READERS[path.suffix](path.read_text(encoding="utf-8")):
        text = re.sub(r"^\s*(>>>|\.\.\.|\.\. ).*$", " ", text, flags=re.MULTILINE)
        text = re.sub(r"`[^`]*`|\{[^}]*\}", "X", text)
        yield line, re.sub(r"\s+", " ", text).strip()


def advice(text):
    return [name for name, pattern in PHRASES.items() for _ in re.finditer(pattern, text)]


def files(paths):
    listed = subprocess.run(["git", "ls-files", "-z", *paths], cwd=ROOT, capture_output=True, check=True).stdout
    found = [ROOT / name.decode() for name in listed.split(b"\0") if name]
    return [path for path in found if path.suffix in READERS and path.is_file()]


def folder(path):
    """The folder that a file counts for: at most two names, "." for the files at the root."""
    return "/".join(path.relative_to(ROOT).parts[:-1][:2]) or "."


def show(paths):
    for path in files(paths):
        for line, text in sentences(path):
            for sentence in re.split(r"(?<=[.;:]) ", text):
                if found := advice(sentence):
                    print(f"{path.relative_to(ROOT)}:{line}: {sentence[:160]}  [{'; '.join(sorted(set(found)))}]")


def main(arguments):
    if arguments[:1] == ["--list"]:
        return show(arguments[1:])
    words, hits = Counter(), Counter()
    for path in files([]):
        for _, text in sentences(path):
            words[folder(path)] += len(text.split())
            hits[folder(path)] += len(advice(text))
    for name in [name for name in words if words[name] < FEWEST_WORDS and "/" in name]:
        above = name.split("/")[0]
        words[above] += words.pop(name)
        hits[above] += hits.pop(name, 0)
    above_limit = 0
    for name in sorted(words):
        rate, limit = round(1000 * hits[name] / max(words[name], 1), 1), LIMITS.get(name, TARGET)
        above_limit += rate > limit
        if rate > limit or "--all" in arguments:
            print(f"{name}: {rate} unclear phrases per 1,000 words, the limit is {limit}")
    if above_limit:
        print("`python .ci/prose.py --list FOLDER` shows each one, with what to write instead")
    return above_limit > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
