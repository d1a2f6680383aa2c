"""Markdown to blocks, by markdown-it (CommonMark with tables and strike-through).

markdown-it tells the lines of a block, not where its characters stand, so these are found again in the source, in
order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from .blocks import Block, Kind
from .plain import add_number, lines_of

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_block import StateBlock
    from markdown_it.token import Token

_FLAG = re.compile(r"(?<![\w-])--?(?=[A-Za-z])")
_DOT = re.compile(r"(?<!\w)\.(?=[A-Za-z])")
_STAR = re.compile(r"(?<!\w)\*(?=[./])")
_LINK_END = re.compile(r"\](?:\([^()]*(?:\([^()]*\)[^()]*)*\)|\[[^\]]*\])?")


@cache
def _parser() -> MarkdownIt:
    # Imported when the first text with markup is read.
    made, table = import_module("markdown_it").MarkdownIt, import_module("markdown_it.rules_block").table
    parser: MarkdownIt = made("commonmark", {"html": False, "maxNesting": 20})
    parser.enable(["table", "strikethrough"])
    parser.block.ruler.at("table", lambda state, line, *rest: _is_row(state, line) and table(state, line, *rest))
    # Indented lines are prose more often than code; HTML has a parser of its own.
    return parser.disable(["code", "html_block", "html_inline", "text_join"])


def _is_row(state: StateBlock, line: int) -> bool:
    """Whether a line begins with the sign of a table: other text with the sign in it is prose."""
    return state.src.startswith("|", state.bMarks[line] + state.tShift[line])


def markdown_blocks(text: str, *, with_code: bool = False) -> Iterator[Block]:
    """The blocks of Markdown `text`, with code blocks if `with_code`."""
    text = re.sub(r"\r(?!\n)", "\n", text)  # a line's end to the parser too
    starts = [0, *(found.end() for found in re.finditer(r"\n", text))]
    kinds, table = [Kind.PARAGRAPH], _Table()
    numbers: list[tuple[str, int, int]] = []
    read_to = 0
    for token in _parser().parse(text):
        if token.type in _OPENS:
            kinds.append(_OPENS[token.type])
            if token.type == "list_item_open" and token.info and token.map:
                at = text.find(token.info, max(starts[token.map[0]], read_to))
                read_to = at + len(token.info) + 1
                numbers.append((token.info, at, read_to))
        elif token.type in _CLOSES:
            kinds.pop()
            if numbers:  # of items without text
                yield _numbered(numbers)
        elif token.type == "inline" and kinds[-1] == Kind.ROW:
            cell = Block(Kind.ROW)
            _add_inline(cell, token, text, starts)
            table.cells.append(cell)
        elif token.type == "inline":
            block = _numbered(numbers, kinds[-1])
            _add_inline(block, token, text, starts)
            yield from lines_of(block) if block.kind == Kind.PARAGRAPH else (block,)
        elif token.type == "fence" and with_code and token.map:
            block = Block(Kind.CODE)
            block.add(token.content, max(text.find(token.content, starts[token.map[0]]), 0))
            yield block
        elif token.type == "thead_close":
            yield table.row()
        if token.type == "tr_close" and table.heads:
            yield table.row()
        elif token.type == "table_close":
            table = _Table()


def _numbered(numbers: list[tuple[str, int, int]], kind: Kind = Kind.ITEM) -> Block:
    """A block that begins with `numbers`, the items' that have begun since the last block; they are used up."""
    block = Block(kind)
    for number in numbers:
        add_number(block, *number)
    numbers.clear()
    return block


_OPENS = {
    "heading_open": Kind.HEADING,
    "blockquote_open": Kind.QUOTE,
    "list_item_open": Kind.ITEM,
    "table_open": Kind.ROW,
}
_CLOSES = frozenset(name.replace("_open", "_close") for name in _OPENS)


class _Table:
    """A table that is being read: its `heads` once they are known, and the `cells` of the current row."""

    def __init__(self) -> None:
        self.heads: list[str] = []
        self.cells: list[Block] = []

    def row(self) -> Block:
        """The current row: the heads, or each cell after its head: "Name, Ada, Age, thirty six"."""
        made, heads = Block(Kind.ROW), self.heads or [""] * len(self.cells)
        for head, cell in zip(heads, self.cells, strict=False):
            if not cell.text.strip():
                continue
            at = cell.origins[0][0]
            made.add((", " if made.text else "") + (f"{head}: " if head else ""), at, at)
            made.take(cell, 0, len(cell.text))
        self.heads = self.heads or [cell.text.strip() for cell in self.cells]
        self.cells = []
        return made


def _add_inline(block: Block, token: Token, text: str, starts: list[int]) -> None:
    """Append what is read of an `inline` token."""
    content, origin = token.content, _origins_of(token, text, starts)
    at = 0

    def add(said: str, written: str) -> None:
        nonlocal at
        found = content.find(written, at)
        if found < 0:
            found = at
        begin = origin[min(found, len(origin) - 1)] if origin else 0
        if len(said) == len(written) and found + len(said) <= len(origin):
            block.text += said
            block.origins += [(origin[n], origin[n] + 1) for n in range(found, found + len(said))]
        else:
            block.add(said, begin, begin + len(written))
        at = found + len(written)

    for child in token.children or ():
        if child.type == "text" and child.content:
            add(child.content, child.content)
        elif child.type == "text_special":
            add(child.content, child.markup or child.content)
        elif child.type in ("softbreak", "hardbreak"):
            add("\n", "\n")
        elif child.type == "code_inline":
            add(_with_names(child.content), child.content)
        elif child.type == "image":
            add(child.content, child.content)
            at = _after_link(content, at)
        elif child.type == "link_close" and child.markup != "autolink":
            at = _after_link(content, at)


def _with_names(code: str) -> str:
    """`code` with other characters, as many, for signs that are said in it: -x, .py, *.c."""
    code = _FLAG.sub(lambda found: "﹣" * len(found[0]), code)
    return _DOT.sub("․", _STAR.sub("＊", code))


def _after_link(content: str, at: int) -> int:
    found = _LINK_END.match(content, content.find("]", at)) if "]" in content[at:] else None
    return found.end() if found else at


def _origins_of(token: Token, text: str, starts: list[int]) -> list[int]:
    """Where each character of the content of an `inline` token stands in `text`."""
    first, _ = token.map or (0, 0)
    at, origins = starts[min(first, len(starts) - 1)], []
    for number, line in enumerate(token.content.split("\n")):
        if number:
            origins.append(max(at - 1, 0))
        found = text.find(line, at) if line else at
        found = at if found < 0 else found
        origins += range(found, found + len(line))
        end = text.find("\n", found + len(line))
        at = len(text) if end < 0 else end + 1
    return origins
