"""`/v1/messages` and `/v1/responses` with the clients of Anthropic and OpenAI: whole, streamed, refused."""

import asyncio
import json
import random
import threading

import pytest
from test_serve import SECONDS, Thinker, listening, serving, wait_until

for name in ("starlette", "uvicorn", "httpx", "openai", "anthropic", "llguidance", "transformers", "jinja2"):
    pytest.importorskip(name, reason=f"{name} is not installed: make test-models")

import anthropic  # noqa: E402
import openai  # noqa: E402
from fake_runner import FakeRunner, says  # noqa: E402
from share import WHOLE  # noqa: E402
from test_serve_tools import CITY, ONE_CALL, SAID, USER, only_call, served_by  # noqa: E402
from test_serve_tools import ONE as ARGUMENTS  # noqa: E402

from pagepool.cluster.front_end import FrontEnd  # noqa: E402
from pagepool.cluster.messages import Begun, Limits, News  # noqa: E402
from pagepool.engine.generation import Generation, Token  # noqa: E402
from pagepool.prefix.events import PrefixSnapshot  # noqa: E402
from pagepool.serve.errors import RequestError  # noqa: E402
from pagepool.serve.messages import MessagesAnswer, read_messages  # noqa: E402
from pagepool.serve.protocol import Request  # noqa: E402
from pagepool.serve.responses import ResponsesAnswer, read_response  # noqa: E402

ONE = [{"role": "user", "content": "x"}]
THOUGHT, ANSWER = "well,\n\nyes", "Yes. \u00e9"
GREEDY = {"temperature": 0.0}


def client_of(served, key="k"):
    return anthropic.Anthropic(base_url=served.url, api_key=key, max_retries=0, timeout=SECONDS)


@pytest.fixture(scope="module")
def thinking():
    """Thinks and answers, after any chat of one message of the user."""
    say = says(f"\n{THOUGHT}\n</think>\n\n{ANSWER}")
    runner = FakeRunner(
        num_blocks=256, next_token=lambda tokens: say(tokens[len("user: x\nassistant: <think>\n") - 1 :])
    )
    with serving(runner, Thinker(), shows_cached_tokens=True) as found, client_of(found) as found.anthropic:
        yield found


