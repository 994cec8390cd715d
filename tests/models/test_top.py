"""`pagepool top` on metrics that pagepool and vLLM 0.32 have written."""

import io
import re
import socket
import sys
import threading

import pytest

pytest.importorskip("rich", reason="rich is not installed: make test-models")

from rich.console import Console

from pagepool.cli import main, top
from pagepool.cli.top import Metrics, rendered
from pagepool.cli.usage import UsageError

PAGEPOOL = """
pagepool:num_requests_running 0.0
pagepool:num_requests_waiting 0.0
pagepool:num_preemptions_total 0.0
pagepool:kv_cache_usage_perc{pool="kv"} 0.0
pagepool:kv_blocks{pool="kv",state="used"} 0.0
pagepool:kv_blocks{pool="kv",state="evictable"} 220.0
pagepool:kv_blocks{pool="kv",state="free"} 36.0
pagepool:kv_bytes{pool="kv"} 7.20896e+06
pagepool:peak{pool="kv"} 223.0
pagepool:prefix_cache_queries_total{cache="prefix"} 506.0
pagepool:prefix_cache_hits_total{cache="prefix"} 336.0
pagepool:prefix_cache_evictions_total{cache="prefix"} 0.0
pagepool:prefix_cache_tier_hits_total{cache="prefix",tier="memory"} 336.0
pagepool:prefix_cache_tier_hits_total{cache="prefix",tier="store"} 0.0
pagepool:store_pages_total{cache="prefix",event="written"} 42.0
pagepool:store_pages_total{cache="prefix",event="evicted"} 0.0
pagepool:store_pages_total{cache="prefix",event="refused"} 0.0
pagepool:store_pages_total{cache="prefix",event="dropped"} 0.0
pagepool:store_bytes_total{cache="prefix",direction="read"} 0.0
pagepool:store_bytes_total{cache="prefix",direction="written"} 1.376256e+06
pagepool:store_disk_bytes{cache="prefix"} 1.396736e+06
pagepool:store_is_writer{cache="prefix"} 1.0
pagepool:requests_total{reason="stop"} 0.0
pagepool:requests_total{reason="length"} 18.0
pagepool:requests_total{reason="abort"} 0.0
pagepool:requests_total{reason="error"} 0.0
pagepool:prompt_tokens_total 8281.0
pagepool:generation_tokens_total 720.0
pagepool:prompt_tokens_cached_total 5376.0
pagepool:prompt_tokens_missed_total{reason="never_seen"} 448.0
pagepool:prompt_tokens_missed_total{reason="short"} 185.0
pagepool:prompt_tokens_missed_total{reason="diverges"} 2272.0
pagepool:time_to_first_token_seconds_count 18.0
pagepool:time_to_first_token_seconds_sum 14.142533896992973
pagepool:e2e_request_latency_seconds_count 18.0
pagepool:e2e_request_latency_seconds_sum 22.90241022498958
pagepool:request_queue_time_seconds_count 18.0
pagepool:request_queue_time_seconds_sum 8.871229513992148
pagepool:time_per_output_token_seconds_count 18.0
pagepool:time_per_output_token_seconds_sum 0.22461221353837452
"""

VLLM = """
vllm:num_requests_running{engine="0",model_name="tiny"} 0.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="deferred"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 41070.0
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 19840.0
vllm:external_prefix_cache_queries_total{engine="0",model_name="tiny"} 0.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="tiny"} 0.0
vllm:num_preemptions_total{engine="0",model_name="tiny"} 0.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 65958.0
vllm:prompt_tokens_cached_total{engine="0",model_name="tiny"} 19840.0
vllm:generation_tokens_total{engine="0",model_name="tiny"} 2325.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 0.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 125.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 0.0
vllm:request_success_total{engine="0",finished_reason="error",model_name="tiny"} 0.0
vllm:request_success_total{engine="0",finished_reason="repetition",model_name="tiny"} 0.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"} 125.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="tiny"} 1483.8201644420624
vllm:inter_token_latency_seconds_count{engine="0",model_name="tiny"} 2200.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="tiny"} 1025.219760687025
"""


# Figures of pagepool 6 seconds earlier.
EARLIER = {
    "num_requests_running 0.0": "num_requests_running 4.0",
    '_usage_perc{pool="kv"} 0.0': '_usage_perc{pool="kv"} 0.33203125',
    'state="used"} 0.0': 'state="used"} 85.0',
    'queries_total{cache="prefix"} 506.0': 'queries_total{cache="prefix"} 338.0',
    'hits_total{cache="prefix"} 336.0': 'hits_total{cache="prefix"} 210.0',
    'requests_total{reason="length"} 18.0': 'requests_total{reason="length"} 9.0',
    "prompt_tokens_total 8281.0": "prompt_tokens_total 5529.0",
    "generation_tokens_total 720.0": "generation_tokens_total 480.0",
    '{reason="diverges"} 2272.0': '{reason="diverges"} 1072.0',
    "first_token_seconds_count 18.0": "first_token_seconds_count 8.0",
    "first_token_seconds_sum 14.142533896992973": "first_token_seconds_sum 12.642533896992973",
    'direction="written"} 1.376256e+06': 'direction="written"} 776256',
}


def scrape(text, seconds, changes=()):
    for now, earlier in dict(changes).items():
        assert text.count(now) == 1
        text = text.replace(now, earlier)
    return Metrics.parse(text, seconds)


def picture(before, now, width=110):
    """Return the lines of the picture by their names."""
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(rendered(before, now, "http://here"))
    title, *lines = console.export_text().splitlines()
    cells = [re.split(r" {2,}", line.strip()) for line in lines]
    return title.strip(), {name: " ".join(rest) for name, *rest in cells}


