"""The built-in voice from nothing, with one command: `python -m builtin_voice WORK --prepared PREPARED --seconds 580`.

Every stage leaves its result in WORK and is passed over once that is there. When the time is up the command ends with
exit code 75, and goes on where it stopped when it is run again; with `--fit` the trainings take as many steps as there
is time for instead. Stages that learn are processes of their own. With two GPUs one learns the codes and then to speak
from them, while the other goes on reading the corpus aloud, encodes it and trains the talker.
"""

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
from sonoro.core.machine import commit_of_checkout, processor, usable_cores

EXIT_UNFINISHED = 75
CORPUS_ROWS = 92_000
ENCODING_S = 60.0
"""At most, by arithmetic, on an H200: it goes on from nothing, so it is not begun with less time than that."""
COMPILING_S = 90.0
"""Before the first step of a decoder or a talker, of which an H200 took 50 to 80."""
WRITING_S = 15.0
"""What a fitted run leaves for the checkpoint."""
RESULTS = {"encoder": "encoder.pt", "codec": "codec.pt", "encode": "codes.pt", "talker": "talker.pt"}
GRACE_S = 10.0
"""Recognisers hear to its end what they have begun, which of a long text may take longer."""


def python(module: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", f"builtin_voice.{module}", *map(str, arguments)]


class Stages:
    """Runs what is missing in `work`, and writes down how long each stage took, and where."""

    def __init__(self, work: Path, deadline_s: float) -> None:
        self._work, self._deadline_s = work, deadline_s

    def run(self, name: str, result: str, make: Callable[[], object], *, needs_s: float = 0.0) -> None:
        """Have `make` make `result`, unless it is there. `Unfinished` if it would begin too late; `needs_s` is what a
        stage takes on the machine this is laid out for if it cannot be interrupted."""
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
        """As `run`, a command that writes to where it is told; its result is put in its place when it is whole."""
        unfinished = self._work / f"{result}.partial"

        def make() -> None:
            subprocess.run(command_to(unfinished), check=True)
            unfinished.rename(self._work / result)

        self.run(name, result, make)


@dataclass
class Readers:
    """Processes that read the corpus of `work` aloud together, each on a GPU of its own where there are any."""

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
        """End what reads on `gpu`; what it had begun is left to the others."""
        if (child := self._running.pop(gpu, None)) is not None:
            child.terminate()
            child.wait()
            for claim in (self.work / "audio").glob("*.claim"):
                if claim.read_text("ascii") == str(child.pid):
                    claim.unlink()

    def are_done(self) -> bool:
        """Whether all has been read. Ends this program if one of them failed."""
        running = [child for child in self._running.values() if not has_ended("synthesis", child)]
        return not running

    def wait(self, deadline_s: float, hours: float = float("inf")) -> None:
        """Until all has been read, there are so many `hours` of audio, or the deadline has passed."""
        while not self.are_done() and recipe.hours_in(self.work / "audio") < hours and time.monotonic() < deadline_s:
            time.sleep(0.5)


def start(command: list[str], gpu: str, log: Path | None = None) -> subprocess.Popen[bytes]:
    """`command` on that GPU alone ("": on what there is), its output appended to `log`."""
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
    if log is None:
        return subprocess.Popen(command, env=environment)
    with log.open("ab") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)


def end_with(name: str, child: subprocess.Popen[bytes], kind: type[BaseException] | None, *_: object) -> None:
    """End `child` for an exception of that `kind`: when the time is up it ends by itself, and writes down where it is;
    that it failed would be worse news."""
    if kind is not None and not issubclass(kind, Unfinished):
        child.terminate()
    child.wait()
    if kind is not None and issubclass(kind, Unfinished):
        has_ended(name, child)


def gpus_there() -> list[str]:
    """As `CUDA_VISIBLE_DEVICES` calls them; a CPU is one that is called ""."""
    count = torch.cuda.device_count()
    return os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")[:count] or [""]


def judge(work: Path, judges: Path, processes: int, deadline_s: float) -> None:
    """The checkpoint's figures as speech.json, but for its speed on a CPU. An interrupted one goes on."""
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
    """End `child` as Ctrl-C would, so that it ends the processes that it has started; if need be all of its group."""
    child.send_signal(signal.SIGINT)
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)


def wait_for(name: str, child: subprocess.Popen[bytes] | None, deadline_s: float = float("inf")) -> None:
    """Until `child` has ended, if there is one. `Unfinished` if the deadline passes first."""
    if child is None:
        return
    try:
        child.wait(max(0.0, deadline_s - time.monotonic()) if deadline_s < float("inf") else None)
    except subprocess.TimeoutExpired as error:
        raise Unfinished(name) from error
    has_ended(name, child)


def has_ended(name: str, child: subprocess.Popen[bytes]) -> bool:
    """Whether `child` has done its work. `Unfinished` if it ran out of time; ends this program if it failed."""
    if child.poll() == EXIT_UNFINISHED:
        raise Unfinished(name)
    if child.returncode:
        raise SystemExit(f"{name} failed with exit code {child.returncode}")
    return child.returncode is not None


@dataclass(frozen=True)
class Times:
    """On the clock of `time.monotonic`: when all ends, when the corpus is taken as far as it has been read, and for a
    run that is fitted, how long the codes are learned."""

    deadline_s: float = float("inf")
    speech_until_s: float = float("inf")
    encoder_s: float | None = None

    @property
    def is_fitted(self) -> bool:
        return self.encoder_s is not None


def run(work: Path, prepared: Path, teacher: str, times: Times, processes: int) -> None:
    """All stages up to the checkpoint. Raises `Unfinished` when the deadline has passed."""
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
            # Flite reads on a CPU, and needs no GPU to itself.
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
    """Makes the corpus and the tokenizer; returns the command that has a `teacher` read it aloud."""
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
    """One of the stages that a process has to itself."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    # cuDNN's attention builds a plan for every new length, which takes longer than the step.
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
    # What was started ends with it then.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
