"""Lexicons: how words and phrases are said. Many rules are one trie, and a text is searched in one pass.

At each place the earlier lexicon decides, then the longest key, then the first rule. An alias is not searched again;
only those of PLS may hold words of the lexicon, which are replaced up to four times, each once.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from sonoro.core.errors import InvalidRequest
from sonoro.core.script import Said

MAX_RULES, MAX_KEY, MAX_ALIAS = 20_000, 200, 500
MAX_LEXICONS = 8
_MOST_ROUNDS = 4
_APOSTROPHES = "'’"
_WORD = re.compile(r"\w+")
_SPACED = "".join(character if _WORD.match(character) else " " for character in map(chr, range(128)))
"""What each character of ASCII is, or a space for those of no word."""


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
    def said(self) -> Said:
        """What is said, at its place in the text."""
        kind, value = ("alias", self.alias) if self.rule.phonemes is None else ("phoneme", self.rule.phonemes)
        return Said(self.start, self.end, self.start, kind, value or "", self.rule.alphabet)

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


class _Node(dict[str, "_Node"]):
    """A node of the trie: those that follow by character, and the numbers of the `rules` whose key ends here."""

    __slots__ = ("rules",)

    def __init__(self) -> None:
        self.rules: tuple[int, ...] = ()


class Lexicon:
    """The `rules` of one lexicon, checked and ready to search. `is_recursive`: aliases are searched again, as in PLS.
    `version` is a digest of the rules. Raises `InvalidRequest`."""

    def __init__(self, rules: Sequence[Rule], *, is_recursive: bool = False) -> None:
        if len(rules) > MAX_RULES:
            raise InvalidRequest("lexicons", f"{len(rules)} rules", f"a lexicon has at most {MAX_RULES}")
        self.rules, self.is_recursive = tuple(rules), is_recursive
        canonical = [self.is_recursive, *(msgspec.to_builtins(rule) for rule in self.rules)]
        self.version = hashlib.sha256(json.dumps(canonical, sort_keys=True).encode()).hexdigest()
        self._root, self._first_words = _Node(), set[str]()
        for number, rule in enumerate(self.rules):
            rule.check()
            key = " ".join(rule.text.split())
            for form in {unicodedata.normalize(form, key) for form in ("NFC", "NFD")}:
                for ending in ("", "s", "es") if rule.inflect else ("",):
                    self._add(form + ending, number)

        self._is_of_words = all(_begins_a_word(rule) for rule in self.rules)
        firsts = {one for key in self._root for one in (key, key.upper(), key.title()) if len(one) == 1}
        firsts |= set(_APOSTROPHES) if "'" in firsts else set()
        letters = "".join(map(re.escape, sorted(firsts)))
        self._first_letters = re.compile(f"[{letters}]" if letters else "(?!)")

    def _add(self, key: str, number: int) -> None:
        if (word := _WORD.match(key)) is not None:
            self._first_words |= {_lowered(word[0]), _lowered(word[0]) + "s"}
        node = self._root
        for character in key:
            folded = _folded(character)
            if folded not in node:
                node[folded] = _Node()
            node = node[folded]
        node.rules += (number,)

    def starts(self, text: str, start: int, stop: int) -> Iterator[int]:
        """Where in characters `start` to `stop` of `text` a match may begin, or with more text behind it."""
        if not self._is_of_words:
            yield from (found.start() for found in self._first_letters.finditer(text, start, stop))
            return
        lowered = _lowered(text)
        if len(lowered) != len(text):  # a rare capital has two small letters
            lowered = text
        is_cut = stop == len(text) and lowered[-1:].isalnum()
        if not is_cut and self._first_words.isdisjoint(_words(lowered[start:stop])):
            return
        for found in _WORD.finditer(lowered, start, stop):
            if found[0] in self._first_words or (is_cut and found.end() == stop):
                yield found.start()

    def longest(self, text: str, start: int, stop: int) -> Match | None:
        """The longest match at `start` of `text` that ends by `stop`."""
        best: Match | None = None
        for node, at in self._walk(text, start, stop):
            for number in node.rules:
                if _fits(self.rules[number], text, start, at):
                    best = Match(start, at, self.rules[number], self)
                    break
        return best

    def may_change(self, text: str, start: int, stop: int, *, is_open: bool) -> bool:
        """Whether more text behind `text` may change the longest match at `start`, which `is_open` beyond `stop`."""
        for node, at in self._walk(text, start, stop):
            # What follows a key decides whether it ends there, by two characters at most.
            if (node and at == len(text) and is_open) or (node.rules and at + 2 > len(text)):
                return True
        return False

    def _walk(self, text: str, start: int, stop: int) -> Iterator[tuple[_Node, int]]:
        """The nodes along `text` from `start` on, and where the key of each ends."""
        node, at = self._root, start
        while at < stop:
            character = text[at]
            at += 1
            if character.isspace():
                while at < stop and text[at].isspace():
                    at += 1
            following = node.get(_folded(character))
            if following is None:
                return
            node = following
            yield node, at


def _folded(character: str) -> str:
    return " " if character.isspace() else "'" if character in _APOSTROPHES else character.lower()


def _lowered(text: str) -> str:
    # By character, as the trie is: a word ends in another small sigma.
    return text.lower() if text.isascii() else "".join(map(str.lower, text))


def _words(text: str) -> list[str]:
    # In ASCII a third of the time of the expression.
    return text.translate(_SPACED).split() if text.isascii() else _WORD.findall(text)


def _begins_a_word(rule: Rule) -> bool:
    first = rule.text.lstrip()[0]
    return rule.word_boundaries and not _is_spaceless(first) and _WORD.match(first) is not None


def _fits(rule: Rule, text: str, start: int, end: int) -> bool:
    """Whether `text[start:end]`, which equals the key but for its case, is a match of `rule`."""
    if rule.case_sensitive is not False and text[start:end] != rule.text:
        key, found = "".join(rule.text.split()), "".join(text[start:end].split())
        key, found = (unicodedata.normalize("NFC", one).replace("’", "'") for one in (key, found))
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
    at, stop = start, len(text) if end is None else end
    for begin in heapq.merge(*(lexicon.starts(text, start, stop) for lexicon in lexicons)):
        if begin < at:
            continue
        found = next((one for lexicon in lexicons if (one := lexicon.longest(text, begin, stop)) is not None), None)
        if found is not None:
            yield found
            at = found.end
