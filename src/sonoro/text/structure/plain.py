"""Plain text to blocks: paragraphs, and lines that are items, quotes of a chat, or rules, by light rules."""

import re
from collections.abc import Iterator

from .blocks import Block, Kind

_BREAK = re.compile(r"\n[ \t]*(?:\n[ \t\n]*)")
_LINE = re.compile(r"[^\n]*\n?")
_RULE = re.compile(r"[ \t]*([-=*_~#+.])(?:[ \t]*\1){2,}[ \t]*\n?")
_ITEM = re.compile(r"[ \t]*(?:(?P<bullet>[-*•‣◦–+])|(?P<number>\d{1,3}|[a-zA-Z])(?P<mark>[.)]))[ \t]+(?=\S)")
_LABEL = re.compile(r"[ \t]*[A-Z][\w.'-]{0,24}(?: [A-Z][\w.'-]{0,24}){0,2}:[ \t]+")
"""Who speaks, or what a line is about: Alice: hi. Such a line does not continue the one before it."""

_SPEAKER = re.compile(r"[ \t]*<(?P<name>[\w .-]{1,32})>[ \t]+(?=\S)")


def plain_blocks(text: str) -> Iterator[Block]:
    """The blocks of plain `text`. A blank line ends a paragraph; a line by itself continues it."""
    at = 0
    while at < len(text):
        found = _BREAK.search(text, at)
        end = found.start() if found else len(text)
        paragraph = Block(Kind.PARAGRAPH)
        paragraph.add(text[at:end], at)
        yield from lines_of(paragraph)
        at = found.end() if found else len(text)


def lines_of(paragraph: Block) -> Iterator[Block]:
    """The blocks of a paragraph: its items, what is said in a chat, and the lines between."""
    text = paragraph.text
    lines = [found.span() for found in _LINE.finditer(text) if found[0]]
    items = sum(_ITEM.match(text, *line) is not None for line in lines)
    block = Block(paragraph.kind)
    for start, stop in lines:
        if _RULE.fullmatch(text, start, stop):
            yield block
            block = Block(paragraph.kind)
            continue
        begin = start
        if (item := _ITEM.match(text, start, stop)) and (item["bullet"] not in (None, "–", "+") or items > 1):
            yield block
            block, begin = Block(Kind.ITEM), item.end()
            if item["number"]:
                block.take(paragraph, *item.span("number"))
                block.add(", ", *[paragraph.origins[item.start("mark")][0]] * 2)
        elif speaker := _SPEAKER.match(text, start, stop):
            yield block
            block, begin = Block(paragraph.kind), speaker.end()
            block.take(paragraph, *speaker.span("name"))
            block.add(": ", *[paragraph.origins[speaker.end("name")][0]] * 2)
        elif start and _LABEL.match(text, start, stop):
            yield block
            block = Block(paragraph.kind)
        block.take(paragraph, begin, stop)
    yield block


def add_number(block: Block, number: str | None, start: int, end: int) -> None:
    """Begin an item with its number, which belongs to it: "1. Open the door" is one, open the door."""
    if number:
        block.add(number, start, end)
        block.add(", ", end, end)
