"""Texts to speak: our own, and those of files."""

import base64
import itertools
from pathlib import Path

import pytest

from sonoro.bench.dataset import BUILTIN, Prompt, Recording, cloned, prompts, shuffled
from sonoro.core.errors import ConfigError


def test_ours_are_two_hundred_plain_english_texts() -> None:
    texts = [prompt.text for prompt in prompts(BUILTIN)]
    assert len(texts) == len(set(texts)) == 200
    lengths = [len(text.split()) for text in texts]
    assert (min(lengths), max(lengths)) == (4, 25)
    for text in texts:
        assert text.isascii()
        assert text == text.strip()
        assert text[-1] in ".?!"


def test_the_text_of_a_list_is_its_fourth_field(tmp_path: Path) -> None:
    listing = tmp_path / "meta.lst"
    listing.write_text(
        "a-1|What was said.|wavs/a.wav|Say this.\n\nb-2|Else.|b.wav| Say that. |truth/b.wav\nA bare text.\n"
    )
    assert prompts(str(listing)) == (
        Prompt("Say this.", Recording(tmp_path / "wavs" / "a.wav", "What was said.")),
        Prompt("Say that.", Recording(tmp_path / "b.wav", "Else.")),
        Prompt("A bare text."),
    )


def test_a_voice_is_cloned_from_one_recording_or_from_that_of_each_line(tmp_path: Path) -> None:
    for name in ("a", "b", "one"):
        (tmp_path / f"{name}.wav").write_bytes(name.encode())
    texts = (Prompt("Say this.", Recording(tmp_path / "a.wav", "A.")), Prompt("That.", Recording(tmp_path / "b.wav")))
    assert [text.recording for text in cloned(texts, None)] == [None, None]
    (same,) = {text.recording for text in cloned(texts, str(tmp_path / "one.wav"), "One.")}
    assert same is not None
    head, data = same.fields.pop("ref_audio").split(",")
    assert (head.startswith("data:audio/"), head.endswith(";base64"), base64.b64decode(data)) == (True, True, b"one")
    assert (same.fields["ref_text"], "x_vector_only_mode" in same.fields) == ("One.", False)
    listed = [text.recording for text in cloned(texts, "list", x_vector_only=True)]
    assert [made and made.path.name for made in listed] == ["a.wav", "b.wav"]
    assert all(made and made.fields["x_vector_only_mode"] for made in listed)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((None, "Hello."), "ref_text: 'Hello.' .* give that too"),
        (("none.wav", None), "ref: 'none.wav' .* readable audio"),
        (("list", "Hello."), "ref_text: 'Hello.' .* its own"),
        (("list", None), "ref: 'list' .* id\\|ref_text"),
    ],
)
def test_a_voice_that_is_not_there_is_refused(arguments: tuple[str | None, str | None], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cloned((Prompt("a"),), *arguments)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"One.\na|b\n", "dataset line 2: 'a\\|b'"),
        (b"a|b|c\n", "dataset line 1"),
        (b"a|b|c| \n", "id\\|ref_text\\|ref_audio\\|text"),
        (b"\n \n", "at least one text"),
        (b"\xff\xfe\xfa", "readable UTF-8"),
    ],
)
def test_what_is_no_list_of_texts_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    listing = tmp_path / "bad.lst"
    listing.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        prompts(str(listing))


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="none/of/these"):
        prompts("none/of/these")


def test_an_order_is_the_seeds_and_has_each_text_once_in_a_round() -> None:
    texts = tuple(map(Prompt, "abcdefghij"))
    first, again, other = (list(itertools.islice(shuffled(texts, seed), 30)) for seed in ("1", "1", "2"))
    assert first == again != other
    for at in range(0, 30, 10):
        assert set(first[at : at + 10]) == set(texts)
    assert first[:10] != first[10:20]
