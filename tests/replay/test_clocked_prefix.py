"""The prefix cache under the virtual clock: cached tokens are not computed, and outputs are hits for the next turn."""

import json

from hypothesis import given
from hypothesis import strategies as st
from share import examples
from trace_bytes import lines_of

from pagepool.cli import main
from pagepool.prefix.eviction import POLICIES
from pagepool.replay.prompts import TraceTokens
from pagepool.replay.ptrace import read_trace


def run(capsys, path, *arguments):
    assert main(["replay", str(path), "--json", "-", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def session(*requests):
    """Return a session of requests (prompt, output, runs), with a think time of one second between them."""
    return {"s": "a", "r": [[at, prompt, output, 1, 1, runs] for at, (prompt, output, runs) in enumerate(requests)]}


def test_tokens_are_equal_where_prefixes_are(make_trace):
    records = [
        session((9, 4, [0, 2]), (18, 2, [0, 4]), (18, 2, [7, 4])),
        session((9, 4, [0, 2])),
    ]
    tokens = TraceTokens(read_trace(make_trace(records, unit="s", block=4), prefixes=True))
    requests = [tokens.of(index) for index in (0, 2, 3, 1)]  # the second session's request arrives after the first one
    (first, answer), (second, _), (third, rest), (other, nothing) = requests
    assert first == [1, 1, 1, 1, 2, 2, 2, 2, 3] and [next(answer) for _ in range(6)] == [3, 3, 3, 4, 0, 0]
    own = 2**31 - 1  # own - n are the unique tokens of request n
    assert second == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4 + [own - 2] * 2
    assert third == [8] * 4 + [9] * 4 + [10] * 4 + [11] * 4 + [own - 3] * 2 and next(rest) == 0
    assert other[:8] == first[:8] and other[8] == own - 1 and next(nothing) == 0
    assert [tokens.salt(index) for index in range(4)] == [1, 2, 1, 1]


def test_the_next_turn_finds_the_output_of_the_last(make_trace, capsys):
    """Turn 1 has 8 prompt and 8 output tokens. Turn 2 continues these 16 with 8 more.

    15 of the 16 tokens are stored, because the last output token was never fed. So three blocks of 4 are found.
    """
    path = make_trace([session((8, 8, [0, 2]), (24, 2, [0, 6]))], unit="s", block=4)
    numbers = run(capsys, path, "--policy", "lru", "--users", "1", "--block-size", "4")
    assert numbers["prefix"]["hit_blocks"] == 3 and numbers["prefix"]["evictions"] == 0
    assert numbers["prefill_tokens"] == 8 + 24 - 12
    assert run(capsys, path, "--users", "1", "--block-size", "4")["prefill_tokens"] == 8 + 24


PROMPT = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), st.integers(1, 3))


@examples(40)
@given(st.lists(PROMPT, max_size=12), st.sampled_from([4, 2, 1]), st.integers(6, 40))
def test_one_user_has_the_hits_of_a_pass(tmp_path_factory, prompts, size, blocks):
    """With one user and enough blocks, the clocked replay finds the same blocks as a pass without a clock."""
    ids, records = {}, []
    for at, (path, rest) in enumerate(prompts):
        runs = [number for end in range(1, len(path) + 1) for number in (ids.setdefault(path[:end], len(ids)), 1)]
        records.append([at, 4 * (len(path) - 1) + rest, 1, runs])
    path = tmp_path_factory.mktemp("clocked") / "trace"
    path.write_bytes(lines_of(records, block=4))
    results = []
    for arguments in (["--clock", "none"], ["--users", "1", "--blocks", "10000", "--policy", "lru"]):
        target = path.with_suffix(".json")
        assert main(["replay", str(path), "--block-size", str(size), "--json", str(target), *arguments]) == 0
        results.append(json.loads(target.read_text()))
    passed, clocked = results
    # At least one token of a prompt is computed. So a fully cached prompt computes its last block again.
    read_again = sum(
        1
        for index, record in enumerate(records)
        if record[1] % size == 0 and any(whole_in(record, earlier, size) for earlier in records[:index])
    )
    assert clocked["prefix"]["hit_blocks"] == passed["prefix"]["hit_blocks"] - read_again
    assert clocked["prefill_tokens"] == sum(record[1] for record in records) - size * clocked["prefix"]["hit_blocks"]
    assert clocked["block_allocs"] == clocked["block_frees"]
    small = ["--users", "1", "--blocks", str(blocks * 4 // size), "--policy", "gittins", "--block-size", str(size)]
    assert main(["replay", str(path), *small, "--json", str(target)]) == 0
    pressed = json.loads(target.read_text())
    assert pressed["finished"] == len(records) and pressed["block_allocs"] == pressed["block_frees"]


def whole_in(record, earlier, size):
    """Return true if `earlier` contains every full block of `record`."""
    block_ids, known = record[3][::2], earlier[3][::2]
    count = -(-record[1] // 4)
    return earlier[1] >= record[1] and known[:count] == block_ids[:count]


def test_under_pressure_everything_ends_and_is_given_back(make_trace, capsys):
    records = [[at, 40 + at % 7, 9, [0, 5, 5 + at, 5]] for at in range(40)]
    path = make_trace(records, block=4)
    for policy in POLICIES:
        numbers = run(capsys, path, "--policy", policy, "--block-size", "4", "--blocks", "30")
        assert numbers["finished"] == 40 and numbers["block_allocs"] == numbers["block_frees"]
        assert numbers["prefix"]["hit_blocks"] > 0 and numbers["prefix"]["evictions"] > 0


def test_the_picture_tells_cached_blocks_from_used_ones(make_trace, tmp_path, capsys):
    path = make_trace([[at, 40, 9, [5 * at, 10]] for at in range(20)], block=4)
    target = tmp_path / "page.html"
    assert main(["replay", str(path), "--policy", "lru", "--block-size", "4", "--html", str(target)]) == 0
    data = target.read_text().partition('<script id="data" type="application/json">')[2].partition("</script>")[0]
    line = json.loads(data)["timeline"]
    assert all(cached <= used for cached, used in zip(line["cached_only"], line["in_use"], strict=True))
    assert line["cached_only"][0] == 0 and line["cached_only"][-1] == line["in_use"][-1] > 0
    capsys.readouterr()


def test_the_table_has_the_cache(make_trace, capsys):
    path = make_trace([[0, 9, 2, [0, 3]], [50, 9, 2, [0, 3]]], block=4)
    assert main(["replay", str(path), "--policy", "lru", "--block-size", "4"]) == 0
    assert "50.0% of 4 blocks hit" in capsys.readouterr().out


def test_several_policies_need_passes_without_a_clock(make_trace, capsys):
    assert main(["replay", str(make_trace([[0, 9, 2, [0, 3]]], block=4)), "--policy", "lru,gittins"]) == 2
    assert "--policy with several policies needs --clock none" in capsys.readouterr().err


def test_a_trace_without_prefixes_has_none_to_keep(make_trace, capsys):
    assert main(["replay", str(make_trace([[0, 9, 2, []]])), "--policy", "lru"]) == 2
    assert "the trace has no prefix blocks, which --policy needs" in capsys.readouterr().err
    assert main(["replay", str(make_trace([[0, 9, 2, [2**31, 1]]], block=4)), "--policy", "lru"]) == 2
    assert "at most 2147483646 block ids, not 2147483649" in capsys.readouterr().err
