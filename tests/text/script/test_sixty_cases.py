"""The sixty cases that markup was specified by, by their numbers. Cases 55, 56 and 60, live text and random texts, are
`test_live.py` and `test_fuzz.py`; samples and marks are `tests/engine/test_script.py`.

Two were bettered. 40: a registered lexicon is named by the request (`lexicons`), which shows whose key may use it; an
element `lexicon` is refused, whatever its address. 53: what follows the backslash is text like any other, so that the
reader says "one second" of it, not "one s"."""

import msgspec
import pytest
from markup_cases import say_as, speak
from scripts import SPEC, spoken

from sonoro.core.errors import InvalidRequest
from sonoro.text.script import lexicon_of, read_lexicon

FISH = msgspec.structs.replace(SPEC, arpabet=("<|phoneme_start|>", "<|phoneme_end|>"), text_normalizer=None)
WORCESTER = '<phoneme alphabet="ipa" ph="wˈʊstər">Worcester</phoneme>'
SSML = [
    (1, 'Hi<break time="750ms"/>there', "hi. |750| there."),
    (2, "Hi<break/>there", "hi. |500| there."),
    (3, 'Hi<break strength="strong" time="200ms"/>there', "hi. |200| there."),
    (4, 'Hi<break time="0.5s"/> <break time="1s"/>there', "hi. |1500| there."),
    (5, 'Hi.<break strength="none"/>There', "hi. there."),
    (6, '<break time="-1s"/>', "break time"),
    (6, '<break time="1"/>', "break time"),
    (6, '<break time="1m"/>', "break time"),
    (7, '<break time="61s"/>', "at most|60 s"),
    (8, '<sub alias="World Wide Web">W3C</sub> rules', "world wide web rules."),
    (17, say_as("date", "99-99-2016"), "ninety nine ninety nine twenty sixteen. w: say-as date"),
    (18, say_as("poem", "Oh my"), "oh my. w: say-as poem"),
    (19, say_as("date", "a <break/> b"), "text only"),
    (21, WORCESTER, "worcester. w: phoneme"),
    (23, '<voice name="nora">Hi.</voice><voice name="hugh">Yes.</voice>', "nora: hi. hugh: yes."),
    (24, 'A <voice name="hugh">b</voice> c', "ay. hugh: b. c."),
    (25, '<voice name="nobody">x</voice>', "nobody"),
    (25, '<voice gender="male">x</voice>', "hugh: x."),
    (26, '<prosody rate="50%">x</prosody>', "rate 0.5: x."),
    (26, '<prosody rate="slow">x</prosody>', "rate 0.75: x."),
    (26, '<prosody rate="+20%">x</prosody>', "rate 1.2: x."),
    (27, '<prosody rate="80%"><prosody rate="50%">x</prosody></prosody>', "rate 0.4: x."),
    (28, '<prosody volume="-6dB">x</prosody>', "gain 0.501: x."),
    (28, '<prosody volume="silent">x</prosody>', "gain 0: x."),
    (29, '<prosody pitch="+2st">Hi</prosody>', "hi. w: prosody pitch"),
    (30, 'One <mark name="m"/>two', "one two."),
    (31, "<p><s>One</s><s>Two</s></p>", "one. two."),
    (32, "5 &lt; 6 &amp; 7 &gt; 3", "five is less than six and seven is greater than three."),
    (32, "<![CDATA[5 < 6]]>", "five is less than six."),
    (33, "one <!-- x --> two<?pi x?>", "one two."),
    (34, "<!DOCTYPE speak><speak/>", "DOCTYPE"),
    (35, "a&nbsp;b", "line 1.*undefined entity nbsp"),
    (36, '<break time="1s">there', "line 1, column 32.*mismatched tag"),
    (37, "<p>" * 32 + "</p>" * 32, "32 deep"),
    (37, "<w/>" * 2000, "2000 elements"),
    (38, "<foo>bar</foo>", "bar. w: foo"),
    (38, '<mstts:silence value="1s"/>bar', "bar. w: silence"),
    (39, '<audio src="http://x/y.mp3">beep</audio><desc>no</desc>', "beep. w: audio"),
    (40, '<lexicon uri="http://x/l.pls"/>', "lexicon"),
    (40, '<lexicon uri="names"/>', "lexicon names"),
    (41, "", ""),
    (42, '<lang xml:lang="de">Hallo</lang>', "hallo. w: lang de"),
]
SAY_AS = [
    (9, "characters", "ABC-123", "", "ay b c, one two three."),
    (10, "cardinal", "1984", "", "one thousand nine hundred and eighty four."),
    (11, "ordinal", "10", "", "tenth."),
    (11, "ordinal", "3rd", "", "third."),
    (12, "number_digit", "4711", "", "four seven one one."),
    (12, "digits", "4711", "", "four seven one one."),
    (13, "date", "10-12-2016", "", "october twelfth, twenty sixteen."),
    (13, "date", "10-12-2016", "dmy", "december tenth, twenty sixteen."),
    (14, "time", "1:30pm", "", "one thirty p m."),
    (15, "telephone", "(555) 010-2030", "", "five five five, zero one zero, two zero three zero."),
    (16, "fraction", "3/8", "", "three eighths."),
]
TAGS = [
    (43, "tags", 'Hello.<break time="1s"/>Nice.', "hello. |1000| nice."),
    (44, "tags", "One <BREAK time='2s' /> two", "one. |2000| two."),
    (45, "tags", "<spell>Bob</spell>", "b o b."),
    (46, "tags", '<speed ratio="1.5"/>I like. <speed ratio="1"/>Now', "rate 1.5: i like. now."),
    (46, "tags", '<speed ratio="9"/>x', "speed ratio"),
    (47, "tags", '<emotion value="angry"/>No', "no. w: emotion"),
    (48, "tags", "I <b>really</b> mean it", "i really mean it. w: b"),
    (48, "auto", "I <b>really</b> mean it", "i really mean it."),
    (49, "auto", "[Worcester](/wˈʊstər/) is easy. [pause:1s] See?", "worcester is easy. |1000| see? w: phoneme"),
    (50, "auto", "[PAUSE:0.5S]Hi", "|500| hi."),
    (50, "auto", "[pause=1.5]", "pause equals one point five."),
    (51, "tags", "Hi [pause 3.2s] there", "hi. |3200| there."),
    (52, "auto", "[voice:nora] Hi [voice:hugh] Yes", "voice, nora, hi, voice, hugh, yes."),
    (52, "voices", "[voice:nora] Hi [voice:hugh] Yes", "nora: hi. hugh: yes."),
    (53, "auto", r"\[pause:1s] x", "pause, one second, x."),
    (54, "deepgram", r'Take \{"word": "x", "pronounce": "ɛks"\}\{pause:500ms\}now', "take x. |500| now. w: phoneme"),
]
ELSEWHERE = {20, 22, 55, 56, 57, 58, 59, 60}


