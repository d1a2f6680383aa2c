"""What markup says, case by case: the words that the built-in voice is prompted with, pauses in ms between bars, the
voice, rate and gain of a line, and what is not honoured."""

import time

import pytest
from markup_cases import IGNORED, REFUSED, SSML, TAGS, speak
from scripts import spoken

from sonoro.core.errors import InvalidRequest, UnknownVoice
from sonoro.text.origins import Origins, shown
from sonoro.text.script import lexicon_of, read_lexicon


@pytest.mark.parametrize(("inner", "said"), SSML)
def test_ssml_says(inner: str, said: str) -> None:
    assert spoken(speak(inner)) == said


@pytest.mark.parametrize(("inner", "said", "name"), IGNORED)
def test_what_is_not_honoured_is_refused_or_listed(inner: str, said: str, name: str) -> None:
    assert spoken(speak(inner), on_markup="plain") == f"{said} w: {name}"
    with pytest.raises(InvalidRequest, match=f"{name}.*line 1, column"):
        spoken(speak(inner))


@pytest.mark.parametrize(("text", "reason"), REFUSED)
def test_ssml_is_refused_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        spoken(text, on_markup="plain")


def test_a_billion_laughs_end_at_the_doctype() -> None:
    entities = "".join(f'<!ENTITY l{n + 1} "{f"&l{n};" * 10}">' for n in range(9))
    began_s = time.process_time()
    with pytest.raises(InvalidRequest, match="DOCTYPE"):
        spoken(f'<?xml version="1.0"?><!DOCTYPE l [<!ENTITY l0 "x">{entities}]><speak>&l9;</speak>')
    # It would take minutes otherwise; a limit guards against that alone.
    assert time.process_time() - began_s < 60


def test_an_unknown_voice_is_refused_whatever_on_markup_says() -> None:
    for how in ("refuse", "plain"):
        with pytest.raises(UnknownVoice, match=r"line 1, column 29.*nora"):
            spoken(speak('<voice name="nobody">x</voice>'), on_markup=how)


def test_ssml_needs_ssml() -> None:
    with pytest.raises(InvalidRequest, match="not well-formed"):
        spoken("Hi", markup="ssml")


def test_an_empty_document_has_no_line() -> None:
    assert spoken("<speak/>") == ""


@pytest.mark.parametrize(("markup", "text", "said"), TAGS)
def test_tags_say(markup: str, text: str, said: str) -> None:
    assert spoken(text, markup=markup, on_markup="plain") == said


def test_elements_of_html_that_are_never_closed_are_left_out() -> None:
    text = "One.<br>Two." + "<p>Three" * 40 + "<li>four"
    said = spoken(text, markup="tags", on_markup="plain")
    assert said == "one. two. " + "three. " * 40 + "four. w: br, li"


def test_a_list_of_warnings_has_an_end() -> None:
    assert len(spoken("<i>a</i> " * 500, markup="tags", on_markup="plain", raw=True).warnings) == 64


@pytest.mark.parametrize("text", ['<speed ratio="9"/>x', '<volume ratio="loud"/>x', '<break time="1"/>x', "[rate:9]x"])
def test_tags_out_of_bounds_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="line 1, column 1"):
        spoken(text, markup="tags", on_markup="plain")


def test_a_lexicon_speaks_words_in_their_cases() -> None:
    rules = lexicon_of({"SQL": "sequel", "cat": "x"})
    assert spoken("SQL and sql concatenate. Cat", lexicons=[rules]) == "sequel and sql concatenate. x."


def test_a_lexicon_knows_either_apostrophe() -> None:
    rules = lexicon_of({"O'Brien": "oh bryan", "’twas": "it was"})
    assert spoken("O’Brien's, O'Brien, 'twas and ’twas", lexicons=[rules]) == "oh bryan's, oh bryan, it was and it was."


def test_a_byte_order_mark_hides_no_document() -> None:
    assert spoken("\ufeff" + speak('<sub alias="yes">x</sub>')) == "yes."


def test_the_longest_phrase_is_said_and_possessives_stay() -> None:
    rules = lexicon_of({"nginx": "engine x", "New York": "a", "New York City": "bee"})
    assert spoken("Nginx's logs. New \n York City", lexicons=[rules]) == "engine x's logs. bee."


def test_markup_beats_a_lexicon_and_bounds_its_phrases() -> None:
    rules = lexicon_of({"W3C": "no", "New York": "no"})
    text = speak('<sub alias="yes">W3C</sub> W3C New<break/>York')
    assert spoken(text, lexicons=[rules]) == "yes no new. |500| york."


def test_pls_replaces_within_an_alias_but_not_in_circles() -> None:
    lexeme = "<lexeme><grapheme>{}</grapheme><alias>{}</alias></lexeme>".format
    pls = (
        "<lexicon version='1.0'>"
        + lexeme("ant", "bee")
        + lexeme("bee", "ant")
        + lexeme("zoo", "ant two")
        + "</lexicon>"
    )
    assert spoken("ant zoo", lexicons=[read_lexicon(pls.encode())]) == "bee bee two."


def test_a_text_without_markup_has_no_script() -> None:
    for text in ("Hello there.", "a < b [1] and [x](/y/)", r"C:\new \[x\]", speak("x")[1:-1]):
        assert spoken(text, markup="auto", raw=True) is None


def test_places_lead_back_to_the_text_as_it_was_sent() -> None:
    text = 'Hé &amp; <sub alias="World Wide Web">W3C</sub> rules'
    script = spoken(speak(text), raw=True)
    assert script.text == "Hé & W3C rules"
    assert len(Origins(script.origins)) == len(script.text)
    sent = Origins(script.origins)
    at = script.text.index("W3C")
    assert speak(text)[slice(*sent.span(at, at + 3))] == "W3C"
    assert speak(text)[slice(*sent.span(3, 4))] == "&amp;"
    assert shown(script, speak(text)).replace("\0", "") == script.text


def test_white_space_of_a_laid_out_text_is_its_last_character() -> None:
    text = "\ufeff<speak>\r\n  “One”\u00a0two.  \n\tThree &#9; &#x201c;four&quot;<![CDATA[ &lt; ]]>\n five</speak>"[1:]
    script = spoken(text, raw=True)
    assert script.text == '“One” two. Three “four" &lt; five'
    for character, (start, end) in zip(script.text, Origins(script.origins), strict=True):
        assert text[start:end] == character or text[start:end] in {"\u00a0", "\t", " ", "&#x201c;", "&quot;"}
    assert shown(script, text).replace("\0", "") == script.text


def test_nothing_within_what_is_not_spoken_is_said() -> None:
    hidden = '<desc><p>no</p><sub alias="not this">x</sub><break/><voice name="hugh">y</voice></desc>'
    assert spoken(speak(f"one {hidden}two")) == "one two."
