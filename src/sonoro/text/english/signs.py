"""How a sign is read that no class claims: by its name, as a pause, or not at all."""

import re
import unicodedata

from sonoro.text.english.line import after, before
from sonoro.text.english.tables import NUMBERED, pairs

_NAMED = pairs(
    "& = and | @ = at | % = percent | + = plus | = = equals | ° = degrees | × = times | ÷ = divided by | "
    "± = plus or minus | ≠ = is not equal to | ≤ = is at most | ≥ = is at least | ≈ = is about | → = to | ⇒ = to | "
    "§ = section | № = number | © = copyright | ® = registered | ™ = trademark | ∞ = infinity | "
    "√ = the square root of | € = euro | £ = pound | ¥ = yen | ₹ = rupee | ₩ = won | $ = dollar | ¢ = cent | "
    "‰ = per mille | ₽ = ruble | ₿ = bitcoin | <= = is at most | >= = is at least | -> = to | => = to | "
    "&& = and | || = or | ∑ = the sum of | ∏ = the product of | ∫ = the integral of | ∂ = partial | ∇ = del | "
    "∈ = in | ∉ = not in | ∀ = for all | ∃ = there is | ∩ = intersected with | ∪ = united with | ⊂ = is a subset of | "
    "⊆ = is a subset of | ∧ = and | ∨ = or | ¬ = not | ∝ = is proportional to | ≡ = is equivalent to | ∼ = about | "
    "− = minus | Å = angstroms | §§ = sections | ¶ = paragraph | ¶¶ = paragraphs | ∛ = the cube root of | "
    "∠ = angle | ⊥ = is perpendicular to | ∥ = is parallel to | ∴ = therefore | ∅ = the empty set | "
    "﹣ = dash | ․ = dot | ＊ = star | ↔ = to and from | ↑ = up | ↓ = down | "
    "!= = is not equal to | == = equals"
)
_PAUSES = pairs(
    ", = , | ; = , | : = , | ( = , | ) = , | [ = , | ] = , | { = , | } = , | — = , | – = , | | = , | • = , | · = ,"
)
_LABEL = re.compile(rf"(?i)\b(?:room|{NUMBERED}) $")
_KEY = re.compile(r"\b(?:Ctrl|Control|Cmd|Command|Alt|AltGr|Shift|Opt|Option|Win|Fn|CTRL|CMD|ALT|SHIFT) ?$")
"""A key that is held while the one behind a plus is pressed."""

_PRESS = r"\b(?:press|hit|dial|enter)\b"
_DIALLED = re.compile(rf"(?i){_PRESS}[^.;:!?]* (?:(?:or|and|then|the|by) )?$")
"""Before a key of a telephone."""

_AFTER_KEY = {"*": " .,;)0123456789", "#": " .,;)"}

_OF_ABOUT = re.compile(r"\b(?:is|are|was|were|be|takes?|took|in|at|of|for|by|to|with|from|than|lasts?) $")
_CURRENCIES = ("$", "€", "£")
_SILENT = frozenset("†‡\"'*_~^\\#←⇐‑¿¡⁻")


def read_sign(text: str, start: int, end: int) -> str | None:
    """What is said for the sign (or the run of it) `text[start:end]`: words, a mark (. , ? !), "" for nothing, or None
    if it cannot be spoken."""
    sign, length = text[start], end - start
    if text[start:end] in _NAMED:
        sign, length = text[start:end], 1
    left, right = before(text, start, 1), text[end : end + 1]
    if sign in "?!":
        return sign
    if sign == ".":
        return _dot(text, end, length, left, right)
    if sign in _PAUSES:
        return _PAUSES[sign] if length < 4 or sign in ",;:" else ","
    if sign in "-/":
        return (_dash if sign == "-" else _slash)(text, start, end)
    if sign in "<>":
        return _compared(text, start, end) if length == 1 else ""
    if sign == "+" and (right.isalnum() or text[end + 1 : end + 2].isupper()) and _KEY.search(before(text, start, 10)):
        return ""
    if sign in "+=" and length > 2:
        return ","
    if sign == "+" and length == 2:
        return "plus plus"
    is_known = sign == "©" and before(text, start, 10).endswith("opyright ")
    if is_known or (sign == "°" and not (left.isdecimal() or left.isspace())):
        return ""
    if sign == "≈" and _OF_ABOUT.search(before(text, start)):
        return "about"
    if sign == "~" and (right.isdecimal() or right in _CURRENCIES):
        return "about"
    if sign in _NAMED:
        return (
            _NAMED[sign]
            if length == 1 or sign == "°"
            else (f"{_NAMED[sign]} {_NAMED[sign]}" if length == 2 and sign not in "=" else ",")
        )
    if sign == "#" and length == 1 and right in " :" and _LABEL.search(before(text, start)):
        return "number"
    if sign == "#" and right and not right.isspace():
        return "hash" if left.isalnum() or not right.isalnum() else "number" if right.isdecimal() else "hashtag"
    if sign in "*#" and length == 1 and right in _AFTER_KEY[sign] and _DIALLED.search(before(text, start, 80)):
        return "star" if sign == "*" else "hash"
    if sign in "*%" and length == 1 and _BETWEEN.match(text, max(0, start - 2), end + 3):
        return "times" if sign == "*" else "mod"
    if sign in _SILENT:
        return ""
    name = unicodedata.name(sign, "")
    if name.startswith("GREEK ") and " LETTER " in name:
        return " ".join([name.split()[-1].lower()] * length)
    return None


