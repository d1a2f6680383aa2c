"""What travels in pieces is what was packed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from builtin_voice import pack, settings


def test_codes_come_back_in_their_first_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "PIECE_BYTES", 1500)
    frames, tokens = torch.tensor([3, 50, 7] * 2), torch.tensor([2, 4, 1, 3, 5, 1])
    stored = {
        "texts": torch.arange(16, dtype=torch.int16),
        "text_lengths": tokens,
        "codes": torch.randint(settings.CODEBOOK_SIZE, (120, settings.CODEBOOKS), dtype=torch.int16),
        "code_lengths": frames,
        "voices": ["af_heart", "bm_george", "af_heart"],
    }
    torch.save(stored, tmp_path / "codes.pt")
    pack.pack(tmp_path / "codes.pt", tmp_path)
    assert len(list(tmp_path.glob("codes.pt.*"))) > 1
    (tmp_path / "codes.pt").unlink()
    pack.unpack(tmp_path / "codes.pt", tmp_path)
    found = torch.load(tmp_path / "codes.pt", weights_only=True)
    assert found["voices"] == stored["voices"]
    expected = {"texts": 7, "text_lengths": 3, "codes": 60, "code_lengths": 3}
    for name, count in expected.items():
        assert torch.equal(found[name], stored[name][:count])


def test_weights_come_back_in_16_bits(tmp_path: Path) -> None:
    weights = {"codec": {"a": torch.randn(9, 5), "count": torch.tensor(3)}, "step": 7}
    torch.save(weights, tmp_path / "codec.pt")
    pack.pack(tmp_path / "codec.pt", tmp_path)
    pack.unpack(tmp_path / "codec.pt", tmp_path)
    found = torch.load(tmp_path / "codec.pt", weights_only=True)
    assert torch.equal(found["codec"]["a"], weights["codec"]["a"].half().float())
    assert (found["codec"]["count"], found["step"]) == (3, 7)