def test_a_message_has_thoughts_text_and_usage_whole_and_streamed(thinking):
    ask = {"model": "fake", "max_tokens": 99, "messages": ONE, "extra_body": GREEDY}
    whole = thinking.anthropic.messages.create(**ask)
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert (whole.content[0].thinking, whole.content[1].text) == (THOUGHT, ANSWER)
    assert (whole.stop_reason, whole.stop_sequence, whole.role) == ("end_turn", None, "assistant")
    prompt = thinking.anthropic.messages.count_tokens(model="fake", messages=ONE).input_tokens
    with thinking.anthropic.messages.stream(**ask) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2
    assert [(block.type, getattr(block, "thinking", None) or block.text) for block in streamed.content] == [
        ("thinking", THOUGHT),
        ("text", ANSWER),
    ]
    # The signature is what makes clients send a thought back.
    assert streamed.content[0].signature == whole.content[0].signature != ""
    for usage in (whole.usage, streamed.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == prompt
    assert streamed.usage.cache_read_input_tokens == prompt // 4 * 4
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    lines = thinking.http.post(
        "/v1/messages", json={**ask["extra_body"], "max_tokens": 1, "messages": ONE, "stream": True}
    )
    assert "event: ping\n" in lines.text


def test_a_response_has_thoughts_text_and_usage_whole_and_streamed(thinking):
    ask = {"model": "fake", "input": "x", **GREEDY}
    whole = thinking.openai.responses.create(**ask)
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert (whole.output[0].content[0].text, whole.output_text, whole.status) == (THOUGHT, ANSWER, "completed")
    assert whole.usage.input_tokens_details.cached_tokens > 0
    with thinking.openai.responses.stream(**ask) as stream:
        found = list(stream)
        streamed = stream.get_final_response()
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert found[0].type == "response.created" and found[-1].type == "response.completed"
    assert "".join(event.delta for event in found if event.type == "response.output_text.delta") == ANSWER
    assert (streamed.output_text, streamed.output[0].content[0].text) == (ANSWER, THOUGHT)
    assert streamed.usage.total_tokens == whole.usage.total_tokens
    cut = thinking.openai.responses.create(**ask, max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_the_reason_of_an_end_is_told_with_the_stop_sequence():
    say = says("one two three")
    runner = FakeRunner(num_blocks=256, next_token=lambda tokens: say(tokens[len("user: x\nassistant: ") - 1 :]))
    with serving(runner) as served, client_of(served) as client:
        ask = {"model": "fake", "messages": ONE, "extra_body": GREEDY}
        for options, reason, stop in [
            ({"max_tokens": 30}, "end_turn", None),
            ({"max_tokens": 5}, "max_tokens", None),
            ({"max_tokens": 30, "stop_sequences": ["three", "two"]}, "stop_sequence", "two"),
        ]:
            whole = client.messages.create(**ask, **options)
            with client.messages.stream(**ask, **options) as stream:
                streamed = stream.get_final_message()
            for found in (whole, streamed):
                assert (found.stop_reason, found.stop_sequence) == (reason, stop)
            assert whole.content[0].text == streamed.content[0].text


def test_the_room_is_the_limit_of_a_message_that_asks_for_more():
    with serving(FakeRunner(num_blocks=256, max_model_len=64)) as served, client_of(served) as client:
        prompt = client.messages.count_tokens(model="fake", messages=ONE).input_tokens
        message = client.messages.create(model="fake", max_tokens=4000, messages=ONE)
        assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 64 - prompt)


def cuts(random, text):
    """Cut a text at random places."""
    places = sorted(random.randrange(len(text) + 1) for _ in range(random.randrange(8)))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


def deltas_of(random, message):
    """Return a message as deltas with random cuts. Some deltas hold the end of one part and the begin of the next."""
    deltas = [{"role": "assistant", "content": ""}]
    for name in ("reasoning_content", "content"):
        deltas += [{name: piece} for piece in cuts(random, message.get(name) or "")]
    for index, call in enumerate(message.get("tool_calls", ())):
        first, *others = cuts(random, call["function"]["arguments"])
        named = {**call, "index": index, "function": {**call["function"], "arguments": first}}
        deltas.append({"tool_calls": [named]})
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": piece}}]} for piece in others]
    place = 1
    while place + 1 < len(deltas):
        if random.random() < 0.3 and not set(deltas[place]) & set(deltas[place + 1]):
            if [*deltas[place], *deltas[place + 1]] != ["tool_calls", "content"]:
                deltas[place : place + 2] = [{**deltas[place], **deltas[place + 1]}]
        place += 1
    return deltas


def folded_message(events):
    """Put the events of a message together, as a client does."""
    assert [one["type"] for one in events[:2]] == ["message_start", "ping"]
    message, texts, is_open = dict(events[0]["message"]), [], False
    for one in events[2:]:
        kind = one["type"]
        if kind == "content_block_start":
            assert one["index"] == len(message["content"]) and not is_open
            message["content"].append(dict(one["content_block"]))
            texts, is_open = [], True
        elif kind == "content_block_delta":
            delta = dict(one["delta"])
            del delta["type"]
            ((name, text),) = delta.items()
            if name == "signature":
                message["content"][-1]["signature"] = text
            else:
                texts.append(text)
        elif kind == "content_block_stop":
            block, is_open = message["content"][one["index"]], False
            if block["type"] == "tool_use":
                block["input"] = json.loads("".join(texts))
            else:
                block[block["type"]] = "".join(texts)
        elif kind == "message_delta":
            message |= {**one["delta"], "usage": one["usage"]}
    assert events[-1]["type"] == "message_stop" and not is_open
    return message


def folded_response(events):
    """Put the events of a response together, and check that each item is what its deltas said."""
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    texts = {}
    for one in events:
        if one["type"].endswith(".delta"):
            texts[one["item_id"]] = texts.get(one["item_id"], "") + one["delta"]
        elif one["type"].endswith(("_text.done", "arguments.done")):
            assert texts[one["item_id"]] == one.get("text", one.get("arguments"))
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    return events[-1]["response"]


@pytest.mark.parametrize(("kind", "fold"), [(MessagesAnswer, folded_message), (ResponsesAnswer, folded_response)])
def test_a_stream_is_the_whole_answer_wherever_it_is_cut(kind, fold):
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}

    def without_ids(found):
        return {
            name: [without_ids(one) for one in value] if isinstance(value, list) else value
            for name, value in found.items()
            if name not in ("id", "created_at")
        }

    for seed in range(10_000 if WHOLE else 300):
        draw = random.Random(seed)
        message, arguments = {}, ['{"a": "\u00e9}{\\""}', "{}", '{"b": [1, {"c": null}]}']
        if draw.random() < 0.5:
            message["reasoning_content"] = "so\n\n\u00e9 "
        if draw.random() < 0.7:
            message["content"] = "It is.\n\U0001f600 "
        calls = [
            {"id": f"call{number}", "type": "function", "function": {"name": "f", "arguments": draw.choice(arguments)}}
            for number in range(draw.randrange(3))
        ]
        message |= {"tool_calls": calls} if calls else {}
        reason = "tool_calls" if calls else draw.choice(["stop", "length"])
        answers = [kind("m", None, Request([ONE], True, None)) for _ in range(2)]
        list(answers[0]._changes(message, reason))
        written = answers[1].event(answers[1].first(0, Generation([1] * 9, lambda: None)))
        deltas = deltas_of(draw, message)
        for delta in deltas:
            written += answers[1].event({"choices": [{"delta": delta, "finish_reason": None}]})
        written += answers[1].event({"choices": [{"delta": {}, "finish_reason": reason}]})
        written += answers[1].event({"choices": [], "usage": usage}) + answers[1].end
        lines = [line.split("\n") for line in written.split("\n\n")[:-1]]
        events = [json.loads(data.removeprefix("data: ")) for _, data in lines]
        assert [name for name, _ in lines] == [f"event: {one['type']}" for one in events]
        assert without_ids(fold(events)) == without_ids(answers[0].complete(usage))


