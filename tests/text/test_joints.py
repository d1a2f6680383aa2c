"""A text that is cut at its joints is read as a whole, wherever its pieces end."""

from __future__ import annotations

import random

import pytest
from marked_texts import MARKDOWN

from sonoro.text import read
from sonoro.text.joints import last_joint

TEXTS = (
    MARKDOWN,
    "See [the long text of a link](https://example.com/a/b_c) and more of it.",
    "Run this:\n\n```sh\n# install from here\npip install the thing now\n```\n\nThat is all of it.",
    "he made calls to 911 for help, and see parts ii and iii of it",
    "- the first item of it\n- the second item of it\n\nand so it ends here",
    "in his 40s he was born in 1066 or so, a $5 bill of it, about 5 hundred thousand dollars",
    "Smith et al. 2020 say that *this is so* and that __is not__ so at all",
    "---\ntitle: the name of it\ntags: a of b\n---\n\nand so it begins with all of it",
    "the bound is \\(a of b\\) and so it is \\[x of y\\] with all of it",
    "<think>a thought of many words\nso it goes</think>What is said of it is here.",
)


def live(pieces: list[str]) -> str:
    """What is read of `pieces`, each up to the last joint of what has come."""
    raw, said = "", []
    for piece in pieces:
        raw += piece
        cut, is_sentence = last_joint(raw)
        text = read(raw[:cut]).text
        comma = "," * (cut > 1 and raw[cut - 2] in ",;:")
        said.append(text if is_sentence else text.removesuffix(".") + comma)
        raw = raw[cut:]
    return " ".join(part for part in [*said, read(raw).text] if part)


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_read_as_the_whole(text: str) -> None:
    draw, whole = random.Random(8), read(text).text
    assert live(list(text)) == whole
    for _ in range(30):
        cuts = sorted(draw.choices(range(len(text)), k=draw.randint(1, 5)))
        assert live([text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole


def test_prose_is_given_up_word_by_word() -> None:
    text = "It was a bright day in the park and all went well"
    assert text[: last_joint(text)[0]] == "It was a bright day in the park and all went "
