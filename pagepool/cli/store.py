"""`pagepool store`: the stores of cached prefixes in a directory, one for each model."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from pagepool.cli.output import STDOUT, check_writable, leaves, parsed, printable, show, size_text, written_to
from pagepool.cli.usage import UsageError, file_name, size_in_bytes
from pagepool.errors import PoolError
from pagepool.prefix.store_folder import bytes_of, last_use, remove, stores_in
from pagepool.prefix.store_report import describe, verify

__all__ = ["add_arguments", "run"]

DAY = 86_400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pagepool store`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="list, show, prune or verify")

    def action(name: str, summary: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        made.add_argument("directory", type=file_name, metavar="DIR", help="the directory, as given to --store")
        return made

    listing = action("list", "List the stores of a directory: model, pages, size and last use.")
    showing = action("show", "Show one store with its whole fingerprint.")
    pruning = action("prune", "Remove stores that no process writes to.")
    verifying = action(
        "verify", "Read every page and compare its sum. Damaged pages are never used, so this is a test."
    )
    showing.add_argument("name", metavar="NAME", help="name of the store, or the beginning of it")
    verifying.add_argument("names", nargs="*", metavar="NAME", help="names of stores; default: all")
    pruning.add_argument("names", nargs="*", metavar="NAME", help="names of stores to remove")
    pruning.add_argument("--days", type=float, metavar="N", help="remove stores that were not used for N days")
    pruning.add_argument(
        "--bytes",
        type=size_in_bytes,
        metavar="BYTES",
        help="remove the oldest ones until the rest takes BYTES, such as 20G",
    )
    for one in (listing, showing):
        one.add_argument("--json", type=file_name, metavar="FILE", help="write the result as JSON; -: standard output")


def run(options: argparse.Namespace) -> None:
    """Run `pagepool store`. Raises `UsageError`, `PoolError` and `OSError`."""
    root = Path(options.directory)
    if not root.is_dir():
        raise UsageError(f"{root} is not a directory")
    if options.action == "prune":
        _prune(root, options)
    elif options.action == "verify":
        _verify(root, options.names)
    elif options.json:
        check_writable(options.json)
        is_list = options.action == "list"
        found = {"stores": list(map(_read, stores_in(root)))} if is_list else _read(_named(root, options.name))
        text = json.dumps(found, indent=2) + "\n"
        with written_to(options.json):
            sys.stdout.write(text) if options.json == STDOUT else Path(options.json).write_text(text, encoding="utf-8")
    else:
        with written_to(STDOUT):
            _print_list(root) if options.action == "list" else _print_store(_read(_named(root, options.name)))


def _named(root: Path, name: str) -> Path:
    """Return the only store whose name begins so. Raises `UsageError`."""
    found = [path for path in stores_in(root) if name and path.name.startswith(name)]
    if len(found) != 1:
        raise UsageError(
            f"{len(found)} stores in {root} have a name that begins with {name!r}; see pagepool store list"
        )
    return found[0]


def _read(folder: Path) -> dict[str, Any]:
    found = describe(folder)
    return {**found, "fingerprint": parsed(found["fingerprint"])}


def _model(fingerprint: Any) -> str:
    """Return the class of the model in a fingerprint of `pagepool serve`, or another short text.

    >>> _model({"parameters": {"model": "Llama"}}), _model({"weights": "sha256:12"}), _model("my model")
    ('Llama', 'weights sha256:12', 'my model')
    """
    if not isinstance(fingerprint, dict):
        return printable(fingerprint)[:40]
    parameters = fingerprint.get("parameters")
    model = parameters.get("model") if isinstance(parameters, dict) else None
    return printable(model if model is not None else f"weights {fingerprint.get('weights')}")[:40]


def _age(seconds: float) -> str:
    """Return a duration in words.

    >>> _age(30), _age(7_300), _age(200_000)
    ('0 minutes', '2 hours', '2 days')
    """
    for unit, name in ((DAY, "days"), (3600, "hours")):
        if seconds >= 2 * unit:
            return f"{seconds // unit:.0f} {name}"
    return f"{max(seconds, 0) // 60:.0f} minutes"


def _print_list(root: Path) -> None:
    rows = []
    for store in map(_read, stores_in(root)):
        used = "in use" if store["in_use"] else _age(time.time() - store["last_use"]) + " ago"
        pages = printable(store["error"]) if "error" in store else f"{store['pages']:,}"
        rows.append([store["name"], _model(store["fingerprint"]), pages, size_text(store["bytes"]), used])
    show(str(root), ["name", "model", "pages", "on disk", "last use"], rows)


def _print_store(store: dict[str, Any]) -> None:
    about = {
        "on disk": size_text(store["bytes"]),
        "last use": "in use" if store["in_use"] else _age(time.time() - store["last_use"]) + " ago",
    }
    if "error" in store:
        about["error"] = printable(store["error"])
    else:
        about["pages"] = f"{store['pages']:,}, {size_text(store['page_bytes'])}"
    show(store["name"], [], [[key, value] for key, value in about.items()])
    show("fingerprint", [], [[printable(key), printable(value)] for key, value in leaves(store["fingerprint"])])


def _prune(root: Path, options: argparse.Namespace) -> None:
    """Remove the named stores, those without a use for some days, and the oldest ones above a size."""
    if not options.names and options.days is None and options.bytes is None:
        raise UsageError("prune needs names of stores, --days N or --bytes BYTES")
    chosen = {_named(root, name): None for name in options.names}
    stores = sorted(stores_in(root), key=last_use)
    if options.days is not None:
        chosen.update((path, None) for path in stores if last_use(path) < time.time() - options.days * DAY)
    if options.bytes is not None:
        sizes = {path: bytes_of(path) for path in stores if path not in chosen}
        for path in list(sizes):
            if sum(sizes.values()) <= options.bytes:
                break
            chosen[path] = None
            del sizes[path]
    with written_to(STDOUT):
        for path in chosen:
            size = size_text(bytes_of(path))
            print(f"{path.name}: " + (f"removed, {size}" if remove(path) else "in use, not removed"))


def _verify(root: Path, names: list[str]) -> None:
    """Raises `PoolError` if a page or an index is damaged."""
    paths = [_named(root, name) for name in names] if names else list(stores_in(root))
    damaged = 0
    with written_to(STDOUT):
        for path in paths:
            try:
                found = verify(path)
            except ValueError as error:
                print(f"{path.name}: {error}")
                damaged += 1
                continue
            print(f"{path.name}: {found['right']:,} pages are right, {found['wrong']:,} are damaged")
            damaged += found["wrong"] > 0
    if damaged:
        raise PoolError(f"stores with damage: {damaged} of {len(paths)}. Damaged pages are computed again when needed")
