"""`pagepool prove` against right servers, servers with noise, and servers that mix up prompts."""

import json
import random

import numpy as np
import pytest

for name in ("starlette", "uvicorn", "prometheus_client", "httpx", "openai"):
    pytest.importorskip(name, reason=f"{name} is not installed: make test-models")

import httpx  # noqa: E402
from fake_runner import VOCABULARY, FakeRunner  # noqa: E402
from test_serve import serving  # noqa: E402

import pagepool.prefix.cache as cache_module  # noqa: E402
from pagepool import PrefixCache  # noqa: E402
from pagepool.cli import main  # noqa: E402
from pagepool.cli.prove import _reason, _result  # noqa: E402
from pagepool.cli.prove_endpoint import Endpoint  # noqa: E402
from pagepool.cli.prove_oracle import NUM_SEGMENTS, Answer, distance, new_group, spliced, told_secret  # noqa: E402
from pagepool.cli.prove_patterns import PATTERNS, Alarm, Prover  # noqa: E402
from pagepool.cli.usage import UsageError  # noqa: E402

TOKENS = [f"t{i}" for i in range(12)]


MOVES = np.sin(
    np.arange(VOCABULARY)[:, None, None] * (3.1 + np.arange(97)[:, None]) + np.arange(32) * 1.7, dtype=np.float32
)


def logits_of(tokens):
    """Logits as a model has them: every token moves all of them a little, by its place."""
    row = np.full(VOCABULARY, -np.inf, np.float32)
    row[32:64] = MOVES[tokens, np.arange(len(tokens)) % 97].sum(axis=0) / 4
    return row


class FirstTokens:
    """A prefix cache that takes a prompt for an earlier one if their first 100 tokens are equal."""

    def __init__(self, cache):
        self.cache = cache
        self.rows = []

    def __getattr__(self, name):
        return getattr(self.cache, name)

    def cache_blocks(self, tokens, blocks, **options):
        self.rows.append(list(tokens))
        return self.cache.cache_blocks(tokens, blocks, **options)

    def match_held(self, held, tokens, *args, **options):
        asked = list(tokens)
        known = next((row for row in self.rows if row[:100] == asked[:100] and len(row) >= 200), None)
        if known is not None:
            asked[: len(known)] = known[: len(asked)]
        return self.cache.match_held(held, np.array(asked, np.int32), *args, **options)


def ask(url, capsys, *options, minutes="0.001"):
    """Return the exit status and the result of the command."""
    status = main(
        ["prove", url, "--minutes", minutes, "--words", "64", "--pressure", "4", "--seed", "7", "--json", "-", *options]
    )
    return status, json.loads(capsys.readouterr().out)


def runner():
    return FakeRunner(num_blocks=2048, block_size=16, max_model_len=600, next_token=logits_of)


def test_a_right_server_has_no_alarm(capsys):
    with serving(runner(), shows_cached_tokens=True) as served:
        status, found = ask(f"{served.url}/v1", capsys)
        assert served.engine.stats()["cached_tokens"] > 1000
    assert (status, found["verdict"], found["fault"]) == (0, "right", None)
    assert found["skips_cache_by"] == "echo" and found["has_salts"] and set(found["patterns"]) == set(PATTERNS)
    assert found["separation"]["between_prompts"] > 0.05 and found["separation"]["noise"] < 1e-4


def test_a_cache_that_compares_too_few_tokens_is_found_with_the_owner(capsys):
    wrong = runner()
    wrong.new_prefix_cache = lambda max_events=0, store=None: FirstTokens(PrefixCache(wrong.pool.allocator))
    with serving(wrong) as served:
        status, found = ask(f"{served.url}/v1", capsys)
    assert (status, found["verdict"]) == (1, "wrong")
    asked, owner = found["fault"]["prompt"].split(), found["fault"]["owner"].split()
    assert asked != owner and asked[:15] == owner[:15]  # of the same group


