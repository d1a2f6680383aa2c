"""Texts as the official package prepares and cuts them, in both forms of the tokeniser; where their tokens are."""

import json
from pathlib import Path

import msgspec
import pytest
import tiny_pocket
from tiny_pocket_lm import NEVER, cases, controls, model_of

from sonoro.core.errors import CheckpointError, CheckpointNotFound, InvalidRequest
from sonoro.models.pocket_tts.config import read
from sonoro.models.pocket_tts.prompt import TextRules, find_tokenizer, most_frames
from sonoro.nn.tokenizer import TextTokenizer
from sonoro.text.splitting import SpokenText


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_pocket.write_checkpoint(folder)
    return folder


@pytest.mark.parametrize("form", ["tokenizer.json", "tokenizer.model"])
def test_texts_are_prepared_and_cut_as_the_official_package_does(reference_root: Path, folder: Path, form: str) -> None:
    tokenizer = TextTokenizer.from_file(folder / form)
    config, stored = read(folder), cases("texts", reference_root)
    assert len(stored) == 45
    for case in stored.values():
        facts = case.facts
        rules = TextRules(msgspec.structs.replace(config, **facts["rules"]), tokenizer)
        written = SpokenText(facts["text"])
        prepared, chunks = rules.prepare(written), rules.chunks(written)
        assert prepared.text == facts["prepared"]
        assert [chunk.text for chunk in chunks] == facts["chunks"], facts["text"]
        assert [tokenizer.encode(chunk.text) for chunk in chunks] == facts["ids"]
        assert rules.frames_after_end(facts["text"]) == facts["guess"] + 2
        for spoken in (prepared, *chunks):
            # Characters that were neither added nor replaced come from themselves.
            assert len(spoken.origins) == len(spoken.text)
            for character, (start, end) in zip(spoken.text, spoken.origins, strict=True):
                if end - start == 1 and written.text[start].isalpha():
                    assert character.lower() in written.text[start].upper().lower()


def test_both_forms_of_the_tokenizer_know_the_same_ids(folder: Path) -> None:
    ours, released = TextTokenizer.from_file(folder / "tokenizer.model"), TextTokenizer.from_folder(folder)
    texts = (" Hello, world!", "a  b", "café 14½", "", " ", "x\ty\n", "日本 😀", "▁x", "...", "it's (so)")
    assert ours.vocabulary == released.vocabulary
    for text in texts:
        assert ours.encode(text) == released.encode(text), text
        assert ours.spans(text) == released.spans(text), text


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it has no pieces"),
        (b"\x0a\xff\x01abc", "it is cut off"),
        (b"\x12\x02\x18\x02", "it is of another kind"),
        (b"\x0b", "wire type 3"),
    ],
)
def test_a_file_that_is_no_unigram_model_is_named(tmp_path: Path, data: bytes, reason: str) -> None:
    file = tmp_path / "tokenizer.model"
    with pytest.raises(CheckpointNotFound, match=r"tokenizer\.model"):
        TextTokenizer.from_file(file)
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"tokenizer.model is no SentencePiece unigram model: {reason}"):
        TextTokenizer.from_file(file)


def test_releases_that_share_a_tokenizer_find_it_beside_them(folder: Path, tmp_path: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    (tmp_path / "english_2026-10").mkdir()
    (tmp_path / "english_2026-09").mkdir()
    (tmp_path / "english_2026-09" / "tokenizer.json").write_text(text)
    found = TextTokenizer.from_file(find_tokenizer(read("pocket-english_2026-10"), tmp_path / "english_2026-10"))
    assert found.encode("Hello world.") == TextTokenizer.from_folder(folder).encode("Hello world.")
    with pytest.raises(CheckpointNotFound, match=r"english_2026-10/tokenizer\.json"):
        TextTokenizer.from_file(
            find_tokenizer(read("pocket-english_2026-10"), tmp_path / "elsewhere" / "english_2026-10")
        )


def test_a_prompt_is_the_voice_the_text_and_the_first_frame() -> None:
    model = model_of()
    voice = model._own_voice("alba")
    prompt = model._prompts.build("hello world", controls(max_frames=1000, threshold=-2.0), voice)
    ids = model._prompts._tokenizer.encode("Hello world.")
    assert prompt.rows[:, 0].tolist() == [0] * 19 + ids + [len(tiny_pocket.pieces())]
    assert (prompt.stored, prompt.text_start, prompt.text_count) == (19, 19, len(ids))
    assert prompt.controls.max_frames == most_frames(len(ids)) == -(-((len(ids) / 3 + 2) * 12.5) // 1)
    assert (prompt.frames_after_end, prompt.threshold) == (5, -2.0)
    long = model._prompts.build("one two three four five", controls(ignore_eos=True, max_frames=1000, after=0), voice)
    assert (long.controls.max_frames, long.frames_after_end, long.threshold) == (1000, 0, NEVER)
    assert model._prompts.build("one two three four five", controls(), voice).frames_after_end == 3


def test_tokens_are_where_they_were_written() -> None:
    model = model_of("first")
    text = "it’s  “hello”,"
    spans = model.token_spans(text)
    prepared = model._prompts.rules.prepare(SpokenText(text)).text
    tokens = model._prompts._tokenizer
    # Eight spaces and the period were not written.
    assert prepared == "        It's “hello”."
    assert len(spans) == len(tokens.encode(prepared))
    assert spans[0] == (0, 0)
    assert spans[-1][0] >= len(text) - 1
    assert all(0 <= start <= end <= len(text) for start, end in spans)
    hello = [span for span in spans if text[slice(*span)].strip(" “") and set(text[slice(*span)]) <= set("hello")]
    assert "".join(text[slice(*span)] for span in hello) == "hello"


def test_control_tokens_and_texts_of_nothing_are_refused() -> None:
    model = model_of("lsd")
    voice = model._own_voice("alba")
    with pytest.raises(InvalidRequest, match=r"control token </s>"):
        model._prompts.build("Hello </s> you", controls(), voice)
    rules = msgspec.structs.replace(model._config, replace_characters={"(": "", ")": ""})
    model._prompts.rules = TextRules(rules, model._prompts._tokenizer)
    with pytest.raises(InvalidRequest, match="leaves out"):
        model._prompts.build("()", controls(), voice)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(folder: Path, tmp_path: Path) -> None:
    document = json.loads((folder / "tokenizer.json").read_text())
    document["model"]["vocab"].append(["more", -9.0])
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=f"holds id {len(tiny_pocket.pieces())}"):
        TextRules(read(folder), TextTokenizer.from_folder(tmp_path))
