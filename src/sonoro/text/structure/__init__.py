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
| formula of TeX | by its signs, in one line |
| front matter | its title |
"""

import re
from collections.abc import Iterable, Iterator

from sonoro.core.types import TextFormat

from .blocks import Block, Kind, Span, spoken
from .markdown import markdown_blocks
from .markup import html_blocks
from .plain import plain_blocks
from .tex import hidden, shown

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
_DOCUMENT = re.compile(r"\s*(?:<\?xml[^>]{0,200}>\s*)?<(?:!DOCTYPE html|html)\b", re.IGNORECASE)
_THOUGHTS = re.compile(
    r"(?P<code>^[ ]{0,3}(?P<fence>`{3,}|~{3,})[^\n]*\n.*?(?:^[ ]{0,3}(?P=fence)|\Z)"
    r"|(?P<ticks>`{1,2})(?!`)[^`\n]{1,500}(?P=ticks))"
    r"|<(?P<name>think|script|style)\b.*?(?:</(?P=name)>|\Z)",
    re.DOTALL | re.IGNORECASE | re.MULTILINE,
)
_TAG = re.compile(
    rf"{_THOUGHTS.pattern.partition('|<(?P<name>')[0]}"
    r"|</?[a-zA-Z][\w:-]{0,40}(?:[ =\t\n](?:(?!\n\s*\n)[^<>]){0,600})?/?>|<![A-Za-z][^<>]{0,300}>|<!--.*?-->",
    re.DOTALL | re.MULTILINE,
)
"""Both match code too, which they leave as it is."""

_FRONT = re.compile(r"\A---[ \t]*\n(?=[\w-]+:)(?:(?!---)[^\n]+\n){1,100}---[ \t]*(?:\n|\Z)")
_TITLE = re.compile(r"(?m)^title:[ \t]*(?P<quote>[\"']?)(?P<title>[^\n]*?)(?P=quote)[ \t]*$")
_BOUND = re.compile(r"(?m)^([ ]{0,3})>(?=(?:=\s?|[$£€.])?\d)")
"""At the start of a line, where a quote's sign stands: >90% of users."""

_HTML_BLOCK = re.compile(r"</?(?:br|p|div|h[1-6]|li|ul|ol|tr|table|hr|details|summary)\b", re.IGNORECASE)
_LONGEST = 20_000
"""Characters without a line end above which a text is no Markdown: the parser takes quadratic time over some runs."""


def format_of(text: str) -> TextFormat:
    """What `text` is written in, by its marks: "markdown", "html" or "plain"."""
    if _DOCUMENT.match(text):
        return "html"
    if _MARKDOWN.search(text) and _is_parsable(text):
        return "markdown"
    return "html" if "<" in text and _HTML.search(text) else "plain"


def _is_parsable(text: str) -> bool:
    return all(len(line) <= _LONGEST for line in text.split("\n"))


def blocks_of(text: str, text_format: TextFormat = "auto", *, with_code: bool = False) -> Iterator[Block]:
    """The blocks of `text` that hold anything to read."""
    # A wide sign of the same meaning is no quote's. What is left out becomes white space of the same length, so that
    # every character keeps its place.
    source, text = text, hidden(_BOUND.sub("\\1＞", text))
    if text_format != "plain" and (front := _FRONT.match(text)):
        text = _without_front(text, front)
    known = format_of(text) if text_format == "auto" else text_format
    if known == "html":
        made: Iterable[Block] = html_blocks(text, with_code=with_code)
    else:
        if "<" in text and text_format != "plain":
            text = _THOUGHTS.sub(lambda found: found["code"] or re.sub(r"\S", " ", found[0]), text)
            text = _TAG.sub(lambda found: found["code"] or _blank(found), text)
        is_markdown = known == "markdown" and _is_parsable(text)
        made = markdown_blocks(text, with_code=with_code) if is_markdown else plain_blocks(text)
    yield from spoken(shown(block, source) for block in made)


def _without_front(text: str, front: re.Match[str]) -> str:
    """`text` without its front matter, but for the title."""
    blank = re.sub(r"\S", " ", front[0])
    if title := _TITLE.search(front[0]):
        blank = blank[: title.start("title")] + title["title"] + blank[title.end("title") :]
        blank = blank[: title.start()] + "\n" + blank[title.start() + 1 : -1] + "\n"
    return blank + text[front.end() :]


def _blank(found: re.Match[str]) -> str:
    """White space for a tag, unless it is the name of somebody who speaks in a chat, or an address."""
    is_name = re.match(r"<[\w .-]{1,32}>$", found[0]) and re.search(
        r"(?:^|\n)[ \t]*(?:\[[^\]\n]{1,30}\][ \t]*)?$", found.string[max(0, found.start() - 80) : found.start()]
    )
    is_closed = f"</{found[0][1:-1]}>" in found.string[found.end() : found.end() + 400]
    if is_name and not is_closed and re.match(r"[ \t]+\S", found.string[found.end() : found.end() + 4]):
        return found[0]
    return ("\n" if _HTML_BLOCK.match(found[0]) else " ").ljust(len(found[0]))
