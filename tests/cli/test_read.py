"""`sonoro read`: the words of a text, with pauses, and where they stand in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sonoro.cli.main import app
from sonoro.core.errors import UnknownVoice
from sonoro.text import read


def run(*arguments: str, given: str | None = None) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["read", *arguments], input=given)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def test_a_sentence_is_a_line() -> None:
    out, err = run("Dr. Smith paid $5.\n\n1. One\n2. Two")
    assert out == "Doctor Smith paid five dollars.\none, One.\ntwo, Two.\n"
    assert err == ""


def test_what_is_left_out_is_told_apart_from_the_words() -> None:
    out, err = run("Tokyo is 東京")
    assert out == "Tokyo is.\n"
    assert err == "left out, as it cannot be said: 東京\n"


@pytest.mark.parametrize("text_format", ["auto", "plain", "markdown", "html"])
def test_the_text_is_read_in_its_format(text_format: str) -> None:
    text = "*one* <b>two</b>"
    out, _ = run(text, "--text-format", text_format)
    assert out.strip() == read(text, text_format).text


def test_json_has_each_word_with_what_it_is_said_for(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("At 5pm, go.", encoding="utf-8")
    said = json.loads(run("--file", str(file), "--json")[0])
    assert said["text"] == "At five p m, go."
    assert [(word["word"], word["written"]) for word in said["words"]] == [
        ("At", "At"), ("five", "5"), ("p", "pm"), ("m", "pm"), ("go", "go"),
    ]  # fmt: skip


def test_a_dash_reads_the_standard_input() -> None:
    assert run("-", given="12kg\n")[0] == "twelve kilograms.\n"


@pytest.mark.parametrize(
    ("voice", "said"),
    [
        ((), "one hundred five"),
        (("--voice", "Hugh"), "one hundred and five"),
        (("--voice", "onyx"), "one hundred five"),
    ],
)
def test_a_voice_reads_numbers_by_its_accent(voice: tuple[str, ...], said: str) -> None:
    assert run("105", *voice)[0] == f"{said}.\n"


def test_an_unknown_voice_is_refused_by_name() -> None:
    result = CliRunner().invoke(app, ["read", "105", "--voice", "bob"])
    assert isinstance(result.exception, UnknownVoice)
    assert "'bob'" in str(result.exception)
    assert "nora, miles, edith, hugh" in str(result.exception)


def test_unquoted_words_are_one_text() -> None:
    assert run("this", "is", "12kg")[0] == "this is twelve kilograms.\n"


def test_unknown_tags_are_named() -> None:
    out, err = run('A <b>bold</b> <foo x="1">word</foo> <break time="1s"/>here, 1 < 2 > 0.')
    assert "bold word" in out
    assert err == "left out, as unknown tags: foo\n"
