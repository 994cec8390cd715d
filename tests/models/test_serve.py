"""OpenAI's clients against the app without a model: answers, streams, errors, limits, disconnects. Tokens are bytes."""

import asyncio
import json
import logging
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from refusals import refuses

for name in ("starlette", "uvicorn", "prometheus_client", "httpx", "openai"):
    pytest.importorskip(name, reason=f"{name} is not installed: make test-models")

import httpx  # noqa: E402
import numpy as np  # noqa: E402
import openai  # noqa: E402
import uvicorn  # noqa: E402
from fake_runner import Bytes, FakeRunner, says  # noqa: E402

from pagepool import SchedulerConfig  # noqa: E402
from pagepool.cluster.front_end import FrontEnd  # noqa: E402
from pagepool.cluster.messages import Limits  # noqa: E402
from pagepool.engine import Engine, SamplingParams  # noqa: E402
from pagepool.errors import EngineClosed  # noqa: E402
from pagepool.serve.app import create_app  # noqa: E402
from pagepool.serve.connections import Connection  # noqa: E402
from pagepool.serve.protocol import Answer  # noqa: E402

ROOT = Path(__file__).parents[2]
SECONDS = 60
MOST = 200  # connections
JSON = b"content-type: application/json\r\n"


def says_no(name):
    """`parse_constant` of `json.loads` for strict JSON, without NaN and Infinity."""
    raise AssertionError(name)


def wait_until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "timeout"
        time.sleep(0.005)


class Served:
    """An engine behind HTTP: its address, OpenAI clients and raw requests."""

    def __init__(self, engine, port):
        self.engine, self.port = engine, port
        self.url = f"http://127.0.0.1:{port}"
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=SECONDS)
        headers = {"content-type": "application/json"}
        self.http = httpx.Client(base_url=self.url, timeout=SECONDS, headers=headers)

    def complete(self, prompt="x", **options):
        return self.openai.completions.create(model="fake", prompt=prompt, **options)

    def chat(self, content="x", **options):
        messages = [{"role": "user", "content": content}]
        return self.openai.chat.completions.create(model="fake", messages=messages, **options)

    def post(self, path="completions", **body):
        return self.http.post(f"/v1/{path}", json=body)

    def is_idle(self):
        return self.engine.num_requests == 0


@contextmanager
def serving(runner, tokenizer=None, **limits):
    with Engine(runner, tokenizer or Bytes()) as engine, listening(engine, **limits) as served:
        yield served
        wait_until(served.is_idle)
        engine.check()


@contextmanager
def listening(engine, **limits):
    """Serve an engine, or an object with its interface."""
    app = create_app(engine, "fake", **limits)
    connection = partial(Connection, most=MOST)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", http=connection))
    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        wait_until(lambda: server.started)
        served = Served(engine, sock.getsockname()[1])
        try:
            yield served
        finally:
            served.openai.close()
            served.http.close()
            server.should_exit = True
            thread.join(SECONDS)


@pytest.fixture(scope="module")
def served():
    with serving(FakeRunner(num_blocks=256, max_model_len=400), shows_cached_tokens=True) as found:
        yield found


@pytest.fixture(scope="module")
def slow():
    """Each step takes 10 ms."""
    with serving(FakeRunner(num_blocks=256, step_seconds=0.01)) as found:
        yield found


def test_a_completion_is_the_output_of_the_engine(served):
    answer = served.complete("hello", max_tokens=12, temperature=0.0)
    wanted = served.engine.submit("hello", SamplingParams(12)).result(SECONDS)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (wanted.text, "length", None)
    assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", "fake", "cmpl-")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 12, 17)
    assert served.complete("hello", temperature=0.0).usage.completion_tokens == 16  # OpenAI's default


def test_variables_of_the_chat_template_change_the_prompt(served):
    plain = served.chat("hi", max_tokens=1).usage.prompt_tokens
    body = {"chat_template_kwargs": {"thinks": False}}
    assert served.chat("hi", max_tokens=1, extra_body=body).usage.prompt_tokens == plain + len("think: no\n")
    answer = served.http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}], **body}).json()
    assert bytes(answer["tokens"]).decode() == "think: no\nuser: hi\nassistant: "
    refused = served.http.post("/tokenize", json={"prompt": "hi", **body})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template_kwargs"


class Thinker(Bytes):
    """Its template opens the thoughts of the model."""

    chat_template = "<think>...</think>"

    def apply_chat_template(self, messages, opens=True, **options):
        return super().apply_chat_template(messages, **options) + "<think>\n" * opens


