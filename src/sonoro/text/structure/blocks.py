"""What a text consists of: blocks of one kind each, with the written span of every character. Knows no language.

A block's text holds what is read, without markup. What is left out (code, thoughts) has no block.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from sonoro.text.splitting import SpokenText, replaced

Span = tuple[int, int]


class Kind(StrEnum):
    """Kinds of a block. Each ends a sentence."""

    HEADING = "heading"
    PARAGRAPH = "paragraph"
    ITEM = "item"
    QUOTE = "quote"
    CODE = "code"
    ROW = "row"


@dataclass
class Block:
    """A block: its `text`, and for each character of it the span of the written text that it stands for."""

    kind: Kind
    text: str = ""
    origins: list[Span] = field(default_factory=list)

    def add(self, text: str, start: int, end: int | None = None) -> None:
        """Append `text`, written from `start` on, character by character, or, up to `end`, as a whole."""
        self.text += text
        if end is None:
            self.origins += [(at, at + 1) for at in range(start, start + len(text))]
        else:
            self.origins += [(start, end)] * len(text)

    def take(self, other: Block, start: int, end: int) -> None:
        """Append characters `start` to `end` of another block."""
        self.text += other.text[start:end]
        self.origins += other.origins[start:end]


_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][\da-fA-F]{1,6}|[A-Za-z][A-Za-z\d]{1,31});")
_HYPHENATED = re.compile(r"(?<=[a-z])-[ \t]*\r?\n[ \t]*(?=[a-z])")


def decoded(block: Block) -> Block:
    """`block` with HTML's entities decoded (twice, as text that was escaped twice is common), and words that a line end
    cuts with a hyphen rejoined."""
    for _ in range(2):
        if "&" in block.text:
            block = _replaced(block, _ENTITY, lambda found: html.unescape(found[0]))
    return _replaced(block, _HYPHENATED, lambda _: "") if "-" in block.text and "\n" in block.text else block


_FOOTNOTE = re.compile(r"\[\^[\w-]{1,20}\]:?|(?:(?<=[.,;!?])|(?<=[.,;!?][\"”’)]))(?:\[\d{1,3}\])+(?=\W|\Z)")
_NUMBERED = re.compile(r"(?<=\A[A-Z\d])[.](?= \S)|(?<=\A[\dIVX]{2})[.](?= \S)")
"""Behind the number or the letter of a heading."""

_EMOTICON = re.compile(r"(?<=\s)(?:[:;]['-]?[DPpOoSs)(/\\|*]+|=[)(DP])(?=\s|\Z)")
_BRACKETED = re.compile(r"(?<=[A-Za-z])\[[a-z]{1,6}\](?=[a-z])|(?<![\w\]])\[[A-Z]\](?=[a-z])")
"""Letters that an editor put into a word: Ph[oe]nicians, [T]he."""

_BOX = re.compile(r"\A\[[ xX]\][ \t]+")
_PROMPT = re.compile(
    r"(?m)^\$ (?=(?:pip3?|npm|git|cd|sudo|python3?|curl|make|docker|uv|cargo|ls|export|brew|apt)\b|\./)"
)


def _without_signs(block: Block) -> Block:
    """`block` without the marks of footnotes, the boxes of tasks and prompts."""
    if "[" in block.text:
        block = _replaced(block, _FOOTNOTE, lambda _: "")
    if block.kind == Kind.ITEM and block.text.startswith("["):
        block = _replaced(block, _BOX, lambda _: "")
    if "]" in block.text:
        block = _replaced(block, _BRACKETED, lambda found: found[0][1:-1])
    if any(eyes in block.text for eyes in (":", ";", "=")):
        block = _replaced(block, _EMOTICON, lambda _: ",")
    if block.kind == Kind.HEADING:
        block = _replaced(block, _NUMBERED, lambda _: ",")
    return _replaced(block, _PROMPT, lambda _: "") if "$ " in block.text else block


def _replaced(block: Block, pattern: re.Pattern[str], replacement: Callable[[re.Match[str]], str]) -> Block:
    made = replaced(SpokenText(block.text, lambda: block.origins), pattern, replacement)
    return Block(block.kind, made.text, [*made.origins])


def spoken(blocks: Iterable[Block]) -> Iterator[Block]:
    """The blocks that hold anything to read, decoded."""
    for block in blocks:
        if block.text.strip():
            yield _without_signs(decoded(block))
