"""A replay of an engine's recording has the same counts as the engine's prefix cache, after any kind of exit."""

import json
import lzma
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from share import examples

import pagepool
from pagepool import BlockAllocator, PrefixCache, cli
from pagepool.replay.passes import cache_pass
from pagepool.replay.prompts import Prompts
from pagepool.replay.ptrace import read_trace
from pagepool.scheduling import recorder
from pagepool.scheduling.recorder import TraceRecorder

SHAREGPT = Path(__file__).parents[3] / "shared" / "data" / "sharegpt300_token_ids.jsonl.xz"
PROMPT = st.tuples(st.lists(st.integers(0, 6), min_size=1, max_size=20), st.sampled_from([None, "a", b"a", 7]))


def hits_of(prompts, block, capacity):
    """Return hits and evictions of the cache for these tokens."""
    cache = PrefixCache(BlockAllocator(capacity), block, "lru")
    found = sum(cache.touch(tokens, cache_salt=salt) for tokens, salt in prompts)
    return found, cache.stats()["evicted"]


@examples(60)
@given(st.lists(PROMPT, max_size=25), st.integers(1, 5), st.integers(0, 30))
def test_a_replay_finds_what_the_engine_found(tmp_path_factory, prompts, block, capacity):
    path = tmp_path_factory.mktemp("recorded") / "trace"
    with TraceRecorder(path, block) as recorded:
        for number, (tokens, salt) in enumerate(prompts):
            recorded.record(tokens, number, arrival=number / 1000, cache_salt=salt)
    trace = read_trace(path, prefixes=True)
    assert list(trace.prompt) == [len(tokens) for tokens, _ in prompts]
    assert list(trace.output) == list(range(len(prompts)))
    assert list(trace.arrival_us) == [1000 * number for number in range(len(prompts))]
    replayed = cache_pass(pagepool, Prompts(trace), "lru", capacity)
    assert (replayed.hit_blocks, replayed.evictions) == hits_of(prompts, block, capacity)