def test_a_cache_without_salts_is_found(capsys, monkeypatch):
    with serving(runner(), shows_cached_tokens=True) as served:
        monkeypatch.setattr(cache_module, "root_key", lambda salt, keys: b"")
        status, found = ask(f"{served.url}/v1", capsys)
    assert (status, found["fault"]["pattern"]) == (1, "salts")
    assert found["fault"]["cached_tokens"] > 100


# Servers without sockets.


class Server:
    """An endpoint that computes log probabilities from the words of a prompt.

    keys     a function from the server and a prompt to the prompt that is read; None: the prompt itself
    noise    standard deviation of each log probability
    fields   names of fields that OpenAI does not have
    """

    def __init__(self, keys=None, noise=0.0, fields=(), has_logprobs=True, tells=False):
        self.keys, self.noise, self.fields = keys, noise, fields
        self.has_logprobs, self.tells = has_logprobs, tells
        self.random = random.Random(3)
        self.is_gone = 0  # requests that are refused
        self.to_come = 0  # requests until it goes away
        self.reply = None  # a function from a request to another answer to prompts, or an exception
        self.asked = []
        self.path = "/v1/completions"

    def __call__(self, request):
        self.to_come -= 1
        if self.is_gone or self.to_come == 0:
            self.is_gone = self.is_gone or 1
            self.is_gone -= 1
            raise httpx.ConnectError("refused", request=request)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "fake"}]})
        if request.url.path != self.path:
            return httpx.Response(404)
        if self.reply is not None:
            return self.reply(request)
        body = json.loads(request.content)
        if "messages" in body:
            body["prompt"] = body["messages"][0]["content"]
        is_wrong = body.get("cache_salt") == 5 and "cache_salt" in self.fields
        if is_wrong or ("logprobs" in body and not self.has_logprobs):
            return httpx.Response(400, text="wrong")
        prompt, is_echo = body["prompt"], "echo" in body and "echo" in self.fields
        is_cold = is_echo or ("cache_salt" in body and "cache_salt" in self.fields)
        self.asked.append(prompt)
        words = (prompt if is_cold or self.keys is None else self.keys(self, prompt)).split()
        text = " ".join(words[27:33]) if self.tells else "text"
        choice = {"text": text}
        if self.has_logprobs:
            seeds = [zip_of(word, i) for i, word in enumerate(words)]
            row = {t: -3 + sum((s * (k + 3) % 101 - 50) for s in seeds) / 4000 for k, t in enumerate(TOKENS)}
            tops = [{t: v + self.random.gauss(0, self.noise) for t, v in row.items()} for _ in range(2)]
            echoed = [" a"] if is_echo else []
            choice = {
                "text": prompt + text if is_echo else text,
                "logprobs": {"tokens": [*echoed, "t1", "t2"], "top_logprobs": [*([None] if is_echo else []), *tops]},
            }
        if "messages" in body:
            places = zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True)
            content = [
                {"token": token, "top_logprobs": [{"token": t, "logprob": v} for t, v in top.items()]}
                for token, top in places
            ]
            choice = {"message": {"content": text}, "logprobs": {"content": content}}
        return httpx.Response(200, json={"choices": [choice], "usage": {"completion_tokens": 2}})

    def prover(self):
        client = httpx.Client(base_url="http://fake/v1/", transport=httpx.MockTransport(self))
        made = Prover(Endpoint(client, None), random.Random(5), 80, 8, 5.0, lambda text: None)
        made.endpoint.probe()
        made.fit()
        made.calibrate()
        return made


def zip_of(word, place):
    return sum(map(ord, word)) * 31 + place * 17


def run_rounds(prover, rounds=3):
    for _ in range(rounds):
        for name in PATTERNS:
            prover.run(name)


def rounded_otherwise(server, prompt):
    """The keys of a prompt whose end is computed alone, by a kernel that rounds otherwise."""
    known = any(old[:200] == prompt[:200] for old in server.asked[:-1])
    return prompt + " city" if known else prompt


