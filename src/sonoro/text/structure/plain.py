"""Plain text to blocks: paragraphs, and lines that are items, quotes of a chat, or rules, by light rules."""

import re
from collections.abc import Iterator

from .blocks import Block, Kind

_BREAK = re.compile(r"\n[ \t]*(?:\n[ \t\n]*)")
_LINE = re.compile(r"[^\n]*\n?")
_RULE = re.compile(r"[ \t]*([-=*_~#+.])(?:[ \t]*\1){2,}[ \t]*\n?")
_ROMAN = r"(?=[IVXL]{2})(?:XL|L?X{0,3})(?:IX|IV|V?I{0,3})|(?=[ivxl]{2})(?:xl|l?x{0,3})(?:ix|iv|v?i{0,3})"
_ITEM = re.compile(
    rf"[ \t]*(?:(?P<bullet>[-*•‣◦–+])|(?P<number>\d{{1,3}}|(?P<roman>{_ROMAN})|[a-zA-Z])(?P<mark>[.)]))[ \t]+(?=\S)"
)
_LABEL = re.compile(r"[ \t]*[A-Z][\w.'-]{0,24}(?: [A-Z][\w.'-]{0,24}){0,2}:[ \t]+")
"""Who speaks, or what a line is about: Alice: hi. Such a line does not continue the one before it."""

_STAMP = (
    r"(?P<stamp>[\[(]?(?:\d{4}-\d\d-\d\d[ T]|\d{1,2}[/.]\d{1,2}[/.]\d{2,4},? )?(?P<time>\d{1,2}:\d\d)(?::\d\d)?"
    r"(?P<half> ?[AaPp][Mm])?[\])]?)(?:[ \t]*-(?=[ \t]))?"
)
_SPEAKER = re.compile(rf"[ \t]*(?:{_STAMP})?[ \t]*<[ @+%~&]?(?P<name>[\w .|`^{{}}\[\]-]{{1,32}})>[ \t]+(?=\S)")
_STAMPED = re.compile(
    rf"[ \t]*(?=[\[(]|[^\n:]{{4,12}},? \d){_STAMP}[ \t]+(?:(?P<name>[^\s:<>][^:<>\n]{{0,30}}):[ \t]+)?(?=\S)"
)
"""A line of a chat: when it was written, of which the hour and the minute are read, and who speaks."""

_PAGE = re.compile(r"[A-Za-z\"'.)][ \t]{2,}(?=\d{1,4}[ \t]*$)", re.MULTILINE)
"""In front of the number of a page, in a table of contents."""

_EQUATION = re.compile(r"[^\n]{0,80}[\w)\]%] ?[=≈<>≤≥] ?[-(\w$£€√]")
_LONGEST_EQUATION = 60


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
    items = [item for line in lines if (item := _ITEM.match(text, *line))]
    is_roman = any(item["roman"] for item in items)
    block, before = Block(paragraph.kind), (0, 0)
    for start, stop in lines:
        if _RULE.fullmatch(text, start, stop):
            yield block
            block = Block(paragraph.kind)
            continue
        begin = start
        if (item := _ITEM.match(text, start, stop)) and (item["bullet"] not in (None, "–", "+") or len(items) > 1):
            yield block
            block, begin = Block(Kind.ITEM), item.end()
            _add_item(block, paragraph, item, is_roman=is_roman)
        elif spoken := _SPEAKER.match(text, start, stop) or _STAMPED.match(text, start, stop):
            yield block
            block, begin = Block(paragraph.kind), spoken.end()
            _add_speaker(block, paragraph, spoken)
        elif start and (_LABEL.match(text, start, stop) or _are_equations(text, before, (start, stop))):
            yield block
            block = Block(paragraph.kind)
        if page := _PAGE.search(text, begin, stop):
            block.take(paragraph, begin, page.start() + 1)
            block.add(", ", *[paragraph.origins[page.end()][0]] * 2)
            begin = page.end()
        block.take(paragraph, begin, stop)
        before = start, stop
    yield block


def _are_equations(text: str, before: tuple[int, int], line: tuple[int, int]) -> bool:
    """Whether two lines hold an equation each, the first too short to be continued by the second."""
    is_short = before[1] - before[0] <= _LONGEST_EQUATION
    return is_short and all(_EQUATION.match(text, *one) is not None for one in (before, line))


def _add_item(block: Block, paragraph: Block, item: re.Match[str], *, is_roman: bool) -> None:
    """Begin `block` with the number of an item, in digits if the list counts with Roman ones."""
    if not item["number"]:
        return
    start, end = item.span("number")
    if is_roman and (value := _value(item["number"].upper())):
        block.add(value, paragraph.origins[start][0], paragraph.origins[end - 1][1])
    else:
        block.take(paragraph, start, end)
    block.add(", ", *[paragraph.origins[item.start("mark")][0]] * 2)


def _value(numeral: str) -> str:
    values = ["IVXL".find(sign) for sign in numeral]
    if -1 in values:
        return ""
    numbers = [(1, 5, 10, 50)[value] for value in values]
    return str(sum(-one if one < then else one for one, then in zip(numbers, [*numbers[1:], 0], strict=True)))


def _add_speaker(block: Block, paragraph: Block, line: re.Match[str]) -> None:
    """Begin `block` with the hour and the minute of a line of a chat, and the name of who speaks."""
    if line["stamp"]:
        start, end = line.span("stamp")
        span = paragraph.origins[start][0], paragraph.origins[end - 1][1]
        block.add(line["time"] + (line["half"] or "") + ", ", *span)
    if line["name"]:
        block.take(paragraph, *line.span("name"))
        block.add(": ", *[paragraph.origins[line.end("name")][0]] * 2)


def add_number(block: Block, number: str | None, start: int, end: int) -> None:
    """Begin an item with its number, which belongs to it: "1. Open the door" is one, open the door."""
    if number:
        block.add(number, start, end)
        block.add(", ", end, end)
