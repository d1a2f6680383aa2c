"""How text is split into words: as the tokenizer was made, or as the official package splits that of a local folder."""

import json
import random
from pathlib import Path

import pytest
from tiny_checkpoint import write_checkpoint
from tokenizers import models, pre_tokenizers

from sonoro.models import registry
from sonoro.models.qwen3_tts import prompt
from sonoro.models.qwen3_tts.live_text import LiveTokens
from sonoro.models.qwen3_tts.prompt import SPLITS, TextTokenizer
from sonoro.models.settings import configure

HUB_ID = "someone/Tiny"


def words(split: str, text: str) -> list[str]:
    tokenizer = TextTokenizer.stand_in()
    tokenizer.split_by(split)
    made = tokenizer._tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in made]


@pytest.mark.parametrize(
    ("text", "qwen2", "mistral"),
    [
        ("iPhone", ["iPhone"], ["i", "Phone"]),
        ("the HTMLPage", ["the", " HTMLPage"], ["the", " HTMLPage"]),
        ("It's", ["It", "'s"], ["It", "'s"]),
        ("IT'S", ["IT", "'S"], ["IT", "'S"]),
        ("McDonald 42", ["McDonald", " ", "4", "2"], ["Mc", "Donald", " ", "4", "2"]),
        ("and!/or", ["and", "!/", "or"], ["and", "!/", "or"]),
        ("a\u0308b", ["a", "\u0308", "b"], ["a\u0308b"]),
    ],
)
def test_camel_case_and_marks_are_split_apart(text: str, qwen2: list[str], mistral: list[str]) -> None:
    assert words("mistral", text) == mistral
    if "\u0308" not in text:
        assert words("qwen2", text) == qwen2


@pytest.mark.parametrize(
    ("version", "size", "expected"),
    [
        ("4.57.3", 100_001, "mistral"),
        (None, 100_001, "mistral"),
        ("4.58.0.dev0", 100_001, "mistral"),
        ("4.57.2", 100_001, "qwen2"),
        ("4.57", 100_001, "qwen2"),
        ("5.0.0", 100_001, "qwen2"),
        ("5.2.1", 100_001, "qwen2"),
        ("4.57.3", 100_000, "qwen2"),
    ],
)
def test_a_local_folder_is_split_as_the_official_package_would(
    tmp_path: Path, version: str | None, size: int, expected: str
) -> None:
    """transformers 4.57.3: of more than 100,000 tokens, beside a config.json of no version, or from 4.57.3 up to 5."""
    write_checkpoint(tmp_path)
    entries = json.loads((tmp_path / "vocab.json").read_text())
    filler = {f"filler{index}": index for index in range(len(entries), size)}
    (tmp_path / "vocab.json").write_text(json.dumps(entries | filler))
    values = json.loads((tmp_path / "config.json").read_text())
    values.pop("transformers_version", None)
    (tmp_path / "config.json").write_text(json.dumps(values | ({"transformers_version": version} if version else {})))
    assert TextTokenizer.from_folder(tmp_path).split == expected


def test_a_hub_id_keeps_the_split_it_was_made_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path)
    monkeypatch.setattr(prompt, "_MISTRAL_FROM", 10)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda hub_id, *, allow_patterns: str(tmp_path))

    def split(model: str | Path, **settings: str) -> str:
        loaded = registry.load(model, device="cpu").model
        configure(loaded, settings)
        return loaded._prompts.tokenizer.split

    assert split(tmp_path) == "mistral"
    assert split(HUB_ID) == "qwen2"
    assert split(tmp_path, tokenizer_split="qwen2") == "qwen2"
    assert split(HUB_ID, tokenizer_split="mistral") == "mistral"


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    "text",
    [
        "iPhone and HTMLPage",
        "ABCd ABCD abcD",
        "\u4e2d\u6587Ab \u4e2d\u6587A, \u4e2d",
        "don't/won't--Stop!/ x",
        "A1b2 Cc\u0301D e",
    ],
)
def test_live_text_gives_the_same_ids_in_any_pieces(split: str, text: str) -> None:
    tokenizer = TextTokenizer.stand_in()
    # A vocabulary in which pieces of words are tokens, so that where a word ends is seen.
    merged = TextTokenizer(vocabulary_of(text), split)
    for made in (tokenizer, merged):
        made.split_by(split)
        for seed in range(40):
            draw, live, found, at = random.Random(seed), LiveTokens(made), [], 0
            while at < len(text):
                step = draw.randint(1, 4)
                found += live.feed(text[at : at + step])
                at += step
            assert [*found, *live.finish()] == made.encode(text)


def vocabulary_of(text: str) -> object:
    """A byte-level BPE that joins whatever stands side by side in `text`, from the left."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries, merges = {symbol: index for index, symbol in enumerate(alphabet)}, []
    whole = "".join(piece for piece, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text))
    for length in (2, 4, 8):
        for start in range(len(whole) - length + 1):
            left, right = whole[start : start + length // 2], whole[start + length // 2 : start + length]
            if left in entries and right in entries and left + right not in entries:
                entries[left + right] = len(entries)
                merges.append((left, right))
    return models.BPE(vocab=entries, merges=merges)
