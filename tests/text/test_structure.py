"""Blocks of Markdown, HTML and plain text: what is read of them, where it stands in the text, and what is left out."""

from __future__ import annotations

import random

import pytest
from marked_texts import HTML, MARKDOWN

from sonoro.core.types import TextFormat
from sonoro.text import read
from sonoro.text.structure import blocks_of, format_of


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        (
            MARKDOWN,
            "Getting started. Run sonoro serve, see the guide. A hyphenated word. one, Open the door. two, Walk in. "
            "one. two. three. quoted. Name, Age. Name, Ada, Age, thirty six. build A cat. The end.",
        ),
        (HTML, "Title. First and last. one, one. two, two. Name, Age. Ada, thirty six. A cat. Unclosed end."),
        ("<alice> hi\n<bob> is 3 < 5?", "alice, hi. bob, is three is less than five?"),
        ("Heading\n===\n\nText", "Heading. Text."),
        ("It&#39;s Tom &amp;amp; Jerry", "It's Tom and Jerry."),
        ("<think>\nLet me see.\n</think>\nYes.", "Yes."),
        ("soft\u00adware, zero\u200bwidth", "software, zerowidth."),
        ("a word[^1] of it.\n\n[^1]: a note", "a word of it. a note."),
    ],
    ids=["markdown", "html", "chat", "heading", "entities", "thought", "invisible", "footnote"],
)
def test_what_is_read(text: str, spoken: str) -> None:
    assert read(text).text == spoken


def test_code_is_read_on_request() -> None:
    assert "print" not in read(MARKDOWN).text
    assert "print, not read" in read(MARKDOWN, with_code=True).text
    assert "code" in read(HTML, with_code=True).text


@pytest.mark.parametrize(
    ("text", "known"),
    [
        *((text, "plain") for text in ("a < b and b > c", "5 * 3 * 2", "snake_case and __init", "x | y", "#1")),
        *((text, "markdown") for text in ("# Title", "**bold**", "- a", "1. a", "[a](b)", "`x`", "> q", "```\nx\n```")),
        *((text, "html") for text in ("<p>Hi", "<b>bold</b>", "a<br>b", "<!DOCTYPE html>")),
    ],
)
def test_the_format_is_recognised(text: str, known: TextFormat) -> None:
    assert format_of(text) == known


@pytest.mark.parametrize(("text", "text_format"), [(MARKDOWN, "markdown"), (HTML, "html"), (MARKDOWN, "plain")])
def test_each_character_knows_where_it_is_written(text: str, text_format: TextFormat) -> None:
    for block in blocks_of(text, text_format):
        assert len(block.origins) == len(block.text)
        for character, (start, end) in zip(block.text, block.origins, strict=True):
            assert 0 <= start <= end <= len(text)
            if end - start == 1:
                assert text[start] == character, (block, start)


@pytest.mark.parametrize("text_format", ["auto", "plain", "markdown", "html"])
def test_no_text_does_harm(text_format: TextFormat) -> None:
    """Unclosed marks, right-to-left and control characters."""
    draw = random.Random(7)
    parts = [
        "```",
        "`",
        "**",
        "_",
        "~~",
        "[",
        "](",
        ")",
        "<",
        "</b>",
        "<div ",
        ">",
        "<!--",
        "-->",
        "&#",
        "&amp;",
        "| a |\n",
    ]
    parts += [
        "\n",
        "\n\n",
        "    ",
        "# ",
        "- ",
        "1. ",
        "> ",
        "|-|\n",
        "\u202e",
        "שלום",
        "\x00",
        "\x1b[0m",
        "\r",
        "word ",
        "12 ",
    ]
    for _ in range(800):
        text = "".join(draw.choices(parts, k=draw.randint(1, 25)))
        reading = read(text, text_format)
        assert len(reading.origins) == len(reading.text)
        assert not set(reading.text) & set("<>*_`[]|#&\n")
