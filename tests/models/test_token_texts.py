"""Log probabilities over HTTP: texts and bytes of tokens for several tokenizers, and values that JSON can represent."""

import json
import math

import pytest

for name in ("tokenizers", "transformers"):
    pytest.importorskip(name, reason=f"{name} is not installed: make test-models")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from pagepool.engine.generation import Token  # noqa: E402
from pagepool.engine.token_texts import TokenTexts  # noqa: E402
from pagepool.serve.protocol import Answer, ChatAnswer, Request  # noqa: E402

EURO = "\u20ac".encode()  # 3 bytes
ANY = Request([], is_chat=False, model=None)


def sentence_piece():
    """A tokenizer like Llama 2's: the decoder strips a leading space."""
    pieces = ["<unk>", "\u2581the", "\u2581train", "train", "\u2581stops", *(f"<0x{byte:02X}>" for byte in range(256))]
    base = Tokenizer(models.WordLevel({piece: place for place, piece in enumerate(pieces)}, unk_token="<unk>"))
    base.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    base.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=base, unk_token="<unk>"), [5 + byte for byte in EURO]


def metaspace():
    tokenizer, _ = sentence_piece()
    tokenizer.backend_tokenizer.decoder = decoders.Metaspace()
    return tokenizer, None


def byte_level():
    pieces = ["<unk>", "\u0120the", "\u0120train", "train", "\u0120stops", "\u00e2", "\u0124", "\u00ac"]
    base = Tokenizer(models.WordLevel({piece: place for place, piece in enumerate(pieces)}, unk_token="<unk>"))
    base.pre_tokenizer, base.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=base, unk_token="<unk>"), [5, 6, 7]


TOKENIZERS = [sentence_piece, metaspace, byte_level]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokens_keep_their_leading_space_and_bytes(kind):
    tokenizer, euro = kind()
    texts = TokenTexts(tokenizer)
    assert [texts.text_of(token) for token in range(5)] == ["<unk>", " the", " train", "train", " stops"]
    assert [texts.bytes_of(token) for token in (2, 3, 2)] == [b" train", b"train", b" train"]
    assert texts.bytes_of(999) == b""  # a model may have more tokens than its tokenizer
    if euro:
        assert b"".join(texts.bytes_of(token) for token in euro) == EURO
        assert [texts.text_of(token) for token in euro] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_drawn_token_is_in_top_logprobs_for_equal_texts(kind):
    texts = TokenTexts(kind()[0])
    row = [
        Token(1, "the", -0.5),
        Token(2, " train", -0.25, {2: -0.25, 3: -9.0}),
        Token(4, " stops", -7.0, {1: -0.1, 3: -3.0}),
    ]
    found = Answer("m", texts, ANY).logprobs(row, 0)
    assert found["tokens"] == [" the", " train", " stops"]
    assert found["top_logprobs"] == [
        {" the": -0.5},
        {" train": -0.25, "train": -9.0},
        {" the": -0.1, "train": -3.0, " stops": -7.0},
    ]
    first, second, third = ChatAnswer("m", texts, ANY).logprobs(row, 0)["content"]
    assert first["top_logprobs"] == [] and (first["token"], first["bytes"]) == (" the", [*b" the"])
    assert [(one["token"], one["logprob"]) for one in second["top_logprobs"]] == [(" train", -0.25), ("train", -9.0)]
    assert [one["token"] for one in third["top_logprobs"]] == [" the", "train", " stops"]


def test_parts_of_characters_do_not_overwrite_each_other():
    tokenizer, euro = sentence_piece()
    row = [Token(euro[0], "", -0.5, {euro[0]: -0.5, euro[1]: -1.0, euro[2]: -2.0, 5 + ord("t"): -3.0})]
    (top,) = Answer("m", TokenTexts(tokenizer), ANY).logprobs(row, 0)["top_logprobs"]
    assert top == {"bytes:\\xe2": -0.5, "bytes:\\x82": -1.0, "bytes:\\xac": -2.0, "t": -3.0}
    (entry,) = ChatAnswer("m", TokenTexts(tokenizer), ANY).logprobs(row, 0)["content"]
    assert [one["bytes"] for one in entry["top_logprobs"]] == [[0xE2], [0x82], [0xAC], [ord("t")]]


@pytest.mark.parametrize("kind", [Answer, ChatAnswer])
def test_impossible_tokens_have_a_number_that_json_can_hold(kind):
    row = [Token(1, " the", -math.inf, {2: -0.0, 3: -math.inf})]
    found = json.dumps(kind("m", TokenTexts(byte_level()[0]), ANY).logprobs(row, 0), allow_nan=False)
    assert found.count("-9999.0") == 3  # the drawn token, its copy in the top tokens, and another top token


class Alone:
    """A tokenizer that only decodes."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join(map(chr, ids))


def test_another_tokenizer_decodes_each_token_alone():
    texts = TokenTexts(Alone())
    assert (texts.text_of(65), texts.bytes_of(0x20AC)) == ("A", EURO)
