"""Thoughts and answers of a model are the same for every cut of the text."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
from share import examples

from pagepool.serve.reasoning import Reasoning

PARTS = ["<think>", "</think>", "<thi", "nk>", "</th", "\n", " ", "<", "a", "\u00e9", "</think"]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)


def split(pieces, is_open=False):
    reasoning = Reasoning(is_open)
    found = [*map(reasoning.add, pieces), reasoning.flush()]
    return tuple(map("".join, zip(*found, strict=True)))


def test_thoughts_end_at_the_first_closing_tag():
    assert split(["<think>\nab\n\n</think>\n\nc</think>d"]) == ("ab", "c</think>d")
    assert split([" \n<think>ab"]) == ("ab", "")
    assert split(["\nab\n</think>\nc"], is_open=True) == ("ab", "c")
    assert split(["<think>\n\n</think>\n\nc"]) == ("", "c")


def test_other_texts_are_the_answer_as_they_are():
    for text in ("", " \n", "ab<think>c</think>", "<", "<thin", "\n\n<thinks"):
        assert split([text]) == ("", text)
    assert split(["ab</thin"], is_open=True) == ("ab</thin", "")


@examples(500)
@given(text=TEXTS, is_open=st.booleans(), cuts=st.lists(st.integers(0, 60), max_size=8))
def test_no_cut_changes_the_result(text, is_open, cuts):
    whole = split([text], is_open)
    assert all(split([text[:cut], text[cut:]], is_open) == whole for cut in range(len(text) + 1))
    assert split(text, is_open) == whole
    places = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    assert split([text[a:b] for a, b in itertools.pairwise(places)], is_open) == whole
