"""The data half of the built-in voice's recipe: inflections, tokenizer files, trimming, shards, what is kept out."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from builtin_voice import flite, judged, shards, synthesize, templates, tokenizer, words
from sonoro.text import read

VERBS = {
    "stop": "stops stopped stopped stopping",
    "carry": "carries carried carried carrying",
    "panic": "panics panicked panicked panicking",
    "travel": "travels traveled traveled traveling",
    "die": "dies died died dying",
    "see": "sees saw seen seeing",
    "fix": "fixes fixed fixed fixing",
    "open": "opens opened opened opening",
}


@pytest.fixture(scope="module")
def lexicon() -> words.Lexicon:
    """A dozen words of each class, with both spellings of an inflection where American English has only one."""

    def choice(*drawn: str) -> words.Choice:
        made = words.Choice()
        for word in drawn:
            made.add(word, 1, 0.0)
        return made

    nouns = dict.fromkeys(("any", *words.CONCRETE.values()), choice("child", "city", "box", "tree", "river", "lamp"))
    forms = [*" ".join(VERBS.values()).split(), "travelled", "children", "cities", "boxes", "trees", "rivers", "lamps"]
    return words.Lexicon(
        nouns=nouns,
        transitive=choice("stop", "carry", "see", "open", "fix"),
        intransitive=choice("travel", "die", "panic"),
        adjectives=choice("old", "quiet", "hourly"),
        adverbs=choice("slowly", "often"),
        proper=["Boston", "Miller"],
        words=["stone", "Boston", "running", "quiet"],
        everyday=["stone", "glue", "running", "quiet"],
        definitions=[("lamp", "an artificial source of light"), ("child", "a young person of either sex")],
        examples=["the birch canoe slid on the smooth planks", "a quiet street", "what did she say"],
        irregular={"child": "children"},
        known=frozenset(forms),
    )


def test_inflections(lexicon: words.Lexicon) -> None:
    for verb, expected in VERBS.items():
        forms = (lexicon.third_person(verb), lexicon.past(verb), lexicon.participle(verb), lexicon.gerund(verb))
        assert " ".join(forms) == expected
    assert [lexicon.plural(noun) for noun in ("child", "city", "box", "tree")] == [
        "children",
        "cities",
        "boxes",
        "trees",
    ]
    assert [words.with_article(word) for word in ("hour", "union", "umbrella", "box")] == [
        "an hour",
        "a union",
        "an umbrella",
        "a box",
    ]


def test_every_template_writes_plain_sentences(lexicon: words.Lexicon) -> None:
    writer = templates.Writer(lexicon, random.Random(5))
    for write in (writer.sentence, writer.number_sentence):
        for _ in range(500):
            written = write()
            assert written[-1] in ".?!", written
            assert written[0].isupper() or written[0].isdigit(), written
            assert read(written).dropped == "", written


def test_harvard_sentences_are_whole() -> None:
    sentences = judged.read_harvard()
    assert len(sentences) == len(set(sentences)) == 720
    assert sentences[0] == "The birch canoe slid on the smooth planks."
    assert sentences[99] == "The bill was paid every third week."


def test_tokenizer_folder_loads_and_has_the_template_as_single_tokens(tmp_path: Path) -> None:
    texts = ["the assistance of an assistant is a constant resistance."] * 20 + ["ant in a sista as siesta."] * 5
    vocabulary, merges = tokenizer.train(texts, merges=12)
    tokenizer.write(tmp_path, vocabulary, merges)
    BPE.from_file(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    loaded = tokenizer.read(tmp_path)
    ids = loaded.encode("<|im_start|>assistant\nit isn't.<|im_end|>\n<|im_start|>assistant\n").ids
    first = len(vocabulary)
    assert sorted(vocabulary.values()) == list(range(first))
    assert ids[:3] == [first, first - 1, vocabulary["Ċ"]]
    assert ids[-5:] == [first + 1, vocabulary["Ċ"], first, first - 1, vocabulary["Ċ"]]
    assert [loaded.token_to_id(token) for token in tokenizer.SPECIALS] == list(range(first, first + 5))
    loaded.decoder = ByteLevel()
    assert loaded.decode(loaded.encode("where's ünï 7?").ids) == "where's ünï 7?"


@pytest.mark.parametrize("silence", [0, 2000, 30000])
def test_trim_leaves_the_stated_silences(silence: int) -> None:
    rng = np.random.default_rng(0)
    speech = rng.normal(0, 0.2, 24000).astype(np.float32)
    noise = rng.normal(0, 0.0002, silence).astype(np.float32)
    whole = np.concatenate([noise, speech, noise])
    trimmed, first = flite.trim(whole)
    kept = slice(max(first, 0), first + len(trimmed))
    assert np.array_equal(trimmed[kept.start - first :][: len(whole[kept])], whole[kept])
    loud = np.flatnonzero(np.abs(trimmed) > 0.05)
    # Ends are found to within one 5 ms window on each side.
    assert abs(loud[0] - 0.06 * 24000) <= 240
    assert abs(len(trimmed) - 1 - loud[-1] - 0.16 * 24000) <= 240


def test_phones_fill_what_is_kept_of_a_reading() -> None:
    given = [("pau", -5), ("dh", 0), ("ax", 10), ("b", 10), ("er", 25), ("pau", 40), ("pau", 50)]
    assert flite.placed(given, 30) == [("ax", 10), ("er", 25), ("pau", 30)]
    assert flite.placed(given, 60) == [("ax", 10), ("er", 25), ("pau", 40), ("pau", 50), ("pau", 60)]


def test_corpus_and_shards_are_read_back(tmp_path: Path) -> None:
    rows = [{"text": f"row {i}.", "voice": flite.VOICES[i % 4]} for i in range(8)]
    path = tmp_path / "corpus.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    assert synthesize.read_corpus(path) == rows
    assert synthesize.read_corpus(path, ["rms"], limit=1) == [rows[1]]
    audio = np.arange(30, dtype=np.int16)
    np.save(tmp_path / "shard-00003.npy", audio)
    phones = {"phones": ["ax", "pau"], "ends": [4, 10]}
    lines = [{"shard": 3, "start": 0, "samples": 10, "text": "a.", "voice": "slt", **phones}]
    lines += [{"shard": 3, "start": 10, "samples": 20, "text": "b.", "voice": "rms", **phones}]
    (tmp_path / "shard-00003.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found, utterances = shards.load(tmp_path)
    second = utterances[1]
    assert found[second.shard][second.start : second.start + second.samples].tolist() == list(range(10, 30))
