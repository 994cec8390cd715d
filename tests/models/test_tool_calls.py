"""Calls of tools: their form is what a chat template writes, and no cut of a text changes what is found in it."""

import itertools
import json
from contextlib import closing

import numpy as np
import pytest
from share import examples

for name in ("transformers", "jinja2"):
    pytest.importorskip(name, reason=f"{name} is not installed: make test-models")

from chat_templates import CHATML, QWEN, TEMPLATES, Templated  # noqa: E402
from fake_runner import VOCABULARY  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from pagepool.engine.grammar_check import FINAL, NEXT  # noqa: E402
from pagepool.engine.structured import Grammars, Structured  # noqa: E402
from pagepool.errors import RequestRejected  # noqa: E402
from pagepool.serve.channels import Channels, with_thinking  # noqa: E402
from pagepool.serve.message_parts import MessageParts, Tags  # noqa: E402
from pagepool.serve.reasoning import Reasoning  # noqa: E402
from pagepool.serve.tools import ToolCalls, form_of, grammar_of  # noqa: E402

FORMS = {family: form_of(Templated(family)) for family in TEMPLATES if family != "gpt_oss"}


@pytest.mark.parametrize(
    ("family", "begin", "middle", "between", "end", "tag"),
    [
        ("qwen", '<tool_call>\n{"name": "', '", "arguments": ', '}\n</tool_call>\n<tool_call>\n{"name": "',
         "}\n</tool_call>", "<tool_call>"),
        ("llama3", '{"name": "', '", "parameters": ', None, "}", ""),
        ("mistral", '[TOOL_CALLS] [{"name": "', '", "arguments": ', '}, {"name": "', "}]", "[TOOL_CALLS]"),
    ],
)  # fmt: skip
def test_the_form_of_calls_is_what_the_template_writes(family, begin, middle, between, end, tag):
    form = FORMS[family]
    assert (form.begin, form.middle, form.between, form.end, form.tag) == (begin, middle, between, end, tag)
    assert form.has_special == (family == "mistral") and form.gap == ("\n" if family == "qwen" else "")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (CHATML, "does not write the tools"),
        (None, "no chat template"),
        ("{{ raise_exception('no tools here') }}", "no tools here"),
        ("{{ tools | tojson }}" + CHATML, "as the name of its function and JSON"),
        (QWEN.replace("call['function']['arguments'] | tojson", "'<a>' ~ call.id"), "as the name of its function"),
        (QWEN.replace('"name": "', '"id": "{{ call.id }}", "name": "'), "apart"),
    ],
)
def test_a_template_that_does_not_write_calls_says_so(template, words):
    tokenizer = Templated("qwen", template or "x")
    if template is None:
        tokenizer.chat_template = None
    with pytest.raises(ValueError, match=words):
        form_of(tokenizer)


def found(form, pieces, thinks=False):
    """Return the text, the thoughts and the calls of a text in pieces, and whether the calls are complete.

    Without a form, the text is in channels.
    """
    parts = MessageParts(Channels(True) if form is None else Tags(Reasoning() if thinks else None, ToolCalls(form)))
    texts, calls = {"content": "", "reasoning_content": ""}, []
    for delta in [*map(parts.add, pieces), parts.end()]:
        for name in texts:
            texts[name] += delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append(["", ""])
            for place, name in enumerate(("name", "arguments")):
                calls[call["index"]][place] += call["function"].get(name, "")
    return texts, calls, parts.is_call


NAMES = st.sampled_from(["f", "get_weather", "a-b"])
ARGUMENTS = st.sampled_from(
    [{}, {"a": '"}]\\'}, {"a": [{"b": "</tool_call>"}], "\u00e9": None}, {"name": "x", "c": "\n"}]
)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3)


def written(form, calls):
    bodies = [f"{name}{form.middle}{json.dumps(arguments, ensure_ascii=False)}" for name, arguments in calls]
    return form.begin + (form.between or "").join(bodies) + form.end


