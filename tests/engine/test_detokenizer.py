"""Incremental detokenization: correct text and linear time for any tokens."""

import pytest
from fake_runner import Bytes
from hypothesis import given
from hypothesis import strategies as st
from share import examples

from pagepool.engine.tokenizing import Detokenizer


class Counting(Bytes):
    """Counts the tokens that it decodes."""

    num_decoded = 0

    def decode(self, ids, skip_special_tokens=True):
        self.num_decoded += len(ids)
        return super().decode(ids, skip_special_tokens)


class Letters:
    """Tokens are code points."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(map(chr, ids))


def text_of(detokenizer, tokens):
    return "".join([*map(detokenizer.add, tokens), detokenizer.flush()])


@pytest.mark.parametrize("bad", [b"\x80", b"\xf0\x9f", b"\xe2\x82\xe2"])
def test_tokens_that_complete_no_character_are_decoded_a_bounded_number_of_times(bad):
    tokenizer = Counting()
    detokenizer = Detokenizer(tokenizer, [])
    tokens = list(bad) * 1000
    pieces = [detokenizer.add(token) for token in tokens]
    assert tokenizer.num_decoded < 20 * len(tokens)
    assert set("".join(pieces)) == {"\ufffd"}
    assert max(place for place, piece in enumerate(pieces) if piece) >= len(tokens) - 4


def test_u_fffd_comes_with_the_fourth_token_that_completes_no_character():
    detokenizer = Detokenizer(Bytes(), [])
    assert [detokenizer.add(token) for token in b"a\x80\x80\x80\x80"] == ["a", "", "", "", "\ufffd"]
    assert detokenizer.add(ord("b")) == "\ufffd\ufffd\ufffdb"


@given(st.lists(st.sampled_from([b"\x80", b"\xf0", *(letter.encode() for letter in "aé€😀")]), max_size=30))
def test_characters_between_invalid_bytes_are_complete(parts):
    text = text_of(Detokenizer(Bytes(), []), b"".join(parts))
    wanted = [part.decode() for part in parts if part not in (b"\x80", b"\xf0")]
    assert [letter for letter in text if letter != "\ufffd"] == wanted


@examples(300)
@given(
    st.text("ab", max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=4),
    st.lists(st.integers(1, 7), max_size=20),
)
def test_a_text_ends_where_a_stop_string_comes(text, stops, sizes):
    """A token of several letters can complete several stop strings: the first one in the text counts."""

    class Pieces:
        def decode(self, ids, skip_special_tokens=True):
            return "".join(pieces[token] for token in ids)

    pieces, begin = [], 0
    for size in [*sizes, 40]:
        pieces.append(text[begin : begin + size])
        begin += size
    detokenizer, seen, given_out = Detokenizer(Pieces(), [], tuple(stops)), "", ""
    for token, piece in enumerate(pieces):
        given_out, seen = given_out + detokenizer.add(token), seen + piece
        found = [(seen.index(stop), stop) for stop in stops if stop in seen]
        assert detokenizer.stopped == bool(found)
        if found:
            assert (given_out, detokenizer.stop_string) == (seen[: min(found)[0]], min(found)[1])
            return
        # Only text that may be the start of a stop string is held back.
        held = seen[len(given_out) :]
        ends = [seen[place:] for place in range(len(seen))]
        assert held == max((end for end in ends if any(stop.startswith(end) for stop in stops)), key=len, default="")
    assert given_out + detokenizer.flush() == text


@pytest.mark.parametrize("first", ["a" * 255 + "z", "ab" * 128])
def test_many_long_stop_strings_are_compared_about_once_per_letter(first, monkeypatch):
    calls = []
    may_begin = Detokenizer._may_begin
    monkeypatch.setattr(Detokenizer, "_may_begin", lambda *given: calls.append(1) or may_begin(*given))
    stops = (first, *("ab" + "c" * 253 + chr(200 + number) for number in range(63)))
    text = "a" * 2000 + "ab" * 1000
    assert text_of(Detokenizer(Letters(), [], stops), map(ord, text)) in (text, text[: text.find(first)])
    assert len(calls) <= 2 * len(text) + 1
