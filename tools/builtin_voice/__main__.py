"""Train the built-in voice from scratch: `python -m builtin_voice WORK --prepared PREPARED --seconds 580`.

Every stage writes its result to WORK, and is skipped if that exists. When the time is up the command exits with 75, and
resumes when it is run again; with `--fit` the trainings instead take as many steps as there is time for. Training
stages run in processes of their own. With two GPUs one trains encoder and codec, while the other continues to
synthesise the corpus, encodes it and trains the talker."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from builtin_voice import recipe, settings
from builtin_voice.training import Run, Unfinished
from sonoro.bench.machine import commit_of_checkout, processor
from sonoro.core.config import usable_cores

EXIT_UNFINISHED = 75
CORPUS_ROWS = 92_000
ENCODING_S = 60.0
"""Upper estimate for encoding on an H200: it cannot be resumed, so it is not started with less time than that."""
COMPILING_S = 90.0
"""Compile time allowed before the first step of decoder or talker; an H200 took 50 to 80 s."""
WRITING_S = 15.0
"""Time that a fitted run reserves for writing the checkpoint."""
RESULTS = {"encoder": "encoder.pt", "codec": "codec.pt", "encode": "codes.pt", "talker": "talker.pt"}
GRACE_S = 10.0
"""Grace for judges to finish a reading, which may take longer for a long text."""


def python(module: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", f"builtin_voice.{module}", *map(str, arguments)]


class Stages:
    """Runs the stages whose results are missing in `work`, and records the time and machine of each."""

    def __init__(self, work: Path, deadline_s: float) -> None:
        self._work, self._deadline_s = work, deadline_s

    def run(self, name: str, result: str, make: Callable[[], object], *, needs_s: float = 0.0) -> None:
        """Run `make` to create `result`, unless it exists. Raises `Unfinished` if too little time is left; `needs_s` is
        the expected time of a stage that cannot be interrupted."""
        if (self._work / result).exists():
            return
        if time.monotonic() + needs_s > self._deadline_s:
            raise Unfinished(name)
        began, is_done = time.monotonic(), False
        try:
            make()
            is_done = True
        finally:
            record = {
                "stage": name,
                "seconds": round(time.monotonic() - began, 1),
                "is_done": is_done,
                "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                "cores": usable_cores(),
                "cpu": processor(),
                "torch": torch.__version__,
                "commit": commit_of_checkout(),
            }
            print(json.dumps(record), flush=True)
            with (self._work / "stages.jsonl").open("a", encoding="ascii") as file:
                file.write(json.dumps(record) + "\n")

    def command(self, name: str, result: str, command_to: Callable[[Path], list[str]]) -> None:
        """As `run`, for a command that writes to a given path; its complete result is moved into place."""
        unfinished = self._work / f"{result}.partial"

        def make() -> None:
            subprocess.run(command_to(unfinished), check=True)
            unfinished.rename(self._work / result)

        self.run(name, result, make)


@dataclass
class Readers:
    """Processes that synthesise the corpus of `work`, each on its own GPU if there are any."""

    work: Path
    command: list[str]
    gpus: list[str]
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> Readers:
        (self.work / "audio").mkdir(exist_ok=True)
        for claim in (self.work / "audio").glob("*.claim"):
            claim.unlink()
        for gpu in self.gpus:
            self._running[gpu] = start(self.command, gpu, self.work / f"synthesis{gpu}.log")
        return self

    def __exit__(self, *_: object) -> None:
        for gpu in list(self._running):
            self.stop(gpu)

    def stop(self, gpu: str) -> None:
        """Stop the process on `gpu`; the others take over its unfinished shard."""
        if (child := self._running.pop(gpu, None)) is not None:
            child.terminate()
            child.wait()
            for claim in (self.work / "audio").glob("*.claim"):
                if claim.read_text("ascii") == str(child.pid):
                    claim.unlink()

    def are_done(self) -> bool:
        """Whether the whole corpus is synthesised. Exits the program if a process failed."""
        running = [child for child in self._running.values() if not has_ended("synthesis", child)]
        return not running

    def wait(self, deadline_s: float, hours: float = float("inf")) -> None:
        """Wait until the corpus is done, `hours` of audio exist, or the deadline has passed."""
        while not self.are_done() and recipe.hours_in(self.work / "audio") < hours and time.monotonic() < deadline_s:
            time.sleep(0.5)


def start(command: list[str], gpu: str, log: Path | None = None) -> subprocess.Popen[bytes]:
    """Start `command` with only `gpu` visible ("": all), its output appended to `log`."""
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
    if log is None:
        return subprocess.Popen(command, env=environment)
    with log.open("ab") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)


def end_with(name: str, child: subprocess.Popen[bytes], kind: type[BaseException] | None, *_: object) -> None:
    """Stop `child` after an exception of type `kind`. If the time is up, it ends by itself after saving its state, and
    a failure of its own takes precedence."""
    if kind is not None and not issubclass(kind, Unfinished):
        child.terminate()
    child.wait()
    if kind is not None and issubclass(kind, Unfinished):
        has_ended(name, child)


def gpus_there() -> list[str]:
    """The GPUs as `CUDA_VISIBLE_DEVICES` names them; [""] without any."""
    count = torch.cuda.device_count()
    return os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")[:count] or [""]


def judge(work: Path, judges: Path, processes: int, deadline_s: float) -> None:
    """Evaluate the checkpoint to speech.json, except its speed on a CPU. Resumes an interrupted run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    unfinished = work / "speech.partial.json"
    command = python(
        "evaluate", "--model", work / "checkpoint", "--judges", judges,
        "--sections", "sentences", "words", "mixed", "paths",
        "--device", device, "--dtype", "float32", "--processes", processes,
        "--journal", work / "readings.jsonl", "--output", unfinished,
    )  # fmt: skip
    with subprocess.Popen(command, process_group=0) as child:
        try:
            wait_for("evaluation", child, deadline_s)
        finally:
            interrupt(child)
    unfinished.rename(work / "speech.json")


