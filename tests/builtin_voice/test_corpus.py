"""The corpus: where its sentences come from, that templates write sentences, what it holds and what it must not."""

from __future__ import annotations

import gzip
import json
import random
import re
import struct
import zlib
from pathlib import Path

import pytest

from builtin_voice import flite, prose, slots, text, words
from builtin_voice.figures import KINDS, LISTS, Figures
from builtin_voice.judged import read_everyday, read_harvard
from builtin_voice.mixed import mixed_texts
from sonoro.text import read


@pytest.fixture(scope="module")
def sources() -> text.Sources:
    """A few words of each class, and sentences of which some judge the voice."""

    def choice(*drawn: str) -> words.Choice:
        made = words.Choice()
        for word in drawn:
            made.add(word, 1, 0.0)
        return made

    nouns = dict.fromkeys(("any", *words.CONCRETE.values()), choice("child", "city", "box", "tree", "river", "lamp"))
    forms = "children cities boxes trees rivers lamps stopped stops stopping carried opened opens died rarely"
    lexicon = words.Lexicon(
        nouns=nouns,
        transitive=choice("stop", "carry", "see", "open"),
        intransitive=choice("travel", "die"),
        adjectives=choice("old", "quiet", "hourly"),
        adverbs=choice("slowly", "often"),
        proper=["Boston", "Miller"],
        words=["stone", "running", "quiet"],
        everyday=["stone", "glue", "running", "quiet"],
        definitions=[],
        examples=[],
        irregular={"child": "children"},
        known=frozenset([*forms.split(), "child", "stop", "quiet", "old", "stone"]),
    )
    spoken = [["We are here today.", "There is much to do.", "Let us begin."], [read_everyday()[3], "And so on."]]
    paragraphs = dict.fromkeys(text.PROSE_SHARES, spoken) | {"definitions": [[f"The sign is {read_harvard()[0]}"]]}
    frequent = ["children", "stopped", "quiet", "stone", "carried", "lamps", "boston", "rarely", "we'd", "xyzzy"]
    return text.Sources(lexicon, paragraphs, frequent, (["Anna", "Juan"], ["Lee", "O'Neil"]), ["Boston"], ["we'd"])


def test_the_corpus_holds_frequent_words_and_none_of_what_judges(sources: text.Sources) -> None:
    corpus = text.write_corpus(sources, 600, seed=2)
    assert corpus == text.write_corpus(sources, 600, seed=2)
    assert list(corpus) != list(text.write_corpus(sources, 600, seed=3))
    assert set(text.TEMPLATE_SHARES) <= set(corpus.values())
    for word in ["children", "stopped", "quiet", "stone", "carried", "lamps", "boston", "rarely", "we'd"]:
        assert sum(word in slots.words_in(line) for line in corpus) >= text.TEXTS_A_WORD, word
    judged = text.judged_runs()
    assert not any(run in judged for line in corpus for run in text.runs_of(line))
    assert all(1 <= len(line) <= 300 and line == line.strip() for line in corpus)
    assert any(len(line) > 110 for line in corpus)
    assert "We are here today." in corpus
    # Neither as it is nor among other words.
    assert read_everyday()[3] not in corpus
    assert not any("canoe" in line for line in corpus)


def test_judged_texts_share_no_five_words(sources: text.Sources) -> None:
    judged = text.judged_runs()
    assert next(iter(text.runs_of("In 400 meters, turn left!"))) in judged
    assert set(text.runs_of(mixed_texts()[7])) <= judged
    assert list(text.runs_of("Yes, of course.")) == ["yes of course"]


@pytest.mark.parametrize("section", sorted(slots.read_templates()))
def test_every_template_writes_what_can_be_spoken(sources: text.Sources, section: str) -> None:
    demand = slots.Demand({"noun": ["lamp"]}, 3)
    writer = slots.Slots(sources.lexicon, demand, sources.people, random.Random(4))
    for _ in range(300):
        written = writer.text(section)
        assert not re.search(r"[{}\[\]|]| {2,}| [.,?!]|(?<!\.)\.\.(?!\.)|\b[Ii] '[dm]\b", written), written
        assert not re.search(r"\ba (?:old|hourly)\b|\ban (?:quiet|lamp)", written), written
        normalized = read(written)
        assert normalized.text
        assert normalized.dropped == "", written


