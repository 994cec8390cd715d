"""`--html`: drawn values add up, the page is self-contained, and hostile names stay text."""

import base64
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from trace_bytes import lines_of

from pagepool import BlockAllocator, SchedulerConfig
from pagepool.cli import main
from pagepool.cli.replay import bundled_trace
from pagepool.replay import picture as picture_module
from pagepool.replay.clock import CostModel
from pagepool.replay.driver import MeteredBlockManager, Replay
from pagepool.replay.picture import Timeline, page, replay_picture
from pagepool.replay.ptrace import read_trace
from pagepool.replay.report import results

VOID = {"meta", "br", "link", "img"}
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


class Page(HTMLParser):
    """Check that every element is closed, and collect attributes and scripts."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.scripts, self.tags = [], [], [], set()
        self.feed(text)
        self.close()
        assert not self.open, self.open
        self.data = json.loads(self.scripts[0])

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)


def drawn(path, *arguments):
    assert main(["replay", *arguments, "--html", str(path)]) == 0
    return Page(path.read_text(encoding="utf-8"))


def replayed(monkeypatch, blocks=700, requests=60, windows=32):
    monkeypatch.setattr(picture_module, "MOST_WINDOWS", windows)
    config = SchedulerConfig(block_size=16, max_sequences=32, max_batch_sequences=32)
    replay = Replay(
        read_trace(bundled_trace(), requests), config, MeteredBlockManager(BlockAllocator(blocks), 16), CostModel()
    )
    timeline = Timeline(blocks)
    used = []

    def see(replay):
        used.append(replay.block_manager.allocator.in_use)
        timeline(replay)

    replay.run(see)
    timeline.end(replay)
    return replay, timeline, used


def test_windows_add_up_to_the_replay(monkeypatch):
    replay, timeline, used = replayed(monkeypatch)
    windows, totals = timeline.windows, replay.totals
    assert 16 <= len(windows) <= 32 and sum(window.steps for window in windows) == totals.steps > 64
    assert sum(window.prefill_tokens for window in windows) == totals.prefill_tokens
    assert sum(window.decode_tokens for window in windows) == totals.decode_tokens
    assert sum(window.busy for window in windows) == totals.occupied_us
    assert sum(len(window.ttft) for window in windows) == totals.finished == 60
    assert windows[0].begin == 0 and windows[-1].end == totals.time_us
    assert [window.end for window in windows[:-1]] == [window.begin for window in windows[1:]]
    assert windows[-1].preemptions == replay.scheduler.num_preemptions
    ends, step = [], 0
    for window in windows:
        step += window.steps
        ends.append(used[step - 1])
        assert window.longest <= window.busy and 0 <= window.in_use <= 700
    assert [window.in_use for window in windows] == ends and ends[-1] == 0


def test_the_map_shows_the_blocks_in_use(monkeypatch):
    _, timeline, _ = replayed(monkeypatch, blocks=700)
    rows = timeline.rows
    sizes = [700 * (row + 1) // rows - 700 * row // rows for row in range(rows)]
    assert set(timeline.windows[-1].column) == {0}
    for window in timeline.windows:
        shown = sum(share / 255 * size for share, size in zip(window.column, sizes, strict=True))
        assert len(window.column) == rows and abs(shown - window.in_use) < rows / 255 * max(sizes)


@pytest.mark.parametrize("blocks", [1, 5, 95, 96, 97, 100_000])
def test_every_row_of_any_pool_has_blocks(blocks):
    timeline = Timeline(blocks)
    assert all(len(row) for row in timeline._blocks) and sum(map(len, timeline._blocks)) <= 6_144 + timeline.rows
    assert timeline._blocks[-1][-1] < blocks and timeline._column(BlockAllocator(blocks)) == bytes(timeline.rows)
    assert Timeline(0).rows == 0


def test_the_page_of_a_replay(tmp_path, capsys):
    found = drawn(tmp_path / "page.html", "--requests", "40")
    line = found.data["timeline"]
    columns = len(line["end"])
    assert len(base64.b64decode(line["map"])) == columns * line["rows"]
    assert {len(values) for values in line.values() if isinstance(values, list)} == {columns}
    assert ["finished / refused", "40 / 0"] in found.data["facts"] and "CC-BY-4.0" in found.data["footer"]
    assert "40 / 0" in capsys.readouterr().out


def test_the_page_needs_nothing_else(tmp_path, capsys):
    found = drawn(tmp_path / "page.html", "--requests", "5")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert re.findall(r"https?://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"]  # a namespace, never fetched
    assert not {name for _, name, _ in found.attributes} & {"src", "href", "action", "srcset", "onload", "onclick"}
    assert not found.tags & {"link", "iframe", "img", "object", "embed", "base", "form"}
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|innerHTML|eval\(", text)
    policy = next(value for tag, name, value in found.attributes if tag == "meta" and "default-src" in (value or ""))
    assert policy.startswith("default-src 'none'")
    assert "prefers-color-scheme: dark" in text
    capsys.readouterr()


def test_hostile_names_stay_text(make_trace, tmp_path, capsys):
    name = "</script><script>alert(1)</script><!--{{data}}&amp;"
    path = make_trace(lines_of([[0, 5, 3, []]], name=name))
    found = drawn(tmp_path / "page.html", str(path))
    assert found.data["title"] == f"pagepool replay of {name}" and len(found.scripts) == 2
    capsys.readouterr()


def test_an_empty_trace_has_a_picture(make_trace, tmp_path, capsys):
    arguments = ["replay", str(make_trace([], block=4)), "--html", str(tmp_path / "page.html")]
    assert main(arguments) == 0
    for more in ([], ["--hybrid", "1"]):
        assert main([*arguments[:2], "--clock", "none", *more]) == 0
    assert main([*arguments, "--blocks", "1"]) == 0
    capsys.readouterr()


def test_pictures_that_cannot_be_are_refused_first(make_trace, tmp_path, capsys):
    path = make_trace([[0, 8, 1, [0, 2]]], block=4)
    assert main(["replay", str(path), "--html", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"pagepool: {tmp_path}: cannot be written: Is a directory\n"


def test_pictures_go_to_standard_output(make_trace, tmp_path, capsysbinary, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["replay", str(make_trace([[0, 8, 1, [0, 2]]], block=4))]
    assert main([*arguments, "--html", "page.html"]) == 0
    capsysbinary.readouterr()
    assert main([*arguments, "--html", "-", "--json", "numbers.json"]) == 0
    printed = capsysbinary.readouterr().out
    assert printed.startswith(b"<!") and printed.rstrip().endswith(b"</html>") and Path("numbers.json").exists()
    assert main([*arguments, "--html", "-", "--json", "-"]) == 2
    captured = capsysbinary.readouterr()
    assert captured.out == b"" and captured.err.count(b"\n") == 1
    assert b"--json and --html cannot both be standard output" in captured.err


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
def test_a_browser_draws_the_page(tmp_path, capsys):
    drawn(tmp_path / "page.html", "--requests", "30")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run(
        [*command, profile, "--dump-dom", (tmp_path / "page.html").as_uri()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("<svg") == 4 and done.stdout.count("<path") >= 3
    assert "NaN" not in done.stdout.partition("<script")[0]
    capsys.readouterr()


def test_the_picture_of_a_replay_is_the_same_twice(monkeypatch):
    pages = []
    for _ in range(2):
        replay, timeline, _ = replayed(monkeypatch, requests=20)
        numbers = results(replay)
        picture = replay_picture(numbers, timeline)
        pages.append(json.dumps(picture["timeline"]))
        assert page(picture).count("{{") == 0
    assert pages[0] == pages[1]