TOOLS = [
    {"name": "weather", "description": "The weather.", "input_schema": CITY},
    {"type": "custom", "name": "clock", "input_schema": {"type": "object", "additionalProperties": False}},
]
FUNCTIONS = [
    {"type": "function", "name": tool["name"], "parameters": tool["input_schema"], "strict": True} for tool in TOOLS
]


FORM = {"format": {"type": "json_schema", "schema": {"type": "object"}}}


def called(family, must_call):
    """Serve a model that wants to say a text and two calls, or one call alone."""
    return served_by(family, only_call(family) if must_call else SAID[family][1])


CHOICES = [  # of Anthropic, of OpenAI, the functions that are called
    ({"type": "auto"}, "auto", ["weather", "clock"]),
    ({"type": "auto", "disable_parallel_tool_use": True}, None, ["weather"]),
    ({"type": "none"}, "none", []),
    ({"type": "any"}, "required", ["weather"]),
    ({"type": "tool", "name": "clock"}, {"type": "function", "name": "clock"}, ["clock"]),
]


@pytest.mark.parametrize(("choice", "_", "names"), CHOICES)
@pytest.mark.parametrize("family", SAID)
def test_calls_are_blocks_of_a_message_whole_and_streamed(family, choice, _, names):
    with called(family, choice["type"] in ("any", "tool")) as served, client_of(served) as client:
        ask = {"model": "fake", "max_tokens": 300, "messages": [USER], "tools": TOOLS, "extra_body": GREEDY}
        whole = client.messages.create(**ask, tool_choice=choice)
        with client.messages.stream(**ask, tool_choice=choice) as stream:
            streamed = stream.get_final_message()
        calls = []
        for found in (whole, streamed):
            calls.append([(block.name, block.input) for block in found.content if block.type == "tool_use"])
            ends = {"end_turn"} if family != "gpt_oss" else {"end_turn", "max_tokens"}  # it wants to call on
            assert found.stop_reason in ({"tool_use"} if names else ends)
        assert calls[0] == calls[1] and [name for name, _ in calls[0]] == names[: 1 if family in ONE_CALL else 2]
        assert all(arguments == (json.loads(ARGUMENTS) if name == "weather" else {}) for name, arguments in calls[0])
        texts = [[block.text for block in found.content if block.type == "text"] for found in (whole, streamed)]
        assert texts[0] == texts[1]
        counted = client.messages.count_tokens(model="fake", messages=[USER], tools=TOOLS)
        assert counted.input_tokens == whole.usage.input_tokens == streamed.usage.input_tokens