@pytest.mark.parametrize("is_open", [True, False])
def test_thoughts_are_apart_from_the_answer(is_open):
    text = "\nwell,\n\nyes\n</think>\n\nYes. \u00e9"
    prompt = "user: x\nassistant: " + "<think>\n" * is_open
    say = says(text if is_open else "<think>" + text)
    runner = FakeRunner(num_blocks=256, next_token=lambda tokens: say(tokens[len(prompt) - 1 :]))
    body = {"chat_template_kwargs": {"opens": is_open}}
    with serving(runner, Thinker()) as served:
        message = served.chat(temperature=0.0, max_tokens=99, extra_body=body).choices[0].message
        assert (message.reasoning_content, message.content) == ("well,\n\nyes", "Yes. \u00e9")
        chunks = list(served.chat(temperature=0.0, max_tokens=99, n=2, stream=True, extra_body=body))
        deltas = [(choice.index, choice.delta) for chunk in chunks for choice in chunk.choices]
        for index in (0, 1):
            found = [delta for number, delta in deltas if number == index]
            assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in found) == "well,\n\nyes"
            assert "".join(delta.content or "" for delta in found) == "Yes. \u00e9"
        message = (
            served.chat(temperature=0.0, max_tokens=99, extra_body={**body, "include_reasoning": False})
            .choices[0]
            .message
        )
        assert message.content == "Yes. \u00e9" and not hasattr(message, "reasoning_content")
        cut = served.chat(temperature=0.0, max_tokens=12, extra_body=body).choices[0]
        assert cut.finish_reason == "length" and cut.message.content == ""
        assert text.strip().startswith(cut.message.reasoning_content.strip())


def test_a_model_without_thoughts_answers_with_their_tags(served):
    assert not hasattr(served.chat(max_tokens=5).choices[0].message, "reasoning_content")


def test_the_usage_says_why_tokens_were_not_cached(caplog):
    caplog.set_level(logging.INFO, "pagepool")
    config = SchedulerConfig(explain_misses=True)
    runner = FakeRunner(num_blocks=256)
    with Engine(runner, Bytes(), config=config) as engine, listening(engine, shows_misses=True) as served:
        prompt = "a" * 30
        asked = [
            (prompt, {}, {"never_seen": 28, "short": 2}),
            (prompt + "b", {}, {"short": 3}),
            ("a" * 21 + "c" * 9, {}, {"diverges": 8, "short": 2}),
            (prompt, {"cache_salt": "other"}, {"never_seen": 28, "short": 2}),
        ]
        for number, (text, options, wanted) in enumerate(asked):
            body = {"model": "fake", "prompt": text, "max_tokens": 1, **options}
            answer = served.http.post("/v1/completions", json=body, headers={"x-request-id": f"r{number}"})
            usage = answer.json()["usage"]
            details = usage["prompt_tokens_details"]
            assert {part["reason"]: part["tokens"] for part in details["miss"]} == wanted
            assert details["cached_tokens"] + sum(wanted.values()) == usage["prompt_tokens"]
        streamed = list(served.complete(prompt, max_tokens=1, stream=True, stream_options={"include_usage": True}))
        assert streamed[-1].usage.prompt_tokens_details.cached_tokens == 28
        metrics = served.http.get("/metrics").text
    missed = dict(re.findall(r'pagepool:prompt_tokens_missed_total\{reason="(\w+)"\} (\S+)', metrics))
    assert missed == {"never_seen": "28.0", "short": "11.0", "diverges": "8.0", "other_key": "28.0"}
    lines = [record.getMessage() for record in caplog.records if " tokens found" in record.getMessage()]
    assert lines[2].startswith(
        "the request r2: 20 of 30 tokens found, 8 differ from token 21 on (99 here, 97 there), 2"
    )
    assert "28 are cached for another salt or other keys" in lines[3]