def _dash(text: str, start: int, end: int) -> str:
    left, right = before(text, start, 1), text[end : end + 1]
    if end - start > 1:
        return ","
    if _is_minus(text, start, end):
        return "minus"
    is_joint = bool(left) and bool(right) and not left.isspace() and not right.isspace()
    return "" if is_joint or not (left.isspace() and right.isspace()) else ","


def _slash(text: str, start: int, end: int) -> str:
    left, right = before(text, start, 1), text[end : end + 1]
    if end - start > 1 or not right:
        return ""
    if _OVER.search(text[max(0, start - 2) : end + 2]):
        return "over"
    return (
        "slash" if left.isalnum() or right.isalnum() or right in "$€£" or (left.isspace() and right.isspace()) else ""
    )


_OVER = re.compile(r"\) ?/ ?[(\d]|\d ?/ ?\(|\) / [A-Za-z]$")
_BETWEEN = re.compile(r"[\w)] [*%] (?:[\d($€£]|[a-z](?!\w))")
_OPERAND = re.compile(r"[\w)\]%] $")
_NEXT_OPERAND = re.compile(r" (?:[\d($€£√]|[A-Za-z](?![A-Za-z])|[A-Za-z]\w*[(_])")
_EQUALS_BEFORE = re.compile(r"(?:^|\s)[=≈<>≤≥] (?:[^.;:!?\n]|\.\d)*$")
FAR = rf"{_PRESS}|[=≈<>≤≥] |\w -{_NEXT_OPERAND.pattern}"
_EQUALS_AFTER = re.compile(r"(?:[^.;:!?\n]|\.\d){0,60}? [=≈] ")


def _is_minus(text: str, start: int, end: int) -> bool:
    """Whether a hyphen between spaces is the minus of an equation."""
    left = before(text, start, 60)
    if _OPERAND.search(left) is None or _NEXT_OPERAND.match(text, end) is None:
        return False
    return _EQUALS_BEFORE.search(left) is not None or _EQUALS_AFTER.match(after(text, end, 70)) is not None


def _compared(text: str, start: int, end: int) -> str:
    """< and > between spaces compare; elsewhere they are marks, as of a quotation or a tag."""
    if text[start] == ">" and _MENU.search(before(text, start)) and re.match(r" [A-Z][a-z]", text[end : end + 3]):
        return ","
    left, right = before(text, start, 2), text[end : end + 2]
    is_between = re.search(r"[\w)|\]] $", left) and re.match(r" [\w(.-]", right)
    said = "is less than" if text[start] == "<" else "is greater than"
    return said if is_between else ""


_MENU = re.compile(
    r"(?:\b(?:Settings|Preferences|File|Edit|View|Tools|Help|Menu|Options|System)|(?:\b[Gg]o to|\b[Oo]pen|\b[Cc]lick|"
    r"\b[Tt]ap|\b[Ss]elect|\b[Cc]hoose|>) [A-Z][\w &-]{1,30}) $"
)
"""An entry of a menu before the next one: Settings > Privacy."""

_NAME = re.compile(r"[A-Z]{2}|[a-z]{3,}(?![\w@])|[a-z]{1,2}(?= (?:files?|extensions?|formats?)\b)")


def _dot(text: str, end: int, length: int, left: str, right: str) -> str:
    if right and right in ",;:":
        return ","
    if length > 1:
        return "," if re.match(r"\s*[a-z\d]", text[end : end + 4]) else "."
    if left.isalnum() and right.isalpha():
        is_capitals = before(text, end - 1, 2).isupper() and text[end : end + 2].isupper()
        return "dot" if right.islower() or is_capitals else "."
    if not left.isalnum() and right.isalpha():
        is_name = _NAME.match(text, end) and left in " \n/("
        return "dot" if is_name else "."
    return "."