@pytest.mark.parametrize(("_", "choice", "names"), CHOICES)
@pytest.mark.parametrize("family", SAID)
def test_calls_are_items_of_a_response_whole_and_streamed(family, _, choice, names):
    with called(family, names != CHOICES[0][2] and choice not in ("none", None)) as served:
        options = {"parallel_tool_calls": False} if choice is None else {"tool_choice": choice}
        ask = {"model": "fake", "input": "hi", "tools": FUNCTIONS, **GREEDY, **options}
        whole = served.openai.responses.create(**ask)
        with served.openai.responses.stream(**ask) as stream:
            streamed = stream.get_final_response()
        calls = []
        for found in (whole, streamed):
            calls.append([(item.name, item.arguments) for item in found.output if item.type == "function_call"])
        assert calls[0] == calls[1] and [name for name, _ in calls[0]] == names[: 1 if family in ONE_CALL else 2]
        assert all(arguments == (ARGUMENTS if name == "weather" else "{}") for name, arguments in calls[0])
        assert whole.output_text == streamed.output_text
        assert [tool.name for tool in whole.tools] == ["weather", "clock"]


def test_a_response_repeats_fields_of_its_request():
    given = {
        "instructions": "Help.",
        "metadata": {"run": "7"},
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [*FUNCTIONS, {"type": "web_search"}],
    }
    with served_by("qwen", "x") as served:
        ask = {"model": "fake", "input": "hi", **GREEDY}
        for repeated in (given, {"tool_choice": "none", "tools": FUNCTIONS}):
            found = served.openai.responses.create(**ask, **repeated)
            with served.openai.responses.stream(**ask, **repeated) as stream:
                streamed = stream.get_final_response()
            for answer in (found.to_dict(), streamed.to_dict()):
                assert {name: answer[name] for name in repeated} == repeated
        plain = served.openai.responses.create(**ask)
        assert (plain.tools, plain.tool_choice, plain.metadata, plain.instructions) == ([], "none", {}, None)


def test_names_of_properties_that_must_be_texts_are_a_tool_s_schema_without_them():
    """Zod writes this for a record; a property with the name of the keyword is another thing."""
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}}
    named = {"type": "object", "properties": {"propertyNames": {"type": "string"}}, "additionalProperties": False}
    call = '<tool_call>\n{"name": "f", "arguments": {"propertyNames": "x"}}\n</tool_call>'
    with served_by("qwen", call) as served, client_of(served) as client:
        ask = {"model": "fake", "max_tokens": 300, "messages": [USER], "tool_choice": {"type": "any"}}
        for schema in (record, named):
            message = client.messages.create(**ask, tools=[{"name": "f", "input_schema": schema}], extra_body=GREEDY)
            assert message.content[0].input == {"propertyNames": "x"}


def turns(count):
    """What a model says as an agent: thoughts, texts, one or two calls."""
    for number in range(count):
        arguments = json.dumps({"city": f'K\u00f6ln "{number}"\n', "days": number % 9 + 1}, ensure_ascii=False)
        calls = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
        calls += '\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>' * (number % 3 == 0)
        text = f"Let me see {number}.\n" * (number % 2)
        yield f"<think>\nI need the weather {number}.\n</think>\n\n{text}{calls}"


def test_an_agent_s_messages_find_their_last_turn_in_the_cache():
    """Turns as Claude Code sends them, with a first line of the system's text that changes each time."""
    messages, count = [{"role": "user", "content": "Compare the cities."}], 20 if WHOLE else 8
    with served_by("qwen", *turns(count), shows_cached_tokens=True) as served, client_of(served) as client:
        found = total = before = 0
        for number in range(count):
            header = {"type": "text", "text": f"x-anthropic-billing-header: cch={number:05x};"}
            ask = {"model": "fake", "max_tokens": 400, "messages": messages, "tools": TOOLS, "extra_body": GREEDY}
            ask["system"] = [header, {"type": "text", "text": "You help."}]
            if number % 2:
                with client.messages.stream(**ask) as stream:
                    message = stream.get_final_message()
            else:
                message = client.messages.create(**ask)
            calls = [block for block in message.content if block.type == "tool_use"]
            assert len(calls) == (2 if number % 3 == 0 else 1) and message.content[0].type == "thinking"
            found, total = found + message.usage.cache_read_input_tokens, total + before
            before = message.usage.input_tokens + message.usage.cache_read_input_tokens + message.usage.output_tokens
            messages.append({"role": "assistant", "content": message.content})
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "fog"} for call in calls]
            messages.append({"role": "user", "content": results})
        assert found >= 0.99 * total > 0


