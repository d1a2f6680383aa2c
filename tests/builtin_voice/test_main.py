"""The one command: stages in order, each once, and going on after the time was up."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from builtin_voice import __main__ as command
from builtin_voice import curves, recipe
from builtin_voice.training import Run, Unfinished


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


RESULT_OF = {**command.RESULTS, "text": "corpus.txt", "phonemize": "phonemes.jsonl.xz", "tokenizer": "tokenizer"}
FAKE = """
import json, os, signal, sys, time
from pathlib import Path
name, work, script = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
with (work / "asked").open("a") as file:
    file.write(json.dumps([name, os.environ.get("CUDA_VISIBLE_DEVICES", ""), *sys.argv[4:]]) + "\\n")
if name == "kokoro.synthesize":
    claim = work / "audio" / f"shard-{os.getpid()}.claim"
    claim.write_text(str(os.getpid()))
code, awaited, result = script.get(name, [0, None, None])
for _ in range(60_000):
    if awaited is None or (work / awaited).exists():
        break
    time.sleep(0.01)
if result and code == 0:
    (work / result).touch()
sys.exit(code)
"""


class Fakes:
    """Processes that make their results and learn nothing; `script` says how one ends, what it awaits and makes."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self.script: dict[str, tuple[int, str | None, str | None]] = {
            name: (0, None, result) for name, result in RESULT_OF.items()
        }

    def python(self, module: str, *arguments: object) -> list[str]:
        words = list(map(str, arguments))
        name = words[words.index("--stage") + 1] if "--stage" in words else module
        script = dict(self.script)
        if name in ("text", "phonemize", "tokenizer"):  # they are told where to write
            script[name] = (script[name][0], None, RESULT_OF[name] + ".partial")
        return [sys.executable, "-c", FAKE, name, str(self._work), json.dumps(script), *words]

    @property
    def asked(self) -> list[list[str]]:
        return [json.loads(line) for line in (self._work / "asked").read_text().splitlines()]

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.asked]

    def gpu_of(self, name: str) -> set[str]:
        return {gpu for other, gpu, *_ in self.asked if other == name}


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fakes:
    made = Fakes(tmp_path)
    monkeypatch.setattr(command, "python", made.python)
    monkeypatch.setattr(command, "gpus_there", lambda: [""])
    monkeypatch.setattr(recipe, "run_checkpoint", lambda work: (work / "checkpoint").touch())
    return made


def run(work: Path, times: command.Times | None = None, teacher: str = "kokoro") -> None:
    command.run(work, work, teacher, times or command.Times(), 1)


def test_all_stages_follow_one_another_and_none_runs_twice(tmp_path: Path, fakes: Fakes) -> None:
    for _ in range(2):
        run(tmp_path)
    learned = ["encoder", "codec", "encode", "talker"]
    assert fakes.names == ["text", "phonemize", "tokenizer", "kokoro.synthesize", *learned]
    assert (tmp_path / "checkpoint").exists()


def test_flite_reads_as_well(tmp_path: Path, fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RESULT_OF, "text", "corpus.jsonl.gz")
    run(tmp_path, teacher="flite")
    assert fakes.names == ["text", "tokenizer", "synthesize", "encoder", "codec", "encode", "talker"]