def interrupt(child: subprocess.Popen[bytes]) -> None:
    """Send SIGINT to `child`, so that it stops its own child processes; if need be, kill its process group."""
    child.send_signal(signal.SIGINT)
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)


def wait_for(name: str, child: subprocess.Popen[bytes] | None, deadline_s: float = float("inf")) -> None:
    """Wait until `child`, if any, has ended. Raises `Unfinished` if the deadline passes first."""
    if child is None:
        return
    try:
        child.wait(max(0.0, deadline_s - time.monotonic()) if deadline_s < float("inf") else None)
    except subprocess.TimeoutExpired as error:
        raise Unfinished(name) from error
    has_ended(name, child)


def has_ended(name: str, child: subprocess.Popen[bytes]) -> bool:
    """Whether `child` has succeeded. Raises `Unfinished` if it ran out of time; exits the program if it failed."""
    if child.poll() == EXIT_UNFINISHED:
        raise Unfinished(name)
    if child.returncode:
        raise SystemExit(f"{name} failed with exit code {child.returncode}")
    return child.returncode is not None


@dataclass(frozen=True)
class Times:
    """Times on `time.monotonic`: the end, when the corpus is used as far as it is synthesised and, for a fitted run,
    the end of the encoder's training."""

    deadline_s: float = float("inf")
    speech_until_s: float = float("inf")
    encoder_s: float | None = None

    @property
    def is_fitted(self) -> bool:
        return self.encoder_s is not None


def run(work: Path, prepared: Path, teacher: str, times: Times, processes: int) -> None:
    """Run all stages up to the checkpoint. Raises `Unfinished` when the deadline has passed."""
    stages, gpus = Stages(work, times.deadline_s), gpus_there()
    first, last = gpus[0], gpus[-1]
    read = written_out(stages, work, prepared, teacher, processes)
    trained_until_s = times.deadline_s - (WRITING_S if times.is_fitted else 0.0)

    def learn(name: str, gpu: str, until_s: float = trained_until_s) -> subprocess.Popen[bytes] | None:
        if (work / RESULTS[name]).exists():
            return None
        fitted = ["--fit"] if times.is_fitted else []
        command = python("__main__", work, "--prepared", prepared, "--stage", name, "--until", until_s, *fitted)
        child = start(command, gpu)
        beside.push(partial(end_with, name, child))
        return child

    with ExitStack() as beside:
        if not (work / RESULTS["encode"]).exists():
            # Flite runs on the CPU.
            readers = beside.enter_context(Readers(work, read, gpus if teacher == "kokoro" else [""]))
            is_shared = teacher == "kokoro" and first == last
            readers.wait(times.speech_until_s, float("inf") if is_shared else settings.CODEC_HOURS)
            readers.stop(first)
            until_s = min(trained_until_s, time.monotonic() + (times.encoder_s or float("inf")))
            wait_for("encoder", learn("encoder", first, until_s))
        is_halved = times.is_fitted and first == last
        decoder = learn("codec", first, (time.monotonic() + trained_until_s) / 2 if is_halved else trained_until_s)
        if first == last:
            wait_for("codec", decoder)
        if not (work / RESULTS["encode"]).exists():
            readers.wait(times.speech_until_s)
            readers.stop(last)
            wait_for("encode", learn("encode", last))
        if decoder:
            has_ended("codec", decoder)
        talker = learn("talker", last)
        wait_for("talker", talker)
        wait_for("codec", decoder)
    stages.run("checkpoint", "checkpoint", lambda: recipe.run_checkpoint(work))


