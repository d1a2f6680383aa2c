"""Compiling in shares: every size is in one of them, each is a configuration that works; a CPU has nothing to do."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from sonoro.core.config import EngineConfig
from sonoro.engine import compile as compilation
from sonoro.engine.compile import compiling, shares_of
from sonoro.transport.messages import WorkerSettings
from tiny_checkpoint import write_checkpoint


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 40])
@pytest.mark.parametrize("slots", [1, 3, 64, 256])
def test_shares_hold_every_size(slots: int, count: int) -> None:
    config = EngineConfig(slots=slots).resolve()
    shares = shares_of(config, count)
    assert 1 <= len(shares) <= count
    assert {size for share in shares for size in share.frame_batches} >= set(config.frame_batches)
    prefills = {*config.prefill_buckets, *config.long_prefills}
    assert (
        {size for share in shares for size in share.prefill_buckets}
        == prefills
        == {16, 32, 64, 128, 256, 512, 1024, 2048}
    )
    launches = {(frames, batch) for share in shares for frames in share.chunk_frames for batch in share.codec_batches}
    assert launches == {(frames, batch) for frames in config.chunk_frames for batch in config.codec_batches}
    assert all(share.is_eager and share.pages == config.pages_per_slot for share in shares)


def test_a_share_runs_its_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU there is nothing to compile, but every step of it is taken."""
    write_checkpoint(tmp_path)
    config = EngineConfig(slots=3, max_positions=64, max_frames=32, prefill_tokens=64, prefill_buckets=(16,))
    runs: list[int] = []

    class Counting(compilation.Runner):
        def warm_up(self) -> None:
            super().warm_up()
            runs.append(sum(self.launches[kind]["eager"] for kind in ("prefill", "frame", "codec")))

    monkeypatch.setattr(compilation, "Runner", Counting)
    for share in shares_of(config, 2):
        settings = WorkerSettings(model=str(tmp_path), device="cpu", config=share)
        monkeypatch.setattr(sys, "argv", ["compile", msgspec.json.encode(settings).decode()])
        compilation.main()
    # Prompts of 16, 32 and 64 rows; frames of 1 and 3, and of 2, rows; four chunk lengths at two batch sizes in all.
    assert sum(runs) == 3 + 3 + 8


def test_a_cpu_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def start(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(compilation, "_start", start)
    with compiling(WorkerSettings(device="cpu")):
        pass


def test_what_was_compiled_serves_whatever_the_folder_of_voices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several engines without a folder are given a new one at every start."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    started: list[int] = []
    share = [sys.executable, "-c", ""]
    monkeypatch.setattr(compilation, "_process_count", lambda settings: 1)
    monkeypatch.setattr(compilation, "_start", lambda *_: started.append(1) or subprocess.Popen(share))
    for slots, folder, count in ((4, "", 1), (4, "one", 1), (4, "another", 1), (5, "another", 2)):
        with compiling(WorkerSettings(device="cuda", config=EngineConfig(slots=slots, voices_folder=folder))):
            pass
        assert len(started) == count
