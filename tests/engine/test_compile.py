"""Compiling ahead: a start is followed without a GPU, what it launches is compiled once; a CPU has nothing to do."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from sonoro.core.config import EngineConfig
from sonoro.engine import compile as compilation
from sonoro.engine import follow
from sonoro.engine.compile import compiling
from sonoro.engine.follow import launched_by
from sonoro.runtime.ahead import Target
from sonoro.transport.messages import WorkerSettings
from tiny_checkpoint import write_checkpoint

H200 = Target("cuda", 90, 32)


def test_a_start_is_followed_without_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of every size is taken on tensors that have shapes alone."""
    write_checkpoint(tmp_path)
    config = EngineConfig(slots=3, max_positions=64, max_frames=32, prefill_tokens=64, prefill_buckets=(16,))
    runners: list[follow.Runner] = []

    class Kept(follow.Runner):
        def warm_up(self) -> None:
            runners.append(self)
            super().warm_up()

    monkeypatch.setattr(follow, "Runner", Kept)
    monkeypatch.setattr(follow, "recording", lambda target: nullcontext([]))
    assert launched_by(WorkerSettings(model=str(tmp_path), device="cuda", config=config), H200) == []
    (runner,) = runners
    assert runner.device.type == "meta"
    # Prompts of 16, 32 and 64 rows; frames of 1, 2 and 3 rows; four chunk lengths of 1 and 3 rows.
    launches = {kind: runner.launches[kind]["eager"] for kind in ("place", "prefill", "frame", "codec")}
    assert launches == {"place": 3, "prefill": 3, "frame": 3, "codec": 8}
    assert runner.launches["frame"]["graph"] == 0


@pytest.mark.parametrize("model", ["qwen3-tts-0.6b-customvoice", "fish-s2-pro", "voxcpm2"])
def test_what_is_found_is_compiled_once(model: str, tmp_path: Path) -> None:
    """In a process of its own, which from then on launches nothing: without a GPU Triton still compiles for one."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE_A_FEW, model], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    count, few = map(int, done.stdout.split())
    assert count > 50
    assert len(list(tmp_path.rglob("*.cubin"))) == few


COMPILE_A_FEW = """
import sys
from sonoro.core.config import EngineConfig
from sonoro.engine.follow import launched_by
from sonoro.runtime.ahead import Target, compile_all
from sonoro.transport.messages import WorkerSettings

config = EngineConfig(slots=2, codec_batches=(1,), prefill_buckets=(16,))
settings = WorkerSettings(model=sys.argv[1], device="cuda", config=config)
variants = launched_by(settings, Target("cuda", 90, 32))
assert len(set(variants)) == len(variants)
few = [variant for variant in variants if len(variant.kernel.src) < 1500][:4]
assert compile_all(few, 2) == [0, 0]
print(len(variants), len(few))
"""


@pytest.mark.parametrize("model", ["qwen3-tts-0.6b-customvoice", "fish-s2-pro", "voxcpm2"])
def test_the_attention_that_serves_is_the_one_that_is_checked(model: str) -> None:
    """And none besides: each takes seconds to compile."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", COMPARE, model], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


COMPARE = """
import sys
import torch
from sonoro.core.config import EngineConfig
from sonoro.engine.runner import Runner
from sonoro.models import registry
from sonoro.runtime.ahead import Target, recording

def attention(variants):
    return {variant for variant in variants if variant.kernel.__name__ == "decode"}

target = Target("cuda", 90, 32)
with recording(target) as checked:
    loaded = registry.load(sys.argv[1], device=torch.device("meta"), load_format="dummy")
    config = EngineConfig(slots=8, codec_batches=(1,), prefill_buckets=(16,), is_eager=True)
    runner = Runner(loaded.model, config.resolve())
with recording(target) as served:
    runner.warm_up()
assert attention(checked) == attention(served) != set()
"""


@pytest.mark.gpu
def test_a_start_compiles_nothing_that_was_compiled_ahead(tmp_path: Path) -> None:
    """The quick way, in processes that launch nothing, finds what the slow one would compile when it launches."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", START], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    hits, *missed = done.stdout.split()
    assert int(hits) > 50
    assert missed == []


START = """
import subprocess, sys
import triton
from sonoro.core.config import EngineConfig
from sonoro.engine.compile import compiling
from sonoro.engine.runner import Runner
from sonoro.models import registry
from sonoro.transport.messages import WorkerSettings

settings = WorkerSettings(model="qwen3-tts-0.6b-customvoice", load_format="dummy", config=EngineConfig(slots=4))
with compiling(settings):
    loaded = registry.load(settings.model, load_format="dummy")
hits, missed = [], []

def listen(*, src, cache_hit, **_):
    (hits if cache_hit else missed).append(src.name)

