"""`bench say` on a tiny model: both arms speak, compiled code is used where it is said, and every figure is there."""

import json
from pathlib import Path

import pytest
import torch
from families import FAMILIES

from sonoro.core.errors import ConfigError
from sonoro.native.library import load
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


@pytest.mark.parametrize("field", [{"threads": (0,)}, {"threads": ()}, {"repeats": 0}])
def test_options_out_of_range_are_refused(field: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        SayBench(text="Hello.", **field)  # type: ignore[arg-type]
