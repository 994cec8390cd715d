"""`pagepool pool`: listing pools in use, damaged files and files of other users; removing and limiting pools."""

import json
import os
import random
import re
import signal
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

import pools
import pytest

from pagepool import MemoryBudget, PoolError, PrefixCache
from pagepool.cli import main
from pagepool.cli import pool as command
from pagepool.memory import shared_files

FINGERPRINT = '{"parameters": {"model": "Llama"}, "weights": "12"}'


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    """An empty folder for pools, so that pools of other programs are not listed."""
    with TemporaryDirectory(dir="/dev/shm") as made:
        monkeypatch.setattr(shared_files, "FOLDER", Path(made))
        monkeypatch.setattr(command, "FOLDER", Path(made))
        yield Path(made)


def run(capsys, *arguments):
    """Return the exit code and the text of a command."""
    try:
        code = main(["pool", *arguments])
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def as_json(capsys, *arguments):
    code, text = run(capsys, *arguments, "--json", "-")
    assert code == 0, text
    return json.loads(text)


def attach(name="a", **options):
    return pools.attach(name, 64, pools.WHOLE_PAGES, fingerprint=FINGERPRINT, **options)


def test_a_pool_in_use_is_listed_and_shown_with_its_processes(folder, capsys):
    assert run(capsys, "list") == (0, f"0 shared pools in {folder}\n")
    pool = attach()
    cache = PrefixCache(pool.allocator)
    blocks = pool.allocator.allocate_n(6)
    cache.cache_blocks(range(64), blocks[:4])
    pool.allocator.free(blocks[:3])

    def die():
        own = attach()
        own.allocator.allocate_n(5)
        os.kill(os.getpid(), signal.SIGKILL)

    dead = pools.in_child(die)
    assert pools.wait(dead) == -9
    before = (folder / "pagepool-a").read_bytes()
    found = as_json(capsys, "show", "a")
    assert as_json(capsys, "list") == {"pools": [found]}
    assert found["layout"]["head_dim"] == 32 and found["fingerprint"]["weights"] == "12"
    counts = [found[key] for key in ("limit", "max_blocks", "in_use", "above_limit", "cached", "evictable")]
    assert counts == [64, 64, 11, 0, 4, 3]
    assert (found["inserted"], found["evicted"], found["cleared"]) == (4, 0, 0)
    assert found["allocated_bytes"] == (folder / "pagepool-a").stat().st_blocks * 512
    assert found["processes"] == [
        {"pid": os.getpid(), "alive": True, "blocks": 3},
        {"pid": dead, "alive": False, "blocks": 5},
    ]
    code, text = run(capsys, "list")
    assert code == 0 and text.splitlines()[2].split()[:10] == "a Llama, 1 x 1 x 32 float32 64 11".split()
    code, text = run(capsys, "show", "a")
    assert code == 0 and "parameters.model  Llama" in text
    assert [str(dead), "no", "5"] in [line.split() for line in text.splitlines()]
    assert (folder / "pagepool-a").read_bytes() == before


def test_a_pool_with_thirty_processes_is_listed(capsys):
    views = [attach() for _ in range(30)]
    assert len(as_json(capsys, "show", "a")["processes"]) == 30
    code, text = run(capsys, "limit", "a", "10")
    assert code == 1 and "has 30 processes, the most possible" in text
    views.pop().close()
    assert run(capsys, "limit", "a", "10")[0] == 0 and views[0].num_blocks == 10


def test_files_that_are_not_pools_are_listed_with_the_reason(folder, capsys):
    attach("good").close()
    (folder / "pagepool-empty").touch(0o600)
    (folder / "pagepool-open").write_text("x")
    (folder / "pagepool-open").chmod(0o644)
    (folder / "pagepool-\x1b[31m\nred").touch(0o600)
    (folder / "pagepool-link").symlink_to("pagepool-good")
    (folder / "pagepool-folder").mkdir()
    os.mkfifo(folder / "pagepool-pipe", 0o600)
    if os.geteuid() == 0:
        attach("others").close()
        os.chown(folder / "pagepool-others", 12345, 12345)
    found = {one["name"]: one.get("error") for one in as_json(capsys, "list")["pools"]}
    assert found.pop("good") is None
    assert "damaged" in found.pop("empty") and "mode -rw-r--r--" in found.pop("open")
    assert "not the name of a pool" in found.pop("\x1b[31m\nred") and "symbolic link" in found.pop("link")
    assert "regular file" in found.pop("pipe") and found.pop("folder")
    assert "belongs to user 12345" in found.pop("others", "belongs to user 12345") and not found
    code, text = run(capsys, "list")
    assert code == 0 and "\x1b" not in text and "\\x1b[31m\\nred" in text
    for name in ("empty", "open", "link", "pipe", "folder"):
        for arguments in (["show", name], ["limit", name, "1"], ["remove", name]):
            code, text = run(capsys, *arguments)
            assert code in (1, 2) and text.startswith("pagepool: ") and text.count("\n") == 1


