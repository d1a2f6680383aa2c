"""Reading what `torch.save` wrote, and folding weight norm."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from sonoro.core.errors import CheckpointError, TensorMismatch
from sonoro.nn.torch_file import fold_norms, read

FILE = Path("codec.pth")


@pytest.mark.parametrize("is_old_format", [False, True])
def test_tensors_are_read_as_they_were_saved(tmp_path, is_old_format):
    stored = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
    file = tmp_path / "codec.pth"
    torch.save(stored, file, _use_new_zipfile_serialization=not is_old_format)
    found = read(file, "cpu")
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())
    torch.save({"state_dict": stored, "epoch": 3}, file)
    assert read(file, "meta")["a"].shape == (2, 3)
    torch.save({"tensors": stored}, file)
    with pytest.raises(CheckpointError, match="holds dict as 'tensors'; expected tensors by name"):
        read(file, "cpu")


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_what_is_no_whole_file_is_refused(tmp_path, suffix):
    stored, file = {"a": torch.ones(2), "edges": torch.tensor([3, 5], dtype=torch.int32)}, tmp_path / f"x.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)(stored, file)
    for device in ("cpu", "meta"):
        assert read(file, device)["edges"].dtype == torch.int32
    assert read(file, "cpu")["edges"].tolist() == [3, 5]
    for content in (b"", b"text", file.read_bytes()[:-4]):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match="not a readable file of tensors alone"):
            read(file, "cpu")


@pytest.mark.parametrize("layer", [nn.Conv1d(4, 6, 3), nn.ConvTranspose1d(4, 6, 3), nn.Linear(4, 6)])
def test_folding_gives_the_weight_that_the_norm_stands_for(layer):
    normed = nn.ModuleDict({"layer": weight_norm(layer)})
    with torch.no_grad():
        normed["layer"].parametrizations.weight.original0.mul_(1.7)
    folded = fold_norms(normed.state_dict(), FILE)
    assert folded.keys() == {"layer.weight", "layer.bias"}
    torch.testing.assert_close(folded["layer.weight"], normed["layer"].weight.detach(), atol=1e-6, rtol=0)


def test_half_a_norm_and_two_spellings_are_refused():
    lengths, directions = torch.ones(2, 1, 1), torch.ones(2, 3, 3)
    stem = "x.parametrizations.weight.original"
    with pytest.raises(TensorMismatch, match=r"'x\.weight_g' is missing, half of a weight norm"):
        fold_norms({"x.weight_v": directions}, FILE)
    with pytest.raises(TensorMismatch, match=r"original0' has shape \[2\], expected \[2, 1, 1\]"):
        fold_norms({f"{stem}0": lengths.flatten(), f"{stem}1": directions}, FILE)
    with pytest.raises(TensorMismatch, match="'x' is stored in more than one way"):
        fold_norms({"x.weight_v": directions, "x.weight_g": lengths, "x.weight": directions}, FILE)
    both = {"x.weight_v": directions, "x.weight_g": lengths, f"{stem}0": lengths, f"{stem}1": directions}
    with pytest.raises(TensorMismatch, match="'x' is stored in more than one way"):
        fold_norms(both, FILE)
