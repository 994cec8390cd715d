"""Parameters of HTTP requests: converted to SamplingParams, accepted if they have no effect, or refused."""

import pytest

from pagepool.engine import SamplingParams
from pagepool.serve.errors import RequestError
from pagepool.serve.protocol import read_request

MESSAGES = [{"role": "user", "content": "x"}]


def read(is_chat=False, **parameters):
    return read_request({"messages": MESSAGES} | parameters if is_chat else {"prompt": "x"} | parameters, is_chat)


def params(is_chat=False, **parameters):
    return read(is_chat, **parameters).params


NEUTRAL = {
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "ignore_eos": False,
    "min_tokens": 0,
    "echo": False,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "bad_words": [],
    "use_beam_search": False,
    "length_penalty": 1.0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "prompt_logprobs": None,
    "continue_final_message": False,
    "repeat_penalty": 1.0,
    "typical_p": 1.0,
    "mirostat": 0,
}


@pytest.mark.parametrize("is_chat", [False, True])
def test_neutral_values_of_other_servers_parameters_change_nothing(is_chat):
    assert params(is_chat, **NEUTRAL, add_special_tokens=not is_chat) == params(is_chat)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_beam_search", True),
        ("length_penalty", 1.5),
        ("include_stop_str_in_output", True),
        ("add_special_tokens", False),
        ("suffix", "x"),
        ("mirostat", 2),
    ],
)
def test_unsupported_values_are_refused_by_name(name, value):
    with pytest.raises(RequestError) as raised:
        read(**{name: value})
    assert (raised.value.status, raised.value.param, raised.value.code) == (400, name, "unsupported_parameter")


def test_tools_of_chats_are_read_and_other_tools_only_where_none_may_be_called():
    tools = [{"type": "function", "function": {"name": "f"}}]
    for choice in ("none", "auto", "required"):
        request = read(True, tools=tools, tool_choice=choice)
        assert (request.tools, request.tool_choice) == (tools, choice)
    assert read(True, tools=tools).tool_choice == "auto" and read(True, tool_choice="auto").tool_choice == "none"
    assert params(tools=tools, tool_choice="none") == params()
    assert params(True, functions=tools, function_call="none") == params(True)
    for is_chat, given in ((False, {"tools": tools}), (True, {"functions": tools})):
        with pytest.raises(RequestError, match="is not supported"):
            read(is_chat, **given)


def test_requests_of_load_tools_are_accepted():
    options = {"include_usage": True, "continuous_usage_stats": True}
    request = read(stream=True, stream_options=options, ignore_eos=True, max_tokens=12, repetition_penalty=1.0)
    assert (request.stream, request.include_usage) == (True, True)
    assert request.params == SamplingParams(12, temperature=1.0, ignore_eos=True)
    with pytest.raises(RequestError, match="continuous_usage_stats must be true or false, not str"):
        read(stream=True, stream_options={"continuous_usage_stats": "yes"})


def test_penalties_biases_and_bad_words_are_taken():
    given = {"min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -0.5, "repetition_penalty": 1.1}
    found = params(**given, logit_bias={"5": 1, "7": -200.0}, bad_words=["a", " b"], temperature=0)
    assert found == SamplingParams(16, **given, logit_bias={5: 1.0, 7: -100.0}, bad_words=("a", " b"))


def test_sampling_defaults_replace_openai_s_but_not_given_values():
    defaults = {"temperature": 0.6, "top_p": 0.9}
    found = read_request({"prompt": "x", "top_p": 0.5}, False, defaults).params
    assert (found.temperature, found.top_p, found.top_k) == (0.6, 0.5, 0)


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({"echo": True}, None),
        ({"echo": True, "logprobs": 3}, 3),
        ({"logprobs": 3}, None),
        ({"prompt_logprobs": 2}, 2),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 2}, 3),
        ({"echo": True, "max_tokens": 0}, 0),
        ({"echo": True, "max_tokens": 0, "logprobs": 1}, 1),
    ],
)
def test_an_echo_needs_log_probabilities_of_the_prompt_where_it_shows_some(given, count):
    assert params(**given).prompt_logprobs == count


def test_min_tokens_are_at_most_the_new_tokens():
    assert params(min_tokens=16).min_tokens == 16
    assert params(True, min_tokens=500).min_tokens == 500
    for given in ({"min_tokens": 17}, {"min_tokens": 4, "max_tokens": 3}):
        with pytest.raises(RequestError) as raised:
            read(**given)
        assert raised.value.param == "min_tokens" and str(given["min_tokens"]) in raised.value.message