def test_remove_refuses_a_pool_in_use_unless_forced(folder, capsys):
    pool, other = attach(), attach("b")
    other.close()
    code, text = run(capsys, "remove", "b", "a")
    assert code == 2 and "a is in use, number of processes: 1; --force removes it" in text
    assert {path.name for path in folder.iterdir()} == {"pagepool-a", "pagepool-b"}
    pool.page(3)[:] = 3
    code, text = run(capsys, "remove", "b", "a", "b", "--force")
    assert (code, text) == (0, "b: removed\na: removed; processes that keep the old pool: 1\n")
    assert not list(folder.iterdir())
    assert pool.page(3)[0] == 3 and attach().page(3)[0] == 0
    code, text = run(capsys, "remove", "c")
    assert code == 2 and "there is no shared pool 'c'" in text
    (folder / "pagepool-c").write_bytes(b"x" * 9000)
    (folder / "pagepool-c").chmod(0o600)
    code, text = run(capsys, "remove", "c")
    assert code == 1 and "damaged; --force removes it" in text
    assert run(capsys, "remove", "c", "--force") == (0, "c: removed\n")


def test_limit_takes_blocks_and_bytes(folder, capsys):
    pool = attach()
    cache = PrefixCache(pool.allocator)
    full = pools.allocated(folder / "pagepool-a")
    blocks = pool.allocator.allocate_n(64)
    cache.cache_blocks(range(64 * 16), blocks)
    pool.allocator.free(blocks[:60])
    code, text = run(capsys, "limit", "a", "40")
    assert code == 0 and "a: 64 -> 40 blocks, memory" in text and "4 blocks above the limit are in use" in text
    assert (pools.allocated(folder / "pagepool-a"), cache.num_cached, pool.num_blocks) == (full - 20, 40, 40)
    pool.allocator.free(blocks[60:])
    assert pools.allocated(folder / "pagepool-a") == full - 24
    assert run(capsys, "limit", "a", "80k")[0] == 0 and pool.num_blocks == 20
    assert run(capsys, "limit", "a", "64")[0] == 0 and pools.allocated(folder / "pagepool-a") == full
    assert run(capsys, "limit", "a", "0")[0] == 0 and pool.num_blocks == 0
    for size, reason in (("65", "room for 64 blocks, not for 65"), ("1G", "not for 262144"), ("4x", "such as 4096")):
        code, text = run(capsys, "limit", "a", size)
        assert code == 2 and reason in text and pool.num_blocks == 0
    assert as_json(capsys, "show", "a")["processes"] == [{"pid": os.getpid(), "alive": True, "blocks": 0}]
    pool.allocator.check()


def test_the_limit_of_a_pool_with_a_memory_budget_is_only_lowered(capsys):
    budget = MemoryBudget("b", 8 << 20)
    pool = pools.attach("a", 64, pools.WHOLE_PAGES, budget=budget)
    assert run(capsys, "limit", "a", "40")[0] == 0 and pool.num_blocks == 40
    code, text = run(capsys, "limit", "a", "41")
    assert code == 1 and "budget 'b'" in text and "limit of 40 blocks can only be lowered, not raised to 41" in text
    assert pool.num_blocks == 40 and as_json(capsys, "list")["pools"][0]["budget"] == "b"
    code, text = run(capsys, "show", "a")
    assert code == 0 and re.search("memory budget +b\n", text)


@pytest.mark.parametrize("depth", [90, 500, 1790])
@pytest.mark.parametrize("text", ['{"":%s}', "[%s]"])
def test_deep_fingerprints_and_control_characters_are_printed(capsys, depth, text):
    nested = "1"
    for _ in range(min(depth, 3500 // (len(text) - 2))):
        nested = text % nested
    pools.attach("deep", fingerprint=nested).close()
    pools.attach("bell", fingerprint=b'{"\\u001b[2J": "\\ud800\\u009b", "x": NaN}\xff').close()
    pools.attach("json", fingerprint=b'{"\\u001b[2J": "\\ud800\\u009b", "parameters": {"model": "\\u001b\\n"}}').close()
    for arguments in (["list"], ["show", "deep"], ["show", "bell"], ["show", "json"]):
        code, out = run(capsys, *arguments)
        assert code == 0 and out.replace("\n", "").isprintable()
        as_json(capsys, *arguments)


def test_no_changed_byte_of_a_header_ends_list_or_show(folder, capsys):
    pool = attach()
    pool.allocator.allocate_n(5)
    path = folder / "pagepool-a"
    choose = random.Random(3)
    listing, showing = Namespace(action="list", json=None), Namespace(action="show", name="a", json=None)
    fd = os.open(path, os.O_RDWR)
    whole = os.pread(fd, 4096 + 128 + 30 * 64 + 512, 0)
    refused = 0
    for at in range(len(whole)):
        os.pwrite(fd, bytes([whole[at] ^ choose.choice([0xFF, 1 << choose.randrange(8)])]), at)
        command.run(listing)
        try:
            command.run(showing)
        except PoolError:
            refused += 1
        os.pwrite(fd, whole, 0)
        assert capsys.readouterr().out.replace("\n", "").isprintable()
    assert 20 < refused < 200
    pool.close()
    os.ftruncate(fd, 6000)
    with pytest.raises(PoolError, match="damaged"):
        command.run(showing)
    os.close(fd)
