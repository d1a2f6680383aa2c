"""Text to blocks: recognises Markdown and HTML, and tells what is read and what is left out.

| written | read |
|---|---|
| heading, paragraph, list item, quote | a sentence of its own each, with a pause behind it |
| ordered item | its number, then its text |
| table | row by row, each cell after its head |
| link, image, badge | its text, its description |
| bare address | its host and path |
| code block, `<think>` | left out, or read where `code` says so |
| emphasis, inline code, comments, rules | without their signs |
"""

import re
from collections.abc import Iterator

from sonoro.core.types import TextFormat

from .blocks import Block, Kind, Span, spoken
from .markdown import markdown_blocks
from .markup import html_blocks
from .plain import plain_blocks

__all__ = ["Block", "Kind", "Span", "TextFormat", "blocks_of", "format_of"]

_TAGS = (
    "a|abbr|article|aside|b|blockquote|body|br|caption|code|dd|details|div|dl|dt|em|figcaption|figure|footer|h[1-6]|head|header|hr|html|i|img|"
    "kbd|li|main|mark|nav|ol|p|pre|q|s|script|section|small|span|strong|style|sub|summary|sup|table|tbody|td|tfoot|th|thead|title|tr|u|ul|video"
)
_HTML = re.compile(
    rf"</(?:{_TAGS})\s*>|<(?:br|hr|img|p|div|li|ul|ol|h[1-6]|html|body|table|tr)(?:\s[^<>]*)?/?>|<!DOCTYPE html",
    re.IGNORECASE,
)
_MARKDOWN_LINE = (
    r"\#{1,6}[ \t]+\S | ``` | ~~~ | >[ \t]?\S | \|.*\|[ \t]*$ | (?:[-*_][ \t]*){3,}$ | =+[ \t]*$"
    r"| (?:[-*+] | \d{1,9}[.)])[ \t]+\S"
)
_MARKDOWN_SPAN = (
    r"\[[^\]\[\n]{1,500}\]\([^()\s] | !\[[^\]\n]{0,200}\]\( | \*\*\S | __[^\s_][^\n]{0,300}?__ | `[^`\n]{1,500}` | ~~\S"
    r"| (?<![\w*])\*[^\s*][^*\n]{0,300}\*(?![\w*]) | (?<![\w_])_[^\s_][^_\n]{0,300}_(?![\w_])"
)
_MARKDOWN = re.compile(rf"(?mx) ^[ ]{{0,3}}(?:{_MARKDOWN_LINE}) | {_MARKDOWN_SPAN}")
_THOUGHTS = re.compile(r"<(think|script|style)\b.*?(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
_TAG = re.compile(r"</?[a-zA-Z][\w:-]{0,40}(?:[ =][^<>\n]{0,300})?/?>|<!--.*?-->", re.DOTALL)
_BOUND = re.compile(r"(?m)^([ ]{0,3})>(?=(?:=\s?|[$£€.])?\d)")
"""At the start of a line, where a quote's sign stands: >90% of users."""

_HTML_BLOCK = re.compile(r"</?(?:br|p|div|h[1-6]|li|ul|ol|tr|table|hr|details|summary)\b", re.IGNORECASE)
_LONGEST = 20_000
"""Characters without a line end above which a text is no Markdown: the parser takes quadratic time over some runs."""


def format_of(text: str) -> TextFormat:
    """What `text` is written in, by its marks: "markdown", "html" or "plain"."""
    if _MARKDOWN.search(text) and _is_parsable(text):
        return "markdown"
    return "html" if "<" in text and _HTML.search(text) else "plain"


def _is_parsable(text: str) -> bool:
    return all(len(line) <= _LONGEST for line in text.split("\n"))


def blocks_of(text: str, text_format: TextFormat = "auto", *, with_code: bool = False) -> Iterator[Block]:
    """The blocks of `text` that hold anything to read."""
    # A wide sign of the same meaning is no quote's, and keeps every character's place.
    text = _BOUND.sub("\\1＞", text)
    known = format_of(text) if text_format == "auto" else text_format
    if known == "html":
        yield from spoken(html_blocks(text, with_code=with_code))
        return
    if "<" in text and text_format != "plain":
        # Thoughts and tags become white space of the same length, so that every character keeps its place.
        text = _THOUGHTS.sub(lambda found: re.sub(r"\S", " ", found[0]), text)
        text = _TAG.sub(_blank, text)
    made = (
        markdown_blocks(text, with_code=with_code) if known == "markdown" and _is_parsable(text) else plain_blocks(text)
    )
    yield from spoken(made)


def _blank(found: re.Match[str]) -> str:
    """White space for a tag, unless it is the name of somebody who speaks in a chat, or an address."""
    is_name = re.match(r"<[\w .-]{1,32}>$", found[0]) and re.search(
        r"(?:^|\n)[ \t]*(?:\[[^\]\n]{1,30}\][ \t]*)?$", found.string[max(0, found.start() - 80) : found.start()]
    )
    is_closed = f"</{found[0][1:-1]}>" in found.string[found.end() : found.end() + 400]
    if is_name and not is_closed and re.match(r"[ \t]+\S", found.string[found.end() : found.end() + 4]):
        return found[0]
    return ("\n" if _HTML_BLOCK.match(found[0]) else " ").ljust(len(found[0]))
