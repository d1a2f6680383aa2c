"""`bench say` on a tiny model: both arms speak, compiled code is used where it is said, and every figure is there."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import FAMILIES

from sonoro.core.errors import ConfigError
from sonoro.native.library import load
from sonoro.profile.peers import time_peer
from sonoro.profile.say import ARMS, SayBench, run

FIGURES = {"rtf", "rtf_cpu", "frame_ms", "frame_cpu_ms", "unit_ms", "frame_units", "first_packet_ms"}


def test_both_arms_are_timed_in_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, threads = tmp_path / "say.json", torch.get_num_threads()
    bench = SayBench(text="Hello there.", threads=(1, 2), repeats=2, out=out)
    values = run(bench, {arm: FAMILIES["talker"].load() for arm in ARMS}, is_cold_timed=False)
    assert [(row["arm"], row["threads"]) for row in values["rows"]] == [
        (arm, count) for count in (1, 2) for arm in ARMS
    ]
    for row in values["rows"]:
        assert row.keys() >= FIGURES
        assert all(row[name] > 0 for name in FIGURES)
    frames = values["frame_launches"]
    assert frames["torch"]["compiled"] == 0 < frames["torch"]["eager"]
    if load() is not None:
        assert frames["compiled"]["eager"] == 0 < frames["compiled"]["compiled"]
    assert json.loads(out.read_text()) == json.loads(capsys.readouterr().out.splitlines()[-1]) == values
    assert torch.get_num_threads() == threads


def test_peers_that_are_installed_are_timed_and_others_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, ...]] = []

    class PiperVoice:
        @staticmethod
        def load(path: str) -> "PiperVoice":
            asked.append((path,))
            return PiperVoice()

        def synthesize(self, text: str) -> Iterator[SimpleNamespace]:
            asked.append((text,))
            yield from [SimpleNamespace(audio_int16_bytes=b"ab" * 800, sample_rate=16000)] * 2

    monkeypatch.setitem(sys.modules, "piper", SimpleNamespace(PiperVoice=PiperVoice))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "kokoro_onnx", None)  # type: ignore[arg-type]
    found = time_peer("piper", tmp_path, "Hello.", 3)
    assert isinstance(found, dict)
    assert found.keys() == {"rtf", "rtf_cpu", "first_packet_ms"}
    # A tenth of a second of audio.
    assert 0 < found["first_packet_ms"] <= 100 * found["rtf"]
    assert asked == [(str(tmp_path),), *[("Hello.",)] * 4]
    assert time_peer("piper", None, "Hello.", 3) == "no --piper"
    assert "kokoro_onnx" in str(time_peer("kokoro", tmp_path, "Hello.", 3))


@pytest.mark.parametrize("field", [{"threads": (0,)}, {"threads": ()}, {"repeats": 0}])
def test_options_out_of_range_are_refused(field: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        SayBench(text="Hello.", **field)  # type: ignore[arg-type]