def test_a_stream_is_the_same_text_in_pieces(served):
    whole = served.complete("hello", max_tokens=12, seed=7).choices[0].text
    chunks = list(served.complete("hello", max_tokens=12, seed=7, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 12 + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_chat_takes_the_chat_template(served):
    answer = served.chat("hello", max_tokens=12, temperature=0.0)
    wanted = served.engine.submit("user: hello\nassistant: ", SamplingParams(12)).result(SECONDS)
    assert (answer.object, answer.choices[0].message.role) == ("chat.completion", "assistant")
    assert answer.choices[0].message.content == wanted.text
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert served.chat(parts, max_tokens=12, temperature=0.0).choices[0].message.content == wanted.text
    assert len(served.chat("x", temperature=0.0).choices[0].message.content) == 400 - len("user: x\nassistant: ")


def test_a_chat_streams_its_role_first_and_its_usage_last(served):
    options = {"max_completion_tokens": 6, "seed": 7}
    whole = served.chat("hello", **options)
    *chunks, last = served.chat("hello", stream=True, stream_options={"include_usage": True}, **options)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert {chunk.usage for chunk in chunks} == {None}
    assert (last.choices, last.usage.completion_tokens, last.usage.prompt_tokens) == ([], 6, whole.usage.prompt_tokens)


def test_the_same_seed_gives_the_same_choices_and_choices_differ(served):
    first = served.complete(["a", "b"], n=3, max_tokens=8, seed=3)
    again = served.complete(["a", "b"], n=3, max_tokens=8, seed=3, stream=True)
    texts = [choice.text for choice in first.choices]
    streamed = [""] * 6
    for chunk in again:
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts and len(set(texts)) == 6
    assert [choice.index for choice in first.choices] == list(range(6))
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (2, 48)


def test_prompts_may_be_token_ids(served):
    text = served.complete("hi", max_tokens=5, temperature=0.0).choices[0].text
    assert served.complete([104, 105], max_tokens=5, temperature=0.0).choices[0].text == text
    both = served.complete([[104, 105], [104, 105]], max_tokens=5, temperature=0.0)
    assert [choice.text for choice in both.choices] == [text, text]


def test_logprobs_have_the_forms_of_both_interfaces(served):
    options = {"max_tokens": 4, "temperature": 0.0}
    (choice,) = served.complete("hello", logprobs=2, **options).choices
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text and found.text_offset == [0, 1, 2, 3]
    assert [top[token] for top, token in zip(found.top_logprobs, found.tokens, strict=True)] == found.token_logprobs
    assert {len(top) for top in found.top_logprobs} == {2}
    chunks = list(served.complete("hello", logprobs=2, stream=True, **options))[:-1]
    assert [chunk.choices[0].logprobs.token_logprobs[0] for chunk in chunks] == found.token_logprobs
    assert [chunk.choices[0].logprobs.text_offset[0] for chunk in chunks] == [0, 1, 2, 3]
    (choice,) = served.chat("hello", logprobs=True, top_logprobs=2, **options).choices
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    entry = choice.logprobs.content[0]
    assert entry.bytes == list(entry.token.encode())
    assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)


def test_log_probabilities_of_impossible_tokens_are_json():
    def next_token(tokens):
        logits = np.full(256, -np.inf, np.float32)
        logits[[97, 98]] = 1.0, 2.0
        return logits

    with serving(FakeRunner(next_token=next_token)) as served:
        request = {"prompt": "x", "logprobs": 4, "max_tokens": 2, "temperature": 0}
        whole = json.loads(served.post(**request).text, parse_constant=says_no)["choices"][0]["logprobs"]
        assert sorted(whole["top_logprobs"][0].values())[:2] == [-9999.0, -9999.0]
        lines = [line[6:] for line in served.post(**request, stream=True).text.split("\n\n") if line[6:7] == "{"]
        first = json.loads(lines[0], parse_constant=says_no)["choices"][0]["logprobs"]
        assert first["top_logprobs"] == whole["top_logprobs"][:1]
        found = served.complete("x", logprobs=0, max_tokens=1).choices[0].logprobs
        assert found.top_logprobs == [dict(zip(found.tokens, found.token_logprobs, strict=True))]


def of_prompt(served, prompt, count):
    """Return the log probabilities of a prompt, computed by the library."""
    params = SamplingParams(1, prompt_logprobs=count)
    return served.engine.submit(prompt, params).result(SECONDS).prompt_logprobs[1:]


def test_an_echo_is_the_prompt_with_its_log_probabilities_and_then_the_answer(served):
    options = {"temperature": 0.0, "max_tokens": 4, "logprobs": 2}
    (alone,) = served.complete("hello", **options).choices
    (choice,) = served.complete("hello", echo=True, **options).choices
    assert choice.text == "hello" + alone.text
    found = choice.logprobs
    assert found.tokens == [*"hello", *alone.logprobs.tokens]
    assert found.text_offset == list(range(9))
    wanted = of_prompt(served, "hello", 2)
    assert found.token_logprobs == [None, *(token.logprob for token in wanted), *alone.logprobs.token_logprobs]
    assert found.top_logprobs[0] is None and found.top_logprobs[5:] == alone.logprobs.top_logprobs
    for top, token in zip(found.top_logprobs[1:5], wanted, strict=True):
        assert top == {
            chr(other): value for other, value in {**token.top_logprobs, token.token_id: token.logprob}.items()
        }

    chunks = [chunk.choices[0] for chunk in served.complete("hello", echo=True, stream=True, **options)]
    assert [chunk.text for chunk in chunks] == ["hello", *alone.text, ""]
    parts = [chunk.logprobs for chunk in chunks[:-1]]
    assert [value for part in parts for value in part.token_logprobs] == found.token_logprobs
    assert [value for part in parts for value in part.text_offset] == found.text_offset


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_of_no_new_tokens_is_the_prompt_alone(served, stream):
    def answers(**options):
        found = served.complete(["hello", [104, 105]], echo=True, max_tokens=0, n=2, stream=stream, **options)
        chunks = [chunk.choices[0] for chunk in found] if stream else found.choices
        if not stream:
            assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (7, 0)
        return [[chunk for chunk in chunks if chunk.index == index] for index in range(4)]

    assert ["".join(chunk.text for chunk in row) for row in answers()] == ["hello", "hello", "hi", "hi"]
    for row in answers(logprobs=0):
        assert row[-1].finish_reason == "length"
        wanted = of_prompt(served, row[0].text, 0)
        assert row[0].logprobs.token_logprobs == [None, *(token.logprob for token in wanted)]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_prompt_logprobs_have_vllm_s_form(served, path):
    is_chat = path != "completions"
    prompt = {"messages": [{"role": "user", "content": "hey"}]} if is_chat else {"prompt": "hey"}
    tokens = served.http.post("/tokenize", json=prompt).json()["tokens"]
    answer = served.post(path, **prompt, max_tokens=2, temperature=0, prompt_logprobs=2).json()
    found = answer["prompt_logprobs"] if is_chat else answer["choices"][0]["prompt_logprobs"]
    assert found[0] is None and "prompt_logprobs" not in answer["choices" if is_chat else "usage"]
    for entries, token in zip(found[1:], of_prompt(served, tokens, 2), strict=True):
        own = {
            "logprob": max(token.logprob, -9999.0),
            "rank": token.rank,
            "decoded_token": Bytes().decode([token.token_id]),
        }
        assert list(entries) == list(map(str, {token.token_id: 0, **token.top_logprobs}))
        assert entries[str(token.token_id)] == own
        assert {entry["rank"] for entry in entries.values()} == {1, 2, token.rank}
    if not is_chat:
        assert served.post(path, **prompt, max_tokens=0, prompt_logprobs=0).json()["choices"][0]["text"] == ""


def test_the_echo_of_all_choices_is_bounded(served, monkeypatch):
    monkeypatch.setattr("pagepool.serve.app.MAX_ECHOED", 1000)
    assert served.post(prompt=["x" * 250] * 2, n=2, max_tokens=1, echo=True).status_code == 200
    response = served.post(prompt=["x" * 250, "x" * 251], n=2, max_tokens=1, echo=True)
    assert response.status_code == 400 and "at most 1000, not 1002" in response.text


def test_log_probabilities_of_choices_are_bounded(served):
    assert served.post(prompt="x", n=24, logprobs=20, max_tokens=1).status_code == 200
    response = served.post(prompt="x", n=25, logprobs=20, max_tokens=1)
    assert response.status_code == 400 and "at most 512, not 525" in response.text


def test_the_default_length_is_cut_to_the_room_and_a_given_one_is_not(served):
    short, full = served.complete("x" * 395, temperature=0.0), served.complete("x" * 5, temperature=0.0)
    assert (short.usage.completion_tokens, full.usage.completion_tokens) == (5, 16)
    assert served.post(prompt="x" * 395, max_tokens=16).status_code == 400


def test_the_model_s_own_defaults_are_those_of_requests():
    class Model:
        """A config that is its own generation_config."""

        eos_token_id = None

        def __init__(self, **found):
            self.found, self.generation_config = found, self

        def to_diff_dict(self):
            return self.found

    runner = FakeRunner()
    runner.model = Model(top_k=1)
    with serving(runner) as served:
        options = {"max_tokens": 12, "seed": 3}
        greedy = served.complete("hello", max_tokens=12, temperature=0.0).choices[0].text
        assert served.complete("hello", **options).choices[0].text == greedy
        assert served.complete("hello", **options, extra_body={"top_k": 0}).choices[0].text != greedy
    runner = FakeRunner()
    runner.model = Model(top_p=0.0)
    with Engine(runner, Bytes()) as engine, refuses(ValueError, "generation_config", "top_p must be above 0", "0.0"):
        create_app(engine, "fake")


def test_stop_strings_end_an_answer():
    with serving(FakeRunner(next_token=says("one two three"))) as served:
        answer = served.complete("x", max_tokens=30, temperature=0.0, stop=["two"])
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one ", "stop")
        answer = served.complete("x", max_tokens=30, temperature=0.0)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one two three", "stop")
        answer = served.complete("x", max_tokens=30, temperature=0.0, extra_body={"stop_token_ids": [ord("w")]})
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one t", "stop")


def test_the_model_is_listed(served):
    assert [model.id for model in served.openai.models.list()] == ["fake"]
    assert served.openai.models.retrieve("fake").object == "model"
    with refuses(openai.NotFoundError, "other", "fake"):
        served.openai.models.retrieve("other")
    with refuses(openai.NotFoundError, "other", "fake"):
        served.openai.completions.create(model="other", prompt="x")


# test_serve_fields.py tests the limits of single fields.
BAD = [
    ({}, "prompt is missing"),
    ({"prompt": None}, "prompt is missing"),
    ({"prompt": ""}, "prompt must have at least 1 token, not 0"),
    ({"prompt": [999]}, "must be from 0 to 255, not 999"),
    ({"prompt": ["x", ""]}, "prompt must have at least 1 token, not 0"),
    ({"prompt": "x" * 400}, "the prompt is too long: 400 tokens and 1 new ones, the limit of the model is 400"),
    (
        {"prompt": "x" * 390, "max_tokens": 20},
        "the prompt is too long: 390 tokens and 20 new ones, the limit of the model is 400",
    ),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens must be at least 1, or 0 with echo or prompt_logprobs, not 0"),
    ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs is not supported with stream"),
    ({"prompt": ["x" * 300] * 90, "prompt_logprobs": 9}, "must be at most 262144, not 270000"),
    ({"prompt": "x", "logit_bias": {"256": 1}}, "a token of logit_bias must be below 256, not 256"),
    ({"prompt": "x", "stop_token_ids": [256]}, "a token of stop_token_ids must be below 256, not 256"),
    ({"prompt": "x", "messages": []}, "unknown parameter: messages"),
]
BAD_CHATS = [
    ({}, "messages is missing"),
    ({"messages": [{"role": "user"}]}, "the content of messages[0] must be text"),
    ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "top_logprobs needs logprobs to be true"),
    ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools[0] must be an object"),
    (
        {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0},
        "max_completion_tokens must be at least 1, not 0",
    ),
]


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [("completions", *bad) for bad in BAD] + [("chat/completions", *bad) for bad in BAD_CHATS],
)
def test_a_bad_request_gets_one_sentence_and_runs_nothing(served, path, body, sentence):
    before = served.engine.stats()["ended"]
    response = served.http.post(f"/v1/{path}", content=json.dumps(body))
    assert response.status_code == 400
    error = response.json()["error"]
    assert sentence in error["message"] and error["type"] == "invalid_request_error"
    wait_until(served.is_idle)
    after = served.engine.stats()["ended"]
    assert (after["length"], after["stop"]) == (before["length"], before["stop"])


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"", 400, "the body is not JSON"),
        (b"{", 400, "the body is not JSON"),
        (b'{"prompt": "\xff"}', 400, "the body is not UTF-8: byte 12 is invalid"),
        (b"[1]", 400, "the body must be a JSON object, not list"),
        (b"[" * 200_000, 400, "the body"),
        (b" " * ((16 << 20) + 1), 413, "at most 16777216 bytes"),
    ],
    ids=["empty", "cut off", "not UTF-8", "no object", "deep", "large"],
)
def test_a_body_that_cannot_be_read_gets_one_sentence(served, body, status, sentence):
    response = served.http.post("/v1/completions", content=body)
    assert response.status_code == status and sentence in response.json()["error"]["message"]