def test_an_agent_s_responses_find_their_last_turn_in_the_cache():
    items = [{"role": "developer", "content": "You help."}, {"role": "user", "content": "Compare the cities."}]
    count = 20 if WHOLE else 6
    with served_by("qwen", *turns(count), shows_cached_tokens=True) as served:
        found = total = before = 0
        for _ in range(count):
            response = served.openai.responses.create(model="fake", input=items, tools=FUNCTIONS, **GREEDY)
            found, total = found + response.usage.input_tokens_details.cached_tokens, total + before
            before = response.usage.total_tokens
            items += response.output
            items += [
                {"type": "function_call_output", "call_id": item.call_id, "output": "fog"}
                for item in response.output
                if item.type == "function_call"
            ]
        assert found >= 0.99 * total > 0


RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "4"}], "is_error": False}
USE = {"type": "tool_use", "id": "a", "name": "add", "input": {"x": "\u00e9"}}
CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"x": "\u00e9"}}}


def messages_of(*messages, **fields):
    return read_messages({"max_tokens": 1, "messages": [*messages], **fields}).prompts[0]


def test_messages_stay_where_they_are_with_thoughts_calls_and_results():
    thought = {"type": "thinking", "thinking": "so", "signature": "none"}
    texts = [{"type": "text", "text": "It ", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "is."}]
    assert messages_of(
        {"role": "user", "content": texts},
        {"role": "assistant", "content": [thought, *texts, USE]},
        {"role": "user", "content": [RESULT, {"type": "text", "text": "and?"}]},
        {"role": "system", "content": "be brief"},
        system=texts,
    ) == [
        {"role": "system", "content": "It is."},
        {"role": "user", "content": "It is."},
        {"role": "assistant", "content": "It is.", "reasoning_content": "so", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": "4"},
        {"role": "user", "content": "and?"},
        {"role": "system", "content": "be brief"},
    ]


def test_a_part_is_read_by_its_type():
    parts = [{"type": "text", "text": "It", "thinking": []}, {"type": "thinking", "thinking": "so", "text": 5}]
    message = {"role": "assistant", "content": [*parts, USE | {"text": {}, "thinking": "x"}]}
    assert messages_of(*ONE, message, *ONE)[1] == {
        "role": "assistant",
        "content": "It",
        "reasoning_content": "so",
        "tool_calls": [CALL],
    }


@pytest.mark.parametrize("is_list", [False, True])
def test_a_text_that_changes_with_each_request_is_left_out_of_the_system_s(is_list):
    header = "x-anthropic-billing-header: cc_version=2.1; cch=eb6c6;"
    system = [{"type": "text", "text": header + "\n"}, {"type": "text", "text": "Be."}] if is_list else f"{header}\nBe."
    assert messages_of(*ONE, system=system)[0] == {"role": "system", "content": "Be."}
    assert messages_of(*ONE, system=header) == ONE


def test_items_of_a_response_are_messages_of_a_chat():
    given = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "add"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "output_text", "text": "Well."}]},
        {"type": "function_call", "call_id": "a", "name": "add", "arguments": '{"x": "\u00e9"}'},
        {"type": "function_call", "call_id": "a", "name": "add", "arguments": '{"x": "\u00e9"}'},
        {"type": "function_call_output", "call_id": "a", "output": "4"},
        {"type": "function_call", "call_id": "a", "name": "add", "arguments": '{"x": "\u00e9"}'},
        {"role": "assistant", "content": "4."},
    ]
    assert read_response({"input": given, "instructions": "Be."}).prompts[0] == [
        {"role": "system", "content": "Be."},
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "Well.", "reasoning_content": "so", "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "a", "content": "4"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "assistant", "content": "4."},
    ]