@pytest.fixture
def two_gpus(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """Two readers that go on until they are stopped; there are hours enough once both have begun."""
    monkeypatch.setattr(command, "gpus_there", lambda: ["5", "7"])
    monkeypatch.setattr(recipe, "hours_in", lambda folder: 500.0 * len(list(folder.glob("*.claim"))) - 900)
    fakes.script["kokoro.synthesize"] = (0, "never", None)
    return fakes


def test_two_gpus_share_the_work(tmp_path: Path, two_gpus: Fakes) -> None:
    """One has the codec, the other the talker; neither waits for the other, and no reader is left over."""
    two_gpus.script["codec"] = (0, "talker.pt", "codec.pt")
    # The readers are done when the encoder is: nothing here waits for the clock.
    two_gpus.script["kokoro.synthesize"] = (0, command.RESULTS["encoder"], None)
    times = command.Times(time.monotonic() + 1000, time.monotonic() + 1000, encoder_s=100.0)
    run(tmp_path, times)
    assert two_gpus.gpu_of("kokoro.synthesize") == {"5", "7"}
    assert two_gpus.gpu_of("encoder") == two_gpus.gpu_of("codec") == {"5"}
    assert two_gpus.gpu_of("encode") == two_gpus.gpu_of("talker") == {"7"}
    untils = {name: float(words[words.index("--until") + 1]) for name, *words in two_gpus.asked if "--until" in words}
    assert untils["encoder"] < time.monotonic() + 100
    assert untils["codec"] == untils["talker"] == times.deadline_s - command.WRITING_S
    assert all("--fit" in words for name, *words in two_gpus.asked if name in command.RESULTS)
    assert not list((tmp_path / "audio").glob("*.claim"))


def test_one_gpu_has_the_codec_before_the_talker(
    tmp_path: Path, two_gpus: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "gpus_there", lambda: ["5"])
    two_gpus.script["kokoro.synthesize"] = (0, None, None)
    run(tmp_path, command.Times(time.monotonic() + 1000, encoder_s=100.0))
    assert two_gpus.names[-4:] == ["encoder", "codec", "encode", "talker"]


@pytest.mark.parametrize(("code", "error"), [(3, SystemExit), (command.EXIT_UNFINISHED, Unfinished)])
@pytest.mark.parametrize("stage", list(command.RESULTS))
def test_a_stage_that_fails_or_runs_out_of_time_is_not_passed_over(
    tmp_path: Path, two_gpus: Fakes, stage: str, code: int, error: type[BaseException]
) -> None:
    two_gpus.script[stage] = (code, None, None)
    with pytest.raises(error, match=stage):
        run(tmp_path, command.Times(speech_until_s=time.monotonic() + 1))
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize(("code", "error"), [(3, SystemExit), (0, Unfinished)])
def test_what_failed_on_one_gpu_is_said_though_the_time_is_up(
    tmp_path: Path, two_gpus: Fakes, code: int, error: type[BaseException]
) -> None:
    two_gpus.script["codec"] = (code, "late", "codec.pt")
    two_gpus.script["talker"] = (command.EXIT_UNFINISHED, None, None)
    threading.Timer(1.0, (tmp_path / "late").touch).start()
    with pytest.raises(error, match="codec" if code else "talker"):
        run(tmp_path, command.Times(speech_until_s=time.monotonic() + 1))
    assert (tmp_path / "codec.pt").exists() == (code == 0)


def test_a_failed_reader_is_not_waited_for(tmp_path: Path, fakes: Fakes) -> None:
    fakes.script["kokoro.synthesize"] = (3, None, None)
    with pytest.raises(SystemExit, match="synthesis failed with exit code 3"):
        run(tmp_path)


def test_claims_of_an_earlier_run_are_not_kept(tmp_path: Path, fakes: Fakes) -> None:
    (tmp_path / "audio").mkdir()
    (tmp_path / "audio" / "shard-00003.claim").write_text("1")
    with command.Readers(tmp_path, fakes.python("kokoro.synthesize"), [""]) as readers:
        readers.wait(float("inf"))
        assert not (tmp_path / "audio" / "shard-00003.claim").exists()


def test_a_process_of_a_stage_learns_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def learn(work: Path, device: torch.device, run: Run) -> None:
        runs.append(run)
        (work / "codec.pt").touch()

    monkeypatch.setattr(recipe, "run_codec", learn)
    arguments = [str(tmp_path), "--prepared", str(tmp_path), "--stage", "codec", "--until", "1e12", "--fit"]
    monkeypatch.setattr(sys, "argv", ["builtin_voice", *arguments])
    command.main()
    (run,) = runs
    assert (run.deadline_s, run.is_fitted, run.snapshot) == (1e12, True, tmp_path / "codec-snapshot.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["codec.pt", "stages.jsonl"]


def test_out_of_time_is_an_exit_code_of_its_own(
    tmp_path: Path, fakes: Fakes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["builtin_voice", str(tmp_path), "--prepared", str(tmp_path), "--seconds", "-1"])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == command.EXIT_UNFINISHED
    assert "run again to go on" in capsys.readouterr().out


def test_an_evaluation_ends_with_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(command, "python", lambda module, *arguments: sleeping)
    # Of a background job's children some do not listen.
    monkeypatch.setattr(command, "GRACE_S", 0.1)
    began = time.monotonic()
    with pytest.raises(Unfinished, match="evaluation"):
        command.judge(tmp_path, tmp_path, 1, began + 0.2)
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
        command.judge(tmp_path, tmp_path, 1, float("inf"))


def test_a_command_that_ends_half_way_leaves_no_result(tmp_path: Path) -> None:
    stages = command.Stages(tmp_path, float("inf"))

    def failing(to: Path) -> list[str]:
        return [sys.executable, "-c", f"open({str(to)!r}, 'w').write('half'); raise SystemExit(3)"]

    with pytest.raises(subprocess.CalledProcessError):
        stages.command("first", "result", failing)
    assert not (tmp_path / "result").exists()


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
    assert results["settings"]["talker"]["positions"] == 40_000