@pytest.mark.parametrize("family", FORMS)
@examples(100)
@given(
    calls=CALLS,
    text=st.sampled_from(["", "Well.", "a\n\n", "<tool", "{", "\u00e9 <tool_cal <", "[TOOL_CALL", "\n"]),
    cuts=st.lists(st.integers(0, 300), max_size=8),
)
def test_no_cut_changes_the_calls_that_are_found(family, calls, text, cuts):
    """Some 10,000 cuts for each form: at every place of each text, at some places together, and at all places."""
    form = FORMS[family]
    calls = calls[: 1 if form.between is None else 3]
    text = text if form.tag else ""
    said = text + (form.gap if text else "") + written(form, calls)
    whole = found(form, [said])
    assert whole[0]["content"] == text and whole[2]
    assert [[name, json.loads(arguments)] for name, arguments in whole[1]] == [list(call) for call in calls]
    for cut in range(len(said) + 1):
        assert found(form, [said[:cut], said[cut:]]) == whole
    assert found(form, said) == whole
    places = sorted({0, *(cut for cut in cuts if cut < len(said)), len(said)})
    assert found(form, [said[a:b] for a, b in itertools.pairwise(places)]) == whole


PARTS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", '\n{"name": "', 'f", "arguments": ', "{}", "}", "<think>", "]"]
PARTS += ["</think>", "\n", "<tool", " ", "a", '{"name": "', 'f", "parameters": ', "\u00e9", ' [{"name": "']


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("family", FORMS)
@examples(100)
@given(text=st.lists(st.sampled_from(PARTS), max_size=10).map("".join))
def test_a_text_that_looks_like_a_call_is_the_same_in_pieces(family, thinks, text):
    form = FORMS[family]
    whole = found(form, [text], thinks)
    assert all(found(form, [text[:cut], text[cut:]], thinks) == whole for cut in range(len(text) + 1))
    assert found(form, text, thinks) == whole
    if not thinks and not whole[1] and not any(form.begin in text[place:] for place in range(len(text))):
        assert whole[0]["content"] == text


def test_the_form_of_calls_in_channels():
    form = form_of(Templated("gpt_oss"))
    assert (form.begin, form.middle, form.end) == (" to=functions.", "<|channel|>commentary json<|message|>", "")
    assert form.is_in_channels and form.between is None and not any(one.is_in_channels for one in FORMS.values())


SPOKEN = st.sampled_from(["", "Well.", "a\n\n", "<|en", "<|end|>", "<|end|><|start|>", "{\u00e9}", "to=functions.f"])
CHANNELS = st.sampled_from(["analysis", "commentary", "analysis code"])
HEADERS = st.sampled_from(
    [
        "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.{}<|message|>",
        " to=functions.{}<|channel|>commentary json<|message|>",
        " to=functions.{}<|channel|>commentary <|constrain|>json<|message|>",
    ]
)


@examples(100)
@given(
    messages=st.lists(st.tuples(CHANNELS, SPOKEN), max_size=3),
    final=st.none() | st.tuples(st.just("final"), SPOKEN | st.just(f"{NEXT}<|channel|>analysis<|message|>x")),
    call=st.none() | st.tuples(NAMES, ARGUMENTS),
    header=HEADERS,
    cuts=st.lists(st.integers(0, 300), max_size=8),
)
def test_no_cut_changes_what_is_found_in_channels(messages, final, call, header, cuts):
    """Some 10,000 cuts, as for the other forms."""
    if final is not None:
        messages, call = [*messages, final], None
    said = [f"<|channel|>{channel}<|message|>{text}" for channel, text in messages]
    if call is not None:
        said.append(header.format(call[0]) + json.dumps(call[1], ensure_ascii=False))
    said = NEXT.join(said)
    whole = found(None, [said])
    thoughts, texts = (
        [text for channel, text in messages if channel.startswith("analysis") == is_thought]
        for is_thought in (True, False)
    )
    last = messages[-1][1] if messages and call is final is None else ""  # it may begin the end of a message
    if not last.startswith("<|en"):
        assert whole[0] == {"content": "\n".join(texts), "reasoning_content": "\n".join(thoughts)}
    calls = [] if call is None else [list(call)]
    assert [[name, json.loads(arguments)] for name, arguments in whole[1]] == calls and whole[2] == bool(calls)
    for cut in range(len(said) + 1):
        assert found(None, [said[:cut], said[cut:]]) == whole
    assert found(None, said) == whole
    places = sorted({0, *(cut for cut in cuts if cut < len(said)), len(said)})
    assert found(None, [said[a:b] for a, b in itertools.pairwise(places)]) == whole