triton.knobs.compilation.listener = listen
Runner(loaded.model, settings.config).warm_up()
print(len(hits), *missed)
"""


def test_whatever_was_started_ends_when_loading_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process and those that it has started itself."""
    _has_a_gpu(monkeypatch, tmp_path)
    pids = tmp_path / "pids"
    code = (
        "import os, pathlib, sys, time; os.fork(); open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(pids)]
    monkeypatch.setattr(compilation, "_start", lambda *_: subprocess.Popen(command, process_group=0))

    def load() -> None:
        while not pids.exists() or len(pids.read_text().split()) < 2:
            time.sleep(0.01)
        raise KeyError

    with pytest.raises(KeyError), compiling(WorkerSettings(device="cuda")):
        load()
    for pid in map(int, pids.read_text().split()):
        while _is_running(pid):
            time.sleep(0.01)


def _is_running(pid: int) -> bool:
    """Whether `pid` is there and not merely waiting to be reaped by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_cpu_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def start(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(compilation, "_start", start)
    with compiling(WorkerSettings(device="cpu")):
        pass


def _has_a_gpu(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))


COMPILED = [
    sys.executable,
    "-c",
    "import pathlib, sys; path = pathlib.Path(sys.argv[1]); path.parent.mkdir(exist_ok=True); path.touch()",
]
"""Leaves what compiling leaves."""


def test_what_was_compiled_serves_whatever_the_folder_of_voices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several engines without a folder are given a new one at every start."""
    _has_a_gpu(monkeypatch, tmp_path)
    started: list[int] = []
    monkeypatch.setattr(
        compilation, "_start", lambda _, marker: started.append(1) or subprocess.Popen([*COMPILED, str(marker)])
    )
    for slots, folder, count in ((4, "", 1), (4, "one", 1), (4, "another", 1), (5, "another", 2)):
        with compiling(WorkerSettings(device="cuda", config=EngineConfig(slots=slots, voices_folder=folder))):
            pass
        assert len(started) == count


def test_an_engine_starts_where_nothing_can_be_compiled_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton knows no such GPU; the folder of its cache is none; the process fails."""

    def no_driver() -> Target:
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    def attempt(cache: Path) -> None:
        caplog.clear()
        _has_a_gpu(monkeypatch, cache)
        # A start that is soon followed.
        config = EngineConfig(slots=1, codec_batches=(1,), prefill_buckets=(16,))
        with compiling(WorkerSettings(device="cuda", config=config)):
            pass
        assert [record.message.partition(" ")[0] for record in caplog.records] == ["event=compile_failed"]

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(compilation, "current_target", no_driver)
    attempt(tmp_path / "cache")
    # A target of a kind that there is not.
    monkeypatch.setattr(compilation, "current_target", lambda: Target("abacus", 1, 1))
    attempt(tmp_path / "file")
    attempt(tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache" / "sonoro").iterdir()] == [".lock"]


COMPILE = """
import json, os, sys, time
from pathlib import Path
from sonoro.engine import follow
from sonoro.runtime.ahead import Variant

class Kernel:
    src, __name__ = "", "kernel"

    def preload(self, data):
        Path(sys.argv[3]).with_suffix(f".{os.getpid()}").touch()
        time.sleep(float(seconds))

def launched_by(settings, target):
    return [Variant(Kernel(), "")]

seconds, parent = sys.argv[1:]
follow.launched_by = launched_by
sys.argv[1:] = ["{}", '["cuda", 90, 32]', os.environ["MARKER"], parent]
follow.main()
"""


def _compile(marker: Path, seconds: float, parent: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", COMPILE, str(seconds), str(parent)]
    return subprocess.Popen(command, env={**os.environ, "MARKER": str(marker)}, process_group=0)


def _compilers(marker: Path) -> list[int]:
    """The forks that have compiled a kernel."""
    return [int(path.suffix[1:]) for path in marker.parent.glob("*.*") if path.suffix != ".lock"]


def test_engines_that_start_at_once_compile_once(tmp_path: Path) -> None:
    marker = tmp_path / "sonoro" / "marker"
    processes = [_compile(marker, 0.5, os.getpid()) for _ in range(3)]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    assert marker.exists()
    assert len(_compilers(marker)) == 1


def test_nobody_waits_for_one_that_was_killed(tmp_path: Path) -> None:
    marker = tmp_path / "sonoro" / "marker"
    killed = _compile(marker, 600, os.getpid())
    while not _compilers(marker):
        time.sleep(0.01)
    second = _compile(marker, 0, os.getpid())
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert second.wait(120) == 0
    assert marker.exists()
    assert len(_compilers(marker)) == 2


def test_compiling_ends_with_the_engine(tmp_path: Path) -> None:
    """Which may have been killed; it cannot end what it has started then."""
    marker = tmp_path / "sonoro" / "marker"
    gone = 2**22 + 1  # no process has such a number on Linux
    assert _compile(marker, 600, gone).wait(120) != 0
    assert not marker.exists()
    assert not any(map(_is_running, _compilers(marker)))
