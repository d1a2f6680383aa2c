"""The built-in voice from nothing, with one command: `python -m builtin_voice WORK --prepared PREPARED --seconds 580`.

Every stage leaves its result in WORK and is passed over once that is there. When the time is up the command ends with
exit code 75, and goes on where it stopped when it is run again. With two GPUs the decoder learns to speak from codes
while the corpus is coded and the talker learns to write it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from builtin_voice import curves, recipe, settings
from builtin_voice.training import Unfinished
from sonoro.core.machine import commit_of_checkout, processor, usable_cores

EXIT_UNFINISHED = 75
CORPUS_ROWS = 92_000
ENCODING_S = 60.0
"""At most, by arithmetic, on an H200: it goes on from nothing, so it is not begun with less time than that."""
COMPILING_S = 90.0
"""Before the first step of a decoder or a talker, of which an H200 took 50 to 80."""
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


@contextmanager
def synthesis(work: Path, prepared: Path, processes: int) -> Iterator[subprocess.Popen[bytes]]:
    """The corpus is read aloud beside what runs within; what is not read by then is read by the next run."""
    command = python(
        "synthesize", work / "corpus.jsonl.gz", work / "audio", "--libraries", prepared / "lib",
        "--voices", ",".join(settings.voices().values()), "--processes", processes,
    )  # fmt: skip
    with (work / "synthesis.log").open("ab") as log, subprocess.Popen(command, stdout=log) as child:
        try:
            yield child
        finally:
            child.terminate()


@contextmanager
def decoder_beside(work: Path, prepared: Path, deadline_s: float) -> Iterator[subprocess.Popen[bytes] | None]:
    """The decoder learns on a second GPU beside what runs within; None if there is none, or it has learned."""
    if torch.cuda.device_count() < 2 or (work / "codec.pt").exists():
        yield None
        return
    command = python("__main__", work, "--prepared", prepared, "--decoder-until", deadline_s)
    second = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[1]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": second}
    with (work / "codec.log").open("ab") as log, subprocess.Popen(command, stdout=log, env=environment) as child:
        try:
            yield child
        except Unfinished:
            # It knows when to end and must write down where it is; that it failed would be worse news than this.
            child.wait()
            has_ended("codec", child)
            raise
        except BaseException:
            child.terminate()
            raise


def judge(work: Path, device: torch.device, processes: int, deadline_s: float) -> None:
    """The checkpoint's figures as speech.json, but for its speed on a CPU. An interrupted one goes on."""
    unfinished = work / "speech.partial.json"
    command = python(
        "evaluate", "--model", work / "checkpoint", "--sections", "sentences", "mixed", "paths",
        "--device", device.type, "--dtype", "float32", "--processes", processes,
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


def wait_for(name: str, child: subprocess.Popen[bytes], deadline_s: float) -> None:
    """Until `child` has ended. `Unfinished` if the deadline passes first."""
    try:
        child.wait(max(0.0, deadline_s - time.monotonic()))
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


def run(work: Path, prepared: Path, device: torch.device, deadline_s: float, processes: int) -> None:
    """All stages. Raises `Unfinished` when the deadline has passed."""
    stages, corpus = Stages(work, deadline_s), work / "corpus.jsonl.gz"
    share = prepared / "share"
    stages.command("corpus", corpus.name, lambda to: python("text", to, "--share", share, "--count", CORPUS_ROWS))
    stages.command("tokenizer", "tokenizer", lambda to: python("tokenizer", corpus, to))
    with ExitStack() as beside:
        reading = None
        if not (work / "codes.pt").exists():
            reading = beside.enter_context(synthesis(work, prepared, processes))
            is_whole = partial(has_ended, "synthesis", reading)
            stages.run("encoder", "encoder.pt", lambda: recipe.run_encoder(work, device, deadline_s, is_whole))
        decoder = beside.enter_context(decoder_beside(work, prepared, deadline_s))
        if not decoder:
            train_decoder(work, device, deadline_s)
        if reading:
            wait_for("synthesis", reading, deadline_s)
            stages.run("encode", "codes.pt", lambda: recipe.run_encode(work, device), needs_s=ENCODING_S)
        if decoder:
            has_ended("codec", decoder)
        train_talker = partial(recipe.run_talker, work, device, deadline_s)
        stages.run("talker", "talker.pt", train_talker, needs_s=COMPILING_S)
        if decoder:
            wait_for("codec", decoder, float("inf"))
    stages.run("checkpoint", "checkpoint", lambda: recipe.run_checkpoint(work))
    stages.run("curves", "training.json", lambda: curves.write(work))
    stages.run("evaluate", "speech.json", lambda: judge(work, device, processes, deadline_s))


def train_decoder(work: Path, device: torch.device, deadline_s: float) -> None:
    """The stage that a second GPU's process has to itself."""
    train = partial(recipe.run_codec, work, device, deadline_s)
    Stages(work, deadline_s).run("codec", "codec.pt", train, needs_s=COMPILING_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="receives everything; what it already holds is kept")
    parser.add_argument("--prepared", type=Path, required=True, help="the folder that prepare.sh filled")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time this run may take")
    parser.add_argument("--processes", type=int, default=max(1, usable_cores() - 2), help="for synthesis")
    parser.add_argument(
        "--decoder-until",
        type=float,
        metavar="T",
        help="train the decoder alone, until the monotonic clock says T",
    )
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + options.seconds
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    # cuDNN's attention builds a plan for every new length, which takes longer than the step.
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        if options.decoder_until is not None:
            train_decoder(options.work, device, options.decoder_until)
        else:
            run(options.work, options.prepared, device, deadline_s, options.processes)
    except Unfinished as left:
        print(f"out of time: {left}; run again to go on", flush=True)
        sys.exit(EXIT_UNFINISHED)


if __name__ == "__main__":
    # What was started ends with it then.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
