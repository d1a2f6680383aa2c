"""The one command: stages in order, each once, and going on after the time was up."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from builtin_voice import __main__ as command
from builtin_voice import curves, recipe
from builtin_voice.training import Unfinished

CPU = torch.device("cpu")
STAGES = ["corpus", "tokenizer", "encoder", "codec", "encode", "talker", "checkpoint", "curves", "evaluate"]


def test_a_stage_runs_once_and_tells_how_long_it_took(tmp_path: Path) -> None:
    stages, calls = command.Stages(tmp_path, float("inf")), []

    def make() -> None:
        calls.append(1)
        (tmp_path / "result").touch()

    stages.run("first", "result", make)
    stages.run("first", "result", make)
    assert calls == [1]
    (record,) = map(json.loads, (tmp_path / "stages.jsonl").read_text("ascii").splitlines())
    assert record["stage"] == "first"
    assert record["is_done"]
    assert record["seconds"] >= 0


def test_no_stage_begins_after_the_deadline_and_an_interrupted_one_is_not_done(tmp_path: Path) -> None:
    with pytest.raises(Unfinished, match="late"):
        command.Stages(tmp_path, 0.0).run("late", "result", lambda: pytest.fail("it has begun"))

    now = time.monotonic()
    with pytest.raises(Unfinished, match="long"):
        command.Stages(tmp_path, now + 60).run("long", "result", lambda: pytest.fail("it has begun"), needs_s=90)

    def interrupted() -> None:
        raise Unfinished("3 of 9 steps")

    with pytest.raises(Unfinished, match="3 of 9"):
        command.Stages(tmp_path, float("inf")).run("half", "result", interrupted)
    (record,) = map(json.loads, (tmp_path / "stages.jsonl").read_text("ascii").splitlines())
    assert not record["is_done"]


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What the stages were asked for: each makes its result, and nothing is learned."""
    asked: list[str] = []

    def fake(name: str, result: str) -> None:
        def make(work: Path, *_: object) -> None:
            asked.append(name)
            (work / result).touch()

        monkeypatch.setattr(recipe, f"run_{name}", make)

    results = {"encoder": "encoder.pt", "codec": "codec.pt", "encode": "codes.pt", "talker": "talker.pt"}
    for name, result in {**results, "checkpoint": "checkpoint"}.items():
        fake(name, result)

    def python(module: str, *arguments: object) -> list[str]:
        asked.append(module)
        at = {"text": 0, "tokenizer": 1, "evaluate": -1}
        made = arguments[at[module]] if module in at else tmp_path / "spoken"
        return [sys.executable, "-c", f"open({str(made)!r}, 'w')"]

    monkeypatch.setattr(command, "python", python)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(curves, "write", lambda work: (work / "training.json").touch())
    return asked


def test_all_stages_follow_one_another_and_none_runs_twice(tmp_path: Path, done: list[str]) -> None:
    for _ in range(2):
        command.run(tmp_path, tmp_path, CPU, float("inf"), 1)
    learned = [name for name in done if name not in ("text", "tokenizer")]
    assert learned == ["synthesize", "encoder", "codec", "encode", "talker", "checkpoint", "evaluate"]
    assert (tmp_path / "speech.json").exists()
    assert (tmp_path / "spoken").exists()
    stages = [json.loads(line)["stage"] for line in (tmp_path / "stages.jsonl").read_text("ascii").splitlines()]
    assert stages == STAGES


SECOND_GPU = """
import os, time
for _ in range(6000):
    if os.path.exists({awaited!r}):
        break
    time.sleep(0.01)
open({codec!r}, "w").write(os.environ["CUDA_VISIBLE_DEVICES"])
raise SystemExit({code})
"""


@pytest.fixture
def second_gpu(
    tmp_path: Path, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, int], list[tuple[object, ...]]]:
    """Gives this machine two GPUs, of which the second's process waits for the file `awaited` and ends with `code`;
    returns what that process is told."""

    def give(awaited: str, code: int) -> list[tuple[object, ...]]:
        paths = {"awaited": str(tmp_path / awaited), "codec": str(tmp_path / "codec.pt")}
        fake, told = command.python, list[tuple[object, ...]]()

        def python(module: str, *arguments: object) -> list[str]:
            if module != "__main__":
                return fake(module, *arguments)
            told.append(arguments)
            return [sys.executable, "-c", SECOND_GPU.format(**paths, code=code)]

        monkeypatch.setattr(command, "python", python)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
        return told

    return give


def test_a_second_gpu_trains_the_decoder_beside_the_talker(
    tmp_path: Path, done: list[str], second_gpu: Callable[[str, int], list[tuple[object, ...]]]
) -> None:
    told = second_gpu("talker.pt", 0)
    for _ in range(2):
        command.run(tmp_path, tmp_path, CPU, 1e9, 1)
    assert told == [(tmp_path, "--prepared", tmp_path, "--decoder-until", 1e9)]
    assert (tmp_path / "codec.pt").read_text() == "7"
    assert "codec" not in done
    assert (tmp_path / "speech.json").exists()


