"""OpenAI's names for voices: whom a client that sends them hears."""

import dataclasses
import json
from collections import Counter, defaultdict
from pathlib import Path

import msgspec
import pytest
from sine_models import VoicedSineModel
from tiny_checkpoint import write_checkpoint

from builtin_voice import settings
from sonoro.core.types import ModelSpec
from sonoro.models import registry
from sonoro.server.config import OPENAI_VOICES, ServerConfig
from sonoro.server.voices import described


def assert_as_expected(spec: ModelSpec) -> None:
    aliases = ServerConfig().aliases(spec)
    for name, expected in OPENAI_VOICES.items():
        assert spec.voice_sexes[aliases[name]] == expected, name
    spoken = Counter(aliases.values())
    assert set(spoken) == set(spec.voices), "every voice has a name of theirs"


@pytest.mark.parametrize("model", [None, "qwen3-tts-0.6b-customvoice", "qwen3-tts-1.7b-customvoice"])
def test_names_are_spoken_by_voices_of_the_sex_that_people_expect(model: str | None) -> None:
    spec = registry.describe(model).spec
    assert set(spec.voice_sexes) == set(spec.voices)
    assert_as_expected(spec)


def test_alloy_is_a_woman_and_onyx_a_man() -> None:
    spec = registry.describe(None).spec
    aliases = ServerConfig().aliases(spec)
    assert [spec.voice_sexes[aliases[name]] for name in ("alloy", "nova", "onyx", "echo")] == [
        *("female", "female"),
        *("male", "male"),
    ]


@pytest.mark.parametrize("model", [None, "qwen3-tts-0.6b-customvoice"])
def test_every_voice_is_described_by_its_accent_and_three_adjectives(model: str | None) -> None:
    spec = registry.describe(model).spec
    assert set(spec.voice_descriptions) == set(spec.voices)
    for voice in spec.voice_descriptions.values():
        assert voice.accent
        assert len({*voice.adjectives}) == 3


def test_the_voices_are_listed_with_what_is_known_of_them() -> None:
    spec = registry.describe(None).spec
    assert described(spec, "nora") == {
        "sex": "female",
        "accent": "American",
        "locale": "en-US",
        "loudness_lufs": -23.5,
        "adjectives": spec.voice_descriptions["nora"].adjectives,
    }
    assert described(spec, "unheard") == {}


def test_a_checkpoint_brings_its_own(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, variant="custom_voice")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["spk_sex"] = {"ryan": "female"}
    path.write_text(json.dumps(config))
    spec = registry.describe(tmp_path).spec
    assert spec.voice_sexes["ryan"] == "female", "what it says goes before what is known of released voices"
    assert_as_expected(spec)


def test_a_voice_that_the_recipe_trains_brings_its_own() -> None:
    config = settings.model_config(1000, defaultdict(int))
    assert set(config["spk_sex"]) == set(config["talker_config"]["spk_id"])
    assert set(config["spk_sex"].values()) == {"female", "male"}
    assert set(config["spk_description"]) == set(config["talker_config"]["spk_id"])


@pytest.mark.parametrize("sexes", [{}, {"high": "female"}])
def test_where_little_is_known_every_name_is_still_spoken(sexes: dict[str, str]) -> None:
    spec = msgspec.structs.replace(VoicedSineModel().spec, voice_sexes=sexes)
    aliases = ServerConfig().aliases(spec)
    assert set(aliases) == set(OPENAI_VOICES)
    assert {aliases[name] for name, sex in OPENAI_VOICES.items() if sex == "male"} == {"low", "high"}
    female = {aliases[name] for name, sex in OPENAI_VOICES.items() if sex == "female"}
    assert female == ({"high"} if sexes else {"low", "high"})


def test_what_the_operator_says_goes_before() -> None:
    spec = msgspec.structs.replace(VoicedSineModel().spec, voice_sexes={"high": "female", "low": "male"})
    config = dataclasses.replace(ServerConfig(), voice_aliases={"Onyx": "high"})
    assert config.aliases(spec)["onyx"] == "high"
