"""`--reference`: allocator, cache and attention in plain Python give the same output, except wall time."""

import json
import sys

import pytest

from pagepool import cli, reference

WALL = ("wall_s", "ns_per_block_op", "sched_us_per_step", "memory_s", "memory_share")
WALL_OF_ATTENTION = ("seconds", "append_seconds", "gb_per_s")


def numbers(capsys, *arguments):
    assert cli.main(["replay", *map(str, arguments), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    for name in WALL:
        del found[name]
    for name in WALL_OF_ATTENTION:
        del found["attention"][name]
    return found


@pytest.fixture
def sessions(make_trace):
    return make_trace([[at, 40 + at % 7, 9 + at % 5, [0, 5, 5 + at, 5]] for at in range(30)], block=4)


@pytest.mark.parametrize(
    ("arguments", "pressed"),
    [
        (["--requests", "80", "--blocks", "400"], True),
        (["--requests", "60", "--budget", "64", "--max-batch", "3"], False),
        (["--requests", "40", "--users", "4"], False),
        (["--requests", "50", "--blocks", "90"], True),
    ],
)
def test_a_recorded_hour_gives_the_same_replay(capsys, arguments, pressed):
    ours = numbers(capsys, *arguments)
    assert numbers(capsys, *arguments, "--reference") == ours
    assert (ours["preemptions"] + ours["refused"] > 0) == pressed and ours["block_allocs"] == ours["block_frees"] > 0


@pytest.mark.parametrize("policy", ["lru", "gittins"])
@pytest.mark.parametrize("options", [[], ["--max-batch", "2"]])
def test_prefixes_are_kept_and_evicted_equally(sessions, capsys, policy, options):
    arguments = [sessions, "--policy", policy, "--block-size", "4", "--blocks", "40", *options]
    ours = numbers(capsys, *arguments)
    assert numbers(capsys, *arguments, "--reference") == ours
    assert ours["prefix"]["hit_blocks"] > 0 and ours["prefix"]["evictions"] > 0


def test_attention_gives_equal_results(make_trace, capsys):
    trace = make_trace([[at, 3 + at, 2, []] for at in range(2)])
    arguments = [trace, "--attend", "qwen2.5-0.5b", "--blocks", "4"]
    ours = numbers(capsys, *arguments)
    assert numbers(capsys, *arguments, "--reference") == ours and ours["attention"]["calls"] > 0


def test_pictures_are_equal(sessions, tmp_path, capsys):
    pages = []
    for more in ([], ["--reference"]):
        arguments = ["replay", str(sessions), "--blocks", "30", "--block-size", "4", "--policy", "lru", *more]
        assert cli.main([*arguments, "--html", str(tmp_path / "page.html")]) == 0
        data = (tmp_path / "page.html").read_text(encoding="utf-8").partition('<script id="data"')[2]
        pages.append(json.loads(data.partition(">")[2].partition("</script>")[0])["timeline"])
    assert pages[0] == pages[1] and len(pages[0]["end"]) > 10
    capsys.readouterr()


def test_nothing_of_it_is_compiled(sessions, capsys, monkeypatch):
    """The compiled cache, allocator, sequences and kernels are not called: each is replaced by one that fails."""
    made = []
    monkeypatch.setattr(reference.BlockAllocator, "demand", watched(reference.BlockAllocator.demand, made))
    for module, name in (("pagepool", "BlockAllocator"), ("pagepool", "PrefixCache"), ("pagepool", "decode")):
        monkeypatch.setattr(sys.modules[module], name, None)
    for name in ("PagedSeqState", "BlockRefs", "append_batch", "release_batch"):
        monkeypatch.setattr(f"pagepool.scheduling.block_manager.{name}", None)
    numbers(capsys, sessions, "--policy", "lru", "--block-size", "4", "--reference")
    assert len(made) > 5


def watched(call, seen):
    def wrapper(*given):
        seen.append(given)
        return call(*given)

    return wrapper
