"""`sonoro bench` on a tiny random checkpoint: it measures, and refuses bad input in one line."""

import json
from pathlib import Path

import pytest
from processes import Run, assert_refused, sonoro
from tiny_checkpoint import write_checkpoint

__all__ = ["sonoro"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "custom_voice"
    write_checkpoint(folder, variant="custom_voice", topology="0.6b")
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frame", "--batch", "1,x"], ["batch", "'1,x'", "between commas"]),
        (["frame", "--batch", ""], ["batch", "''", "between commas"]),
        (["frame", "--batch", "1,0"], ["batch", "(1, 0)", "at least 1"]),
        (["frame", "--context", "0"], ["context", "0", "at least 1"]),
        (["frame", "--context", "many"], ["context", "'many'", "whole number"]),
        (["frame", "--model", "none/of/these"], ["none/of/these", "no folder"]),
        (["engine", "--concurrency", "1;2"], ["concurrency", "'1;2'", "between commas"]),
        (["engine", "--concurrency", "8", "--slots", "4"], ["concurrency", "8", "slots, 4"]),
        (["engine", "--concurrency", "0"], ["concurrency", "0", "at least 1"]),
        (["engine", "--slots", "0", "--concurrency", "1"], ["slots", "0", "at least 1"]),
        (["engine", "--slots", "x"], ["slots", "'x'", "whole number"]),
        (["engine", "--frames", "a-b"], ["frames", "'a-b'", "around a dash"]),
        (["engine", "--frames", "90-30"], ["frames", "(90, 30)", "ascend"]),
        (["engine", "--frames", "30-9000"], ["frames", "(30, 9000)", "1024"]),
        (["engine", "--duration", "1"], ["warm_up_s", "2.0", "below duration_s, 1"]),
        (["engine", "--config", "none.yaml"], ["config", "none.yaml"]),
        (["engine", "--model", "none", "--concurrency", "1"], ["no folder 'none'"]),
        (["frame", "--out", "none/r.json"], ["none/r.json", "No such file or directory"]),
        (["engine", "--out", "none/r.json"], ["none/r.json", "No such file or directory"]),
        (["sing"], ["sing"]),
    ],
)
def test_bad_benches_are_refused_in_one_line(sonoro: Run, arguments: list[str], words: list[str]) -> None:
    assert_refused(*sonoro("bench", *arguments), words)


def test_bench_frame_ends_with_its_results_in_one_line(sonoro: Run, model: Path) -> None:
    code, out, _ = sonoro(*("bench", "frame", "--model", model, "--batch", "1,2", "--context", "64", "-o", "r.json"))
    assert code == 0
    results = json.loads(out.splitlines()[-1])
    assert results == json.loads(Path("r.json").read_text())
    assert (results["bench"], results["arm"], [row["batch"] for row in results["rows"]]) == ("frame", "eager", [1, 2])


def test_bench_engine_ends_with_its_results_in_one_line(sonoro: Run, model: Path) -> None:
    Path("engine.yaml").write_text("slots: 4\nmax_frames: 16\nchunk_frames: [1, 4]\n")
    code, out, _ = sonoro(
        *("bench", "engine", "--model", model, "--concurrency", "1,2", "--frames", "4-8"),
        *("--duration", "0.8", "--warm-up", "0.2", "--config", "engine.yaml", "--out", "r.json"),
    )
    assert code == 0
    results = json.loads(out.splitlines()[-1])
    assert results == json.loads(Path("r.json").read_text())
    assert (results["bench"], [row["concurrency"] for row in results["rows"]]) == ("engine", [1, 2])
    assert results["settings"]["slots"] == 4
    assert all(row["xrt"] > 0 and row["failed"] == 0 for row in results["rows"])
