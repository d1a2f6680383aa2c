"""`sonoro compile` refuses what it cannot compile for, and says what there is."""

import pytest
import torch
from processes import Run, assert_refused, sonoro

__all__ = ["sonoro"]

H200 = ["--device-name", "NVIDIA H200"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device-name", "NVIDIA H2000"], ["device_name", "NVIDIA H2000", "NVIDIA H200", "NVIDIA L4"]),
        ([], ["device_name", "there is no GPU here"]),
        ([*H200, "--slots", "0"], ["slots", "0"]),
        ([*H200, "--processes", "0"], ["processes", "at least 1"]),
        ([*H200, "--config", "nowhere.yaml"], ["nowhere.yaml"]),
    ],
)
def test_what_cannot_be_compiled_for_is_said(
    arguments: list[str], words: list[str], sonoro: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(*sonoro("compile", "fish-s2-pro", *arguments), words)