@pytest.mark.parametrize(("code", "error"), [(3, SystemExit), (command.EXIT_UNFINISHED, Unfinished)])
@pytest.mark.parametrize("awaited", ["encoder.pt", "talker.pt"])
def test_a_second_gpu_that_fails_or_runs_out_of_time_is_not_passed_over(
    tmp_path: Path,
    second_gpu: Callable[[str, int], list[tuple[object, ...]]],
    awaited: str,
    code: int,
    error: type[BaseException],
) -> None:
    second_gpu(awaited, code)
    with pytest.raises(error, match="codec"):
        command.run(tmp_path, tmp_path, CPU, float("inf"), 1)
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize(("code", "error"), [(3, SystemExit), (0, Unfinished), (command.EXIT_UNFINISHED, Unfinished)])
def test_what_failed_on_a_second_gpu_is_said_though_the_time_is_up(
    tmp_path: Path,
    second_gpu: Callable[[str, int], list[tuple[object, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    error: type[BaseException],
) -> None:
    def late(work: Path, *_: object) -> None:
        (work / "late").touch()
        raise Unfinished("3 of 9 steps")

    second_gpu("late", code)
    monkeypatch.setattr(recipe, "run_talker", late)
    with pytest.raises(error, match="codec" if code else "3 of 9"):
        command.run(tmp_path, tmp_path, CPU, float("inf"), 1)
    assert (tmp_path / "codec.pt").exists()


def test_the_second_gpus_process_trains_the_decoder_and_no_more(
    tmp_path: Path, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [str(tmp_path), "--prepared", str(tmp_path), "--decoder-until", str(time.monotonic() + 1000)]
    monkeypatch.setattr(sys, "argv", ["builtin_voice", *arguments])
    command.main()
    assert done == ["codec"]


def test_out_of_time_is_an_exit_code_of_its_own(
    tmp_path: Path, done: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["builtin_voice", str(tmp_path), "--prepared", str(tmp_path), "--seconds", "-1"])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == command.EXIT_UNFINISHED
    assert "run again to go on" in capsys.readouterr().out


def test_an_evaluation_ends_with_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(command, "python", lambda module, *arguments: sleeping)
    began = time.monotonic()
    with pytest.raises(Unfinished, match="evaluation"):
        command.judge(tmp_path, torch.device("cpu"), 1, began + 0.2)
    assert time.monotonic() - began < 30, "nothing was waited for"
    assert not (tmp_path / "speech.json").exists()


GROUP = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("begun", flush=True)
time.sleep(60)
"""


def test_what_an_evaluation_began_ends_with_it_though_it_does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "GRACE_S", 0.1)
    arguments = [sys.executable, "-c", GROUP]
    with subprocess.Popen(arguments, process_group=0, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"begun\n"
        command.interrupt(child)
        # Both hold it open as long as they live.
        assert child.communicate(timeout=30)[0] == b""


def test_a_stage_that_fails_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = [sys.executable, "-c", "raise SystemExit(3)"]
    monkeypatch.setattr(command, "python", lambda module, *arguments: failing)
    with pytest.raises(SystemExit, match="evaluation failed with exit code 3"):
        command.judge(tmp_path, torch.device("cpu"), 1, float("inf"))


def test_a_command_that_ends_half_way_leaves_no_result(tmp_path: Path) -> None:
    stages = command.Stages(tmp_path, float("inf"))

    def failing(to: Path) -> list[str]:
        return [sys.executable, "-c", f"open({str(to)!r}, 'w').write('half'); raise SystemExit(3)"]

    with pytest.raises(subprocess.CalledProcessError):
        stages.command("first", "result", failing)
    assert not (tmp_path / "result").exists()


def test_an_encoder_does_not_wait_for_a_synthesis_that_failed(
    tmp_path: Path, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(work: Path, device: torch.device, deadline_s: float, is_whole: Callable[[], bool]) -> None:
        while not is_whole():
            time.sleep(0.01)

    monkeypatch.setattr(recipe, "run_encoder", wait)
    fake = command.python

    def python(module: str, *arguments: object) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit(3)"] if module == "synthesize" else fake(module, *arguments)

    monkeypatch.setattr(command, "python", python)
    with pytest.raises(SystemExit, match="synthesis failed with exit code 3"):
        command.run(tmp_path, tmp_path, CPU, float("inf"), 1)


def test_curves_take_the_last_record_of_a_step(tmp_path: Path) -> None:
    lines = [
        {"step": 200, "spectral": 2.0},
        {"step": 0, "spectral": 4.0},
        {"step": 200, "spectral": 1.0, "critic": 0.5},
    ]
    (tmp_path / "codec.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="ascii")
    for log, name in (("encoder", "sketch"), ("talker", "first")):
        (tmp_path / f"{log}.jsonl").write_text(json.dumps({"step": 0, name: 7.0}) + "\n", encoding="ascii")
    assert [record["spectral"] for record in curves.read(tmp_path / "codec.jsonl")] == [4.0, 1.0]
    stage = {"stage": "codec", "seconds": 425.1, "is_done": True}
    (tmp_path / "stages.jsonl").write_text(json.dumps(stage) + "\n", encoding="ascii")
    curves.write(tmp_path)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "training.json").read_text("utf-8"))
    assert results["rows"][1:3] == [
        {"stage": "codec", "step": 0, "spectral": 4.0},
        {"stage": "codec", "step": 200, "spectral": 1.0, "critic": 0.5},
    ]
    assert results["stages"] == [stage]
    assert results["settings"]["talker"]["decay_steps"] == 16_000
