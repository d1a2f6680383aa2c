"""Texts become rows of phonemes; with misaki (tools/builtin_voice/requirements.txt) the right ones."""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path

import pytest

from builtin_voice import phonemize


def test_rows_keep_their_numbers_and_what_cannot_be_spoken_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def spelled(text: str, accent: str) -> str:
        return phonemize.UNKNOWN if "unknown" in text else f"{accent} {text}"

    monkeypatch.setattr(phonemize, "phonemes", spelled)
    monkeypatch.setattr(phonemize, "phonemize", lambda texts, _: map(phonemize._row, enumerate(texts)))
    corpus, output = tmp_path / "corpus.txt", tmp_path / "phonemes.jsonl.xz"
    lines = ["It is 9:30", "", "你好", "an unknown word", "x" * 511, "Mr. Brown"]
    corpus.write_text("\n".join(lines), "utf-8")
    monkeypatch.setattr(sys, "argv", ["phonemize", str(corpus), str(output)])
    phonemize.main()
    with lzma.open(output, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    said = "It is nine thirty."
    assert rows[0] == {"row": 0, "text": said, "us": f"us {said}", "gb": f"gb {said}"}
    assert [(row["row"], row["text"]) for row in rows[1:]] == [(5, "Mister Brown.")]
    assert capsys.readouterr().out == "left_out=4\n"


@pytest.mark.filterwarnings("ignore")
def test_heteronyms_letters_and_accents() -> None:
    for package in ("misaki", "spacy", "textblob_aptagger"):
        pytest.importorskip(package)
    assert phonemize.phonemes("I read the book yesterday, and I will read it again.", "us").count("ɹˈɛd") == 1
    assert phonemize.phonemes("He wound the bandage round the wound.", "us") == "hˌi wˈWnd ðə bˈændɪʤ ɹˈWnd ðə wˈund."
    assert phonemize.phonemes("Grade ay.", "us").endswith("ˈA.")
    assert phonemize.phonemes("x.", "us") == "ˈɛks."
    assert phonemize.phonemes("I can't.", "gb") == "ˌI kˈɑːnt."
    assert phonemize.UNKNOWN not in phonemize.phonemes("Zyzzlebrack frobnicates.", "us")
