"""The limit of every path and every field: the values at it are accepted, those beyond it get one short sentence."""

import json
import logging

import pytest
from test_serve import ROOT, says_no, serving

for name in ("starlette", "uvicorn", "httpx"):
    pytest.importorskip(name, reason=f"{name} is not installed: make test-models")

from fake_runner import FakeRunner  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from pagepool.engine import SamplingParams  # noqa: E402
from pagepool.engine.structured import MAX_GRAMMAR_LENGTH  # noqa: E402
from pagepool.serve import fields  # noqa: E402
from pagepool.serve.fields import (  # noqa: E402
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    FIELDS,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
)

LONG = "x" * 100_000
ONE = [{"role": "user", "content": "x"}]
BASES = {
    COMPLETIONS: {"prompt": "x", "max_tokens": 2},
    CHAT: {"messages": ONE, "max_tokens": 2},
    MESSAGES: {"messages": ONE, "max_tokens": 2},
    COUNT_TOKENS: {"messages": ONE},
    RESPONSES: {"input": "x", "max_output_tokens": 2},
    TOKENIZE: {"prompt": "x"},
    DETOKENIZE: {"tokens": [1]},
}
EVERY = [(path, name) for path, found in FIELDS.items() for name in found]
STRANGE = [
    float("nan"),
    float("inf"),
    float("-inf"),
    10**400,
    1e308,
    5e-324,
    -0.0,
    True,
    LONG,
    {LONG: LONG},
    [LONG],
    [[]],
]


