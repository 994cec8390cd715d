"""`pagepool store`: stores that are in use, damaged, older or of nobody; removing and verifying them."""

import json
import os
import time

import pytest
from store_world import World

from pagepool.cli import main


def run(capsys, *arguments):
    """Return the exit code and the text of a command."""
    try:
        code = main(["store", *map(str, arguments)])
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.fixture
def folders(tmp_path):
    """Two stores of 5 pages."""
    made = []
    for weights in ("sha256:one", "sha256:two"):
        world = World(tmp_path, weights=weights)
        world.run(range(20))
        world.restart(tmp_path, weights=weights).stop()
        made.append(world.store.folder)
    return made


def test_stores_are_listed_and_shown(tmp_path, folders, capsys):
    world = World(tmp_path, weights="sha256:one")
    code, text = run(capsys, "list", tmp_path)
    assert code == 0 and all(folder.name in text for folder in folders)
    assert "sha256:two" in text and text.count("in use") == 1 and text.count("ago") == 1
    code, text = run(capsys, "list", tmp_path, "--json", "-")
    stores = {store["name"]: store for store in json.loads(text)["stores"]}
    assert [stores[folder.name]["in_use"] for folder in folders] == [True, False]
    assert [stores[folder.name]["pages"] for folder in folders] == [5, 5]
    code, text = run(capsys, "show", tmp_path, folders[1].name[:12])
    assert code == 0 and "sha256:two" in text and "KvLayout" in text
    code, text = run(capsys, "show", tmp_path, folders[1].name, "--json", "-")
    assert json.loads(text)["page_bytes"] == 5 * 256
    world.stop()


def test_damaged_and_older_stores_are_listed_with_the_reason(tmp_path, folders, capsys):
    (folders[0] / "index").write_bytes(b"damaged")
    (folders[1] / "index").unlink()
    (folders[1] / "index.sqlite").write_bytes(b"of an older version")
    (tmp_path / "weights.json").write_text("{}")
    code, text = run(capsys, "list", tmp_path)
    assert code == 0 and "damaged" in text and "No such file" in text and "weights.json" not in text
    code, text = run(capsys, "verify", tmp_path, folders[0].name)
    assert code == 1 and "damaged" in text
    code, text = run(capsys, "prune", tmp_path, *[folder.name for folder in folders])
    assert code == 0 and not any(folder.exists() for folder in folders) and (tmp_path / "weights.json").exists()


def test_verify_reads_every_page(tmp_path, folders, capsys):
    code, text = run(capsys, "verify", tmp_path)
    assert code == 0 and text.count("5 pages are right, 0 are damaged") == 2
    pages = folders[1] / "pages"
    data = bytearray(pages.read_bytes())
    data[100] ^= 1
    data[4096 + 100] ^= 1
    pages.write_bytes(data)
    code, text = run(capsys, "verify", tmp_path)
    assert code == 1 and "3 pages are right, 2 are damaged" in text and "1 of 2" in text
    world = World(tmp_path, weights="sha256:one")  # also while it is in use
    assert run(capsys, "verify", tmp_path, folders[0].name)[0] == 0
    world.stop()


def test_prune_removes_old_stores_and_none_in_use(tmp_path, folders, capsys):
    then = time.time() - 3 * 86_400
    os.utime(folders[0] / "index", (then, then))
    assert run(capsys, "prune", tmp_path)[0] == 2
    assert run(capsys, "prune", tmp_path, "--days", "4") == (0, "")
    world = World(tmp_path, weights="sha256:one")
    os.utime(folders[0] / "index", (then, then))
    code, text = run(capsys, "prune", tmp_path, "--days", "2")
    assert code == 0 and "not removed" in text and folders[0].exists()
    world.stop()
    os.utime(folders[0] / "index", (then, then))
    code, text = run(capsys, "prune", tmp_path, "--bytes", "250k")
    assert code == 0 and "removed" in text and [folder.exists() for folder in folders] == [False, True]
    assert run(capsys, "prune", tmp_path, "--bytes", "250k") == (0, "")


def test_wrong_names_and_directories_are_refused(tmp_path, folders, capsys):
    for arguments, words in (
        (("list", tmp_path / "missing"), ("missing", "not a directory")),
        (("show", tmp_path, "zz"), ("0 stores", "'zz'")),
        (("show", tmp_path, ""), ("0 stores",)),
        (("prune", tmp_path, folders[0].name, "zz"), ("0 stores", "'zz'")),
        (("list", tmp_path, "--json", tmp_path), (str(tmp_path),)),
    ):
        code, text = run(capsys, *arguments)
        assert code == 2 and all(word in text for word in words) and text.count("\n") == 1
    assert all(folder.exists() for folder in folders)