def test_settings_are_those_of_a_chat():
    schema = {"type": "object"}
    request = read_messages(
        {
            "max_tokens": 7,
            "messages": ONE,
            "stop_sequences": ["a"],
            "thinking": {"type": "disabled", "display": "omitted"},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": schema}},
            "metadata": {"user_id": "me"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        }
    )
    assert (request.params.max_new_tokens, request.params.stop) == (7, ("a",))
    assert request.template_options == {"enable_thinking": False, "reasoning_effort": "low"}
    assert request.structured_field == "output_config" and not request.include_reasoning and request.include_usage
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    request = read_response(
        {
            "input": "x",
            "max_output_tokens": 7,
            "reasoning": {"effort": "none", "summary": "auto"},
            "text": {"format": form, "verbosity": "low"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "client_metadata": {"installation": "1"},
            "tools": [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}],
        }
    )
    assert request.params.max_new_tokens == 7 and request.template_options == {"enable_thinking": False}
    assert (request.structured_field, request.prompt_field, request.tools) == ("text", "input", [])


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages", ["image"]),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages", ["document"]),
        (
            {"messages": [{"role": "user", "content": [RESULT | {"content": [{"type": "image"}]}]}]},
            "messages",
            ["image"],
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]}, "messages", ["redacted"]),
        ({"messages": [{"role": "assistant", "content": [USE | {"input": "{}"}]}]}, "messages", ["input", "str"]),
        ({"messages": [*ONE, {"role": "assistant", "content": "Yes"}]}, "messages", ["continue"]),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", ["role", "user"]),
        ({"messages": ["x"]}, "messages", ["messages[0]", "str"]),
        ({"messages": []}, "messages", ["at least 1"]),
        ({"max_tokens": None}, "max_tokens", ["missing"]),
        ({"max_tokens": 0}, "max_tokens", ["at least 1"]),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools", ["custom"]),
        ({"tool_choice": {"type": ["any"]}}, "tool_choice", ["any"]),
        ({"thinking": {"type": "between_tools"}}, "thinking", ["enabled"]),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config", ["json_schema"]),
        ({"container": "c"}, "container", ["not supported"]),
        ({"context_management": {"edits": [{"type": "clear_tool_uses"}]}}, "context_management", ["not supported"]),
        ({"output_config": FORM, "tools": TOOLS}, "output_config", ["tools or output_config"]),
        ({"n": 2}, "n", ["unknown"]),
    ],
)
def test_what_a_message_cannot_have_is_refused_by_name(fields, param, words):
    with pytest.raises(RequestError) as found:
        read_messages({"max_tokens": 1, "messages": ONE, **fields})
    assert found.value.status == 400 and found.value.param == param
    assert all(word in found.value.message for word in words), found.value.message


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"store": True}, "store", ["stores no responses"]),
        ({"background": True}, "background", ["stores no responses"]),
        ({"previous_response_id": "resp_1"}, "previous_response_id", ["stores no responses"]),
        ({"conversation": "conv_1"}, "conversation", ["stores no responses"]),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input", ["send the item itself"]),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", ["input_image"]),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input", ["input_audio"]),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", ["role", "tool"]),
        ({"input": [{"type": "computer_call"}]}, "input", ["computer_call"]),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "a"}]}, "input", ["arguments", "NoneType"]),
        ({"input": []}, "input", ["at least 1"]),
        ({"input": None}, "input", ["missing"]),
        ({"tools": [{"type": "file_search"}]}, "tools", ["file_search"]),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", ["function"]),
        ({"text": {"format": {"type": "xml"}}}, "text", ["xml"]),
        ({"truncation": "auto"}, "truncation", ["not supported"]),
        ({"include": ["message.output_text.logprobs"]}, "include", ["not supported"]),
        ({"n": 2}, "n", ["unknown"]),
    ],
)
def test_what_a_response_cannot_have_is_refused_by_name(fields, param, words):
    with pytest.raises(RequestError) as found:
        read_response({"input": "x", **fields})
    assert found.value.status == 400 and found.value.param == param
    assert all(word in found.value.message for word in words), found.value.message