def at_limit(kind):
    """Return values that the kind accepts, at the ends of its range."""
    if isinstance(kind, fields.Integer):
        return [kind.low, kind.high]
    if isinstance(kind, fields.Number):
        return [5e-324 if kind.is_above else kind.low, 1e308 if kind.high is None else kind.high]
    if isinstance(kind, fields.Flag):
        return [False, True]
    if isinstance(kind, fields.Text):
        return ["", "x" * min(kind.most, 1 << 20)]
    if isinstance(kind, fields.Texts):
        return [[], ["x" * (kind.length // kind.most)] * kind.most]
    if isinstance(kind, fields.Tokens):
        return [[], [1] * kind.most]
    if isinstance(kind, fields.Biases):
        return [{}, {str(token): -1e308 for token in range(kind.most)}]
    if isinstance(kind, fields.Prompts):
        return ["x", [1], [[1], "x"], ["x"] * fields.MAX_PROMPTS]
    if isinstance(kind, fields.Messages):
        parts = [{"type": "text", "text": "x"}] * fields.MAX_PARTS
        return [[{"role": "u" * 64, "content": parts}], ONE * fields.MAX_MESSAGES]
    if isinstance(kind, fields.Tools):
        tools = [{"type": "function", "function": {"name": f"{number:064d}"}} for number in range(fields.MAX_TOOLS)]
        return [[], tools]
    if isinstance(kind, fields.ToolChoice):
        return ["none", "auto", "required", {"type": "function", "function": {"name": "f"}}]
    if isinstance(kind, fields.StreamOptions):
        return [{}, {"include_usage": True, "continuous_usage_stats": None, "other": 1}]
    if isinstance(kind, fields.ResponseFormat):
        schema = {"type": "json_schema", "json_schema": {"name": "x", "strict": None, "schema": {"type": "null"}}}
        return [{"type": "text"}, {"type": "json_object"}, {"type": "json_object", "schema": {}}, schema]
    if isinstance(kind, fields.StructuredOutputs):
        others = {"disable_any_whitespace": False, "structural_tag": None}
        given = [{"json": {}}, {"json": "{}"}, {"json_object": True}, {"regex": "a"}, {"grammar": "start: /a/"}]
        return [*given, {"choice": ["x"] * 1024, **others}, {"regex": "(?:a|b)" * (MAX_GRAMMAR_LENGTH // 7)}]
    if isinstance(kind, fields.JsonSchema):
        return [{}, {"description": "x" * (MAX_GRAMMAR_LENGTH - len('{"description": ""}'))}]
    if isinstance(kind, fields.GrammarText):
        return ["", "root ::= [a-z]", "start: /a/" + " " * (MAX_GRAMMAR_LENGTH - 10)]
    if isinstance(kind, fields.Nested):
        most = {str: "x", list: [{}] * fields.MAX_MESSAGES, dict: {}}
        return [most[wanted] for wanted in kind.wanted]
    if isinstance(kind, fields.TemplateOptions):
        names = {f"x{number}": number for number in range(fields.MAX_VARIABLES)}
        most = {"x" * 64: "y" * (fields.MAX_VARIABLES_LENGTH - 72)}
        return [{}, {"enable_thinking": False, "_x1": [{"a b": None}]}, names, most]
    return list(kind.values) if isinstance(kind, fields.Only) else STRANGE[3:]


def beyond_limit(kind):
    """Return values that the kind refuses: just beyond its range, and of other types."""
    if isinstance(kind, fields.Ignored):
        return [*STRANGE[:3], [{"x": float("nan")}]]
    found = [value for value in STRANGE if not isinstance(kind, fields.Number) or value not in (1e308, 5e-324, -0.0)]
    if isinstance(kind, fields.Integer):
        return [*found, kind.low - 1, kind.high + 1, float(kind.high), "1"]
    if isinstance(kind, fields.Number):
        return [
            *found,
            kind.low - 1e-9,
            *([] if kind.high is None else [kind.high + 1e-9]),
            *([kind.low] * kind.is_above),
        ]
    if isinstance(kind, fields.Flag):
        return [*[value for value in found if value is not True], 0, 1, "true"]
    if isinstance(kind, fields.Text):
        return [
            *[value for value in found if value is not LONG],
            *(["x" * (kind.most + 1)] if kind.most < 10**6 else []),
        ]
    if isinstance(kind, fields.Texts):
        return [*found, ["x"] * (kind.most + 1), ["x" * kind.length, "x"], ["x", ""], [1]]
    if isinstance(kind, fields.Tokens):
        return [*found, [1] * (kind.most + 1), [True], [1.0], ["1"]]
    if isinstance(kind, fields.Biases):
        most = {str(token): 1 for token in range(kind.most + 1)}
        return [*found, most, {"-1": 1}, {"1" * 11: 1}, {"x": 1}, {"1": "x"}, {"1": True}, {"1": float("nan")}]
    if isinstance(kind, fields.Prompts):
        return [*found[:-4], [LONG, 1], {}, [], [1.0], [True], [[True]], ["x"] * (fields.MAX_PROMPTS + 1), ["x", 1]]
    if isinstance(kind, fields.Messages):
        parts = [{"type": "text", "text": "x"}] * (fields.MAX_PARTS + 1)
        contents = [None, 1, [{}], [{"type": "image_url"}], [{"type": "text", "text": None}], parts]
        roles = [None, 1, "", "u" * 65, "a b", "<|im_end|>", LONG, "\u00e9"]
        bad = [{"role": "user", "content": content} for content in contents]
        calls = [{}, [1], [{"function": {}}], [{"function": {"name": "f"}}], [{"function": {"name": 1}}]]
        calls.append([{"function": {"name": "f", "arguments": {}}}] * (fields.MAX_TOOLS + 1))
        calls += [[{"function": {"name": "f", "arguments": value}}] for value in ("", "1", "{", "NaN", 1, [])]
        bad += [{"role": "assistant", "content": None, "tool_calls": one} for one in calls]
        bad += [{"role": role, "content": "x"} for role in roles]
        return [*found, [], {}, ONE * (fields.MAX_MESSAGES + 1), *([one] for one in bad)]
    if isinstance(kind, fields.Tools):
        names = [None, 1, "", "a b", "x" * 65, "\u00e9"]
        bad = [{"name": "f", "parameters": []}, {"name": "f", "description": 1}, *({"name": name} for name in names)]
        one = {"type": "function", "function": {"name": "f"}}
        lists = [[one, one], [{"type": "x", "function": {"name": "f"}}], [{"type": "function"}]]
        lists += [[{"type": "function", "function": function}] for function in bad]
        return [*[value for value in found if value != []], *lists, [one] * (fields.MAX_TOOLS + 1)]
    if isinstance(kind, fields.ToolChoice):
        names = [{}, {"name": 1}, None, [], "f"]
        return [*found, "any", {"type": "function"}, *({"type": "function", "function": name} for name in names)]
    if isinstance(kind, fields.StreamOptions):
        return [*[value for value in found if not isinstance(value, dict)], {"include_usage": 1}]
    if isinstance(kind, fields.ResponseFormat):
        schemas = [{}, {"schema": None}, {"schema": True}, {"schema": LONG}, {"schema": {"x": LONG * 2}}, None, []]
        types = [None, 1, "xml", "structural_tag", LONG]
        return [
            *found,
            {},
            *({"type": one} for one in types),
            *({"type": "json_schema", "json_schema": one} for one in schemas),
        ]
    if isinstance(kind, fields.StructuredOutputs):
        values = [{"json": 1}, {"json": [1]}, {"regex": 1}, {"choice": "x"}, {"choice": [""]}, {"choice": ["x"] * 1025}]
        more = [{"json": {}, "regex": "a"}, {"structural_tag": "x"}, {"whitespace_pattern": " "}, {"json_object": 1}]
        return [*found, {}, {"json_object": False}, {"grammar": "x" * (MAX_GRAMMAR_LENGTH + 1)}, *values, *more]
    if isinstance(kind, fields.JsonSchema):
        return [*found, [], "{}"]
    if isinstance(kind, fields.Nested):
        long = [[{}] * (fields.MAX_MESSAGES + 1)] if list in kind.wanted else []
        return [*long, *(value for value in found if not isinstance(value, kind.wanted))]
    if isinstance(kind, fields.TemplateOptions):
        names = [*fields.RESERVED, "", "a b", "x" * 65, "1", "{{", "\u00e9"]
        most = {"x": "y" * fields.MAX_VARIABLES_LENGTH}
        many = {f"x{number}": 1 for number in range(fields.MAX_VARIABLES + 1)}
        return [*found, most, many, *({one: 1} for one in names)]
    if isinstance(kind, fields.GrammarText):
        return [*[value for value in found if value is not LONG], "x" * (MAX_GRAMMAR_LENGTH + 1), {}, []]
    return [value for value in found if value not in kind.values]


@pytest.fixture(scope="module")
def served():
    with serving(
        FakeRunner(num_blocks=256, max_model_len=400), priorities=(-fields.MAX_PRIORITY, fields.MAX_PRIORITY)
    ) as found:
        yield found


def refused(served, path, body):
    """Send a body that is refused; return the error's `param` after checking that the error is short."""
    response = served.http.post(path, content=json.dumps(body))
    error = response.json()["error"]
    assert response.status_code == 400 and len(response.content) < 1500, (str(body)[:200], response.text[:200])
    assert error["type"] == "invalid_request_error" and error["message"]
    return error["param"]


@pytest.mark.parametrize(("path", "name"), EVERY)
def test_values_at_the_limit_are_accepted_and_beyond_it_refused_by_name(served, path, name):
    kind = FIELDS[path][name]
    for value in at_limit(kind):
        fields.read_fields({**BASES[path], name: value}, path)
        response = served.http.post(path, content=json.dumps({**BASES[path], name: value}))
        assert response.status_code in (200, 400, 404), response.text
    for value in beyond_limit(kind):
        assert refused(served, path, {**BASES[path], name: value}) == name, str(value)[:100]


@pytest.mark.parametrize("path", FIELDS)
def test_a_text_that_is_no_unicode_is_refused_by_the_name_of_its_field(served, path):
    for name in FIELDS[path]:
        for value in ("\ud800", ["x", "\udfff"], {"x": [{"\ud800": 1}]}, [{"role": "user", "content": "\udc00"}]):
            assert refused(served, path, {**BASES[path], name: value}) == name
    assert refused(served, path, {**BASES[path], "\ud800": 1}) == "\\ud800"


@pytest.mark.parametrize("path", FIELDS)
def test_a_deeply_nested_value_is_refused_or_not_looked_at(served, path):
    for depth in (99, 101, 500, *range(960, 990), 5_000, 200_000):
        for text in ("1", '"\\ud83d\\ude00"'):
            deep = "[" * depth + text + "]" * depth
            for name in ("metadata", "tools", "prompt", "x"):
                body = json.dumps(BASES[path])[:-1] + f', "{name}": {deep}}}'
                assert served.http.post(path, content=body).status_code in (200, 400)


@pytest.mark.parametrize("path", FIELDS)
def test_errors_quote_at_most_200_characters(served, path):
    for name, value in ((LONG, 1), ("model", LONG), ("x" * 300, LONG)):
        refused(served, path, {**BASES[path], name: value})
    refused(served, path, {**BASES[path], **{f"k{number}": 1 for number in range(10_000)}})
    response = served.http.post(path, content=json.dumps({**BASES[path], "model": "x" * fields.MAX_NAME}))
    assert response.status_code == 404 and len(response.content) < 500
    for response in (served.http.get("/" + "x" * 20_000), served.http.get("/v1/models/" + "x" * 20_000)):
        assert response.status_code == 404 and len(response.content) < 500


def test_the_guide_has_the_tables():
    guide = (ROOT / "docs" / "guide" / "server.md").read_text(encoding="utf-8")
    assert fields.tables() in guide, "put the output of fields.tables() there"


def test_the_limits_of_http_are_those_of_the_library():
    for kind, name in ((kind, name) for name, kind in FIELDS[COMPLETIONS].items()):
        if hasattr(SamplingParams, name) and name not in ("seed", "min_tokens", "ignore_eos"):
            for value in at_limit(kind):
                SamplingParams(
                    **{name: {int(key): bias for key, bias in value.items()} if name == "logit_bias" else value}
                )


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 5) | st.sampled_from([*STRANGE[:7], "", "x", "\u00e9", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "5"]), inner)
    ),
    max_leaves=4,
)


def bodies(path):
    """Bodies of a path: some fields with values of any type or at their limit."""
    few = {
        "n": st.integers(1, 3),
        "max_tokens": st.integers(0, 3),
        "prompt": st.sampled_from(["x", [1, 2], ["x", [1]]]),
    }

    def values(name, kind):
        own = few[name] if name in few else st.sampled_from(at_limit(kind) or [None])
        return st.one_of(own, own, VALUES)

    kinds, base = FIELDS[path], BASES[path]
    optional = {name: values(name, kind) for name, kind in kinds.items() if name not in base}
    required = {name: st.one_of(st.just(value), values(name, kinds[name])) for name, value in base.items()}
    some = st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True)
    return some.flatmap(lambda names: st.fixed_dictionaries({**required, **{name: optional[name] for name in names}}))


@given(st.sampled_from(sorted(FIELDS)).flatmap(lambda path: st.tuples(st.just(path), bodies(path))))
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_body_gets_an_answer_or_one_sentence_about_one_of_its_fields(served, caplog, asked):
    path, body = asked
    caplog.clear()
    response = served.http.post(path, content=json.dumps(body))
    assert response.status_code in (200, 400, 404), response.text
    events = [response.text]
    if response.headers["content-type"].startswith("text/event-stream"):
        *events, last = [line.partition("data: ")[2] for line in response.text.split("\n\n") if line]
        if last != "[DONE]":
            ends = ("message_stop", "response.completed", "response.incomplete")
            assert "error" in json.loads(last) or json.loads(last)["type"] in ends
            events.append(last)
    for event in events:
        found = json.loads(event, parse_constant=says_no)
        if response.status_code != 200:
            error = found["error"]
            assert error["message"] and len(response.content) < 1500
            assert error["param"] in {*body, *BASES[path], "max_tokens", "n"}, error
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert served.engine.is_accepting