def test_a_wanted_word_is_drawn_until_there_is_enough() -> None:
    demand, rng = slots.Demand({"noun": ["lamp", "Boston"], "word": ["lamp"]}, 2), random.Random(0)
    for _ in range(2):
        assert demand.draw("noun", rng) in {"lamp", "Boston"}
        demand.count("The lamp's lamp, a LAMP of Boston.")
    assert demand.draw("noun", rng) is demand.draw("word", rng) is demand.draw("unheard", rng) is None
    assert demand.kinds_left() == []


def test_figures_are_as_people_write_them() -> None:
    figures = Figures(random.Random(1))
    written = {kind: {getattr(figures, kind)() for _ in range(200)} for kind in KINDS}
    assert {"$", "£", "€"} <= set("".join(written["price"]))
    assert any(re.fullmatch(r"\(\d{3}\) \d{3}-\d{4}", phone) for phone in written["phone"])
    assert any(re.fullmatch(r"\d{1,2}:\d\d p\.m\.", time) for time in written["time"])
    assert {ordinal[-2:] for ordinal in written["ordinal"]} == {"st", "nd", "rd", "th"}
    assert all(values and "" not in values for values in LISTS.values())


def test_prose_is_taken_apart_at_sentences() -> None:
    paragraph = 'Mr. Lee met\nDr. Ann in the U.S. Congress. "Who is _he_?" she said--and left. Then: {x} no. It ended.'
    assert prose.sentences_of(paragraph) == [
        "Mr. Lee met Dr. Ann in the U.S. Congress.",
        '"Who is he?" she said — and left.',
        "It ended.",
    ]


def test_prose_is_read_from_files(tmp_path: Path) -> None:
    for year, line in ((1950, "It was long ago."), (1999, "It is new. We like it.")):
        (tmp_path / f"{year}_a.txt").write_text(f"{line}\n", "utf-8")
    assert prose.read_speeches(tmp_path) == [["It is new.", "We like it."]]
    assert prose.read_speeches(tmp_path, modern=False) == [["It was long ago."]]
    (tmp_path / "chapter_1.txt").write_text("Call me\nlater.\n\nNo.\n", "utf-8")
    assert prose.read_novel(tmp_path) == [["Call me later."], ["No."]]
    for name in prose._CHATS.split():
        (tmp_path / f"{name}.yml").write_text("categories:\n- a\nconversations:\n- - hello there\n  - Hi!\n", "utf-8")
    assert prose.read_chats(tmp_path)[0] == ["Hello there.", "Hi!"]


def test_a_vector_of_r_is_read(tmp_path: Path) -> None:
    lines = ["EMMA", "", "She was", "clever.", "", "Was she?"]
    strings = b"".join(struct.pack(">ii", 0x40009, len(line)) + line.encode() for line in lines)
    head = b"X\n" + struct.pack(">iiii", 3, 0x40201, 0x30500, 5) + b"UTF-8" + struct.pack(">ii", 16, len(lines))
    packed = zlib.compress(head + strings)
    database = tmp_path / "books.rdb"
    database.write_bytes(2 * (struct.pack(">i", len(head + strings)) + packed))
    assert prose.read_austen(database) == 2 * [[], ["She was clever."], ["Was she?"]]


def test_flite_is_given_normalised_rows(tmp_path: Path) -> None:
    text.write(["It's 5!", "It's five!", "No."], tmp_path / "corpus.jsonl.gz.partial")
    rows = gzip.decompress((tmp_path / "corpus.jsonl.gz.partial").read_bytes()).decode().splitlines()
    assert [json.loads(row) for row in rows] == [
        {"text": "it's five!", "voice": flite.VOICES[0]},
        {"text": "no.", "voice": flite.VOICES[1]},
    ]
    text.write(["café", "No."], tmp_path / "corpus.txt.partial")
    assert (tmp_path / "corpus.txt.partial").read_text("utf-8") == "café\nNo.\n"
