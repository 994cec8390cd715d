"""Tools over HTTP: how a model's calls are found, constrained, streamed and written back to its next prompt."""

import json

import pytest
from test_serve import serving

for name in ("starlette", "uvicorn", "httpx", "openai", "llguidance", "transformers", "jinja2"):
    pytest.importorskip(name, reason=f"{name} is not installed: make test-models")

from chat_templates import CHATML, Templated  # noqa: E402
from fake_runner import FakeRunner  # noqa: E402

from pagepool.serve.tools import LACKING  # noqa: E402

CHAT = "/v1/chat/completions"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
USER = {"role": "user", "content": "hi"}
ONE = '{"city": "K\u00f6ln \\"}\\\\", "days": 2}'
# A text and one call, and a text and two calls, as each family writes them.
QWEN = f'Well.\n<tool_call>\n{{"name": "weather", "arguments": {ONE}}}\n</tool_call>'
MISTRAL = f'Well.[TOOL_CALLS] [{{"name": "weather", "arguments": {ONE}}}'
LLAMA3 = f'{{"name": "weather", "parameters": {ONE}}}'
GPT_OSS = "<|channel|>commentary<|message|>Well.<|end|><|start|>assistant"
GPT_OSS += f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ONE}"
ONE_CALL = ("llama3", "gpt_oss")  # families that write one call in a message
SAID = {
    "qwen": (QWEN, f'{QWEN}\n<tool_call>\n{{"name": "clock", "arguments": {{}}}}\n</tool_call>'),
    "llama3": (LLAMA3, LLAMA3),
    "mistral": (f"{MISTRAL}]", f'{MISTRAL}, {{"name": "clock", "arguments": {{}}}}]'),
    "gpt_oss": (GPT_OSS, GPT_OSS),
}


def only_call(family):
    """Return what a model writes for one call without a text."""
    return SAID[family][0].rpartition("Well.")[2].removeprefix("<|end|><|start|>assistant").lstrip()


def served_by(family, *answers, template=None, **limits):
    tokenizer = Templated(family, template)
    runner = FakeRunner(num_blocks=4096, max_model_len=12_000, next_token=tokenizer.answering(*answers))
    return serving(runner, tokenizer, **limits)


def asked(served, status=200, **body):
    response = served.http.post(CHAT, json={"messages": [USER], "tools": TOOLS, "temperature": 0, **body})
    assert response.status_code == status, response.text
    return response.json() if status == 200 else response.json()["error"]


