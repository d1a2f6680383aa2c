"""Random cuts and joins of texts with markup: they are read or refused, never read aloud, and always end."""

import random
import re

import pytest
from markup_cases import IGNORED, REFUSED, SSML, TAGS, speak
from scripts import SPEC

from sonoro.core.errors import InvalidRequest
from sonoro.core.types import SpeechRequest, is_speakable
from sonoro.text.origins import Origins, shown
from sonoro.text.script import lexicon_of, scripted

SOURCES = [
    *(speak(inner) for inner, *_ in (*SSML, *IGNORED)),
    *(text for text, _ in REFUSED if len(text) < 1000),
    *(text for _, text, _ in TAGS),
]
LEXICON = lexicon_of({"hi": "hello", "one two": "three", "W3C": "web"})
KNOWN = re.compile(r"<(?:break|spell|speed|volume|sub)\b[^<>]*>|\[pause:\d+s\]", re.IGNORECASE)


def joined(chance: random.Random) -> str:
    parts = []
    for _ in range(chance.randint(1, 4)):
        source = chance.choice(SOURCES)
        start, end = sorted(chance.choices(range(len(source) + 1), k=2))
        parts.append(source if chance.random() < 0.3 else source[start:end])
    return "".join(parts)


@pytest.mark.parametrize("seed", range(20))
def test_random_texts_are_read_or_refused(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(500):
        text, markup = joined(chance), chance.choice(["auto", "ssml", "tags", "voices", "deepgram"])
        if not is_speakable(text):
            continue
        request = SpeechRequest(id="a", text=text, markup=markup, on_markup=chance.choice(["plain", "refuse"]))
        try:
            script = scripted(request, SPEC, [LEXICON] * chance.randint(0, 1)).script
        except InvalidRequest:
            continue
        if script is None:
            assert markup != "tags" or not KNOWN.search(text), text
            continue
        assert len(Origins(script.origins)) == len(script.text)
        assert len(shown(script, text)) == len(text)
        sent = Origins(script.origins)
        for line in script.lines:
            origins = Origins(line.origins)
            assert len(origins) == len(line.text)
            assert all(0 <= start <= end <= len(script.text) for start, end in origins)
            assert all(0 <= place <= len(text) for origin in origins for place in sent.span(*origin))
            read_aloud = [found for found in KNOWN.findall(line.text) if found in text]
            assert not read_aloud or markup != "tags" or "\\" in text, (text, line.text)
