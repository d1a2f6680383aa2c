"""Phonemes of English: IPA to ARPAbet, with the stress of each vowel."""

import re
import unicodedata

_VOWELS = {
    **{"aʊ": "AW", "aɪ": "AY", "eɪ": "EY", "oʊ": "OW", "əʊ": "OW", "ɔɪ": "OY", "ər": "ER", "əɹ": "ER", "ɜr": "ER"},
    **{"ɜɹ": "ER", "ɝ": "ER", "ɜ": "ER", "ɚ": "ER", "ɑ": "AA", "ɒ": "AA", "a": "AA", "æ": "AE", "ʌ": "AH", "ə": "AH"},
    **{"ɐ": "AH", "ɔ": "AO", "ɛ": "EH", "e": "EH", "ɪ": "IH", "ᵻ": "IH", "i": "IY", "o": "OW", "ʊ": "UH", "u": "UW"},
}
_CONSONANTS = {
    **{"tʃ": "CH", "ʧ": "CH", "dʒ": "JH", "ʤ": "JH", "b": "B", "d": "D", "ð": "DH", "f": "F", "ɡ": "G", "g": "G"},
    **{"h": "HH", "k": "K", "l": "L", "ɫ": "L", "m": "M", "n": "N", "ŋ": "NG", "p": "P", "r": "R", "ɹ": "R", "ɾ": "D"},
    **{"s": "S", "ʃ": "SH", "t": "T", "θ": "TH", "v": "V", "w": "W", "j": "Y", "z": "Z", "ʒ": "ZH"},
}
_STRESS = {"ˈ": "1", "'": "1", "ˌ": "2"}
_SILENT = frozenset("ːˑ.͜͡ ̯‿ˑ")
_PHONES = frozenset((*_VOWELS.values(), *_CONSONANTS.values()))
_OF_VOWELS = frozenset(_VOWELS.values())
_CMU = re.compile(r"([A-Z]{1,2})([0-2]?)")


def arpabet(value: str, alphabet: str) -> str | None:
    """`value` in ARPAbet, as "W UH1 S T ER0"; None for another alphabet. Raises `ValueError` with an unknown symbol."""
    if alphabet == "ipa":
        return _of_ipa(value)
    return _of_cmu(value) if alphabet in ("cmu", "cmu-arpabet", "x-cmu") else None


def _of_ipa(value: str) -> str:
    """A stress mark counts for the next vowel; length, syllables and tie bars for nothing."""
    text = "".join(one for one in unicodedata.normalize("NFD", value) if one not in _SILENT)
    phones: list[str] = []
    stress, at = "0", 0
    while at < len(text):
        if text[at] in _STRESS:
            stress, at = _STRESS[text[at]], at + 1
            continue
        size = next((size for size in (2, 1) if text[at : at + size] in _VOWELS | _CONSONANTS), 0)
        if not size:
            raise ValueError(text[at])
        phone, at = text[at : at + size], at + size
        if phone in _VOWELS:
            phones.append(_VOWELS[phone] + stress)
            stress = "0"
        else:
            phones.append(_CONSONANTS[phone])
    return " ".join(phones)


def _of_cmu(value: str) -> str:
    phones = []
    for one in value.upper().split():
        found = _CMU.fullmatch(one)
        if found is None or found[1] not in _PHONES or (found[2] and found[1] not in _OF_VOWELS):
            raise ValueError(one)
        phones.append(one + "0" * (not found[2] and found[1] in _OF_VOWELS))
    return " ".join(phones)