def test_a_server_that_rounds_otherwise_behind_cached_tokens_is_no_alarm():
    prover = Server(rounded_otherwise, fields=("echo",)).prover()
    assert 0 < prover.separation.noise < prover.separation.between / 4
    run_rounds(prover, 2)


@pytest.mark.parametrize(
    ("noise", "fields"),
    [(0.0, ()), (0.001, ()), (0.02, ("cache_salt",)), (0.02, ("echo",)), (0.5, ("echo", "cache_salt"))],
)
def test_noise_is_no_alarm(noise, fields):
    prover = Server(noise=noise, fields=fields).prover()
    run_rounds(prover, 2)
    assert sum(tally.answers for tally in prover.tallies.values()) > 70


def earlier_segments(server, prompt):
    """The keys of the first prompt with the same beginning, up to the middle."""
    known = next((old for old in server.asked if old[:100] == prompt[:100] and len(old) > 200), prompt)
    return known[:260] + prompt[260:]


@pytest.mark.parametrize(("noise", "fields"), [(0.0, ("echo",)), (0.001, ("echo", "cache_salt")), (0.002, ("echo",))])
def test_keys_of_a_part_of_another_prompt_name_it_and_the_part(noise, fields):
    with pytest.raises(Alarm) as found:
        run_rounds(Server(earlier_segments, noise, fields).prover())
    about = found.value.about
    assert about["owner"][:100] == about["prompt"][:100] and about["owner"] != about["prompt"]
    assert "words 1 to " in str(found.value)


def test_equal_answers_to_different_prompts_are_found_without_a_cold_answer():
    def keys(server, prompt):
        return next((old for old in server.asked if old[:100] == prompt[:100] and len(server.asked) > 40), prompt)

    with pytest.raises(Alarm):
        run_rounds(Server(keys).prover())


@pytest.mark.parametrize("keys", [None, earlier_segments])
def test_a_server_that_has_chats_only(keys):
    server = Server(keys, fields=("cache_salt",))
    server.path = "/v1/chat/completions"
    if keys is None:
        run_rounds(prover := server.prover())
        assert prover.endpoint.path == "chat/completions" and prover.endpoint.cold == "cache_salt"
    else:
        with pytest.raises(Alarm):
            run_rounds(server.prover())


def test_a_told_secret_names_its_owner_without_log_probabilities():
    right = Server(tells=True, has_logprobs=False)
    run_rounds(prover := right.prover())
    assert all(tally.told == tally.answers for name, tally in prover.tallies.items() if name != "salts")
    with pytest.raises(Alarm, match="used the keys of prompt"):
        run_rounds(Server(earlier_segments, tells=True, has_logprobs=False).prover())


def test_a_restarted_server_is_awaited_and_asked_again():
    server = Server(fields=("echo",))
    prover = server.prover()
    prover.run("repeat")
    server.is_gone = 3
    prover.run("concurrent")
    assert prover.restarts == 1 and prover.tallies["restart"].answers > 0


def test_a_server_that_goes_away_again_while_it_is_asked_again_is_awaited():
    server = Server(fields=("echo",))
    prover = server.prover()
    prover.run("repeat")
    server.is_gone, server.to_come = 1, 12
    prover.run("repeat")
    assert prover.restarts == 2


def test_old_keys_after_a_restart_are_found():
    server = Server(fields=("echo",))
    prover = server.prover()
    prover.run("repeat")
    stale = set(server.asked)
    server.keys = lambda _, prompt: prompt.replace("able", "zzzz") + " of another model" if prompt in stale else prompt
    server.is_gone = 1
    with pytest.raises(Alarm, match="pattern restart"):
        prover.run("concurrent")


def test_a_server_that_lists_its_models_and_drops_all_prompts_ends_the_command():
    def drop(request):
        raise httpx.ReadError("dropped", request=request)

    server = Server(fields=("echo",))
    prover = server.prover()
    server.reply, prover.wait = drop, 0.0
    with pytest.raises(UsageError, match="answered no prompt for 0 seconds: ReadError: dropped"):
        prover.run("repeat")


