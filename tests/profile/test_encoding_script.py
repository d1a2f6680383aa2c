"""`benchmarks/encoding.py` on a tiny checkpoint: it counts the gaps of running streams while references are encoded."""

import json
from pathlib import Path

import pytest
from sine_engines import CONFIG, FACTORY, nothing_left
from tiny_checkpoint import write_checkpoint

from encoding import VoiceBench, arguments, run
from sonoro.core.config import EngineConfig
from sonoro.core.errors import ConfigError, InvalidReference

__all__ = ["nothing_left"]


@pytest.fixture
def out(tmp_path: Path, nothing_left: Path) -> Path:  # in this order: the latter moves the folder of the former
    return tmp_path / "voice.json"


def test_rows_are_the_gaps_without_and_with_encodings(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = {"streams": 2, "reference_s": (1, 2), "repeats": 2, "config": CONFIG, "device": "cpu", "out": out}
    values = run(VoiceBench(model="slow voices", factory=FACTORY, **bench))
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == json.loads(out.read_text())
    assert (values["bench"], values["model"]) == ("voice", "sine")
    assert [(row["reference_s"], row["encodings"]) for row in values["rows"]] == [(0, 0), (1, 2), (2, 2)]
    for row in values["rows"]:
        # A frame of this model takes 5 ms, and encoding half a second.
        assert row["gaps"] > 10
        assert 0 < row["gap_p50_ms"] <= row["gap_p99_ms"] <= row["gap_max_ms"]
        assert row["reference_s"] == 0 or row["encode_mean_ms"] >= 500


def test_it_runs_on_a_checkpoint_that_clones(out: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "base", variant="base")
    config = EngineConfig(max_positions=512, max_frames=64)
    bench = {"streams": 2, "reference_s": (1,), "repeats": 1, "config": config, "device": "cpu", "out": out}
    assert len(run(VoiceBench(model=str(tmp_path / "base"), **bench))["rows"]) == 2


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"streams": 0}, "streams"), ({"repeats": 0}, "repeats"), ({"reference_s": (61,)}, "reference_s")],
)
def test_what_cannot_be_measured_is_refused(changes: dict, field: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        VoiceBench(**changes)
    assert refusal.value.field == field


def test_a_model_that_cannot_clone_says_so(out: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "named", variant="custom_voice")
    config = EngineConfig(max_positions=512, max_frames=64)
    bench = VoiceBench(model=str(tmp_path / "named"), streams=1, reference_s=(1,), config=config, device="cpu")
    with pytest.raises(InvalidReference, match="cannot clone voices"):
        run(bench)


def test_the_command_line_says_what_is_measured() -> None:
    bench = arguments(["--model", "base", "--reference", "5", "20", "--out", "r.json"])
    assert (bench.model, bench.reference_s, bench.streams, bench.out) == ("base", (5, 20), 16, Path("r.json"))