WORDS = ["<|channel|>", "<|message|>", "<|start|>assistant", "<|end|>", "<|call|>", "final", "analysis", "commentary"]
WORDS += [" to=functions.f", " to=user", "<|constrain|>json", " ", "{}", '{"a": "}', "\n", "<|", "\u00e9"]


@examples(100)
@given(text=st.lists(st.sampled_from(WORDS), max_size=10).map("".join))
def test_any_text_is_the_same_in_pieces_in_channels(text):
    whole = found(None, [text])
    assert all(found(None, [text[:cut], text[cut:]]) == whole for cut in range(len(text) + 1))
    assert found(None, text) == whole


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("choice", ["response_format", "auto", "required", "none"])
def test_no_text_spells_the_end_of_a_thought_with_ordinary_tokens(choice):
    pytest.importorskip("llguidance", reason="llguidance is not installed: make test-models")
    tokenizer = Templated("gpt_oss")
    thought = [*tokenizer("<|channel|>analysis<|message|>")["input_ids"], *NEXT.encode()]
    grammar = None if choice == "response_format" else grammar_of(form_of(tokenizer), [TOOL], choice)
    structured = Structured(grammar=grammar) if grammar else Structured(json_object=True, after=FINAL)
    with closing(Grammars(tokenizer, VOCABULARY, [0])) as grammars:
        matcher = grammars.compiled(structured).matcher(thought[:-1])
        mask = matcher.masked(np.zeros(VOCABULARY, np.float32))
        (end,) = tokenizer("<|end|>")["input_ids"]
        assert mask[thought[-1]] == -np.inf and mask[ord("a")] == mask[end] == 0.0


def test_the_final_channel_of_a_model_without_channels_is_a_text_like_others():
    pytest.importorskip("llguidance", reason="llguidance is not installed: make test-models")
    tokenizer = Templated("qwen")
    with closing(Grammars(tokenizer, VOCABULARY, [0])) as grammars:
        grammar = grammars.compiled(Structured(choice=["a"], after=FINAL))
        mask = grammar.matcher([*f"x{FINAL}".encode()]).masked(np.zeros(VOCABULARY, np.float32))
        assert mask[ord("a")] == 0.0 and mask[ord("b")] == -np.inf


@pytest.mark.parametrize("text", ["", " ", " to", "<|", "Well.", " to be", "<|end|>", "\n"])
def test_an_answer_without_a_header_is_text(text):
    assert found(None, [text]) == found(None, text) == ({"content": text, "reasoning_content": ""}, [], False)


def test_messages_are_written_as_the_template_of_gpt_oss_reads_them():
    call = {"function": {"name": "f", "arguments": {}}}
    plain = {"role": "assistant", "content": "x", "reasoning_content": "y"}
    assert with_thinking([{"role": "user", "content": "x"}, plain]) == [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "x", "thinking": "y"},
    ]
    (found,) = with_thinking([{**plain, "tool_calls": [call]}])
    assert (found["thinking"], found["content"]) == ("y\nx", "") and plain["content"] == "x"
    with pytest.raises(RequestRejected, match=r"1 call .*messages\[1\] has 2"):
        with_thinking([plain, {**plain, "tool_calls": [call, call]}])
