"""The engine's configuration: every wrong field is refused by name."""

import dataclasses
import logging
import os
from pathlib import Path

import pytest

from sonoro.core.config import LOG_LEVEL_VARIABLE, EngineConfig, log_level, see_gpus
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
        ({"segment_letters": 5}, "segment_letters", "at least 16"),
        ({"max_voices": 0}, "max_voices", "at least 1"),
        ({"max_registered_voices": -1}, "max_registered_voices", "at least 0"),
        ({"voices_folder": None}, "voices_folder", "a string"),
        ({"voices_folder": "a\0b"}, "voices_folder", "a string"),
        ({"pages": 63}, "pages", "at least 64"),
        ({"prefix_cache_bytes": -1}, "prefix_cache_bytes", "at least 0"),
        ({"prefix_cache_bytes": 1e9}, "prefix_cache_bytes", "whole number"),
        ({"memory_fraction": 0}, "memory_fraction", "at least 0.01"),
        ({"memory_fraction": 1.5}, "memory_fraction", "at most 1"),
        ({"memory_fraction": float("nan")}, "memory_fraction", "at most 1"),
        ({"memory_fraction": "half"}, "memory_fraction", "number"),
        ({"prefill_tokens": 2046}, "prefill_tokens", "longest prompt"),
        ({"codec_dtype": "int8"}, "codec_dtype", "auto or float16 or bfloat16 or float32"),
        ({"codec_dtype": None}, "codec_dtype", "a string"),
        ({"chunk_frames": []}, "chunk_frames", "at least one"),
        ({"chunk_frames": 4}, "chunk_frames", "list of whole numbers"),
        ({"chunk_frames": [1, 2.5]}, "chunk_frames", "list of whole numbers"),
        ({"chunk_frames": [0, 1]}, "chunk_frames", "at least 1"),
        ({"chunk_frames": [4, 2]}, "chunk_frames", "ascend"),
        ({"chunk_frames": [2, 2]}, "chunk_frames", "without repeats"),
        ({"chunk_frames": [1, 2000]}, "chunk_frames", "at most 1024"),
        ({"frame_batches": [1, 8]}, "frame_batches", "the largest must be slots, 16"),
        ({"frame_batches": [16, 1]}, "frame_batches", "ascend"),
        ({"frame_batches": [1, 32]}, "frame_batches", "at most 16"),
        ({"prefill_buckets": [16, 4096]}, "prefill_buckets", "at most 2048"),
        ({"codec_batches": [0]}, "codec_batches", "at least 1"),
        ({"is_eager": 1}, "is_eager", "true or false"),
        ({"slot": 4}, "slot", "known keys: slots, max_positions"),
        ({3: 4}, "3", "known keys"),
        ({"tuning": {}}, "tuning", "no such key"),
    ],
)
def test_wrong_fields_are_named(values: dict, field: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        EngineConfig.from_mapping(values)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("max_characters", "called segment_letters"),
        ("max_text", "follows from max_frames"),
        ("max_waiting", "max_waiting of the section server"),
        ("max_live_characters", "always 100000"),
        ("live_max_s", "always 60"),
        ("page_positions", "always 32"),
        ("is_prefill_fused", "always true"),
        ("codec_frames", "four times slots"),
        ("codec_wait", "always 4"),
        ("codec_overlap", "always 256"),
        ("finds_word_heads", "sonoro calibrate"),
    ],
)
def test_a_removed_key_is_named_with_what_replaces_it(key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"it was removed: .*{words}") as refusal:
        EngineConfig.from_mapping({key: 5})
    assert refusal.value.field == key


def test_there_are_few_settings_and_each_is_explained() -> None:
    fields = dataclasses.fields(EngineConfig)
    assert len(fields) <= 24
    assert all(entry.metadata["help"] for entry in fields if entry.name != "tuning")
    assert [entry.name for entry in fields] == [*EngineConfig().shown, "tuning"]


def test_a_file_overrides_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("slots: 7\nchunk_frames: [1, 3]\nis_eager: true\n")
    assert EngineConfig.from_file(path) == EngineConfig(slots=7, chunk_frames=(1, 3), is_eager=True)
    path.write_text("# nothing\n")
    assert EngineConfig.from_file(path) == EngineConfig()


def test_of_a_servers_file_an_engine_reads_its_section(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("engine:\n  slots: 7\nserver:\n  port: 80\n")
    assert EngineConfig.from_file(path) == EngineConfig(slots=7)
    path.write_text("server:\n  port: 80\n")
    assert EngineConfig.from_file(path) == EngineConfig()


def test_sizes_that_are_left_out_are_filled_in() -> None:
    resolved = EngineConfig(slots=48, prefill_buckets=(20, 40)).resolve()
    assert resolved.frame_batches == (1, 2, 4, 8, 16, 32, 48)
    assert resolved.codec_batches == (1, 4, 16, 32)
    assert resolved.prefill_buckets == (20, 40)
    assert resolved.codec_frames == 4 * 48
    assert resolved.resolve() == resolved


def test_many_slots_have_graphs_for_as_many_prompt_tokens_as_a_tick_may_run() -> None:
    few, many = (EngineConfig(slots=slots).resolve() for slots in (4, 64))
    assert few.prefill_buckets == (16, 32, 64, 96, 128, 192, 256, 384, 512)
    assert few.long_prefills == (1024, 2048)
    assert many.prefill_buckets == (*few.prefill_buckets, 768, 1024, 1536, 2048)
    assert many.long_prefills == ()
    assert many.first_sizes.prefill_buckets == (16, 512, 2048)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"- 1\n- 2\n", "not a list"),
        (b"slots: [1\n", "YAML"),
        (b"\xff\xfe\x00", "readable"),
        (b"slots: x", "whole"),
        (b"slots: 4\nslots: 8\n", "slots is written twice"),
        (b"engine: 3\n", "engine: 3 is not allowed; it must hold keys"),
        (b"engine:\nslots: 4\n", "engine: nothing was given; there is no such key"),
    ],
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


@pytest.mark.parametrize(("seen", "left"), [(None, "2"), ("", "2"), ("4,5,6", "6"), ("GPU-a, GPU-b,GPU-c", "GPU-c")])
def test_one_gpu_is_left_of_those_that_are_seen(seen: str | None, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen or "")
    if seen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    see_gpus(2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == left


def test_the_log_level_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LOG_LEVEL_VARIABLE, raising=False)
    assert log_level() == logging.WARNING
    monkeypatch.setenv(LOG_LEVEL_VARIABLE, "debug")
    assert log_level() == logging.DEBUG
    monkeypatch.setenv(LOG_LEVEL_VARIABLE, "loud")
    with pytest.raises(ConfigError, match="DEBUG") as refusal:
        log_level()
    assert refusal.value.field == LOG_LEVEL_VARIABLE
