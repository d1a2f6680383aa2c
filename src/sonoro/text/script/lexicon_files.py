"""Reads lexicons: PLS, JSON rules (ours, ElevenLabs', Cartesia's) and lists of `word=alias`. Writes PLS."""

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any
from xml.parsers import expat

import msgspec

from sonoro.core.errors import InvalidRequest

from .lexicon import Lexicon, Rule

MAX_BYTES = 4 * 2**20

_PHONE_KEYS = ("phonemes", "phoneme")
_TEXT_KEYS = ("text", "string_to_replace", "grapheme", "token", "word")
_ALIAS_KEYS = ("alias", "pronunciation", "replacement")
_ALPHABETS = {"cmu": "cmu", "cmu-arpabet": "cmu", "x-cmu": "cmu", "arpabet": "cmu"}


def read_lexicon(content: bytes, name: str = "") -> Lexicon:
    """The lexicon in the file `content`, which may be called `name`. Raises `InvalidRequest`."""
    if len(content) > MAX_BYTES:
        raise InvalidRequest("lexicons", f"{len(content)} bytes", f"a lexicon has at most {MAX_BYTES} bytes")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest("lexicons", name, f"it is not UTF-8: {error.reason} at byte {error.start}") from error
    begin = text.lstrip()[:1]
    if begin == "<":
        return _read_pls(text)
    if begin in ("[", "{"):
        try:
            return lexicon_of(json.loads(text))
        except RecursionError as error:
            raise InvalidRequest("lexicons", name, "its JSON is nested too deep") from error
        except ValueError as error:
            raise InvalidRequest("lexicons", name, f"it is not JSON: {error}") from error
    return Lexicon(_listed(text))


def lexicon_of(given: object) -> Lexicon:
    """The lexicon of JSON: a list of rules, an object with `rules` or `items`, or of aliases by text."""
    if isinstance(given, Mapping):
        rules = given.get("rules", given.get("items"))
        if rules is None:
            rules = [{"text": text, "alias": alias} for text, alias in given.items()]
        given = rules
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise InvalidRequest("lexicons", given, "it must be a list of rules, or aliases by text")
    return Lexicon([rule_of(one) for one in given])


def rule_of(given: object) -> Rule:
    """A rule of JSON, with our names of its fields, ElevenLabs' or Cartesia's. Raises `InvalidRequest`."""
    if not isinstance(given, Mapping):
        raise InvalidRequest("lexicons", given, "a rule must be an object with text and alias")
    fields: dict[str, Any] = {
        "text": _first(given, _TEXT_KEYS),
        "alias": None if any(given.get(key) is not None for key in _PHONE_KEYS) else _first(given, _ALIAS_KEYS),
        "phonemes": _first(given, _PHONE_KEYS),
    }
    fields |= {
        key: given[key] for key in ("case_sensitive", "word_boundaries", "inflect") if given.get(key) is not None
    }
    if given.get("alphabet") is not None:
        fields["alphabet"] = _ALPHABETS.get(str(given["alphabet"]), str(given["alphabet"]))
    try:
        rule = msgspec.convert({name: value for name, value in fields.items() if value is not None}, Rule)
    except msgspec.ValidationError as error:
        raise InvalidRequest("lexicons", str(given)[:80], str(error)) from error
    rule.check()
    return rule


def _first(given: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((given[key] for key in keys if given.get(key) is not None), None)


def _listed(text: str) -> list[Rule]:
    """Rules of lines `word=alias`, with a tab or a sign of equality; # begins a comment."""
    rules = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        word, sign, alias = line.partition("\t" if "\t" in line else "=")
        if not sign or not word.strip():
            raise InvalidRequest("lexicons", line[:80], f"line {number}: it must be word=alias")
        rules.append(Rule(text=word.strip(), alias=alias.strip()))
    return rules


class _Pls:
    """Collects the lexemes of a PLS document; those for a part of speech alone are left out."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []
        self._alphabet, self._text, self._is_root = "ipa", "", True
        self._graphemes: list[str] = []
        self._said: list[tuple[bool, str, str]] = []
        self._role = self._alphabet_here = ""
        self._is_preferred = False

    def doctype(self, *_: object) -> None:
        raise InvalidRequest("lexicons", "DOCTYPE", "PLS has none here; leave it out")

    def begin(self, name: str, attributes: dict[str, str]) -> None:
        local = name.rpartition(":")[2]
        if self._is_root and local != "lexicon":
            raise InvalidRequest("lexicons", local, "the outermost element of PLS is lexicon")
        self._text = ""
        if self._is_root:
            self._is_root, self._alphabet = False, attributes.get("alphabet", "ipa")
        elif local == "lexeme":
            self._graphemes, self._said, self._role = [], [], attributes.get("role", "")
        self._is_preferred = attributes.get("prefer") in ("true", "1")
        self._alphabet_here = attributes.get("alphabet", self._alphabet)

    def end(self, name: str) -> None:
        local = name.rpartition(":")[2]
        if local == "grapheme":
            self._graphemes.append(" ".join(self._text.split()))
        elif local in ("phoneme", "alias"):
            self._said.append((self._is_preferred, local, self._text.strip()))
        elif local == "lexeme" and self._said and not self._role:
            _, kind, said = next((one for one in self._said if one[0]), self._said[0])
            alphabet = _ALPHABETS.get(self._alphabet_here, self._alphabet_here)
            for text in self._graphemes:
                how = {"alias": said} if kind == "alias" else {"phonemes": said, "alphabet": alphabet}
                self.rules.append(msgspec.convert({"text": text, "case_sensitive": True, **how}, Rule))

    def characters(self, data: str) -> None:
        self._text += data


def _read_pls(text: str) -> Lexicon:
    collected, parser = _Pls(), expat.ParserCreate("utf-8")
    parser.StartDoctypeDeclHandler = collected.doctype
    parser.StartElementHandler, parser.EndElementHandler = collected.begin, collected.end
    parser.CharacterDataHandler = collected.characters
    try:
        parser.Parse(text.lstrip().encode(), True)
    except expat.ExpatError as error:
        what = f"line {error.lineno}, column {error.offset + 1}: {expat.ErrorString(error.code)}"
        raise InvalidRequest("lexicons", "PLS", f"it is not well-formed: {what}") from error
    return Lexicon(collected.rules, is_recursive=True)


def written_pls(rules: Sequence[Rule], language: str = "en") -> str:
    """A PLS document with `rules`."""
    lexemes = []
    for rule in rules:
        kind, said = ("alias", rule.alias) if rule.phonemes is None else ("phoneme", rule.phonemes)
        written, said = html.escape(rule.text), html.escape(said or "")
        lexemes.append(f"<lexeme><grapheme>{written}</grapheme><{kind}>{said}</{kind}></lexeme>")
    head = '<?xml version="1.0" encoding="UTF-8"?>\n<lexicon version="1.0" alphabet="ipa" xml:lang="{}" '
    space = 'xmlns="http://www.w3.org/2005/01/pronunciation-lexicon">'
    return head.format(language) + space + "\n" + "\n".join(lexemes) + "\n</lexicon>\n"
