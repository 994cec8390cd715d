"""Structured output over HTTP, as OpenAI, vLLM and llama-server write it."""

import json
import re
import threading
import time

import numpy as np
import pytest
from test_serve import serving

for name in ("starlette", "uvicorn", "httpx", "openai", "llguidance"):
    pytest.importorskip(name, reason=f"{name} is not installed: make test-models")

from fake_runner import VOCABULARY, FakeRunner  # noqa: E402
from json_schemas import HOSTILE  # noqa: E402

from pagepool.engine.structured import Grammars  # noqa: E402

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "maximum": 99, "minimum": 0}, "y": {"enum": ["up", "down"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "point", "strict": True, "schema": POINT}}


def babble(tokens):
    """Random logits of all tokens; a text that may end does so."""
    logits = np.random.default_rng(len(tokens)).standard_normal(VOCABULARY).astype(np.float32)
    logits[0] += 9.0
    return logits


def is_point(text):
    found = json.loads(text)
    return set(found) == {"x", "y"} and 0 <= found["x"] <= 99 and found["y"] in ("up", "down")


FORMS = [
    ({"response_format": SCHEMA}, is_point),
    ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
    ({"response_format": {"type": "json_object", "schema": POINT}}, is_point),
    ({"structured_outputs": {"json": POINT}}, is_point),
    ({"structured_outputs": {"json": json.dumps(POINT), "disable_any_whitespace": False}}, is_point),
    ({"structured_outputs": {"json_object": True}}, lambda text: isinstance(json.loads(text), dict)),
    ({"structured_outputs": {"regex": "[a-c]{4}"}}, re.compile("[a-c]{4}").fullmatch),
    ({"structured_outputs": {"choice": ["left", "right"]}}, ["left", "right"].__contains__),
    ({"structured_outputs": {"grammar": "start: /[0-9]/ /[x-z]/"}}, re.compile("[0-9][x-z]").fullmatch),
    ({"json_schema": POINT}, is_point),
    ({"grammar": 'root ::= "a" [0-9] | "b"'}, re.compile("a[0-9]|b").fullmatch),
]


@pytest.fixture(scope="module")
def served():
    with serving(FakeRunner(num_blocks=512, max_model_len=600, next_token=babble)) as found:
        yield found


def asked(path, **more):
    base = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    return {**base, "max_tokens": 400, "seed": 1, **more}


def texts(answer):
    return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in answer["choices"]]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("form", "is_right"), FORMS)
def test_every_form_gives_texts_of_its_grammar_whole_and_streamed(served, path, form, is_right):
    answer = served.http.post(path, json=asked(path, n=3, **form)).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 3
    assert all(map(is_right, texts(answer)))
    lines = served.http.post(path, json=asked(path, n=3, stream=True, **form)).text.split("\n\n")
    pieces = ["", "", ""]
    for line in lines[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            pieces[choice["index"]] += choice["delta"].get("content", "") if path == CHAT else choice["text"]
    assert pieces == texts(answer) and lines[-2] == "data: [DONE]"


def test_openai_s_client_parses_an_answer(served):
    found = served.openai.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hi"}],
        response_format=SCHEMA,
        max_tokens=400,
        logprobs=True,
    )
    assert is_point(found.choices[0].message.content) and found.choices[0].logprobs.content


def test_the_limit_of_tokens_gives_an_incomplete_text_with_the_reason_length(served):
    answer = served.http.post(CHAT, json=asked(CHAT, response_format=SCHEMA) | {"max_tokens": 5}).json()
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("form", "param", "word"),
    [
        ({"json_schema": {"uniqueItems": True, "type": "array"}}, "json_schema", "uniqueItems"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format",
            "not",
        ),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
        ({"grammar": "root ::= x"}, "grammar", "grammar"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "structural_tag"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "grammar", "json_schema"),
    ],
)
def test_what_is_not_supported_is_refused_by_the_name_of_field_and_keyword(served, form, param, word):
    before = served.engine.stats()["ended"]
    for path in (COMPLETIONS, CHAT):
        for stream in (False, True):
            response = served.http.post(path, json=asked(path, stream=stream, **form))
            error = response.json()["error"]
            assert response.status_code == 400 and error["param"] == param and word in error["message"]
    assert served.engine.stats()["ended"] == before and served.engine.num_requests == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_has_no_token_left_says_so_in_its_field(served, stream):
    body = asked(CHAT, stream=stream, structured_outputs={"choice": ["abc"]}, bad_words=["b"])
    response = served.http.post(CHAT, json=body)
    text = response.text if not stream else response.text.split("\n\n")[-2].removeprefix("data: ")
    error = json.loads(text)["error"]
    assert error["param"] == "structured_outputs" and "structured" in error["message"]


def test_a_neutral_value_changes_nothing(served):
    plain = served.http.post(COMPLETIONS, json=asked(COMPLETIONS)).json()
    body = asked(COMPLETIONS, response_format={"type": "text"}, grammar="", structured_outputs=None)
    assert texts(served.http.post(COMPLETIONS, json=body).json()) == texts(plain)


def test_a_grammar_that_takes_long_holds_up_no_request_with_another(served, monkeypatch):
    known = asked(COMPLETIONS, structured_outputs={"choice": ["known"]})
    served.http.post(COMPLETIONS, json=known)
    ending, checked = threading.Event(), Grammars._checked

    def slow(self, structured):
        if structured.kind == "regex":
            ending.wait(60)
        return checked(self, structured)

    monkeypatch.setattr(Grammars, "_checked", slow)
    bodies = [asked(COMPLETIONS, structured_outputs={"regex": f"x{number}"}) for number in range(4)]
    answers = []
    threads = [
        threading.Thread(target=lambda body=body: answers.append(served.http.post(COMPLETIONS, json=body, timeout=60)))
        for body in bodies
    ]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.05)
        assert texts(served.http.post(COMPLETIONS, json=known).json()) == ["known"]
        assert served.http.post(COMPLETIONS, json=asked(COMPLETIONS)).status_code == 200
        assert not answers
    finally:
        ending.set()
        for thread in threads:
            thread.join(60)
    assert sorted(texts(answer.json())[0] for answer in answers) == [f"x{number}" for number in range(4)]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_gets_an_answer_or_one_sentence(served, name):
    ((kind, value),) = HOSTILE[name].items()
    field = {"structured_outputs": {"json" if kind == "json_schema" else kind: value}}
    response = served.http.post(COMPLETIONS, content=json.dumps(asked(COMPLETIONS, **field) | {"max_tokens": 20}))
    assert response.status_code in (200, 400) and len(response.content) < 1500
    assert served.engine.is_accepting and served.http.post(COMPLETIONS, json=asked(COMPLETIONS)).status_code == 200
