"""Phonemes of English in ARPAbet, for a model that takes them between tokens of its own."""

import msgspec
import pytest
from markup_cases import speak
from scripts import SPEC, spoken

from sonoro.core.errors import InvalidRequest
from sonoro.text.script import lexicon_of
from sonoro.text.script.phonemes import arpabet

ABLE = msgspec.structs.replace(SPEC, arpabet=("{", "}"), text_normalizer=None)


@pytest.mark.parametrize(
    ("ipa", "phones"),
    [
        ("wˈʊstər", "W UH1 S T ER0"),
        ("ˈɛndʒən", "EH1 N JH AH0 N"),
        ("t͡ʃiːz", "CH IY0 Z"),
        ("duːˈpɪljuːmæb", "D UW0 P IH1 L Y UW0 M AE0 B"),
        ("ˌaʊtˈsaɪd", "AW2 T S AY1 D"),
        ("fəʊn", "F OW0 N"),
        ("ɡɝl", "G ER0 L"),
    ],
)
def test_ipa_becomes_arpabet(ipa: str, phones: str) -> None:
    assert arpabet(ipa, "ipa") == phones


def test_arpabet_is_checked_and_other_alphabets_are_unknown() -> None:
    assert arpabet("eh1 n jh ah n", "cmu") == "EH1 N JH AH0 N"
    assert arpabet("x", "x-sampa") is None
    for value, alphabet in (("☂", "ipa"), ("QQ", "cmu"), ("K1", "cmu")):
        with pytest.raises(ValueError, match=value):
            arpabet(value, alphabet)


def test_a_model_that_speaks_phonemes_gets_them_in_place_of_the_word() -> None:
    text = speak('<phoneme alphabet="ipa" ph="wˈʊstər">Worcester</phoneme> is easy')
    assert [line.text for line in spoken(text, spec=ABLE, raw=True).lines] == ["{W UH1 S T ER0} is easy"]
    rules = lexicon_of([{"text": "Worcester", "phoneme": "W UH1 S T ER0", "alphabet": "cmu-arpabet"}])
    script = spoken("At Worcester.", spec=ABLE, lexicons=[rules], raw=True)
    assert [line.text for line in script.lines] == ["At {W UH1 S T ER0}."]
    with pytest.raises(InvalidRequest, match=r"column 8.*☂"):
        spoken(speak('<phoneme ph="☂">x</phoneme>'), spec=ABLE)
    with pytest.raises(InvalidRequest, match="phoneme"):
        spoken(speak('<phoneme ph="x" alphabet="sapi">x</phoneme>'), spec=ABLE)