def test_an_open_or_killed_recording_can_be_read(tmp_path):
    path = tmp_path / "trace"
    code = f"""
import os, pagepool.scheduling.recorder
recorder = pagepool.scheduling.recorder.TraceRecorder({str(path)!r}, 4)
for number in range(5):
    recorder.record(range(10), 3)
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert len(read_trace(path, prefixes=True)) == 5
    with path.open("ab") as file:
        file.write(b"[17,10,3,[0")  # the process ended within a line
    assert len(read_trace(path, prefixes=True)) == 5
    assert cli.main(["replay", str(path)]) == 0


def test_threads_record_at_once(tmp_path):
    with TraceRecorder(tmp_path / "trace", 2) as recorded:
        threads = [
            threading.Thread(target=lambda base=base: [recorded.record([base, base, at], at) for at in range(200)])
            for base in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    trace = read_trace(recorded.path, prefixes=True)
    assert len(trace) == 800 and sorted(trace.output) == sorted(list(range(200)) * 4)
    assert len({runs[0] for runs in trace.runs}) == 4
    assert json.loads(recorded.path.read_text().splitlines()[0])["n"] == 800


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    recorded = TraceRecorder(tmp_path / "trace", 2)
    recorded.record([1, 2, 3], 1, arrival=0)
    before = recorded.path.read_bytes()
    written = os.pwrite

    def full(file, data, offset):
        if len(data) > 4:
            return written(file, data[:4], offset)
        raise OSError(28, "No space left on device")

    for failing in (full, lambda *arguments: full(0, b"", 0)):
        monkeypatch.setattr(recorder.os, "pwrite", failing)
        with pytest.raises(OSError, match="No space left"):
            recorded.record(list(range(7)) * 10, 1)
        assert recorded.path.read_bytes() == before and recorded.num_requests == 1
    monkeypatch.setattr(recorder.os, "pwrite", lambda file, data, offset: written(file, data[:3], offset))
    recorded.record([1, 2, 4], 1, arrival=1)
    recorded.close()
    monkeypatch.undo()
    first, second = read_trace(recorded.path, prefixes=True).runs
    assert first == [0, 2] and second[:2] == [0, 1] and second[2] > 1


def test_ids_are_forgotten_when_there_are_too_many(tmp_path):
    with TraceRecorder(tmp_path / "trace", 1, max_blocks=5) as recorded:
        for prompt in ([1, 2], [1, 2], [3, 4], [1, 2]):
            recorded.record(prompt, 0, arrival=0)
    assert read_trace(recorded.path, prefixes=True).runs == [[0, 2], [0, 2], [2, 2], [4, 2]]


def test_without_identity_no_ids_are_written(tmp_path):
    with TraceRecorder(tmp_path / "trace", 0) as recorded:
        recorded.record(range(100), 5, arrival=2.5)
    assert recorded.path.read_text().splitlines()[1] == "[2500000,100,5,[]]"


def test_no_token_is_in_the_file(tmp_path):
    with TraceRecorder(tmp_path / "trace", 4) as recorded:
        recorded.record([31337] * 9, 5, arrival=1)
    assert "31337" not in recorded.path.read_text()


def test_bad_arguments_change_nothing(tmp_path):
    path = tmp_path / "trace"
    for block in (-1, 1 << 21):
        with refuses(ValueError, "block", 0, 1048576, block):
            TraceRecorder(path, block)
    with refuses(ValueError, "name"):
        TraceRecorder(path, name="a\nb")
    assert not path.exists()
    with TraceRecorder(path) as recorded:
        before = path.read_bytes()
        for arguments in (
            ([], 1),
            ([1], -1),
            ([1], 1 << 25),
            ([1], 1, -1.0),
            ([1], 1, 1e12),
            ([1], 1, float("nan")),
            ([1 << 40], 1),
        ):
            with pytest.raises(ValueError):
                recorded.record(*arguments)
        with pytest.raises(TypeError):
            recorded.record(["a"], 1)
        with refuses(TypeError, "cache_salt"):
            recorded.record([1], 1, cache_salt=1.5)
        assert path.read_bytes() == before
        with pytest.raises(FileExistsError):
            TraceRecorder(path)
    recorded.close()
    with refuses(ValueError, "closed"):
        recorded.record([1], 1)


# --------------------------------------------------------------------------------------------------- pagepool record


@pytest.fixture
def jsonl(tmp_path):
    def make(*lines, name="served.jsonl"):
        path = tmp_path / name
        text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines).encode()
        path.write_bytes(lzma.compress(text) if name.endswith(".xz") else text)
        return path

    return make


@pytest.mark.parametrize("packed", ["", ".xz"])
def test_record_converts_token_ids(jsonl, tmp_path, capsys, packed):
    source = jsonl(
        {"input_tok_ids": [1, 2, 3, 4, 5], "output_tok_ids": [9] * 7, "arrival_time_ns": 2_000_000},
        {"prompt_token_ids": [1, 2, 3], "output_len": 4, "arrival": 0.001},
        {"tokens": [1, 2], "cache_salt": "b", "output_tokens": [1, 2]},
        name=f"served.jsonl{packed}",
    )
    target = tmp_path / f"made.ptrace{packed}"
    assert cli.main(["record", str(source), str(target), "--block", "2", "--licence", "CC0"]) == 0
    assert capsys.readouterr().out == f"3 requests in {target}\n"
    trace = read_trace(target, prefixes=True)
    assert (trace.name, trace.licence, trace.block) == ("served", "CC0", 2)
    assert list(trace.arrival_us) == [0, 1000, 2000] and list(trace.output) == [2, 4, 7]
    assert trace.runs == [[4, 1], [0, 1, 3, 1], [0, 3]]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([source.name, target.name])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1, 2]", "a request must be an object, not a list"),
        ('{"prompt": "text"}', "the prompt must be a list of token ids under one of the keys input_tok_ids"),
        ('{"tokens": [1, true]}', "the prompt must be a list of token ids"),
        ('{"tokens": []}', "from 1 to 16777216 prompt tokens, not 0"),
        ('{"tokens": [1], "output_tokens": "3"}', "the output must be a list of token ids or their number"),
        ('{"tokens": [1], "output_tokens": -3}', "from 0 to 16777216 output tokens, not -3"),
        ('{"tokens": [1], "arrival": "now"}', "the arrival must be a number, not 'now'"),
        ('{"tokens": [1], "arrival": -1}', "arrival must be from 0"),
        ('{"tokens": [1], "arrival": 1e999}', "arrival must be from 0"),
        ('{"tokens": [99999999999]}', "token 99999999999 has more than 32 bits"),
        ('{"tokens": [1], "tenant": [1]}', "cache_salt must be"),
        ("nonsense", "not JSON"),
        ("", "the line is empty"),
    ],
)
def test_hostile_lines_are_one_sentence_and_leave_no_file(jsonl, tmp_path, capsys, line, message):
    source = jsonl({"tokens": [1, 2]}, line)
    assert cli.main(["record", str(source), str(tmp_path / "made")]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"pagepool: {source}:2: ") and message in printed and printed.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


def test_record_refuses_invalid_arguments(jsonl, tmp_path, capsys):
    source, empty = jsonl({"tokens": [1, 2]}), tmp_path / "empty"
    empty.touch()
    for arguments, message in (
        ([str(empty), str(tmp_path / "made")], f"{empty}: the file has no requests"),
        ([str(source), str(source)], "exists: give another name"),
        ([str(source), str(tmp_path / "no" / "made")], "No such file or directory"),
        ([str(tmp_path / "missing"), str(tmp_path / "made")], "cannot be read: No such file"),
        ([str(source), str(tmp_path / "made"), "--block=-1"], "--block must be from 0 to 1048576, not -1"),
        ([str(source), str(tmp_path / "made"), "--name", "a\nb"], "--name and --licence must be printable"),
    ):
        assert cli.main(["record", *arguments]) == 2
        printed = capsys.readouterr().err
        assert message in printed and printed.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {source.name, empty.name}


@pytest.mark.skipif(not SHAREGPT.is_file(), reason="needs the recorded traces next to the checkout")
def test_real_prompts_have_the_same_hits_as_their_tokens(tmp_path, capsys):
    with lzma.open(SHAREGPT) as file:
        requests = sorted(map(json.loads, file), key=lambda request: request["arrival_time_ns"])
    target = tmp_path / "sharegpt.ptrace"
    assert cli.main(["record", str(SHAREGPT), str(target)]) == 0
    capsys.readouterr()
    for capacity in (500, 4000, 100_000):
        assert cli.main(["replay", str(target), "--clock", "none", "--capacity", str(capacity), "--json", "-"]) == 0
        found = json.loads(capsys.readouterr().out)["prefix"]
        expected = hits_of([(request["input_tok_ids"], None) for request in requests], 16, capacity)
        assert (found["hit_blocks"], found["evictions"]) == expected and expected[0] > 90