def test_errors_are_the_exceptions_of_the_clients():
    with (
        serving(
            FakeRunner(num_blocks=256, max_model_len=64, step_seconds=0.02), api_keys={"key": "a"}, max_requests=1
        ) as served,
        client_of(served, "key") as client,
        client_of(served, "other") as stranger,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="key", max_retries=0) as other,
    ):

        def raises(vendor, kind, call, **fields):
            with pytest.raises(getattr(vendor, kind)) as found:
                call(**fields)
            return found.value

        ask, create = {"model": "fake", "max_tokens": 9, "messages": ONE}, client.messages.create
        long = [{"role": "user", "content": "x" * 99}]
        error = raises(anthropic, "BadRequestError", create, **ask, extra_body={"container": "c"})
        assert error.body["type"] == "error" and error.body["error"]["type"] == "invalid_request_error"
        assert raises(anthropic, "BadRequestError", create, **{**ask, "messages": long}).type == "invalid_request_error"
        assert raises(anthropic, "NotFoundError", create, **{**ask, "model": "no"}).type == "not_found_error"
        assert raises(anthropic, "NotFoundError", client.messages.batches.list).type == "not_found_error"
        assert raises(anthropic, "AuthenticationError", stranger.messages.create, **ask).type == "authentication_error"
        assert served.http.post("/v1/messages", json=ask, headers={"x-api-key": "key"}).status_code == 200
        assert served.http.post("/v1/messages", json=ask, headers={"x-api-key": "no"}).status_code == 401
        asked = {"model": "fake", "input": "x"}
        assert raises(openai, "BadRequestError", other.responses.create, **asked, store=True).param == "store"
        assert raises(openai, "BadRequestError", other.responses.create, model="fake", input="x" * 99).param == "input"
        assert raises(openai, "NotFoundError", other.responses.create, model="no", input="x").code == "model_not_found"
        assert raises(openai, "NotFoundError", other.responses.retrieve, response_id="resp_1").status_code == 404
        with client.messages.create(**{**ask, "max_tokens": 40}, stream=True):
            wait_until(lambda: not served.is_idle())
            assert raises(anthropic, "RateLimitError", create, **ask).type == "rate_limit_error"
            assert raises(openai, "RateLimitError", other.responses.create, **asked).status_code == 429


def test_a_request_that_takes_too_long_is_the_server_s_error_also_in_a_stream():
    with (
        serving(FakeRunner(num_blocks=256, step_seconds=0.05), timeout=0.2) as served,
        client_of(served) as client,
    ):
        ask = {"model": "fake", "max_tokens": 200, "messages": ONE}
        with pytest.raises(anthropic.ServiceUnavailableError):
            client.messages.create(**ask)
        with pytest.raises(openai.InternalServerError):
            served.openai.responses.create(model="fake", input="x", max_output_tokens=200)
        with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
            list(client.messages.create(**ask, stream=True))
        with pytest.raises(openai.APIError, match=r"more than 0\.2 s"):
            list(served.openai.responses.create(model="fake", input="x", max_output_tokens=200, stream=True))


class Saying:
    """The connection to a worker that says one text."""

    async def generate(self, worker, call):
        yield Begun(worker, 0, 0, "")
        for token in [*b"<think>\nso\n</think>\n\none two", 0][call.num_generated :]:
            yield Token(token, "")


def test_a_cluster_answers_messages_and_responses():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    limits = Limits(None, None, vocab_size=256, block_size=4, stop_token_ids=frozenset([0]))
    cluster = FrontEnd(limits, Thinker(), Saying(), loop=loop)
    cluster.news(News("one", False, 1, [], PrefixSnapshot(1, [], 0), load=0, room=8))
    try:
        with listening(cluster) as served, client_of(served) as client:
            ask = {"model": "fake", "max_tokens": 99, "messages": ONE, "stop_sequences": ["two"]}
            ask["extra_body"] = {"chat_template_kwargs": {"opens": False}}
            with client.messages.stream(**ask) as stream:
                streamed = stream.get_final_message()
            for found in (client.messages.create(**ask), streamed):
                assert [found.content[0].thinking, found.content[1].text] == ["so", "one "]
                assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "two")
            response = served.openai.responses.create(model="fake", input="x", extra_body=ask["extra_body"])
            assert (response.output_text, response.output[0].content[0].text) == ("one two", "so")
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(SECONDS)
        loop.close()


def test_a_stream_that_its_client_closes_is_cancelled():
    with serving(FakeRunner(num_blocks=256, step_seconds=0.01)) as served, client_of(served) as client:
        with client.messages.create(model="fake", max_tokens=500, messages=ONE, stream=True) as stream:
            next(iter(stream))
        wait_until(served.is_idle)
        assert served.engine.stats()["ended"]["abort"] == 1
