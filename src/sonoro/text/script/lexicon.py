"""Lexicons: how words and phrases are said. Many rules are one trie, and a text is searched in one pass.

At each place the earlier lexicon decides, then the longest key, then the first rule. An alias is not searched again;
only those of PLS may hold words of the lexicon, which are replaced up to four times, each once.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from sonoro.core.errors import InvalidRequest

MAX_RULES, MAX_KEY, MAX_ALIAS = 20_000, 200, 500
MAX_LEXICONS = 8
_MOST_ROUNDS = 4
_APOSTROPHES = "'’"
_RULE = ""
"""The key of a trie's node under which its rules are: no character."""


class Rule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`text` is said as the `alias`, or as `phonemes` in an `alphabet`.

    `case_sensitive` None: a key in small letters also matches with a capital first. `word_boundaries`: only whole
    words, except for keys of scripts without spaces. `inflect`: also with an s or es behind it."""

    text: str
    alias: str | None = None
    phonemes: str | None = None
    alphabet: str = "ipa"
    case_sensitive: bool | None = None
    word_boundaries: bool = True
    inflect: bool = False

    def check(self) -> None:
        """Raise `InvalidRequest` for a rule that is too long, empty, or without one way to be said."""
        if not self.text.strip() or len(self.text) > MAX_KEY:
            raise InvalidRequest("lexicons", self.text, f"the text of a rule has 1 to {MAX_KEY} characters")
        said = self.alias if self.phonemes is None else self.phonemes
        if said is None or (self.alias is not None and self.phonemes is not None):
            raise InvalidRequest("lexicons", self.text, "a rule has an alias or phonemes, not both")
        if len(said) > MAX_ALIAS:
            raise InvalidRequest("lexicons", self.text, f"its alias or phonemes have at most {MAX_ALIAS} characters")


class Match(NamedTuple):
    """Characters `start` to `end` of a text are said by `rule` of `lexicon`."""

    start: int
    end: int
    rule: Rule
    lexicon: Lexicon

    @property
    def alias(self) -> str | None:
        """What is said, with the words of a recursive lexicon in it replaced; None for phonemes."""
        said, used, home = self.rule.alias, {self.rule.text}, [self.lexicon]
        for _ in range(_MOST_ROUNDS * (said is not None and self.lexicon.is_recursive)):
            assert said is not None
            found = [one for one in matches(said, home) if _may_replace(one, used)]
            for one in reversed(found):
                said = said[: one.start] + (one.rule.alias or "") + said[one.end :]
            used |= {one.rule.text for one in found}
        return said


def _may_replace(found: Match, used: set[str]) -> bool:
    """Whether the alias of `found` may stand in another: it leads back to none of the texts `used` before."""
    alias = found.rule.alias
    if alias is None or found.rule.text in used:
        return False
    return all(one.rule.text not in used for one in matches(alias, [found.lexicon]))


class Lexicon:
    """The `rules` of one lexicon, checked and ready to search. `is_recursive`: aliases are searched again, as in PLS.
    `version` is a digest of the rules. Raises `InvalidRequest`."""

    def __init__(self, rules: Sequence[Rule], *, is_recursive: bool = False) -> None:
        if len(rules) > MAX_RULES:
            raise InvalidRequest("lexicons", f"{len(rules)} rules", f"a lexicon has at most {MAX_RULES}")
        self.rules, self.is_recursive = tuple(rules), is_recursive
        canonical = [self.is_recursive, *(msgspec.to_builtins(rule) for rule in self.rules)]
        self.version = hashlib.sha256(json.dumps(canonical, sort_keys=True).encode()).hexdigest()
        self._root: dict[str, object] = {}
        for number, rule in enumerate(self.rules):
            rule.check()
            key = " ".join(rule.text.split())
            for form in {unicodedata.normalize(form, key) for form in ("NFC", "NFD")}:
                for ending in ("", "s", "es") if rule.inflect else ("",):
                    self._add(form + ending, number)

        firsts = {one for key in self._root for one in (key, key.upper(), key.title()) if len(one) == 1}
        is_of_words = all(rule.word_boundaries and not _is_spaceless(rule.text[0]) for rule in self.rules)
        only_first = r"(?<!\w)" if is_of_words else ""
        letters = "".join(map(re.escape, sorted(firsts)))
        self.begins = re.compile(rf"{only_first}[{letters}]" if letters else "(?!)")
        """What a match may begin with."""

    def _add(self, key: str, number: int) -> None:
        node = self._root
        for character in key:
            node = node.setdefault(_folded(character), {})  # type: ignore[assignment]
        node.setdefault(_RULE, []).append(number)  # type: ignore[attr-defined]

    def longest(self, text: str, start: int, stop: int) -> Match | None:
        """The longest match at `start` of `text` that ends by `stop`."""
        best: Match | None = None
        node, at = self._root, start
        while at < stop:
            character = text[at]
            at += 1
            if character.isspace():
                while at < stop and text[at].isspace():
                    at += 1
                character = " "
            following = node.get(_folded(character))
            if following is None:
                break
            node = following  # type: ignore[assignment]
            for number in node.get(_RULE, ()):  # type: ignore[attr-defined]
                if _fits(self.rules[number], text, start, at):
                    best = Match(start, at, self.rules[number], self)
                    break
        return best


def _folded(character: str) -> str:
    return " " if character.isspace() else character.lower()


def _fits(rule: Rule, text: str, start: int, end: int) -> bool:
    """Whether `text[start:end]`, which equals the key but for its case, is a match of `rule`."""
    if rule.case_sensitive is not False:
        key, found = "".join(rule.text.split()), "".join(text[start:end].split())
        key, found = unicodedata.normalize("NFC", key), unicodedata.normalize("NFC", found)
        found = found[: len(key)]
        may_begin = rule.case_sensitive is None and key[0].islower() and found[0].isupper()
        if found != key and not (may_begin and found[1:] == key[1:]):
            return False
    if not rule.word_boundaries or any(_is_spaceless(character) for character in rule.text):
        return True
    if start and (
        _is_wordly(text[start - 1]) or (text[start - 1] in _APOSTROPHES and text[start - 2 : start - 1].isalpha())
    ):
        return False
    after = text[end : end + 2]
    return not (after and _is_wordly(after[0])) or (after[0] in "sS" and after[1:] in tuple(_APOSTROPHES))


def _is_wordly(character: str) -> bool:
    return character.isalnum() or unicodedata.category(character)[0] == "M"


def _is_spaceless(character: str) -> bool:
    return "\u3040" <= character <= "\u9fff" or "\uf900" <= character <= "\ufaff" or character >= "\U00020000"


def matches(text: str, lexicons: Sequence[Lexicon], start: int = 0, end: int | None = None) -> Iterator[Match]:
    """The matches of `lexicons` in characters `start` to `end` of `text`, from left to right without overlap.
    What stands around them counts for the borders of words."""
    stop = len(text) if end is None else end
    at = start
    while hits := [hit.start() for lexicon in lexicons if (hit := lexicon.begins.search(text, at, stop))]:
        at = min(hits)
        found = next((one for lexicon in lexicons if (one := lexicon.longest(text, at, stop)) is not None), None)
        if found is not None:
            yield found
        at = at + 1 if found is None else found.end