def test_unknown_paths_and_methods_get_json(served):
    assert served.http.get("/v1/nothing").json()["error"]["message"] == "GET /v1/nothing: Not Found"
    response = served.http.get("/v1/completions")
    assert response.status_code == 405 and "Method Not Allowed" in response.json()["error"]["message"]


def test_parameters_without_effect_are_accepted(served):
    response = served.post(
        prompt="x",
        max_tokens=2,
        user="me",
        metadata={"a": "b"},
        frequency_penalty=0,
        presence_penalty=None,
        echo=False,
        best_of=1,
        logit_bias={},
    )
    assert response.status_code == 200


def test_a_prompt_begins_with_cached_pages_unless_its_salt_is_another(served):
    prompt = "a prompt that is longer than some blocks"

    def cached(**extra):
        return served.complete(prompt, max_tokens=1, extra_body=extra).usage.prompt_tokens_details.cached_tokens

    assert [cached(cache_salt="one"), cached(cache_salt="one"), cached(cache_salt="two")] == [0, 36, 0]


def test_a_stream_that_its_client_closes_is_cancelled(slow):
    stream = slow.complete("x", max_tokens=200, stream=True)
    next(iter(stream))
    stream.close()
    wait_until(slow.is_idle)
    assert slow.engine.stats()["ended"]["abort"] >= 1


