"""Where a text that is still arriving can be cut so that its parts read as the whole does. Knows no model.

A joint is a space between two plain words in lower case that no class of `english.classes` reads together, or behind a
mark before such a word or an amount of money, or the end of a list item. It never stands in what `structure` reads as a
whole: a heading, a link, a table, code.
"""

import re

from sonoro.text.english.reader import classes

_JOINT = re.compile(r"(?<!\S)(?<![\d½⅓⅔¼¾⅛]\s)[a-z]{2,}[ ](?=[a-z][a-z ])(?!(?:[ivxlc]+|no)(?![a-z]))")
_MARK_JOINT = re.compile(
    r"(?<!\S)[^\s,;:\[\](){}<>]{0,40}[A-Za-z\d%][,;:][ ]"
    r"(?=(?!ext\b)[a-z]{2,}[ ]|[$£€]\d{1,3}(?:,\d{3})*[,;:]?[ ])(?![ivxlc]+(?![a-z]))"
)
"""Behind a comma, a semicolon or a colon: what was before it is settled, and a class reads on behind it only where a
number or a capital follows."""

_MARKED_LINE = re.compile(
    r"(?m)^(?:[ \t]*(?:\#{1,6}[ \t] | > | \| | ``` | ~~~ | [-*+•‣◦–][ \t] | "
    r"(?:\d{1,9}|[a-zA-Z]|[IVXL]{2,7}|[ivxl]{2,7})[.)][ \t])"
    r"| [ \t]+\S)",
    re.VERBOSE,
)
_ITEM = re.compile(r" {0,3}(?:[-*+]|\d{1,9}[.)])[ \t]+\S")
_NEXT_ITEM = re.compile(rf"\n(?={_ITEM.pattern})")
_PARAGRAPH_END = re.compile(r"(?m)\n[ \t]*\n|^ {0,3}#{1,6}[ \t][^\n]*\n")
_CLOSED = re.compile(
    r"(?ims)<think\b.*?</think>|^[ \t]*(```|~~~).*?\n[ \t]*\1[^\n]*(?=\n|\Z)|!?\[[^\]\[\n]*\]\([^()\s]*\)"
    r"|\A---[ \t]*\n(?=[\w-]+:)(?:(?!---)[^\n]+\n)+---|\$\$[^$]+\$\$|\$[^$\n]+\$|\\\(.*?\\\)|\\\[.*?\\\]"
)
_HELD = re.compile(r"<[A-Za-z/!]|\[|\$[^\s\d.,]|\\(?:[(\[]|\Z)|\A---[ \t]*\n(?=[\w-]+:)(?!(?:[^\n]*\n)*?[ \t]*\n)")
"""What holds back all that follows: a tag, whose end may be far away, a bracket, whose address may be, a formula, the
front matter."""

_PAIRED = ("`", "*", "_", "~", '"', "“", "”")


def last_joint(text: str) -> tuple[int, bool]:
    """Where `text` can be cut at the latest, 0 if nowhere, and whether a sentence ends there."""
    # A link, a thought, a fence and a formula are a word each: no joint within.
    text = _CLOSED.sub(lambda found: "X" * len(found[0]), text)
    held = _HELD.search(text)
    end = min(held.start() if held else len(text), _open_fence(text))
    breaks = [0, *(found.end() for found in _PARAGRAPH_END.finditer(text, 0, end))]
    for start, stop in zip(reversed(breaks), [end, *reversed(breaks)], strict=False):
        cut = _joint_of(text, start, stop)
        if cut[0]:
            return cut
    return 0, False


def _open_fence(text: str) -> int:
    """Where a fence begins that is not closed yet, or the end of `text`."""
    marks = [found.start() for found in re.finditer(r"(?m)^[ \t]*(?:```|~~~)", text)]
    return marks[-1] if len(marks) % 2 else len(text)


def _joint_of(text: str, start: int, end: int) -> tuple[int, bool]:
    """The last joint in the paragraph `text[start:end]`."""
    if _ITEM.match(text, start):
        items = [found.end() for found in _NEXT_ITEM.finditer(text, start, end)]
        items = [at for at in items if _is_balanced(text[start:at])]
        return (items[-1], True) if items else (0, False)
    marked = _MARKED_LINE.search(text, start, end)
    stop = marked.start() if marked else end
    joints = (found.end() for form in (_JOINT, _MARK_JOINT) for found in form.finditer(text, start, stop))
    unsettled = classes().UNSETTLED
    for at in sorted(joints, reverse=True):
        if _is_balanced(text[start:at]) and not unsettled.search(text[max(start, at - 80) : at]):
            return at, False
    return 0, False


def _is_balanced(text: str) -> bool:
    """Whether each mark of a pair in `text` has its other."""
    return all(text.count(mark) % 2 == 0 for mark in _PAIRED[:-2]) and text.count("“") == text.count("”")
