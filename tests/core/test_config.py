"""The engine's configuration: every wrong field is refused by name."""

import logging
from pathlib import Path

import pytest

from sonoro.core.config import LOG_LEVEL_VARIABLE, EngineConfig, log_level
from sonoro.core.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "field", "words"),
    [
        ({"slots": 0}, "slots", "at least 1"),
        ({"slots": 2.0}, "slots", "whole number"),
        ({"slots": True}, "slots", "whole number"),
        ({"slots": "4"}, "slots", "whole number"),
        ({"slots": None}, "slots", "whole number"),
        ({"max_frames": 2048}, "max_positions", "at least 2049"),
        ({"max_positions": 100}, "max_positions", "max_frames"),
        ({"max_text": -1}, "max_text", "at least 1"),
        ({"max_characters": 5}, "max_characters", "at least 16"),
        ({"max_prefills": 0}, "max_prefills", "at least 1"),
        ({"max_voices": 0}, "max_voices", "at least 1"),
        ({"first_chunk_frames": 0}, "first_chunk_frames", "at least 1"),
        ({"first_chunk_frames": 20}, "max_chunk_frames", "at least 20"),
        ({"chunk_growth": 0.5}, "chunk_growth", "at least 1"),
        ({"chunk_growth": float("nan")}, "chunk_growth", "at least 1"),
        ({"max_chunk_frames": 2000}, "max_chunk_frames", "at most 1024"),
        ({"slot": 4}, "slot", "known keys: slots, max_positions"),
        ({3: 4}, "3", "known keys"),
    ],
)
def test_wrong_fields_are_named(values: dict, field: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        EngineConfig.from_mapping(values)
    assert refusal.value.field == field


def test_a_file_overrides_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("slots: 7\nchunk_growth: 3\n")
    assert EngineConfig.from_file(path) == EngineConfig(slots=7, chunk_growth=3)
    path.write_text("# nothing\n")
    assert EngineConfig.from_file(path) == EngineConfig()


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"- 1\n- 2\n", "not a list"), (b"slots: [1\n", "YAML"), (b"\xff\xfe\x00", "readable"), (b"slots: x", "whole")],
)
def test_files_that_are_no_configuration_are_refused(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_file(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="readable") as refusal:
        EngineConfig.from_file(tmp_path / "none.yaml")
    assert refusal.value.field == "config"


def test_the_log_level_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LOG_LEVEL_VARIABLE, raising=False)
    assert log_level() == logging.WARNING
    monkeypatch.setenv(LOG_LEVEL_VARIABLE, "debug")
    assert log_level() == logging.DEBUG
    monkeypatch.setenv(LOG_LEVEL_VARIABLE, "loud")
    with pytest.raises(ConfigError, match="DEBUG") as refusal:
        log_level()
    assert refusal.value.field == LOG_LEVEL_VARIABLE