def test_an_answer_without_a_client_is_cancelled(slow):
    before = slow.engine.stats()["ended"]["abort"]
    body = json.dumps({"prompt": "x", "max_tokens": 250, "n": 2}).encode()
    with socket.create_connection(("127.0.0.1", slow.port)) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n%b" % (JSON, len(body), body)
        )
        wait_until(lambda: slow.engine.num_requests == 2)
    wait_until(slow.is_idle)
    assert slow.engine.stats()["ended"]["abort"] == before + 2


def test_a_disconnect_during_the_body_disturbs_no_other_request(slow):
    with socket.create_connection(("127.0.0.1", slow.port)) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + JSON + b"content-length: 100\r\n\r\n{")
    assert slow.post(prompt="x", max_tokens=1).status_code == 200


@pytest.mark.parametrize("version", ["2.3", "2.4"])
def test_a_disconnect_cancels_with_every_asgi_version(version):
    """Before ASGI 2.4 a disconnect is a message; since 2.4 `send` raises."""
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": version}, "http_version": "1.1"}
    scope |= {"method": "POST", "path": "/v1/completions", "raw_path": b"/", "query_string": b""}
    scope["headers"] = [(b"content-type", b"application/json")]
    body = {"type": "http.request", "body": b'{"prompt": "x", "max_tokens": 200, "stream": true}', "more_body": False}

    async def call(app):
        messages, left = [body], asyncio.Event()

        async def receive():
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if message.get("body"):
                left.set()
                if version == "2.4":
                    raise OSError("closed")

        await app(dict(scope), receive, send)

    with Engine(FakeRunner(step_seconds=0.01), Bytes()) as engine:
        asyncio.run(asyncio.wait_for(call(create_app(engine, "fake")), SECONDS))
        wait_until(lambda: engine.num_requests == 0)
        assert engine.stats()["ended"]["abort"] == 1
        engine.check()


def test_many_clients_get_their_own_answers(served):
    async def ask(client, number):
        stream = await client.completions.create(
            model="fake", prompt=f"number {number}", max_tokens=16, temperature=0.0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(24)))

    wanted = [served.engine.submit(f"number {number}", SamplingParams(16)) for number in range(24)]
    assert asyncio.run(ask_all()) == [generation.result(SECONDS).text for generation in wanted]


class Slow(Bytes):
    """Records texts; texts that begin with "slow" wait for the event `may`."""

    def __init__(self):
        self.may, self.seen = threading.Event(), []

    def __deepcopy__(self, memo):
        return self

    def get_vocab(self):
        return {bytes([token]).decode("latin-1"): token for token in range(256)}

    def __call__(self, text, **options):
        self.seen.append(text)
        if text.startswith("slow"):
            assert self.may.wait(SECONDS)
        return super().__call__(text, **options)