def check(text: str, markup: str, said: str) -> None:
    """Whether `text` is said so, or refused with such a reason."""
    try:
        assert spoken(text, markup=markup, on_markup="plain") == said
    except InvalidRequest as error:
        with pytest.raises(InvalidRequest, match=said):
            raise error


def test_all_sixty_are_here_or_named() -> None:
    assert {number for number, *_ in (*SSML, *SAY_AS, *TAGS)} | ELSEWHERE == set(range(1, 61))


@pytest.mark.parametrize(("number", "inner", "said"), SSML)
def test_ssml(number: int, inner: str, said: str) -> None:
    check(inner if inner.startswith(("<speak", "<!DOCTYPE")) else speak(inner), "ssml", said)


@pytest.mark.parametrize(("number", "kind", "text", "form", "said"), SAY_AS)
def test_say_as(number: int, kind: str, text: str, form: str, said: str) -> None:
    check(say_as(kind, text, form), "auto", said)


@pytest.mark.parametrize(("number", "markup", "text", "said"), TAGS)
def test_tags(number: int, markup: str, text: str, said: str) -> None:
    check(text, markup, said)


def test_what_is_refused_by_default() -> None:
    for text, name in (  # cases 17, 20, 29, 42
        (say_as("date", "99-99-2016"), "say-as date"),
        (speak(WORCESTER), "phoneme.*spoken cannot honour it"),
        (speak('<prosody pitch="+2st">Hi</prosody>'), "prosody pitch"),
        (speak('<lang xml:lang="de">Hallo</lang>'), "lang de"),
    ):
        with pytest.raises(InvalidRequest, match=name):
            spoken(text)
    with pytest.raises(InvalidRequest):  # 41
        spoken("Hi", markup="ssml")


def test_phonemes_of_a_model_that_speaks_them() -> None:
    [line] = spoken(speak(WORCESTER), spec=FISH, raw=True).lines  # 21
    assert line.text == "<|phoneme_start|>W UH1 S T ER0<|phoneme_end|>"
    with pytest.raises(InvalidRequest, match="☂"):  # 22
        spoken(speak('<phoneme alphabet="ipa" ph="☂">x</phoneme>'), spec=FISH)


def test_lexicons() -> None:
    rules = lexicon_of({"SQL": "sequel", "cat": "x"})
    assert spoken("SQL and sql concatenate.", lexicons=[rules]) == "sequel and sql concatenate."  # 57
    rules = lexicon_of({"nginx": "engine x", "New York": "no", "New York City": "bee"})
    script = spoken("Nginx's logs. New York City.", lexicons=[rules], raw=True)  # 58
    assert script.text == "Nginx's logs. New York City."
    assert [line.text for line in script.lines] == ["engine x's logs. bee."]
    lexemes = (  # 59
        "<lexeme><grapheme>ant</grapheme><alias>bee</alias></lexeme>"
        "<lexeme><grapheme>bee</grapheme><alias>ant</alias></lexeme>"
        "<lexeme><grapheme>W</grapheme><phoneme>wˈʌn</phoneme><phoneme prefer='true'>tˈuː</phoneme></lexeme>"
    )
    pls = read_lexicon(f"<lexicon version='1.0'>{lexemes}</lexicon>".encode())
    [line] = spoken("ant W", spec=FISH, lexicons=[pls], raw=True).lines
    assert line.text == "bee <|phoneme_start|>T UW1<|phoneme_end|>"
