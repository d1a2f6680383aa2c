"""HTML to blocks, by the standard library's parser: entities decoded, scripts and styles left out."""

import html
import re
from html.parser import HTMLParser

from .blocks import Block, Kind
from .plain import add_number

_BLOCKS = {
    **dict.fromkeys(("h1", "h2", "h3", "h4", "h5", "h6", "title", "caption"), Kind.HEADING),
    **dict.fromkeys(
        (
            "p",
            "div",
            "br",
            "hr",
            "section",
            "article",
            "ul",
            "ol",
            "table",
            "pre",
            "figure",
            "figcaption",
            "dt",
            "dd",
            "body",
        ),
        Kind.PARAGRAPH,
    ),
    **{"li": Kind.ITEM, "blockquote": Kind.QUOTE, "tr": Kind.ROW},
}
_LEFT_OUT = frozenset(("script", "style", "head", "think", "template", "svg"))
_VOID = frozenset(("br", "hr", "img", "input", "meta", "link", "wbr", "source", "col"))


class _Reader(HTMLParser):
    def __init__(self, text: str, *, with_code: bool) -> None:
        super().__init__(convert_charrefs=False)
        self._starts = [0, *(found.end() for found in re.finditer("\n", text))]
        self.blocks = [Block(Kind.PARAGRAPH)]
        self._hidden: list[str] = []
        self._lists: list[int | None] = []
        self._with_code = with_code

    def _at(self) -> int:
        line, column = self.getpos()
        return self._starts[line - 1] + column

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in _LEFT_OUT or (tag == "pre" and not self._with_code):
            self._hidden.append(tag)
        if self._hidden:
            return
        if tag in ("ul", "ol"):
            self._lists.append(1 if tag == "ol" else None)
        if tag in _BLOCKS:
            self.blocks.append(Block(_BLOCKS[tag]))
        if tag == "li" and self._lists and (number := self._lists[-1]) is not None:
            add_number(self.blocks[-1], str(number), self._at(), self._at())
            self._lists[-1] = number + 1
        if tag in ("td", "th") and self.blocks[-1].text.strip():
            self.blocks[-1].add(", ", self._at(), self._at())
        if tag == "img" and (alt := dict(attributes).get("alt")):
            raw = self.get_starttag_text() or ""
            found = raw.find(alt)
            self.blocks[-1].add(alt, self._at() + max(found, 0), None if found >= 0 else self._at() + len(raw))

    def handle_endtag(self, tag: str) -> None:
        if self._hidden:
            if tag == self._hidden[-1]:
                self._hidden.pop()
            return
        if tag in ("ul", "ol") and self._lists:
            self._lists.pop()
        if tag in _BLOCKS and tag not in _VOID:
            self.blocks.append(Block(Kind.PARAGRAPH))

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.blocks[-1].add(data, self._at())

    def handle_entityref(self, name: str) -> None:
        self._reference(f"&{name};")

    def handle_charref(self, name: str) -> None:
        self._reference(f"&#{name};")

    def _reference(self, written: str) -> None:
        if not self._hidden:
            self.blocks[-1].add(html.unescape(written), self._at(), self._at() + len(written))


def html_blocks(text: str, *, with_code: bool = False) -> list[Block]:
    """The blocks of HTML `text`, with preformatted ones if `with_code`. An unclosed tag does no harm."""
    reader = _Reader(text, with_code=with_code)
    reader.feed(text)
    reader.close()
    return reader.blocks
