"""Many workers under one clock: counts computed by hand, no lost tokens; one worker equals a plain replay."""

import json
import random

import pytest

from pagepool.cli import main
from pagepool.replay import cluster
from pagepool.replay.cluster import ROUTES, Link

SAME_AS_REPLAY = ("prefill_tokens", "decode_tokens", "steps", "preemptions", "virtual_s", "ttft_ms", "tbt_ms")


def run(capsys, path, *arguments):
    assert main(["replay", str(path), "--block-size", "4", "--json", "-", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def routes(capsys, path, *arguments):
    return {row["route"]: row for row in run(capsys, path, *arguments)["routes"]}


def traffic(seed, count=200, gap=40):
    """Return requests `gap` ms apart. Each begins with one of a few documents of 1 to 12 blocks, or a part of one."""
    source, records, time = random.Random(seed), [], 0
    for number in range(count):
        time += source.randrange(2 * gap)
        document, length = source.randrange(12), source.randint(1, 12)
        runs = [100 * document, length, 10_000 + 10 * number, 2]
        records.append([time, 4 * (length + 1) + source.randint(1, 4), source.randint(1, 20), runs])
    return records


def sessions(seed, count=12):
    source, found = random.Random(seed), []
    for _ in range(count):
        turns = [[0, 8 * turn, 3, source.random(), 1, [0, 2 * turn]] for turn in range(1, 6)]
        found.append({"s": "a", "r": turns})
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("policy", ["lru", "gittins"])
def test_one_worker_is_a_plain_replay(make_trace, capsys, route, policy):
    path = make_trace(traffic(1), block=4)
    options = ("--policy", policy, "--blocks", "40", "--budget", "32")
    plain = run(capsys, path, *options)
    [row] = run(capsys, path, *options, "--workers", "1", "--route", route, "--staleness", "5000")["routes"]
    assert {name: row[name] for name in SAME_AS_REPLAY} == {name: plain[name] for name in SAME_AS_REPLAY}
    assert row["finished"] == 200 and row["load_spread"] == 1 and row["moved_tokens"] == 0


@pytest.mark.parametrize("route", ROUTES)
def test_one_worker_with_users_is_a_plain_replay(make_trace, capsys, route):
    path = make_trace(sessions(2), unit="s", block=4)
    options = ("--policy", "lru", "--users", "3", "--blocks", "60")
    plain = run(capsys, path, *options)
    [row] = run(capsys, path, *options, "--workers", "1", "--route", route)["routes"]
    assert {name: row[name] for name in SAME_AS_REPLAY} == {name: plain[name] for name in SAME_AS_REPLAY}


def test_two_workers_by_hand(make_trace, capsys):
    """Cost: 1000 us per step, 10 per prompt token, 100 per decode token. Requests have 9 prompt tokens and 1 output.

    by prefix    A to 0 (9 tokens: 0 to 1090), B to 1 (1 to 1091), A again to 0: 8 found, 1 computed (5000 to 6010), B
                 again to 1 (5001 to 6011)
    round-robin  workers 0, 1, 0, 1: with requests in the order A B B A the second A and B get the other worker
    """
    options = ("--workers", "2", "--route", "prefix,round-robin", "--cost", "1000,10,100")
    first, second = [0, 2, 90, 1], [10, 2, 91, 1]
    times = [0, 1, 5000, 5001]
    turned = [[time, 9, 1, runs] for time, runs in zip(times, (first, second, second, first), strict=True)]
    found = routes(capsys, make_trace(turned, unit="us", block=4), *options)
    assert found["prefix"]["prefill_tokens"] == 20 and found["prefix"]["found_tokens"] == 16
    assert found["prefix"]["ttft_ms"] == {"p50": 1.01, "p90": 1.09, "p99": 1.09}
    assert found["prefix"]["router"]["forecast_tokens"] == 16 == found["prefix"]["router"]["found_tokens"]
    assert found["round-robin"]["prefill_tokens"] == 36 and found["round-robin"]["router"] is None
    assert found["round-robin"]["ttft_ms"] == {"p50": 1.09, "p90": 1.09, "p99": 1.09}
    assert found["prefix"]["load_spread"] == found["round-robin"]["load_spread"] == 1


def test_a_request_waits_for_the_step_that_its_worker_is_in(make_trace, capsys):
    """One worker computes from 0 to 1090. A request that arrives at 500 starts at 1090 and finds the new blocks."""
    records = [[0, 9, 1, [0, 2, 90, 1]], [500, 9, 1, [0, 2, 91, 1]]]
    options = ("--workers", "3", "--cost", "1000,10,100")
    [row] = run(capsys, make_trace(records, unit="us", block=4), *options)["routes"]
    assert row["found_tokens"] == 8 and row["virtual_s"] == 0.0021
    assert row["load_spread"] == 3 and row["used_workers"] == 1  # one did everything


@pytest.mark.one_in(3)
@pytest.mark.parametrize("link", [(), ("--link", "0.001,50"), ("--link", "10,1")])
@pytest.mark.parametrize("blocks", ["30", "1000"])
def test_every_token_is_computed_found_or_moved(make_trace, capsys, link, blocks):
    records = traffic(3)
    path = make_trace(records, block=4)
    options = ("--workers", "5", "--blocks", blocks, "--staleness", "2000", "--max-batch", "1", *link)
    found = routes(capsys, path, *options, "--route", ",".join(ROUTES))
    assert list(found) == list(ROUTES)
    for row in found.values():
        assert (row["finished"], row["refused"], row["preemptions"]) == (200, 0, 0)
        assert row["prompt_tokens"] == sum(record[1] for record in records)
        assert row["prefill_tokens"] == row["prompt_tokens"] - row["found_tokens"]
        assert row["decode_tokens"] == sum(record[2] - 1 for record in records)
        assert bool(row["moved_tokens"]) == bool(row["moved_s"])
    fewest = min(row["prefill_tokens"] for row in found.values())
    assert link or found["prefix"]["prefill_tokens"] == fewest


def test_pages_are_moved_where_that_takes_less_time_than_to_compute_them(make_trace, capsys):
    """Request 2 goes to worker 1, which has none of its 8 prefix tokens. Computing them costs 8 * 100 us.

    Worker 0 has them. The transfer takes 500 + 8 us for 8 tokens of 32 KiB. The request arrives at 5000 and starts at
    5508 with one token to compute: 100 us, plus 1000 us for the step.
    """
    records = [[0, 9, 1, [0, 2, 90, 1]], [5000, 9, 1, [0, 2, 91, 1]]]
    path = make_trace(records, unit="us", block=4)
    options = ("--workers", "2", "--route", "round-robin", "--cost", "1000,100,100")
    [moved] = run(capsys, path, *options, "--link", "0.032768,500")["routes"]
    assert moved["moved_tokens"] == 0  # the transfer takes 500 + 8000 us
    [moved] = run(capsys, path, *options, "--link", "32.768,792")["routes"]
    assert moved["moved_tokens"] == 0  # 792 + 8 us, equal to the time to compute them
    [moved] = run(capsys, path, *options, "--link", "32.768,500")["routes"]
    assert (moved["moved_tokens"], moved["moved_s"], moved["found_tokens"]) == (8, 0.000508, 8)
    assert moved["prefill_tokens"] == 10 and moved["virtual_s"] == 0.006608
    assert moved["ttft_ms"]["p50"] == 1.608 and moved["ttft_ms"]["p99"] == 1.9
    assert moved["router"]["choices"] == 0


def test_a_link_sends_transfers_one_after_another(make_trace, capsys):
    """Workers 1 and 2 request 8 tokens of worker 0 at once: 508 us each, and the second waits for the first."""
    records = [[time, 9, 1, [0, 2, 90 + number, 1]] for number, time in enumerate((0, 5000, 5001))]
    path = make_trace(records, unit="us", block=4)
    options = ("--workers", "3", "--route", "round-robin", "--link", "32.768,500")
    [row] = run(capsys, path, *options, "--cost", "1000,100,100")["routes"]
    assert row["moved_tokens"] == 8  # 1015 us exceed the 800 us of computing
    [row] = run(capsys, path, *options, "--cost", "1000,200,100")["routes"]
    assert row["moved_tokens"] == 16 and row["moved_s"] == 0.001016
    assert Link(1, 500, 1000).cost(8) == 508


@pytest.mark.one_in(4)
@pytest.mark.parametrize("gap", [5, 40])
@pytest.mark.parametrize(("route", "latest"), [("cost", 10_000), ("prefix", 200_000)])
def test_late_news_cost_at_most_2_percent_more_computed_tokens(make_trace, capsys, gap, route, latest):
    """Tokens are summed over six traces: in one trace, a single request on another worker can change them by over 2 %.

    `cost` is tested with news that are at most 10 ms late. A step takes 2 ms, so loads that are 200 ms old do not help.
    """
    options = ("--workers", "8", "--blocks", "60", "--cost", "2000,60,150", "--route", route)
    computed = dict.fromkeys((0, latest), 0)
    for seed in range(6):
        path = make_trace(traffic(seed, 400, gap), block=4)
        for staleness in computed:
            [row] = run(capsys, path, *options, "--staleness", str(staleness))["routes"]
            computed[staleness] += row["prefill_tokens"]
    assert max(computed.values()) <= 1.02 * computed[0]


def test_prompts_that_share_one_block_use_all_workers(make_trace, capsys):
    """16 prompts of 64 tokens, 4 of them shared, come within 1 ms. A prompt takes 13 ms."""
    records = [[number * 50, 64, 1, [0, 1, 100 * (number + 1), 15]] for number in range(16)]
    options = ("--workers", "8", "--blocks", "200", "--cost", "1000,200,100", "--route", "cost,prefix,least-loaded")
    found = routes(capsys, make_trace(records, unit="us", block=4), *options)
    assert {route: row["used_workers"] for route, row in found.items()} == {"cost": 8, "prefix": 1, "least-loaded": 8}
    assert found["cost"]["ttft_ms"]["p50"] <= found["least-loaded"]["ttft_ms"]["p50"]
    assert found["cost"]["prefill_tokens"] <= found["least-loaded"]["prefill_tokens"]


def test_a_log_that_is_too_short_for_a_step_costs_snapshots_and_no_hits(make_trace, capsys, monkeypatch):
    path = make_trace(traffic(5), block=4)
    options = ("--workers", "3", "--blocks", "40", "--route", "prefix")
    [whole] = run(capsys, path, *options)["routes"]
    monkeypatch.setattr(cluster, "MAX_EVENTS", 3)
    [short] = run(capsys, path, *options)["routes"]
    assert whole["router"]["gaps"] == 0 < short["router"]["gaps"] == short["router"]["snapshots"]
    assert short["found_tokens"] >= 0.98 * whole["found_tokens"]


def test_requests_that_never_fit_are_refused(make_trace, capsys):
    records = [[0, 900, 1, [0, 225]], [0, 9, 1, [0, 2, 500, 1]], [1, 900, 1, [0, 225]]]
    for row in routes(
        capsys, make_trace(records, block=4), "--workers", "2", "--blocks", "9", "--route", ",".join(ROUTES)
    ).values():
        assert (row["finished"], row["refused"], row["prompt_tokens"]) == (1, 2, 9)


def test_an_empty_trace_and_more_workers_than_requests(make_trace, capsys):
    [row] = run(capsys, make_trace([], block=4), "--workers", "3")["routes"]
    assert (row["finished"], row["hit_rate"], row["load_spread"]) == (0, 0.0, 0.0)
    [row] = run(capsys, make_trace(traffic(6, 3), block=4), "--workers", "100", "--route", "random")["routes"]
    assert row["finished"] == 3


def test_the_same_numbers_twice(make_trace, capsys):
    path = make_trace(traffic(7), block=4)
    options = ("--workers", "4", "--blocks", "40", "--route", ",".join(ROUTES), "--link", "1,20")
    first = run(capsys, path, *options)
    assert run(capsys, path, *options) == first


def test_the_table_has_a_line_for_each_route(make_trace, capsys):
    path = make_trace([[0, 9, 2, [0, 3]], [500, 9, 2, [0, 3]]], block=4)
    options = ["--block-size", "4", "--workers", "2", "--route", "prefix,random"]
    assert main(["replay", str(path), *options]) == 0
    title, header, *lines = capsys.readouterr().out.splitlines()
    assert "2 requests, 2 workers with 3,072 x 4 tokens" in title and header.split()[:3] == [
        "route",
        "found",
        "computed",
    ]
    assert header.split("  ")[-1].strip() == "workers that got a request"
    assert (
        lines[0].split()[:4] == ["prefix", "44.4%", "10", "0"]
        and lines[0].split()[-1] == "1"
        and lines[1].split()[0] == "random"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--route", "prefix"], "--route needs --workers"),
        (["--staleness", "0"], "--staleness needs --workers"),
        (["--link", "1,1"], "--link needs --workers"),
        (["--workers", "2", "--attend", "llama-3.2-1b"], "--attend cannot be used with --workers"),
        (["--workers", "2", "--reference"], "--reference cannot be used with --workers"),
        (["--workers", "2", "--html", "x.html"], "--html cannot be used with --workers"),
        (["--workers", "2", "--clock", "none"], "--workers needs the virtual clock"),
        (["--workers", "2", "--policy", "lru,gittins"], "--policy with several policies needs --clock none"),
    ],
)
def test_options_that_do_not_go_together(make_trace, capsys, arguments, message):
    assert main(["replay", str(make_trace([[0, 9, 2, [0, 3]]], block=4)), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0"], "must be from 1 to 65536, not 0"),
        (["--route", "nearest"], "'nearest' is not one of cost, prefix, least-loaded, round-robin, random"),
        (["--link", "0,5"], "'0,5' is not a link"),
        (["--link", "5"], "'5' is not a link"),
        (["--staleness", "-1"], "must be from 0 to"),
    ],
)
def test_arguments_that_cannot_be(capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(["replay", *arguments])
    assert message in capsys.readouterr().err


def test_a_trace_without_prefixes_has_nothing_to_route_by(make_trace, capsys):
    path = make_trace([[0, 9, 2, []]])
    assert main(["replay", str(path), "--workers", "2"]) == 2
    assert f"{path}: the trace has no prefix blocks, which --workers needs" in capsys.readouterr().err
