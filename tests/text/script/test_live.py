"""Markup in live text: wherever the text is cut, the same is said, and what is no tag is not held back."""

import random
import re
from collections.abc import Sequence

import pytest
from markup_cases import IGNORED, REFUSED, SSML, TAGS, speak
from scripts import SPEC

from sonoro.core.errors import InvalidRequest
from sonoro.core.script import Line
from sonoro.core.types import SpeechRequest, is_speakable
from sonoro.text.live_feed import LiveFeed
from sonoro.text.script import Delivery, Lexicon, lexicon_of, scripted
from sonoro.text.script.live import LiveScript
from sonoro.text.script.live_lexicon import LiveLexicons
from sonoro.text.script.tags import complete
from sonoro.text.splitting import SpokenText

SOURCES = [
    *((markup, text) for markup, text, _ in TAGS if markup != "none"),
    *(("auto", speak(inner)) for inner, *_ in (*SSML[:12], *IGNORED)),
    *(
        ("tags", inner)
        for inner, *_ in (*SSML, *IGNORED)
        if "CDATA" not in inner and "&" not in inner and "<!" not in inner
    ),
    ("auto", "a < b and [x] or [pau and \\ and <bre"),
    ("auto", "Plain at first, then a pause.[pause:1s] And so on."),
    ("auto", "  \n<speak>Hi<break/>there</speak>"),
]


def letters(text: str) -> str:
    """`text` without white space and signs, of which those between segments are dropped; brackets of words stay."""
    return "".join(re.findall(r"[<>\[\]]*[^\W_]+[<>\[\]]*", text))


def made(live: LiveScript) -> list[tuple[object, ...]]:
    """The lines of a text that has ended, as far as they are spoken."""
    lines: list[list[object]] = []
    while live.has_more:
        live.advance(len(live.segments))
    for segment in live.segments:
        line = segment.line
        assert line is not None
        text = letters(segment.text)
        if lines and lines[-1][0] is line:
            lines[-1][1] += text  # type: ignore[operator]
        else:
            lines.append([line, text, segment.lead_s])
    return [(text, lead_s, line.pause_s, line.rate, line.gain, line.voice) for line, text, lead_s in lines]


def live_of(
    markup: str, pieces: list[str], on_markup: str = "plain", lexicons: Sequence[Lexicon] = ()
) -> list[tuple[object, ...]]:
    def feed(line: Line, segments: list, start: int) -> LiveFeed:
        split = lambda text: [SpokenText(text).stripped()]  # noqa: E731
        return LiveFeed(lambda: None, split, "en", 10_000, 100_000, segments=segments, start=start)

    live = LiveScript(markup, Delivery(SPEC, {}, on_markup), feed, 100_000)
    words = LiveLexicons(lexicons, markup) if lexicons else None
    given = [(piece, ()) if words is None else words.append(piece) for piece in pieces]
    given += [] if words is None else [words.end()]
    assert "".join(text for text, _ in given) == "".join(pieces)
    spoken = "".join([live.append(*each) for each in given] + [live.end()])
    assert len(live.origins) in (0, len(spoken))
    return made(live)


def whole_of(markup: str, text: str, lexicons: Sequence[Lexicon] = ()) -> list[tuple[object, ...]]:
    script = scripted(SpeechRequest(id="a", text=text, markup=markup, on_markup="plain"), SPEC, lexicons).script
    if script is None:
        return [(letters(text), 0.0, 0.0, 1.0, 1.0, None)]
    leads = [script.lead_s, *[0.0] * len(script.lines)]
    return [
        (letters(line.text), lead_s, line.pause_s, line.rate, line.gain, line.voice)
        for line, lead_s in zip(script.lines, leads, strict=False)
    ]


@pytest.mark.parametrize(("markup", "text"), SOURCES)
def test_live_equals_whole_for_every_cut(markup: str, text: str) -> None:
    whole = whole_of(markup, text)
    assert live_of(markup, list(text)) == whole
    for cut in range(len(text) + 1):
        assert live_of(markup, [text[:cut], text[cut:]]) == whole, cut