def streamed(served, **body):
    """Return the messages and finish reasons of a stream, put together from its deltas like OpenAI's client does."""
    body = {"messages": [USER], "tools": TOOLS, "temperature": 0, "stream": True, **body}
    messages, reasons = {}, {}
    for line in served.http.post(CHAT, json=body).text.split("\n\n")[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            message = messages.setdefault(choice["index"], {"content": "", "reasoning_content": "", "tool_calls": []})
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    assert call["id"] and call["type"] == "function"
                    message["tool_calls"].append(dict(call["function"]))
                else:
                    assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                    message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            reasons[choice["index"]] = choice["finish_reason"]
    return [messages[index] for index in sorted(messages)], [reasons[index] for index in sorted(reasons)]


def whole(answer):
    found = []
    for choice in answer["choices"]:
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        found.append({"content": message["content"] or "", "tool_calls": calls})
        found[-1]["reasoning_content"] = message.get("reasoning_content", "")
    return found, [choice["finish_reason"] for choice in answer["choices"]]


@pytest.mark.parametrize("is_parallel", [True, False])
@pytest.mark.parametrize("family", SAID)
def test_calls_are_apart_from_the_text_whole_and_streamed(family, is_parallel):
    with served_by(family, SAID[family][1]) as served:
        body = {"n": 2, "parallel_tool_calls": is_parallel}
        found = whole(asked(served, **body))
        assert found == streamed(served, **body)
        messages, reasons = found
        calls = [{"name": "weather", "arguments": ONE}, {"name": "clock", "arguments": "{}"}]
        count = 2 if is_parallel and family not in ONE_CALL else 1
        for message in messages:
            assert message["content"] == ("" if family == "llama3" else "Well.")
            assert message["tool_calls"] == calls[:count]
        assert reasons == ["tool_calls"] * 2
        message = asked(served)["choices"][0]["message"]
        assert {call["type"] for call in message["tool_calls"]} == {"function"}
        assert len({call["id"] for call in message["tool_calls"]}) == len(message["tool_calls"])
        assert message["content"] == (None if family == "llama3" else "Well.")


@pytest.mark.parametrize("family", SAID)
def test_a_choice_of_tools_says_what_may_be_called(family):
    header = "<|channel|>final<|message|>" if family == "gpt_oss" else ""
    with served_by(family, f"{header}Just <a [text] {{\nwith <tool_cal\u00e9") as served:
        for choice in (None, "auto", "none"):
            found = asked(served, tool_choice=choice)["choices"][0]
            assert found["message"]["content"] == "Just <a [text] {\nwith <tool_cal\u00e9"
            assert "tool_calls" not in found["message"] and found["finish_reason"] == "stop"
    with served_by(family, only_call(family)) as served:
        for name in ("weather", "clock"):
            choice = {"type": "function", "function": {"name": name}} if name == "clock" else "required"
            (message,), (reason,) = found = whole(asked(served, tool_choice=choice))
            assert found == streamed(served, tool_choice=choice)
            assert message["tool_calls"] == [{"name": name, "arguments": ONE if name == "weather" else "{}"}]
            assert reason == "tool_calls" and message["content"] == ""


@pytest.mark.parametrize("family", ["qwen", "gpt_oss"])
def test_a_call_that_the_limit_of_tokens_cuts_has_the_reason_length(family):
    said = SAID[family][0]
    with served_by(family, said) as served:
        for size in range(1, len(Templated(family)(said)["input_ids"]), 7):
            found = whole(asked(served, max_tokens=size))
            assert found == streamed(served, max_tokens=size)
            (message,), (reason,) = found
            assert reason == "length" and all(ONE.startswith(call["arguments"]) for call in message["tool_calls"])


def test_a_stop_string_ends_a_message_with_a_call():
    with served_by("qwen", SAID["qwen"][1]) as served:
        for stop, count, reason in (("ll.", 0, "stop"), ("days", 1, "stop"), ("</tool_call>\n", 1, "stop")):
            found = whole(asked(served, stop=[stop]))
            assert found == streamed(served, stop=[stop])
            assert len(found[0][0]["tool_calls"]) == count and found[1] == [reason]


def test_log_probabilities_are_of_all_tokens():
    said = SAID["mistral"][0]
    with served_by("mistral", said) as served:
        answer = asked(served, logprobs=True, top_logprobs=1)["choices"][0]
        texts = [token["token"] for token in answer["logprobs"]["content"]]
        assert len(texts) == len(Templated("mistral")(said)["input_ids"]) + 1  # and the stop token
        assert "[TOOL_CALLS]" in texts


@pytest.mark.parametrize("is_open", [True, False])
def test_thoughts_and_calls_are_apart(is_open):
    thought = "Is it <tool_call> or\nnot?"
    said = f"<think>\n{thought}\n</think>\n\n" + SAID["qwen"][1]
    with served_by("qwen", said) as served:
        for choice in ("auto", "required"):
            body = {"chat_template_kwargs": {"opens": is_open}, "tool_choice": choice, "max_tokens": 900}
            found = whole(asked(served, **body))
            assert found == streamed(served, **body)
            (message,), reasons = found
            assert message["reasoning_content"] == thought and reasons == ["tool_calls"]
            if choice == "auto":
                assert message["content"] == "Well." and len(message["tool_calls"]) == 2


def test_a_grammar_begins_behind_thoughts_that_the_prompt_opens():
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
    with served_by("qwen", f"<think>\nHm, {{\n</think>\n\n{ONE}") as served:
        for is_open in (True, False):
            body = {"chat_template_kwargs": {"opens": is_open}, "response_format": schema, "tools": None}
            found = whole(asked(served, **body, max_tokens=300))
            assert found == streamed(served, **body, max_tokens=300)
            ((message,), _) = found
            assert message["reasoning_content"] == ("Hm, {" if is_open else "")
            assert not is_open or message["content"] == ONE


THOUGHT = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


def test_thoughts_texts_and_calls_are_apart_in_channels():
    with served_by("gpt_oss", THOUGHT.format("Is it <tool_call>?") + GPT_OSS) as served:
        found = whole(asked(served))
        assert found == streamed(served)
        (message,), reasons = found
        assert (message["reasoning_content"], message["content"]) == ("Is it <tool_call>?", "Well.")
        assert message["tool_calls"] == [{"name": "weather", "arguments": ONE}] and reasons == ["tool_calls"]
        assert asked(served, include_reasoning=False)["choices"][0]["message"].get("reasoning_content") is None
        for choice, calls in (("required", 1), ("none", 0)):  # the model wants to think first, and to call
            (message,), _ = found = whole(asked(served, tool_choice=choice, max_tokens=200))
            assert found == streamed(served, tool_choice=choice, max_tokens=200)
            assert len(message["tool_calls"]) == calls
            assert message["content"].startswith("Well.")
    with served_by("gpt_oss", THOUGHT.format("a") + FINAL + "b") as served:
        for more in ({}, {"tools": None}):
            (message,), reasons = found = whole(asked(served, **more))
            assert found == streamed(served, **more) and reasons == ["stop"]
            assert (message["reasoning_content"], message["content"], message["tool_calls"]) == ("a", "b", [])


@pytest.mark.parametrize("said", [FINAL + ONE, THOUGHT.format("Hm, {") + FINAL + ONE, "no channel", FINAL + "[1]"])
def test_a_grammar_is_for_the_final_channel(said):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
    with served_by("gpt_oss", said) as served:
        body = {"response_format": schema, "tools": None, "max_tokens": 2000}
        (message,), reasons = found = whole(asked(served, **body))
        assert found == streamed(served, **body)
        if ONE in said:
            assert message["reasoning_content"] == ("Hm, {" if "Hm" in said else "")
            assert message["content"] == ONE and reasons == ["stop"]
        else:
            assert reasons == ["length"] or json.loads(message["content"]).keys() <= {"city", "days"}


@pytest.mark.parametrize("end", ["<|return|>", "<|call|>"])
def test_the_end_of_a_message_in_channels_ends_the_answer(end):
    """Without tools no grammar ends a call, and the model's list of stop tokens may lack both tokens."""
    with served_by("gpt_oss", f"{FINAL}a{end}b", f"{GPT_OSS}{end}b") as served:
        (message,), reasons = found = whole(asked(served, tools=None))
        assert found == streamed(served, tools=None)
        assert message["content"] == "a" and reasons == ["stop"]
        assert asked(served, tools=None, ignore_eos=True, max_tokens=40)["choices"][0]["finish_reason"] == "length"
        messages = [USER, {"role": "assistant", "content": "a"}, USER]
        (message,), reasons = found = whole(asked(served, tools=None, messages=messages))
        assert found == streamed(served, tools=None, messages=messages)
        assert (message["content"], message["reasoning_content"]) == ("Well.", ONE) and reasons == ["stop"]


def test_tools_that_must_not_be_called_may_have_any_schema():
    with served_by("gpt_oss", f"{FINAL}a") as served:
        answer = asked(served, tools=[strict(properties={"x": {"uniqueItems": True}})], tool_choice="none")
        assert answer["choices"][0]["message"]["content"] == "a"


def tool(**parameters):
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def strict(**parameters):
    return {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}


@pytest.mark.parametrize("keyword", sorted(LACKING))
def test_a_keyword_that_no_grammar_has_binds_a_strict_function_only(keyword):
    schema = {"type": "object", "properties": {keyword: {"type": "array", keyword: {"type": "string"}}}}
    schema |= {"required": [keyword], "additionalProperties": False}
    with served_by(
        "qwen", f'<tool_call>\n{{"name": "f", "arguments": {{"{keyword}": [1, 1]}}}}\n</tool_call>'
    ) as served:
        message = asked(served, tools=[tool(**schema)])["choices"][0]["message"]
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {keyword: [1, 1]}
        assert keyword in asked(served, 400, tools=[strict(**schema)])["message"]


def called(arguments):
    return [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (
            {"tools": [WEATHER, strict(properties={"x": {"uniqueItems": True}})]},
            "tools",
            ["function f:", "uniqueItems"],
        ),
        ({"tools": [tool(type="array")]}, "tools", ["function f:", "array"]),
        ({"tools": [tool(maximum=1.5, exclusiveMinimum=1)]}, "tools", ["function f:", "exclusiveMinimum"]),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", ["tools"]),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", ["'g'"]),
        ({"response_format": {"type": "json_object"}}, "response_format", ["tools"]),
        ({"messages": called("[1]")}, "messages", ["messages[1].tool_calls[0]", "JSON object"]),
        ({"messages": called('{"a": ')}, "messages", ["messages[1].tool_calls[0]", "JSON object"]),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "messages", ["messages[1]"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(body, param, words):
    with served_by("qwen", "x") as served:
        for stream in (False, True):
            error = asked(served, 400, stream=stream, **body)
            assert error["param"] == param and all(word in error["message"] for word in words), error


def test_a_template_that_writes_no_tools_refuses_them():
    with served_by("qwen", "x", template=CHATML) as served:
        error = asked(served, 400)
        assert error["param"] == "tools" and "chat template" in error["message"]
        assert asked(served, tool_choice="none")["choices"][0]["message"]["content"] == "x"


def test_tokenize_counts_the_tools():
    with served_by("qwen", "x") as served:
        answer = served.http.post("/tokenize", json={"messages": [USER], "tools": TOOLS}).json()
        assert answer["count"] == asked(served)["usage"]["prompt_tokens"]


def test_a_conversation_with_tools_finds_all_of_its_last_turn_in_the_cache():
    """20 turns of an agent: thoughts, texts, one or two calls, and their results."""
    answers = []
    for number in range(20):
        arguments = json.dumps({"city": f'K\u00f6ln "{number}"\n', "days": number % 9 + 1}, ensure_ascii=False)
        call = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
        more = '\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>' if number % 3 == 0 else ""
        text = f"Let me see {number}.\n" if number % 2 else ""
        answers.append(f"<think>\nI need the weather {number}.\n</think>\n\n{text}{call}{more}")
    messages = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Compare the cities."}]
    with served_by("qwen", *answers, shows_cached_tokens=True) as served:
        found = total = before = 0
        for number in range(20):
            answer = asked(served, messages=messages, chat_template_kwargs={"opens": False})
            message, usage = answer["choices"][0]["message"], answer["usage"]
            assert len(message["tool_calls"]) == (2 if number % 3 == 0 else 1)
            found, total = found + usage["prompt_tokens_details"]["cached_tokens"], total + before
            before = usage["prompt_tokens"] + usage["completion_tokens"]
            messages.append({name: value for name, value in message.items() if name != "refusal"})
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": "fog"} for call in message["tool_calls"]
            ]
        assert found >= 0.99 * total > 0


WRITTEN = " to=functions.weather<|channel|>commentary json<|message|>"  # as the template writes a call
USUAL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"


@pytest.mark.parametrize(("header", "least"), [(WRITTEN, 0.99), (USUAL, 0.9)])
def test_a_conversation_in_channels_finds_what_the_template_writes_again(header, least):
    answers = []
    for number in range(20):
        arguments = json.dumps({"city": f'K\u00f6ln "{number}"\n', "days": number % 9 + 1}, ensure_ascii=False)
        answers.append(THOUGHT.format(f"I need the weather {number}.") + header + arguments)
    messages = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Compare the cities."}]
    with served_by("gpt_oss", *answers, shows_cached_tokens=True) as served:
        found = total = before = 0
        for _ in range(20):
            answer = asked(served, messages=messages)
            message, usage = answer["choices"][0]["message"], answer["usage"]
            assert len(message["tool_calls"]) == 1 and message["reasoning_content"]
            found, total = found + usage["prompt_tokens_details"]["cached_tokens"], total + before
            before = usage["prompt_tokens"] + usage["completion_tokens"]
            messages.append({name: value for name, value in message.items() if name != "refusal"})
            messages.append({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "fog"})
        assert 1.0 >= found / total >= least, found / total


def test_openai_s_client_calls_a_tool_and_gets_its_answer_whole_and_streamed():
    with served_by("qwen", SAID["qwen"][1], "It is 5.") as served:
        messages = [USER]
        options = {"tools": TOOLS, "temperature": 0}
        message = served.openai.chat.completions.create(model="fake", messages=messages, **options).choices[0].message
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
        assert calls == [("weather", json.loads(ONE)), ("clock", {})] and message.content == "Well."
        with served.openai.chat.completions.stream(model="fake", messages=messages, **options) as stream:
            done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
            streamed = stream.get_final_completion().choices[0]
        assert [(event.name, json.loads(event.arguments)) for event in done] == calls
        assert streamed.finish_reason == "tool_calls" and streamed.message.content == "Well."
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in message.tool_calls]
        answer = served.openai.chat.completions.create(model="fake", messages=messages, **options).choices[0]
        assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == ("It is 5.", None, "stop")
