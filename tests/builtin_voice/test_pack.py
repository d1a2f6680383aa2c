"""What travels in pieces is what was packed."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from builtin_voice import pack, settings
from builtin_voice.voice_codec import VoiceCodec


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
    weights = {"talker": {"a": torch.randn(9, 5), "count": torch.tensor(3)}, "step": 7}
    torch.save(weights, tmp_path / "talker-snapshot.pt")
    pack.pack(tmp_path / "talker-snapshot.pt", tmp_path)
    pack.unpack(tmp_path / "talker-snapshot.pt", tmp_path)
    found = torch.load(tmp_path / "talker-snapshot.pt", weights_only=True)
    assert torch.equal(found["talker"]["a"], weights["talker"]["a"].half().float())
    assert (found["talker"]["count"], found["step"]) == (3, 7)


def test_a_codec_is_whole_again(tmp_path: Path, tiny_codec: VoiceCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its encoder travels once, and what is drawn not at all."""
    learned = copy.deepcopy(tiny_codec)
    with torch.no_grad():
        for name, parameter in learned.decoder.named_parameters():
            parameter.add_(0.0 if name.startswith("quantizer.") else 0.5)
        for module in (tiny_codec, learned):
            for tensor in module.state_dict().values():
                tensor.copy_(tensor.half())
    monkeypatch.setattr(pack, "VoiceCodec", lambda _: tiny_codec)
    (tmp_path / "sent").mkdir()
    for name, module in (("encoder.pt", tiny_codec), ("codec.pt", learned)):
        torch.save(module.state_dict(), tmp_path / name)
        pack.pack(tmp_path / name, tmp_path / "sent")
        size = (tmp_path / name).stat().st_size
        assert sum(piece.stat().st_size for piece in (tmp_path / "sent").glob(f"{name}.*")) < 0.51 * size
        (tmp_path / name).unlink()
    for name, module in (("encoder.pt", tiny_codec), ("codec.pt", learned)):
        pack.unpack(tmp_path / name, tmp_path / "sent")
        found = torch.load(tmp_path / name, weights_only=True)
        assert found.keys() == module.state_dict().keys()
        assert all(torch.equal(value, found[key]) for key, value in module.state_dict().items())
