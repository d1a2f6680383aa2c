"""The script that times Pocket TTS beside the official package: its checkpoint, and our side of it."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_pocket import pieces

import beside_pocket
from official_pocket import FRAMES, Asked

RELEASE = "english_2m_2026-10"


def test_our_side_speaks_the_checkpoint_that_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiny_pocket.pieces", pieces)
    folder = tmp_path / RELEASE
    beside_pocket.write_checkpoint(folder, RELEASE)
    (folder / "embeddings").mkdir()
    # In place of what the official package exports.
    voice = {"audio_prompt": np.full((1, 7, 112), 0.1, np.float32)}
    save_file(voice, folder / "embeddings" / "alba.safetensors")
    speak = beside_pocket.speaker(Asked(folder, "none", "cpu"))
    for _ in range(2):
        assert sum(chunk.numel() for chunk in speak()) == FRAMES * 1920