def test_a_text_that_must_be_too_long_is_refused_before_it_is_tokenized():
    tokenizer = Slow()
    with serving(FakeRunner(num_blocks=256, max_model_len=400), tokenizer) as served:
        for path, asked in (("completions", {"prompt": "x" * 1_000_000}), ("completions", {"prompt": [1] * 1_000_000})):
            response = served.post(path, **asked)
            assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
            assert "1000000" in response.json()["error"]["message"] and "400" in response.json()["error"]["message"]
        response = served.post("chat/completions", messages=[{"role": "user", "content": "x" * 1_000_000}])
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert tokenizer.seen == []
        assert served.post(prompt="x" * 399, max_tokens=1).status_code == 200


def test_texts_in_tokenization_count_towards_the_limit_and_block_no_other_request():
    tokenizer = Slow()
    with serving(FakeRunner(), tokenizer, max_requests=3) as served, ThreadPoolExecutor(2) as threads:
        slow = [threads.submit(served.post, prompt=f"slow {number}", max_tokens=1) for number in range(2)]
        wait_until(lambda: len(tokenizer.seen) == 2)
        assert served.http.get("/health").status_code == 200
        assert served.http.get("/metrics").status_code == 200
        assert served.post(prompt=[1, 2], n=2).status_code == 429
        tokenizer.may.set()
        assert [each.result(SECONDS).status_code for each in slow] == [200, 200]
        assert served.post(prompt=[1, 2], n=2).status_code == 200


def test_bad_words_are_tokenized_outside_of_submit():
    """They wait for a free tokenizer, and no other request waits for them."""
    tokenizer = Slow()
    with serving(FakeRunner(), tokenizer) as served, ThreadPoolExecutor(3) as threads:
        slow = [threads.submit(served.post, prompt=f"slow {number}", max_tokens=1) for number in range(2)]
        wait_until(lambda: len(tokenizer.seen) == 2)
        waiting = threads.submit(served.post, prompt=[1, 2], max_tokens=1, bad_words=["word"])
        time.sleep(0.1)
        assert served.post(prompt=[1, 2], max_tokens=1).status_code == 200 and not waiting.done()
        tokenizer.may.set()
        assert [each.result(SECONDS).status_code for each in (*slow, waiting)] == [200, 200, 200]


def test_a_text_of_a_disconnected_client_is_not_tokenized():
    tokenizer = Slow()
    with serving(FakeRunner(), tokenizer) as served:
        clients = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(6)]
        for number, client in enumerate(clients):
            body = json.dumps({"prompt": f"slow {number}"}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n" % (JSON, len(body))
            client.sendall(head + body)
        wait_until(lambda: len(tokenizer.seen) == 2)
        time.sleep(0.2)  # until the server has read all requests
        for client in clients:
            client.close()
        time.sleep(0.2)
        tokenizer.may.set()
        assert served.complete("after", max_tokens=1).usage.prompt_tokens == 5
        assert len([text for text in tokenizer.seen if text.startswith("slow")]) == 2


def test_a_full_queue_gets_429_and_the_others_go_on():
    with serving(FakeRunner(step_seconds=0.01), max_requests=2) as served:
        stream = served.complete("x", max_tokens=100, n=2, stream=True)
        next(iter(stream))
        response = served.post(prompt="x")
        assert response.status_code == 429 and response.headers["retry-after"] == "1"
        assert "2 requests run or wait, 1 more exceed 2" in response.json()["error"]["message"]
        with pytest.raises(openai.RateLimitError):
            served.complete("x")
        assert sum(1 for chunk in stream if chunk.choices[0].finish_reason == "length") == 2
        never = served.post(prompt="x", n=3)
        assert never.status_code == 400 and "retry-after" not in never.headers
        assert "2 choices" in never.json()["error"]["message"] and "not 3" in never.json()["error"]["message"]
        assert served.post(prompt="x", max_tokens=1).status_code == 200


@pytest.mark.parametrize("n", [1, 2])
def test_requests_that_come_at_one_moment_do_not_pass_the_limit(n):
    class Slow(Bytes):
        """So slow that all requests arrive before the first one is encoded."""

        def __call__(self, text, **options):
            time.sleep(0.01)
            return super().__call__(text)

    most = []
    with serving(FakeRunner(step_seconds=0.01), Slow(), max_requests=5) as served:
        submit = served.engine.submit

        def counted(*arguments, **options):
            generation = submit(*arguments, **options)
            most.append(served.engine.num_requests)
            return generation

        served.engine.submit = counted

        async def ask_all():
            async with httpx.AsyncClient(base_url=served.url, timeout=SECONDS) as client:
                body = {"prompt": "x", "max_tokens": 100, "n": n}
                found = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(24)))
                return sorted(response.status_code for response in found)

        assert asyncio.run(ask_all()) == [200] * (5 // n) + [429] * (24 - 5 // n)
        assert max(most) == 5 // n * n
        assert served.post(prompt="x", max_tokens=1).status_code == 200


def test_a_request_that_takes_too_long_gets_503():
    with serving(FakeRunner(step_seconds=0.02, num_blocks=256), timeout=1.0) as served:
        response = served.post(prompt="x", max_tokens=500)
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "the request took more than 1 s"
        with refuses(openai.APIError, "1 s"):
            list(served.complete("x", max_tokens=500, stream=True))
        assert served.post(prompt="x", max_tokens=1).status_code == 200


def test_a_limit_of_prompts_can_be_set():
    with serving(FakeRunner(), max_prompt_tokens=10) as served:
        assert served.post(prompt="x" * 10, max_tokens=1).status_code == 200
        error = served.post(prompt="x" * 11).json()["error"]
        assert error["message"] == "the prompt is too long: 11 tokens, the limit of the server is 10"
        assert error["code"] == "context_length_exceeded"
        error = served.post(prompt="x" * 10, max_tokens=1000).json()["error"]
        assert "256" in error["message"]  # the pool's capacity in tokens


def logged_in(caplog):
    """Return the records of the server without its access log, which an earlier test may have switched on."""
    return [record for record in caplog.records if record.name == "pagepool"]


def test_a_model_that_fails_is_logged_and_its_text_is_not_sent(caplog):
    failures = [ArithmeticError("secret"), None, ArithmeticError("secret")]
    with serving(FakeRunner(fails=lambda batch: failures.pop(0) if failures else None)) as served:
        response = served.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "mine"})
        assert response.status_code == 500
        assert "mine" in response.json()["error"]["message"] and "secret" not in response.text
        with pytest.raises(openai.APIError) as caught:
            list(served.complete("x", max_tokens=3, stream=True))
        name = re.search("[0-9a-f]{32}", str(caught.value))[0]
        assert "secret" not in str(caught.value)
        assert served.post(prompt="x", max_tokens=3).status_code == 200
    logged = logged_in(caplog)
    # For each failed step the engine logs the traceback, and the server the id that the client received.
    messages = [record.getMessage() for record in logged]
    assert len(messages) == 4 and ["mine" in text for text in messages] == [True, True, False, False]
    assert name in messages[3]
    assert [record.exc_info and str(record.exc_info[1]) for record in logged] == ["secret", None] * 2


