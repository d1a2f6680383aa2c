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


def test_emphasis_and_emotion_are_cues_in_the_text_of_a_model_that_reads_them() -> None:
    able = msgspec.structs.replace(ABLE, cues=("[", "]"))
    text = "<speak>Not <emphasis>now</emphasis> <express-as style='sad'>please</express-as>, Al</speak>"
    assert [line.text for line in spoken(text, spec=able, raw=True).lines] == [
        "Not [emphasis] now",
        "[sad] please",
        ", Al",
    ]
    text = "<speak><p>Hi</p><p><emphasis>Now</emphasis></p></speak>"
    assert [line.text for line in spoken(text, spec=able, raw=True).lines] == ["Hi. [emphasis] Now."]
    text = "<speak>Now<emphasis/></speak>"
    assert [line.text for line in spoken(text, spec=able, raw=True).lines] == ["Now[emphasis]"]
    text = '<emotion value="angry"/>No. <emotion value="neutral"/>Yes.'
    assert [line.text for line in spoken(text, markup="tags", spec=able, raw=True).lines] == ["[angry] No.", "Yes."]


def test_emotion_is_an_instruction_to_a_model_that_follows_them() -> None:
    able = msgspec.structs.replace(ABLE, accepts_instructions=True)
    script = spoken('One. <emotion value="angry"/>No. [pause:1s]Two.', markup="tags", spec=able, raw=True)
    assert [(line.text, line.instructions) for line in script.lines] == [
        ("One.", None),
        ("No.", "angry"),
        ("Two.", "angry"),
    ]
    unable = spoken('One <emotion value="angry"/>two', markup="tags", on_markup="plain", spec=ABLE, raw=True)
    assert [line.text for line in unable.lines] == ["One two"]


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