def written_out(stages: Stages, work: Path, prepared: Path, teacher: str, processes: int) -> list[str]:
    """Make corpus and tokenizer; returns the command with which `teacher` synthesises the corpus."""
    share = prepared / "share"
    if teacher == "flite":
        corpus = work / "corpus.jsonl.gz"
        stages.command("corpus", corpus.name, lambda to: python("text", to, "--share", share, "--count", CORPUS_ROWS))
        stages.command("tokenizer", "tokenizer", lambda to: python("tokenizer", corpus, to))
        voices = ",".join(settings.voices("flite").values())
        options = ["--libraries", prepared / "lib", "--voices", voices, "--processes", processes]
        return python("synthesize", corpus, work / "audio", *options)
    written, corpus = work / "corpus.txt", work / "phonemes.jsonl.xz"
    if not corpus.exists():
        stages.command("corpus", written.name, lambda to: python("text", to, "--share", share))
        stages.command("phonemes", corpus.name, lambda to: python("phonemize", written, to, "--processes", processes))
    stages.command("tokenizer", "tokenizer", lambda to: python("tokenizer", corpus, to))
    return python("kokoro.synthesize", corpus, prepared / "kokoro.npz", work / "audio")


def learn_alone(name: str, work: Path, run: Run) -> None:
    """Run one training stage, in a process of its own."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    # cuDNN's attention builds a plan for each new length, which takes longer than a step.
    torch.backends.cuda.enable_cudnn_sdp(False)
    make: dict[str, Callable[[], None]] = {
        "encoder": partial(recipe.run_encoder, work, device, run),
        "codec": partial(recipe.run_codec, work, device, run),
        "encode": partial(recipe.run_encode, work, device),
        "talker": partial(recipe.run_talker, work, device, run),
    }
    needs_s = {"encode": ENCODING_S, "encoder": 0.0}.get(name, COMPILING_S)
    stages = Stages(work, run.deadline_s)
    stages.run(name, RESULTS[name], make[name], needs_s=0.0 if run.is_fitted else needs_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="receives everything; what it already holds is kept")
    parser.add_argument("--prepared", type=Path, required=True, help="the folder that prepare.sh filled")
    parser.add_argument("--teacher", choices=list(settings.TEACHERS), default="kokoro")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time this run may take")
    parser.add_argument("--speech-seconds", type=float, default=float("inf"), help="of that, for reading aloud")
    parser.add_argument("--encoder-seconds", type=float, default=150.0, help="of that, for learning codes, with --fit")
    parser.add_argument("--fit", action="store_true", help="train for as many steps as there is time for")
    parser.add_argument("--processes", type=int, default=max(1, usable_cores() - 2), help="on a CPU")
    parser.add_argument("--no-evaluation", action="store_true", help="end with the checkpoint, without curves")
    parser.add_argument("--stage", choices=list(RESULTS), help="this stage alone, as its process is started")
    parser.add_argument("--until", type=float, default=float("inf"), help="and until the monotonic clock says so")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    try:
        if options.stage:
            work, name = options.work, options.stage
            log, state = recipe.logger(work / f"{name}.jsonl"), work / f"{name}-state.pt"
            learn_alone(name, work, Run(options.until, log, state, options.fit, work / f"{name}-snapshot.pt"))
            return
        times = Times(
            began_s + options.seconds,
            began_s + options.speech_seconds,
            options.encoder_seconds if options.fit else None,
        )
        run(options.work, options.prepared, options.teacher, times, options.processes)
        if not options.no_evaluation:
            stages = Stages(options.work, times.deadline_s)
            stages.run("curves", "training.json", partial(subprocess.run, python("curves", options.work), check=True))
            evaluate = partial(judge, options.work, options.prepared / "judges", options.processes, times.deadline_s)
            stages.run("evaluate", "speech.json", evaluate)
    except Unfinished as left:
        print(f"out of time: {left}; run again to go on", flush=True)
        sys.exit(EXIT_UNFINISHED)


if __name__ == "__main__":
    # So that child processes are stopped too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