def test_parameters_that_leave_no_token_are_the_client_s_fault(served, caplog):
    body = {"prompt": "x", "max_tokens": 4, "min_tokens": 2, "stop_token_ids": list(range(256))}
    response = served.post(**body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "stop_token_ids"
    *_, last = [line for line in served.post(**body, stream=True).text.split("\n\n") if line]
    assert json.loads(last.removeprefix("data: "))["error"]["param"] == "stop_token_ids"
    response = served.post(prompt="x", bad_words=[chr(letter) for letter in range(33, 127)], logit_bias={"32": -100})
    assert response.status_code == 200 and set(response.json()["choices"][0]["text"]) == {" "}
    assert not logged_in(caplog)


@pytest.mark.parametrize("name", ["piece", "first", "last", "total"])
def test_a_chunk_that_cannot_be_made_ends_its_stream_and_is_logged_once(served, caplog, monkeypatch, name):
    def fail(*arguments):
        raise KeyError("secret")

    monkeypatch.setattr(Answer, name, fail)
    body = {"prompt": "x", "max_tokens": 4, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    response = served.post(**body)
    error = json.loads(response.text.rstrip().rpartition("data: ")[2])["error"]
    assert response.status_code == 200 and error["type"] == "server_error" and "secret" not in response.text
    (record,) = logged_in(caplog)
    assert record.exc_info[0] is KeyError and response.headers["x-request-id"] in record.getMessage()
    assert response.headers["x-request-id"] in error["message"]
    wait_until(served.is_idle)


def test_a_failed_answer_is_logged_once(served, caplog, monkeypatch):
    monkeypatch.setattr(Answer, "content", lambda *arguments: 1 / 0)
    response = served.post(prompt="x", max_tokens=1)
    assert response.status_code == 500 and "division" not in response.text
    (record,) = logged_in(caplog)
    assert record.exc_info[0] is ZeroDivisionError and response.headers["x-request-id"] in record.getMessage()


def test_parameters_are_checked_once_for_all_choices(served, monkeypatch):
    checks, check = [], SamplingParams.__post_init__
    monkeypatch.setattr(SamplingParams, "__post_init__", lambda params: (checks.append(params), check(params)))
    counts = []
    for n in (1, 32):
        assert served.post(prompt=["x", "y"], n=n, max_tokens=1, stop_token_ids=[1] * 1024).status_code == 200
        counts.append(len(checks))
    assert counts[1] == 2 * counts[0]


def test_a_dead_stepping_thread_is_logged_and_the_server_says_so(caplog, monkeypatch):
    with serving(FakeRunner()) as served:

        def fail(*args):
            raise ArithmeticError("secret")

        monkeypatch.setattr(served.engine.scheduler, "schedule", fail, raising=False)
        response = served.post(prompt="x", max_tokens=3)
        assert response.status_code == 500 and "secret" not in response.text
        wait_until(lambda: served.engine.failure is not None)
        assert str(served.engine.failure) == "secret"
        assert served.http.get("/health").json() == served.http.get("/ready").json() == {"status": "failed"}
        with pytest.raises(EngineClosed):
            served.engine.reset_prefix_cache()
        response = served.post(prompt="x", max_tokens=3)
        assert response.status_code == 503 and "the engine has failed" in response.json()["error"]["message"]
    (record,) = [record for record in caplog.records if record.name == "pagepool" and record.levelname == "CRITICAL"]
    assert str(record.exc_info[1]) == "secret"


def test_a_server_whose_engine_drains_takes_nothing_new_and_is_alive():
    with serving(FakeRunner(step_seconds=0.01)) as served:
        assert served.http.get("/health").json() == {"status": "ok"}
        stream = served.complete("x", max_tokens=30, stream=True)
        next(iter(stream))
        served.engine.drain(0)
        found = [served.http.get("/health"), served.http.get("/ready"), served.post(prompt="x")]
        assert [answer.status_code for answer in found] == [200, 503, 503]
        assert found[1].json() == {"status": "draining"} and "shutting down" in found[2].json()["error"]["message"]
        assert list(stream)[-1].choices[0].finish_reason == "length"


def test_a_request_that_the_engine_aborts_gets_503():
    with serving(FakeRunner(step_seconds=0.01, num_blocks=256)) as served:
        found = []
        thread = threading.Thread(target=lambda: found.append(served.post(prompt="x", max_tokens=500)))
        thread.start()
        wait_until(lambda: served.engine.num_requests == 1)
        served.engine.scheduler.cancel(1)
        thread.join(SECONDS)
        assert found[0].status_code == 503 and "aborted" in found[0].json()["error"]["message"]


def test_a_cluster_without_workers_answers_503_after_its_limit():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    limits = Limits(None, None, vocab_size=256, block_size=4, stop_token_ids=frozenset())
    cluster = FrontEnd(limits, Bytes(), None, loop=loop, max_wait=0.1)
    try:
        with listening(cluster) as served:
            for options in ({}, {"stream": True}):
                response = served.post(prompt="x", max_tokens=3, **options)
                assert "there was no worker for 0.1 s" in response.text
                assert response.status_code == (200 if options else 503)  # of a stream, the error is the only event
            assert cluster.num_requests == 0
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(SECONDS)
        loop.close()


def test_a_tokenizer_without_a_chat_template_is_said_to_have_none(monkeypatch):
    monkeypatch.setattr(Bytes, "chat_template", None)
    with serving(FakeRunner()) as served:
        response = served.post("chat/completions", messages=[{"role": "user", "content": "x"}])
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "the model's tokenizer has no chat template"


def test_a_request_id_is_the_engine_s(served, monkeypatch):
    found, submit = [], served.engine.submit

    def noting(request, **options):
        found.append(options["request_id"])
        return submit(request, **options)

    monkeypatch.setattr(served.engine, "submit", noting)
    for n in (1, 2):
        headers = {"x-request-id": "mine"}
        assert served.http.post("/v1/completions", json={"prompt": "x", "n": n}, headers=headers).status_code == 200
    served.post(prompt="x")
    assert found == ["mine", "mine/0", "mine/1", None]
    for own, sentence in (("x" * 257, "at most 256 characters, not 257"), ("a\x9bb", "printable ASCII characters")):
        response = served.http.post(
            "/v1/completions", json={"prompt": "x"}, headers=[(b"x-request-id", own.encode("latin-1"))]
        )
        assert response.status_code == 400 and sentence in response.text
        assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])