LEXICONS = [
    lexicon_of({"hi": "hello", "one": "won", "One two": "three", "W3C": "web", "SQL": "sequel", "New York": "a"}),
    lexicon_of({"New York City": "b", "nginx": "engine x", "a < b": "less", "x": "ex", "now": "later", "two": "too"}),
]


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        *SOURCES[:40:3],
        *SOURCES[40::5],
        ("auto", "Nginx's logs. New York City, SQL and sql. New York"),
        ("none", "a < b and One two, <b>SQL</b>"),
        ("auto", "hi<break/>hi [pause:1s]x one"),
        ("tags", '<b>hi</b>s now, hi<speed ratio="1.5"/>s one <sub alias="x">One</sub> two'),
        ("auto", "<speak>W3C &amp; <sub alias='x'>SQL</sub> SQL <p>New</p> York</speak>"),
    ],
)
def test_lexicons_say_the_same_live_for_every_cut(markup: str, text: str) -> None:
    whole = whole_of(markup, text, LEXICONS)
    assert live_of(markup, list(text), lexicons=LEXICONS) == whole
    for cut in range(len(text) + 1):
        assert live_of(markup, [text[:cut], text[cut:]], lexicons=LEXICONS) == whole, cut


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ("plain words", "plain words"),
        ("at New", "at "),
        ("at New Y", "at "),
        ("at Newer", "at Newer"),
        ("an SQL", "an "),
        ("an SQL. ", "an SQL. "),
        ("hi there <bre", "hi there <bre"),
        ("<speak>hi", ""),
    ],
)
def test_only_what_may_be_a_word_of_a_lexicon_is_held(text: str, passed: str) -> None:
    assert LiveLexicons(LEXICONS, "auto").append(text)[0] == passed


def test_markup_is_refused_though_a_word_of_a_lexicon_is_held() -> None:
    with pytest.raises(InvalidRequest, match="break time"):
        live_of("tags", ["one two", '<break time="1"/>', "six"], lexicons=LEXICONS)


ELEMENTS = [
    *('<prosody rate="50%">', '<prosody rate="200%">', "</prosody>", '<voice name="hugh">', "</voice>", "[voice:nora]"),
    *('<speed ratio="1.5"/>', '<volume ratio="1"/>', '<emotion value="sad"/>', "[rate:1]", "[rate:2]", "[pause:1s]"),
    *("<s>", "</s>", "<p>", "</p>", "<br>", '<sub alias="x y">', "</sub>", '<lang xml:lang="en">', "</lang>"),
    *('<break time="1s"/>', " ", "one", "two", " three ", ". ", "5", "\n"),
]


@pytest.mark.parametrize("seed", range(4))
def test_random_joins_and_cuts_are_the_same_live(seed: int) -> None:
    chance = random.Random(seed)
    texts = [text for markup, text in SOURCES] + [text for text, _ in REFUSED if len(text) < 500]
    for _ in range(150):
        markup = chance.choice(["auto", "tags", "voices", "deepgram"])
        text = "".join(chance.choice(texts)[chance.randint(0, 5) :] for _ in range(chance.randint(1, 3)))
        if chance.random() < 0.5:
            text = "".join(chance.choices(ELEMENTS, k=chance.randint(2, 12)))
        lexicons = chance.choice([(), LEXICONS])
        cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randint(1, 6)))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        if not is_speakable(text):
            continue
        try:
            whole = whole_of(markup, text, lexicons)
        except InvalidRequest:
            with pytest.raises(InvalidRequest):
                live_of(markup, pieces, lexicons=lexicons)
            continue
        assert live_of(markup, pieces, lexicons=lexicons) == whole, (markup, text, pieces, bool(lexicons))


@pytest.mark.parametrize(
    ("text", "markup", "held"),
    [
        ("Hi <bre", "auto", "<bre"),
        ("Hi <br>", "auto", ""),
        ("a < b", "tags", ""),
        ("a <", "auto", "<"),
        ("[pau", "auto", "[pau"),
        ("[note] then", "auto", ""),
        ("see [note]", "auto", "[note]"),
        ("plain text", "tags", ""),
        (r"\{pause:50", "deepgram", r"\{pause:50"),
        ("[pause] x", "deepgram", ""),
        ("<b", "auto", "<b"),
        ("<b>", "auto", ""),
    ],
)
def test_only_what_may_be_a_tag_is_held(text: str, markup: str, held: str) -> None:
    assert text[complete(text, 0, markup) :] == held
