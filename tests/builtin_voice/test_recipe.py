"""From shards of audio to what is trained on, and from trained modules to a checkpoint folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from builtin_voice import recipe, rehearse, settings, tokenizer
from builtin_voice.critic import Critic
from builtin_voice.phones import UNHEARD, class_of
from builtin_voice.settings import TalkerTraining
from builtin_voice.shards import Utterance
from builtin_voice.spectra import SpeechSpectra
from builtin_voice.talker_training import Layout, Utterances
from builtin_voice.training import Run, halved
from builtin_voice.voice_codec import CONTEXT_FRAMES, VoiceCodec
from sonoro.models.qwen3_tts import weights
from sonoro.models.qwen3_tts.backbone import Talker
from sonoro.models.qwen3_tts.config import read_configs
from sonoro.nn.linear import kept_as_stored, widen_stored

Chords = Callable[[int, int], Tensor]
HOP = settings.HOP


def end_to_end(*lengths: int) -> list[Utterance]:
    """Utterances of those many samples, one after the other."""
    starts = np.cumsum([0, *lengths]).tolist()
    return [
        Utterance(
            0,
            start,
            length,
            f"row {index}.",
            "am_michael" if index % 2 else "af_heart",
            ["ə", ""],
            [length // 2, length],
        )
        for index, (start, length) in enumerate(zip(starts, lengths, strict=False))
    ]


def test_hours_are_those_of_whole_shards(tmp_path: Path) -> None:
    for shard, is_whole in enumerate((True, False, True)):
        np.save(tmp_path / f"shard-{shard:05d}.npy", np.zeros(24_000 * 36, dtype=np.int16))
        if is_whole:
            (tmp_path / f"shard-{shard:05d}.jsonl").touch()
    assert recipe.hours_in(tmp_path) == pytest.approx(0.02, rel=1e-3)


@pytest.mark.parametrize("stage", ["encoder", "codec"])
def test_a_codec_is_whole_before_what_it_could_go_on_from_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_codec: VoiceCodec, stage: str
) -> None:
    result, state = tmp_path / f"{stage}.pt", tmp_path / f"{stage}-state.pt"
    run = Run(float("inf"), lambda record: None, state)

    def train(*_: object, **__: object) -> VoiceCodec:
        state.touch()
        return tiny_codec

    def break_off(values: object, path: Path) -> None:
        path.write_bytes(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr(recipe, f"train_{stage}", train)
    monkeypatch.setattr(recipe, "load_codec", lambda path, device: tiny_codec)
    monkeypatch.setattr(recipe, "audio_of", lambda *_: (torch.zeros(9, dtype=torch.int16), end_to_end(9)))

    def make() -> None:
        if stage == "encoder":
            recipe.run_encoder(tmp_path, torch.device("cpu"), run)
        else:
            recipe.run_codec(tmp_path, torch.device("cpu"), run)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", break_off)
        with pytest.raises(OSError, match="No space"):
            make()
    assert (result.exists(), state.exists()) == (False, True)
    make()
    assert (result.exists(), state.exists()) == (True, False)
    stored = torch.load(result, weights_only=True)
    assert stored.keys() == tiny_codec.state_dict().keys()


@pytest.mark.parametrize("has_critic", [True, False])
def test_a_decoder_goes_on_from_what_it_has_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_codec: VoiceCodec, has_critic: bool
) -> None:
    """At a lower rate, the critic with it if it is kept."""
    begun: dict[str, Any] = {}

    def train(
        codec: VoiceCodec, crops: object, training: settings.CodecTraining, *_: object, critic: Critic
    ) -> VoiceCodec:
        begun.update(codec=codec, rate=training.learning_rate, critic=next(critic.parameters()).flatten()[0].item())
        return codec

    monkeypatch.setattr(recipe, "train_codec", train)
    monkeypatch.setattr(recipe, "load_codec", lambda path, device: tiny_codec)
    monkeypatch.setattr(recipe, "audio_of", lambda *_: (torch.zeros(9, dtype=torch.int16), end_to_end(9)))
    learned = {
        name: value + 1 for name, value in tiny_codec.state_dict().items() if name.startswith("decoder.pre_conv")
    }
    assert learned
    critic = {name: torch.full_like(value, 7.0) for name, value in Critic().state_dict().items()}
    start = halved({"codec": learned} | ({"critic": critic} if has_critic else {}))
    torch.save(start, tmp_path / "codec-start.pt")
    run = Run(float("inf"), lambda record: None, tmp_path / "codec-state.pt")
    recipe.run_codec(tmp_path, torch.device("cpu"), run)
    assert begun["rate"] == settings.CodecTraining().further_rate
    assert (begun["critic"] == 7.0) == has_critic
    found = begun["codec"].state_dict()
    assert all(torch.allclose(found[name], value, atol=1e-2) for name, value in learned.items())


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_talker_goes_on_from_what_it_has_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    begun: dict[str, Any] = {}

    def train(talker: Talker, *_: object, training: settings.TalkerTraining, run: Run) -> Talker:
        begun.update(talker=talker, rate=training.learning_rate)
        return talker

    utterances = Utterances(*(torch.zeros(2, 1, dtype=torch.int64),) * 5)
    monkeypatch.setattr(recipe, "train_talker", train)
    monkeypatch.setattr(recipe, "utterances_on", lambda *_: (utterances, utterances))
    tokenizer.write(tmp_path / "tokenizer", *tokenizer.train(["words and words"] * 4, 8))
    learned = {
        name: torch.full_like(value, 0.5)
        for name, value in Talker(recipe.model_config(tmp_path / "tokenizer")[1].talker_config).state_dict().items()
    }
    if has_begun:
        torch.save({"talker": halved(learned)}, tmp_path / "talker-start.pt")
    run = Run(float("inf"), lambda record: None, tmp_path / "talker-state.pt")
    recipe.run_talker(tmp_path, torch.device("cpu"), run)
    training = settings.TalkerTraining()
    assert begun["rate"] == (training.further_rate if has_begun else training.learning_rate)
    assert all((value == 0.5).all() == has_begun for value in begun["talker"].state_dict().values() if value.ndim > 1)


def test_a_rehearsal_tells_what_kernels_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = recipe.settings._talker_config(300) | {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 32}
    values["code_predictor_config"] |= {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 32}
    monkeypatch.setattr(settings, "_talker_config", lambda vocabulary: values | {"text_vocab_size": vocabulary})
    monkeypatch.setattr(settings, "TalkerTraining", lambda: TalkerTraining(positions=400))
    rehearse.lay_out(tmp_path, utterances=2, encoded=40)
    table = rehearse.profile(tmp_path, torch.device("cpu"), steps=1)
    assert re.match(r"1 steps, \d+ x \d+ rows", table)
    assert "aten::mm" in table or "aten::addmm" in table


def cut(*, margin: int, count: int) -> tuple[list[Utterance], Tensor, Tensor]:
    """Three utterances whose samples count up from 1, crops of them, and their phones (255: none)."""
    rows = end_to_end(500, 70, 1000)
    audio, phones = torch.arange(1, 1571, dtype=torch.int16), recipe.phones_of(rows, torch.device("cpu"))
    torch.manual_seed(0)
    places = [recipe.random_places(rows, 100, margin, torch.device("cpu"))(2) for _ in range(count)]
    crops = torch.cat([recipe.sound_at(audio, *place) for place in places]) * 32768
    return rows, crops.long(), torch.cat([torch.where(is_there, phones[at], 255) for at, is_there in places])


def test_crops_stay_within_an_utterance_and_reach_its_ends() -> None:
    rows, crops, _ = cut(margin=0, count=4000)
    starts, ends = set(), set()
    for first, count in {(int(crop[0]), int((crop > 0).sum())) for crop in crops}:
        owner = next(row for row in rows if row.start < first <= row.start + row.samples)
        assert count == min(100, owner.samples)
        assert first - 1 + count <= owner.start + owner.samples
        starts.add(first - 1)
        ends.add(first - 1 + count)
    assert {0, 500, 570} <= starts
    assert {500, 570, 1570} <= ends
    filled = crops > 0
    assert torch.equal(crops, torch.where(filled, crops[:, :1] + torch.arange(100), 0))


def test_what_is_around_a_crop_is_of_its_utterance_or_silence() -> None:
    rows, crops, phones = cut(margin=40, count=1000)
    assert crops.shape == phones.shape == (2000, 180)
    before, after = set(), set()
    for crop, heard in zip(crops, phones, strict=True):
        inside = crop[40:140][crop[40:140] > 0]
        owner = next(row for row in rows if row.start < inside[0] <= row.start + row.samples)
        reach = torch.arange(int(inside[0]) - 40, int(inside[0]) + 140)
        is_inside = (reach > owner.start) & (reach <= owner.start + owner.samples)
        assert torch.equal(crop, torch.where(is_inside, reach, 0))
        # The first half of each is a vowel, the other a pause.
        is_first = reach - owner.start <= owner.samples // 2
        expected = torch.where(is_first, class_of("ə"), class_of("pau"))
        assert torch.equal(heard.long(), torch.where(is_inside, expected, 255))
        before.add(bool(crop[0]))
        after.add(bool(crop[-1]))
    assert before == after == {True, False}


def test_labels_are_of_the_columns_between_the_context() -> None:
    """The first half of a long utterance is a vowel, the other a pause, as is what is around it."""
    (row,) = end_to_end(40 * HOP)
    audio = torch.arange(40 * HOP).div(4).short()
    torch.manual_seed(0)
    sounds, phones = recipe.labelled_crops(audio, [row], 3)(50)
    assert sounds.shape == (50, (3 + 2 * CONTEXT_FRAMES) * HOP)
    assert phones.shape == (50, 3 * HOP // SpeechSpectra.column)
    middles = CONTEXT_FRAMES * HOP + SpeechSpectra.column * torch.arange(phones.shape[1]) + SpeechSpectra.column // 2
    is_first = sounds[:, middles] * 32768 < 20 * HOP // 4
    assert torch.equal(phones, torch.where(is_first, class_of("ə"), class_of("pau")))
    assert phones.unique().numel() == 2


def test_phones_have_a_class_and_marks_have_none() -> None:
    assert class_of("pau") == class_of("") == class_of(".") == 0
    assert class_of("b") == class_of("b") != class_of("ʧ") != class_of("ch")
    assert [class_of(mark) for mark in ("ˈ", "ˌ", "ː", " ", ",")] == [UNHEARD] * 5


@pytest.mark.parametrize("shift", [0, 480, 1440])
def test_encoding_the_corpus_is_encoding_each_utterance_after_the_silence(
    monkeypatch: pytest.MonkeyPatch, tiny_codec: VoiceCodec, chords: Chords, shift: int
) -> None:
    lengths = (5 * HOP, 3 * HOP + 1, 4 * HOP - 480, 700, 3 * HOP)
    rows = end_to_end(*lengths)
    sounds = [chords(5, length)[index] for index, length in enumerate(lengths)]
    audio = (torch.cat(sounds) * 32767).round().to(torch.int16)
    monkeypatch.setattr(recipe, "ENCODED_SAMPLES", 11 * HOP)
    found = recipe.encode_corpus(tiny_codec, audio, rows, shift)
    for codes, row in zip(found, rows, strict=True):
        frames = -(-(row.samples + shift) // HOP)
        moved = torch.zeros(1, frames * HOP)
        moved[0, shift : shift + row.samples] = audio[row.start : row.start + row.samples].float() / 32768
        assert codes.dtype == torch.int16
        assert torch.equal(codes.long(), tiny_codec.codes(moved)[0])
    assert torch.cat(found).unique().numel() > 10


def test_held_out_texts_are_trained_on_in_no_encoding(tmp_path: Path) -> None:
    """Six texts in two encodings, the last two held out; one encoding of the first is too long."""
    vocabulary, merges = tokenizer.train(["a small text of the assistant."], merges=4)
    tokenizer.write(tmp_path / "tokenizer", vocabulary, merges)
    _, config = recipe.model_config(tmp_path / "tokenizer")
    lengths = [*range(1, 7), *range(2, 8)]
    frames = [recipe.LONGEST_FRAMES + 1, *range(2, 13)]
    stored = {
        "texts": torch.cat([torch.full((count,), row, dtype=torch.int16) for row, count in enumerate(lengths)]),
        "text_lengths": torch.tensor(lengths),
        "codes": torch.cat([torch.full((count, 12), row, dtype=torch.int16) for row, count in enumerate(frames)]),
        "code_lengths": torch.tensor(frames),
        "voices": ["am_michael", "af_heart", "af_heart", "am_michael", "am_michael", "af_heart"],
    }
    torch.save(stored, tmp_path / "codes.pt")
    data, held_out = recipe.utterances_on(torch.device("cpu"), tmp_path, Layout(config, 0), held_out=2)
    trained = [1, 2, 3, 6, 7, 8, 9]
    assert data.text[:, 0].tolist() == data.codes[:, 0, 0].tolist() == trained
    assert data.frame_lengths.tolist() == [frames[row] for row in trained]
    assert data.text_lengths.tolist() == [lengths[row] for row in trained]
    for row, (text, codes) in zip(trained, zip(data.text, data.codes, strict=True), strict=True):
        assert text.tolist() == [row] * lengths[row] + [0] * (len(text) - lengths[row])
        assert codes[:, 5].tolist() == [row] * frames[row] + [0] * (len(codes) - frames[row])
    assert held_out.text[:, 0].tolist() == held_out.codes[:, 0, 0].tolist() == [4, 5]
    assert held_out.text_lengths.tolist() == [5, 6]
    miles, nora = (config.talker_config.spk_id[name] for name in ("miles", "nora"))
    assert held_out.speaker.tolist() == [miles, nora]


def test_tokens_are_taken_apart_into_what_they_were_merged_from(tmp_path: Path) -> None:
    texts = ["a small text of the assistant.", "the small assistant", "text"]
    vocabulary, merges = tokenizer.train(texts * 3, merges=40)
    tokenizer.write(tmp_path, vocabulary, merges)
    made, parts, rng = tokenizer.read(tmp_path), tokenizer.parts_of(tmp_path), np.random.default_rng(0)
    rows = [made.encode(text).ids for text in texts]
    ids, lengths = np.concatenate(rows), np.array([len(row) for row in rows])
    same, counts = tokenizer.take_apart(ids, lengths, parts, 0.0, rng)
    assert same.tolist() == ids.tolist()
    assert counts.tolist() == lengths.tolist()
    apart, counts = tokenizer.take_apart(ids, lengths, parts, 0.5, rng)
    assert (counts >= lengths).all()
    assert len(apart) == counts.sum() > len(ids)
    pieces = np.split(apart, counts.cumsum()[:-1])
    tokens = [map(made.id_to_token, row.tolist()) for row in pieces]
    assert ["".join(row).replace("\u0120", " ") for row in tokens] == texts
    everything, _ = tokenizer.take_apart(ids, lengths, parts, 1.0, np.random.default_rng(0))
    assert len(everything) > len(ids) + 10


def test_a_written_checkpoint_decodes_to_the_sound_of_training(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_codec: VoiceCodec,
    codec_values: dict[str, Any],
    chords: Chords,
) -> None:
    monkeypatch.setattr(settings, "codec_config", lambda: codec_values)
    monkeypatch.setattr(settings, "is_in_8_bits", lambda name, value: name.startswith("talker.") and value.ndim > 1)
    with torch.no_grad():
        for tensor in (*tiny_codec.parameters(), tiny_codec.quantizer.books):
            tensor.copy_(tensor.half())  # what the file can hold
        codes = tiny_codec.codes(chords(2, 9 * settings.HOP))
        expected = tiny_codec.spoken(codes)
    vocabulary, merges = tokenizer.train(["a small text of the assistant."], merges=4)
    tokenizer.write(tmp_path / "tokenizer", vocabulary, merges)
    _, config = recipe.model_config(tmp_path / "tokenizer")
    talker = Talker(config.talker_config)
    torch.save(talker.state_dict(), tmp_path / "talker.pt")
    torch.save(tiny_codec.state_dict(), tmp_path / "codec.pt")
    recipe.run_checkpoint(tmp_path)
    folder = tmp_path / "checkpoint"

    assert "encoder_config" not in json.loads((folder / "speech_tokenizer" / "config.json").read_text("utf-8"))
    loaded = weights.FILES.load(folder, read_configs(folder), device=torch.device("cpu"), dtype=torch.float32)
    found = loaded.codec.decode(codes)
    assert expected.std() > 1e-3
    assert codes.unique().numel() > 10
    # Float32: folded tables sum in another order.
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert len(list(folder.glob("model-*.safetensors"))) == 2
    wanted = talker.state_dict()
    widen_stored(kept_as_stored(loaded.lm.talker))
    for name, tensor in loaded.lm.talker.state_dict().items():
        step = wanted[name].abs().amax(-1, keepdim=True) / 127 if tensor.ndim > 1 else 2e-3
        assert ((tensor - wanted[name]).abs() <= 0.501 * step).all(), name