def test_drafts_are_counted_in_the_usage_and_in_the_metrics():
    text = "one two three. " * 8
    with Engine(FakeRunner(256, next_token=says(text + "?" * 20)), Bytes(), drafts="ngram") as engine:
        engine._drafts.costs.costs = lambda first, last: [1.0] * (last - first + 1)  # whatever the machine's steps take
        with listening(engine) as served:
            usage = served.complete("x", max_tokens=len(text)).usage
            counts = [usage.completion_tokens_details.accepted_prediction_tokens]
            counts.append(usage.completion_tokens_details.rejected_prediction_tokens)
            assert counts[0] > len(text) / 2 and usage.completion_tokens == len(text)
            *_, last = served.complete("x", max_tokens=len(text), stream=True, stream_options={"include_usage": True})
            counts[0] += last.usage.completion_tokens_details.accepted_prediction_tokens
            counts[1] += last.usage.completion_tokens_details.rejected_prediction_tokens
            assert served.complete("x", max_tokens=1).usage.completion_tokens_details is None
            found = dict(line.rsplit(" ", 1) for line in served.http.get("/metrics").text.splitlines())
            assert float(found["pagepool:spec_decode_num_accepted_tokens_total"]) == counts[0]
            assert float(found["pagepool:spec_decode_num_draft_tokens_total"]) == sum(counts)


def test_metrics_show_requests_tokens_and_latencies():
    with serving(FakeRunner()) as served:
        served.complete("hello", max_tokens=4)
        list(served.complete("hello", max_tokens=4, stream=True))
        served.post(prompt="")
        text = served.http.get("/metrics").text
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        found = {name: float(value) for name, value in lines.items()}
        assert found["pagepool:prompt_tokens_total"] == 10 and found["pagepool:generation_tokens_total"] == 8
        assert found['pagepool:requests_total{reason="length"}'] == 2
        assert found['pagepool:http_responses_total{status="200"}'] == 2
        assert found['pagepool:http_responses_total{status="400"}'] == 1
        assert found["pagepool:time_to_first_token_seconds_count"] == 2
        assert found["pagepool:e2e_request_latency_seconds_count"] == 2
        assert found['pagepool:kv_blocks{pool="kv",state="free"}'] > 0
        assert found['pagepool:prefix_cache_queries_total{cache="prefix"}'] >= 2
