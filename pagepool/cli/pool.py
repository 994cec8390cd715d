"""`pagepool pool`: the shared pools of this user."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagepool.cli.output import STDOUT, check_writable, leaves, parsed, printable, show, size_text, written_to
from pagepool.cli.usage import UsageError, between, file_name, pool_name, size_in_bytes
from pagepool.errors import PoolError
from pagepool.memory.shared_files import FOLDER, NAME, PREFIX, open_named, path_of
from pagepool.memory.shared_pages import change_limit, cost_of, read_pool

__all__ = ["add_arguments", "run"]

MAX_BLOCKS = 2**31 - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pagepool pool`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="list, show, remove or limit")

    def action(name: str, summary: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=summary, description=summary, allow_abbrev=False)

    listing = action("list", f"List the shared pools of this user in {FOLDER}.")
    showing = action("show", "Show the layout, the fingerprint, the blocks and the processes of a pool.")
    removing = action("remove", "Remove pools, so that their memory is freed when their last process ends.")
    limiting = action("limit", "Set how many blocks a pool may use, also while engines run.")
    for one in (showing, limiting):
        one.add_argument("name", type=pool_name, metavar="NAME", help="name of the pool")
    for one in (listing, showing):
        one.add_argument("--json", type=file_name, metavar="FILE", help="write the result as JSON; -: standard output")
    removing.add_argument("names", type=pool_name, nargs="+", metavar="NAME", help="names of the pools")
    removing.add_argument(
        "--force",
        action="store_true",
        help="also remove pools in use and damaged files. Running processes keep the old pool, new ones make a new one",
    )
    limiting.add_argument(
        "size",
        type=_size,
        metavar="SIZE",
        help="a number of blocks, or bytes of pages with k, M, G or T as for --pool-bytes, such as 4G",
    )


def _size(text: str) -> tuple[int, bool]:
    """Parse a number of blocks or of bytes. Returns the number, and whether it is a number of bytes.

    >>> _size("400"), _size("4k")
    ((400, False), (4096, True))
    """
    if text.isdecimal():
        return between(0, MAX_BLOCKS)(text), False
    return size_in_bytes(text), True


def run(options: argparse.Namespace) -> None:
    """Run `pagepool pool`. Raises `UsageError`, `PoolError` and `OSError`."""
    if options.action == "remove":
        _remove(list(dict.fromkeys(options.names)), options.force)
    elif options.action == "limit":
        _limit(options.name, *options.size)
    elif options.json:
        check_writable(options.json)
        found = {"pools": list(_pools())} if options.action == "list" else _read(options.name)
        text = json.dumps(found, indent=2) + "\n"
        with written_to(options.json):
            sys.stdout.write(text) if options.json == STDOUT else Path(options.json).write_text(text, encoding="utf-8")
    else:
        with written_to(STDOUT):
            _print_list(list(_pools())) if options.action == "list" else _print_pool(_read(options.name))


def _read(name: str) -> dict[str, Any]:
    """Return what is known about a pool. Raises `UsageError`, `PoolError` and `OSError`."""
    fd = open_named(name)
    if fd is None:
        raise UsageError(f"there is no shared pool {name!r}; see pagepool pool list")
    try:
        found = read_pool(fd)
        budget = cost_of(fd)[0]
    except OSError as error:
        if error.errno != errno.EBADMSG:
            raise
        raise PoolError(f"{path_of(name)} is not a pool of this version of pagepool, or it is damaged") from None
    finally:
        os.close(fd)
    return {"name": name, "budget": budget, **found, "fingerprint": parsed(found["fingerprint"])}


def _pools() -> Iterator[dict[str, Any]]:
    """Describe each file in the folder of pools. A file that is not a pool of this user has an `error`."""
    for path in sorted(FOLDER.glob(f"{PREFIX}*")):
        name = path.name.removeprefix(PREFIX)
        try:
            if not NAME.fullmatch(name):
                raise UsageError("this is not the name of a pool")
            yield _read(name)
        except (PoolError, UsageError, OSError) as error:
            if os.path.lexists(path):  # else it was removed meanwhile
                yield {"name": name, "error": str(error)}


def _model(pool: dict[str, Any]) -> str:
    """Return the model class in a fingerprint of `pagepool serve`, and the layout."""
    fingerprint, layout = pool["fingerprint"], pool["layout"]
    parameters = fingerprint.get("parameters") if isinstance(fingerprint, dict) else None
    model = parameters.get("model") if isinstance(parameters, dict) else None
    shape = f"{layout['num_layers']} x {layout['num_kv_heads']} x {layout['head_dim']} {layout['dtype']}"
    return f"{printable(model)[:40]}, {shape}" if isinstance(model, str) else shape


def _alive(pool: dict[str, Any]) -> int:
    return sum(process["alive"] for process in pool["processes"])


def _print_list(found: list[dict[str, Any]]) -> None:
    pools, others = [pool for pool in found if "error" not in pool], [pool for pool in found if "error" in pool]
    rows = [
        [
            pool["name"],
            _model(pool),
            f"{pool['limit']:,}",
            f"{pool['in_use']:,}",
            f"{pool['cached']:,}",
            size_text(pool["allocated_bytes"]),
            str(_alive(pool)),
        ]
        for pool in pools
    ]
    if rows or not others:
        header = ["name", "layers x heads x dim", "blocks", "in use", "cached", "memory", "processes"]
        show(f"{len(rows)} shared pools in {FOLDER}", header if rows else [], rows)
    if others:
        show("files that are not used", [], [[printable(other["name"]), printable(other["error"])] for other in others])


def _print_pool(pool: dict[str, Any]) -> None:
    about = {
        **pool["layout"],
        "memory": size_text(pool["allocated_bytes"]),
        "memory budget": printable(pool["budget"]) or "none",
        "blocks": f"{pool['limit']:,} of at most {pool['max_blocks']:,}",
        "in use": f"{pool['in_use']:,}, {pool['above_limit']:,} of them above the limit",
        "cached": f"{pool['cached']:,}, {pool['evictable']:,} of them held by no process",
        "index": f"{pool['inserted']:,} inserted, {pool['evicted']:,} evicted, {pool['cleared']:,} cleared",
    }
    show(f"{pool['name']}: {path_of(pool['name'])}", [], [[key, str(value)] for key, value in about.items()])
    rows = [[str(one["pid"]), "yes" if one["alive"] else "no", f"{one['blocks']:,}"] for one in pool["processes"]]
    if rows:
        show("processes", ["pid", "alive", "blocks"], rows)
    show("fingerprint", [], [[printable(key), printable(value)] for key, value in leaves(pool["fingerprint"])])


def _remove(names: list[str], is_forced: bool) -> None:
    """Remove all pools or none."""
    alive = {}
    for name in names:
        try:
            alive[name] = _alive(_read(name))
        except PoolError as error:
            if not is_forced:
                raise PoolError(f"{error}; --force removes it") from None
            alive[name] = 0
        if alive[name] and not is_forced:
            raise UsageError(
                f"{name} is in use, number of processes: {alive[name]}; --force removes it: they keep it, and "
                "new processes make a new one"
            )
    with written_to(STDOUT):
        for name, count in alive.items():
            path_of(name).unlink(missing_ok=True)
            print(f"{name}: removed" + (f"; processes that keep the old pool: {count}" if count else ""))


def _limit(name: str, size: int, is_bytes: bool) -> None:
    before = _read(name)
    limit = size // before["layout"]["bytes per block"] if is_bytes else size
    if limit > before["max_blocks"]:
        raise UsageError(f"{name} has room for {before['max_blocks']} blocks, not for {limit}")
    change_limit(name, limit)
    after = _read(name)
    memory = f"{size_text(before['allocated_bytes'])} -> {size_text(after['allocated_bytes'])}"
    with written_to(STDOUT):
        print(f"{name}: {before['limit']:,} -> {after['limit']:,} blocks, memory {memory}")
        if after["above_limit"]:
            print(
                f"{after['above_limit']:,} blocks above the limit are in use; their memory returns when they are free"
            )