LOG_PROBABILITIES = {"tokens": ["t1"], "top_logprobs": [{"t1": None}]}
NO_COMPLETIONS = [
    b"<html>\x1b[2J",
    b"[]",
    b"null",
    b'{"error": "busy"}',
    b'{"choices": []}',
    b'{"choices": [5]}',
    b'{"choices": [{"text": null}]}',
    b'{"choices": [{"text": "a", "logprobs": "b"}]}',
    json.dumps({"choices": [{"text": "a", "logprobs": LOG_PROBABILITIES}]}).encode(),
    b'{"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "top_logprobs": [{"a": NaN}]}}]}',
]


@pytest.mark.parametrize("content", NO_COMPLETIONS)
def test_an_answer_that_is_no_completion_is_one_sentence(content):
    server = Server()
    prover = server.prover()
    server.reply = lambda request: httpx.Response(200, content=content)
    with pytest.raises(UsageError, match="status 200 without a completion: ") as found:
        prover.run("repeat")
    assert str(found.value).isprintable()
    with pytest.raises(UsageError, match="to completions and chats: "):
        prover.endpoint.probe()


def test_an_answer_with_a_wrong_encoding_is_one_sentence():
    server = Server()
    prover = server.prover()
    server.reply = lambda request: httpx.Response(
        200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(b"text")
    )
    with pytest.raises(UsageError, match="status 200 without a completion: Error"):
        prover.run("repeat")
    prover.endpoint.cancel("text", 1.0)


def test_patterns_without_an_answer_leave_the_verdict_unknown():
    server = Server(fields=("echo",))
    prover = server.prover()
    prover.run("repeat")
    server.reply = lambda request: httpx.Response(500)
    for name in PATTERNS:
        prover.run(name)
    assert _result(prover, None, 5, 1.0)["verdict"] == "unknown"
    assert _reason(prover) == "no request of these patterns was answered: concurrent, cancelled, pressed"
    server.reply = None
    for name in PATTERNS:
        prover.run(name)
    assert _result(prover, None, 5, 1.0)["verdict"] == "right"


# The oracle.


def test_a_spliced_prompt_has_the_beginning_of_one_and_the_end_of_the_other():
    one, two = new_group(random.Random(1), 0, 2, 200)
    assert spliced(one, two, 1).text == two.text and spliced(one, two, NUM_SEGMENTS + 1).text == one.text
    words = [prompt.text.split() for prompt in (one, two, spliced(one, two, 3))]
    assert {len(row) for row in words} == {len(words[0])} and words[2] != words[0] != words[1]


def test_distance_compares_no_token_behind_the_first_difference():
    same, left, right = {"a": -1.0, "b": -1.1}, {"c": -1.0}, {"c": -9.0}
    one = Answer("", ("a", "c"), (same, left))
    assert distance(one, Answer("", ("b", "c"), (same, right))) == 0
    assert distance(one, Answer("", ("a", "c"), (same, right))) == 8
    assert distance(Answer("", ("a",), ({"a": -np.inf},)), Answer("", ("a",), ({"a": -9999.0},))) == 0


def test_a_secret_of_two_prompts_is_told_by_its_own():
    one, two = new_group(random.Random(1), 0, 2, 200)
    secret = Answer(" ".join(two.parts[1].split()[:6]))
    assert told_secret(secret, one, [two]) is two and told_secret(secret, two, [one]) is None
    assert told_secret(Answer("able acid"), one, [two]) is None


def test_the_command_needs_httpx_and_says_so(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "httpx", None)
    assert main(["prove", "http://127.0.0.1:1/v1"]) == 2
    assert "pip install 'pagepool[prove]'" in capsys.readouterr().err


def test_a_wrong_address_is_one_line(capsys):
    assert main(["prove", "http://127.0.0.1:1/v1"]) == 2
    assert "127.0.0.1:1" in capsys.readouterr().err
