"""What devices can do."""

import pytest
import torch

from sonoro.ops.device import capability


def test_numbers_of_amd_are_not_taken_for_those_of_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MI300 says (9, 4), and is no Hopper."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    assert capability.__wrapped__(torch.device("cuda", 0)) == (0, 0)