def test_pagepool():
    title, lines = picture(scrape(PAGEPOOL, 0.0, EARLIER), scrape(PAGEPOOL, 6.0))
    assert title == "pagepool top: pagepool at http://here, last 6.0 s"
    assert lines == {
        "requests": "0 running, 0 waiting",
        "ended": "1.5/s 150.0 ms to the first token",
        "prompt tokens": "459/s 8,281 in all",
        "generated tokens": "40/s - for each",
        "KV in use": "........................ 0.0% 0 used, 220 evictable, 36 free",
        "prefix hits": "##################...... 75.0% 0 tokens/s found",
        "evictions": "0/s 0 in all",
        "preemptions": "0/s 0 in all",
        "blocks found": "0/s from memory, 0/s from store",
        "store": "0.0 MB/s read, 0.1 written 1 MB; 42 written, 0 evicted, 0 refused, 0 dropped",
        "missed: diverges": "200 tokens/s 2,272 in all",
        "missed: never_seen": "0 tokens/s 448 in all",
        "missed: short": "0 tokens/s 185 in all",
    }


def test_vllm():
    before = {'generation_tokens_total{engine="0",model_name="tiny"} 2325.0': "generation_tokens_total 2225.0"}
    title, lines = picture(scrape(VLLM, 0.0, before), scrape(VLLM, 2.0))
    assert title == "pagepool top: vllm at http://here, last 2.0 s"
    assert lines == {
        "requests": "0 running, 0 waiting",
        "ended": "0.0/s - to the first token",
        "prompt tokens": "0/s 65,958 in all",
        "generated tokens": "50/s - for each",
        "KV in use": "........................ 0.0%",
        "prefix hits": "############............ 48.3% 0 tokens/s found",
        "preemptions": "0/s 0 in all",
    }


def test_a_restarted_server_counts_from_zero():
    _, lines = picture(scrape(PAGEPOOL, 0.0), scrape(PAGEPOOL, 1.0, EARLIER))
    assert lines["requests"] == "4 running, 0 waiting" and lines["prompt tokens"] == "5,529/s 5,529 in all"
    assert lines["KV in use"] == "########................ 33.2% 85 used, 220 evictable, 36 free"


@pytest.mark.parametrize("text", ["", "<html>", "python_info 1.0", "pagepool:requests_total many"])
def test_other_answers_are_refused(text):
    with pytest.raises(ValueError, match=r"no metrics of pagepool or vLLM|the value 'many'"):
        Metrics.parse(text, 0.0)


def test_control_characters_of_a_server_are_not_printed():
    for label in ('reason="short"', 'state="free"', 'tier="store"', 'event="written"'):
        text = PAGEPOOL.replace(label, f'{label[:-1]}\x1b[2J"')
        _, lines = picture(scrape(text, 0.0), scrape(text, 1.0))
        assert "\x1b" not in str(lines.items()) and any("x1b" in " ".join(line) for line in lines.items())


def test_a_value_that_is_no_number_is_shown_as_none():
    text = PAGEPOOL.replace('_usage_perc{pool="kv"} 0.0', '_usage_perc{pool="kv"} NaN')
    assert picture(scrape(text, 0.0), scrape(text, 1.0))[1]["KV in use"].startswith("- ")


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_a_narrow_terminal_shows_the_names(width):
    _, lines = picture(scrape(PAGEPOOL, 0.0), scrape(PAGEPOOL, 1.0), width)
    assert "generated tokens" in lines and "missed: never_seen" in lines


@pytest.mark.parametrize("answer", [b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"])
def test_an_answer_that_is_not_http_is_one_line(answer, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def respond():
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=respond)
        thread.start()
        assert main(["top", f"127.0.0.1:{server.getsockname()[1]}", "--once"]) == 2
        thread.join()
    assert re.fullmatch(r"pagepool: http://127.0.0.1:\d+/metrics: .+\n", capsys.readouterr().err)


def test_an_address_in_brackets_is_shown():
    console = Console(file=io.StringIO(), width=110, record=True)
    console.print(rendered(scrape(PAGEPOOL, 0.0), scrape(PAGEPOOL, 1.0), "http://[fe80::1]:8000"))
    assert "at http://[fe80::1]:8000, last" in console.export_text()


def test_a_wrong_port_is_one_line(capsys):
    assert main(["top", "127.0.0.1:port", "--once"]) == 2
    assert "nonnumeric port: 'port'" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_line(capsys):
    assert main(["top", "127.0.0.1:1", "--once"]) == 2
    assert capsys.readouterr().err.startswith("pagepool: http://127.0.0.1:1/metrics: ")


@pytest.mark.parametrize("is_back", [False, True])
def test_the_picture_goes_on_after_a_restart_of_the_server(is_back, monkeypatch, capsys):
    found = iter([scrape(PAGEPOOL, 0.0), UsageError("no answer")] + [scrape(PAGEPOOL, 1.0)] * is_back)

    def next_scrape(*_):
        one = next(found, KeyboardInterrupt())
        if isinstance(one, BaseException):
            raise one
        return one

    monkeypatch.setattr(top, "_scrape", next_scrape)
    assert main(["top", "--interval", "0.1"]) == 130
    out = capsys.readouterr().out
    assert ("0 running, 0 waiting" if is_back else "no answer: trying again") in out


def test_the_command_needs_rich_and_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["top"]) == 2
    assert "pip install 'pagepool[top]'" in capsys.readouterr().err
