"""Configuration files: the released ones as shipped, and what a folder with wrong ones is told."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import write_checkpoint

from sonoro.core.errors import CheckpointError, CheckpointNotFound
from sonoro.core.types import SpeechRequest
from sonoro.models.qwen3_tts.config import RELEASED, GenerationConfig, read_configs, released_configs
from sonoro.models.qwen3_tts.model import spec_of

CUSTOM_VOICES = ("serena", "vivian", "uncle_fu", "ryan", "aiden", "ono_anna", "sohee", "eric", "dylan")


@pytest.mark.parametrize("name", RELEASED)
def test_released_configurations_differ_by_size_and_variant(name: str) -> None:
    model, generation, codec = released_configs(name)
    talker = model.talker_config
    is_small, variant = "0.6b" in name, name.rsplit("-", 1)[1]
    assert (model.tts_model_size, talker.hidden_size, talker.intermediate_size) == (
        ("0b6", 1024, 3072) if is_small else ("1b7", 2048, 6144)
    )
    assert (
        model.tts_model_type == {"base": "base", "customvoice": "custom_voice", "voicedesign": "voice_design"}[variant]
    )
    assert (model.speaker_encoder_config is None) == (variant != "base")
    if model.speaker_encoder_config is not None:
        assert model.speaker_encoder_config.enc_dim == talker.hidden_size
    assert tuple(talker.spk_id) == (CUSTOM_VOICES if variant == "customvoice" else ())
    assert len(talker.codec_language_id) == (12 if variant == "customvoice" else 10)
    assert generation == GenerationConfig(max_new_tokens=8192)
    assert codec.decoder_config.upsample_rates == (8, 5, 4, 3)


def edit(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((folder / name).read_text())
    change(values)
    (folder / name).write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "config.json",
            lambda c: c.pop("tts_model_type"),
            r"config\.json: .*missing required field `tts_model_type`",
        ),
        (
            "config.json",
            lambda c: c["talker_config"].update(hidden_size="wide"),
            r"config\.json: Expected `int`, got `str` - at `\$\.talker_config\.hidden_size`",
        ),
        ("config.json", lambda c: c.update(tts_model_type="base"), "lacks speaker_encoder_config"),
        ("config.json", lambda c: c.update(tts_model_type="opera"), "tts_model_type is 'opera'; known: custom_voice"),
        ("config.json", lambda c: c["talker_config"].update(spk_id={}), "spk_id is empty"),
        (
            "config.json",
            lambda c: c["talker_config"]["spk_is_dialect"].update(ryan="elvish"),
            "spk_is_dialect of 'ryan' is 'elvish'; it must be false or a key of codec_language_id",
        ),
        (
            "config.json",
            lambda c: c.update(voice_aliases={"rick": "richard"}),
            "voice_aliases of 'rick' is 'richard'; it must be another name, in lower case, of a key of spk_id",
        ),
        ("config.json", lambda c: c.update(voice_aliases={"Rick": "ryan"}), "voice_aliases of 'Rick'"),
        ("config.json", lambda c: c.update(voice_aliases={"ryan": "ryan"}), "voice_aliases of 'ryan'"),
        ("config.json", lambda c: c["talker_config"].update(num_code_groups=5), "num_code_groups is 5, but .* is 4"),
        (
            "config.json",
            lambda c: c["talker_config"].update(vocab_size=1100),
            "vocab_size less 1024 is 76, but code_predictor_config.vocab_size is 64",
        ),
        (
            "speech_tokenizer/config.json",
            lambda c: c["decoder_config"].update(codebook_size=32),
            "vocab_size less 1024 is 64, but speech_tokenizer codebook_size is 32",
        ),
        (
            "speech_tokenizer/config.json",
            lambda c: c.update(encoder_valid_num_quantizers=3),
            "num_code_groups is 4, but speech_tokenizer encoder_valid_num_quantizers is 3",
        ),
        (
            "config.json",
            lambda c: c.update(speaker_encoder_config={"enc_dim": 16}),
            r"hidden_size is 32, but speaker_encoder_config\.enc_dim is 16",
        ),
        (
            "config.json",
            lambda c: c["talker_config"].update(codec_eos_token_id=63),
            "codec_eos_token_id is 63; it must be at least 64 and below vocab_size 1088",
        ),
        (
            "config.json",
            lambda c: c.update(lead_in=1920),
            "lead_in is 1920; it must be below speech_tokenizer decode_upsample_rate 1920",
        ),
        ("config.json", lambda c: c.update(lead_in=-1), "lead_in is -1; it must be at least 0"),
        # The official default of an absent key.
        (
            "config.json",
            lambda c: c["talker_config"].pop("codec_pad_id"),
            "codec_pad_id is 4196; it must be below vocab_size 1088",
        ),
        (
            "config.json",
            lambda c: c["talker_config"]["spk_id"].update(ryan=-1),
            "spk_id.ryan is -1; it must be below vocab_size 1088",
        ),
        (
            "config.json",
            lambda c: c["talker_config"]["codec_language_id"].update(klingon=1088),
            "codec_language_id.klingon is 1088; it must be below vocab_size 1088",
        ),
        (
            "config.json",
            lambda c: c.update(tts_pad_token_id=424),
            "tts_pad_token_id is 424; it must be below text_vocab_size 424",
        ),
        (
            "generation_config.json",
            lambda c: c.update(top_k="many"),
            r"generation_config\.json: Expected `int`, got `str`",
        ),
        (
            "generation_config.json",
            lambda c: c.update(temperature=11.0),
            r"generation_config\.json: temperature: 11.0 is not allowed; .* at most 10",
        ),
        (
            "generation_config.json",
            lambda c: c.update(subtalker_top_p=1.5),
            r"generation_config\.json: subtalker_top_p: 1.5 is not allowed; .* at most 1",
        ),
        (
            "config.json",
            lambda c: c["talker_config"].update(rope_theta=0.0),
            r"config\.json: talker_config: rope_theta is 0.0; it must be above 0",
        ),
        (
            "speech_tokenizer/config.json",
            lambda c: c["decoder_config"].pop("head_dim"),
            r"speech_tokenizer.config\.json: .*`head_dim` - at `\$\.decoder_config`",
        ),
    ],
)
def test_a_wrong_key_is_named_with_its_file(
    tmp_path: Path, name: str, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    write_checkpoint(tmp_path)
    edit(tmp_path, name, change)
    with pytest.raises(CheckpointError, match=message):
        read_configs(tmp_path)


def test_a_file_that_is_absent_or_no_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"config\.json does not exist"):
        read_configs(tmp_path)
    write_checkpoint(tmp_path)
    (tmp_path / "speech_tokenizer/config.json").write_text("{,}")
    with pytest.raises(CheckpointError, match=r"speech_tokenizer.config\.json is not a readable JSON file"):
        read_configs(tmp_path)


@pytest.mark.parametrize("absent", [None, -1, "left out"])
def test_what_generation_leaves_open_is_the_default(tmp_path: Path, absent: object) -> None:
    write_checkpoint(tmp_path)
    names = [field.name for field in dataclasses.fields(GenerationConfig)]
    given = {} if absent == "left out" else dict.fromkeys(names, absent)
    (tmp_path / "generation_config.json").write_text(json.dumps(given | {"eos_token_id": 7}))
    expected = GenerationConfig()
    if absent == -1:
        expected = dataclasses.replace(expected, top_k=0, subtalker_top_k=0)
    assert read_configs(tmp_path).generation == expected


@pytest.mark.parametrize("is_null", [False, True])
@pytest.mark.parametrize(
    ("file", "section", "values"),
    [
        ("config.json", "", {"assistant_token_id": 77091, "im_start_token_id": 151644, "tts_eos_token_id": 151673}),
        ("config.json", "talker_config", {"spk_is_dialect": {}, "rms_norm_eps": 1e-6}),
        ("speech_tokenizer/config.json", "", {"output_sample_rate": 24000, "encoder_valid_num_quantizers": 16}),
        ("speech_tokenizer/config.json", "decoder_config", {"num_semantic_quantizers": 1, "sliding_window": 72}),
    ],
)
def test_an_absent_key_has_the_official_default(
    tmp_path: Path, file: str, section: str, values: dict[str, Any], is_null: bool
) -> None:
    def absent(keys: dict[str, Any]) -> None:
        inner = keys[section] if section else keys
        for key in values:
            inner.pop(key)
            if is_null:
                inner[key] = None

    write_checkpoint(tmp_path)
    # The default ids are those of the released vocabulary.
    edit(tmp_path, "config.json", lambda c: c["talker_config"].update(text_vocab_size=151936))
    edit(tmp_path, file, absent)
    edit(tmp_path, "speech_tokenizer/config.json", lambda c: c.pop("encoder_config", None))
    configs = read_configs(tmp_path)
    found = configs.model if file == "config.json" else configs.codec
    found = getattr(found, section) if section else found
    assert {key: getattr(found, key) for key in values} == values


def test_a_voice_design_checkpoint_needs_no_speakers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, variant="voice_design")
    edit(
        tmp_path, "config.json", lambda c: (c["talker_config"].pop("spk_id"), c["talker_config"].pop("spk_is_dialect"))
    )
    assert read_configs(tmp_path).model.talker_config.spk_id == {}


def test_speakers_are_named_in_lower_case(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    edit(
        tmp_path,
        "config.json",
        lambda c: c["talker_config"].update(spk_id={"Anna_Lee": 1064}, spk_is_dialect={"Anna_Lee": "sichuan_dialect"}),
    )
    configs = read_configs(tmp_path)
    assert configs.model.talker_config.spk_is_dialect == {"anna_lee": "sichuan_dialect"}
    assert spec_of("tuned", configs).resolve(SpeechRequest(id="a", text="Hello.", voice="Anna_Lee")).voice == "anna_lee"


def test_keys_that_nothing_uses_are_ignored(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    before = read_configs(tmp_path)
    edit(tmp_path, "config.json", lambda c: (c.update(pad_token_id=2148), c["talker_config"].update(new={"a": [None]})))
    assert read_configs(tmp_path) == before


@pytest.mark.parametrize(
    ("file", "section", "key", "value"),
    [
        ("config.json", "talker_config", "hidden_size", -5),
        ("config.json", "talker_config", "num_hidden_layers", 0),
        ("config.json", "talker_config", "codec_pad_id", -1),
        ("speech_tokenizer/config.json", "decoder_config", "upsample_rates", [8, 5, 0, 3]),
    ],
)
def test_a_number_that_no_tensor_can_have_is_named(
    tmp_path: Path, file: str, section: str, key: str, value: object
) -> None:
    write_checkpoint(tmp_path)
    values = json.loads((tmp_path / file).read_text())
    values[section][key] = value
    (tmp_path / file).write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=rf"config\.json: {section}: {key} is .*at least [01]"):
        read_configs(tmp_path)
