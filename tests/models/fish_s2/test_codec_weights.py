"""codec.pth: strict by name and shape in every spelling, nothing run; random weights that sound."""

import math
import pickle
import re

import pytest
import torch

from fish_codec import CONFIG, CPU, make_codec
from sonoro.core.errors import CheckpointError, CheckpointNotFound, TensorMismatch
from sonoro.models.fish_s2 import codec_weights
from sonoro.models.fish_s2.codec import CodecConfig
from sonoro.nn.weights import count_parts
from tiny_fish_codec import codec_tensors, shapes_of, sound, write_codec

STALE = {
    "quantizer.post_module.causal_mask": torch.ones(2, 2, dtype=torch.bool),
    "quantizer.post_module.freqs_cis": torch.ones(2, 2, 2, dtype=torch.bfloat16),
}


def tensors():
    return {name: torch.from_numpy(tensor) for name, tensor in codec_tensors().items()}


def loaded(folder, stored):
    file = folder / "codec.pth"
    torch.save(stored, file)
    codec_weights.check(file, CONFIG)
    return codec_weights.load(file, CONFIG, device=CPU, dtype=torch.float32)


def refused(folder, stored, message, error=TensorMismatch):
    """Loading and checking refuse alike."""
    file = folder / "codec.pth"
    torch.save(stored, file)
    with pytest.raises(error, match=message):
        codec_weights.check(file, CONFIG)
    with pytest.raises(error, match=message):
        codec_weights.load(file, CONFIG, device=CPU, dtype=torch.float32)


def other_spelling(stored):
    """Each weight norm as the other kind writes it."""
    pairs = {
        ".parametrizations.weight.original0": ".weight_g",
        ".parametrizations.weight.original1": ".weight_v",
    }
    swapped = {}
    for name, tensor in stored.items():
        for one, other in [*pairs.items(), *((new, old) for old, new in pairs.items())]:
            if name.endswith(one):
                swapped[name.removesuffix(one) + other] = tensor
                break
        else:
            swapped[name] = tensor
    return swapped


def plain(stored):
    """Without weight norm, folded by torch itself."""
    folded = dict(stored)
    for lengths, directions in (
        (".parametrizations.weight.original0", ".parametrizations.weight.original1"),
        (".weight_g", ".weight_v"),
    ):
        for name in [name for name in stored if name.endswith(lengths)]:
            stem = name.removesuffix(lengths)
            folded[f"{stem}.weight"] = torch._weight_norm(folded.pop(stem + directions), folded.pop(name), 0)
    return folded


def test_released_names_and_shapes_are_known():
    assert codec_weights.stored_shapes(CONFIG) == shapes_of()
    released = codec_weights.stored_shapes(CodecConfig())
    assert len(released) == 535
    assert sum(map(math.prod, released.values())) == 391_430_530
    assert count_parts(released, codec_weights.PARTS) == {
        "codec decoder": 54_104_162 + 109_085_696 + 21_006_336,
        "codec codebooks": 51_216 + 239_760,
        "codec encoder": 76_851_328 + 109_085_696 + 21_006_336,
    }
    folded = 391_398_385
    assert codec_weights.weight_bytes(CodecConfig(), torch.float32) == 4 * folded
    assert codec_weights.weight_bytes(CodecConfig(), torch.float16) < 4 * folded - 2 * 184_000_000


@pytest.mark.parametrize("spell", [other_spelling, plain, lambda stored: stored | STALE])
def test_every_spelling_loads_the_same(tmp_path, spell):
    expected, codec = make_codec(dtype=torch.float32), loaded(tmp_path, spell(tensors()))
    for name, tensor in expected.state_dict().items():
        # 1e-6: norms summed in another order.
        torch.testing.assert_close(codec.state_dict()[name], tensor, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda stored: {"state_dict": stored},
        lambda stored: {f"generator.{name}": tensor for name, tensor in stored.items()},
        lambda stored: {"state_dict": {f"generator.{name}": tensor for name, tensor in stored.items()}},
    ],
)
def test_outer_names_are_stripped(tmp_path, wrap):
    assert torch.equal(loaded(tmp_path, wrap(tensors())).decoder.weight, make_codec(dtype=torch.float32).decoder.weight)


def test_every_tensor_counts(tmp_path):
    """Each of them missing is told by name."""
    stored = tensors()
    for name in [*stored][:: len(stored) // 7]:
        rest = {key: tensor for key, tensor in stored.items() if key != name}
        refused(tmp_path, rest, f"tensor '{re.escape(name)}'.* is missing")


def test_foreign_and_misshapen_tensors_are_refused(tmp_path):
    stored = tensors()
    refused(tmp_path, stored | {"decoder.model.9.alpha": torch.ones(3)}, "'decoder.model.9.alpha' .* not part")
    name = "quantizer.post_module.layers.1.feed_forward.w3.weight"
    refused(tmp_path, stored | {name: torch.ones(96, 63)}, rf"{name}' has shape \[96, 63\], expected \[96, 64\]")
    refused(tmp_path, stored | {"encoder.block.4.alpha": torch.ones(64)}, r"has shape \[64\], expected \[1, 64, 1\]")
    refused(tmp_path, stored | {name: torch.ones(96, 64, dtype=torch.int32)}, "stored as torch.int32")
    stem = "decoder.model.0.conv"
    lengths = f"{stem}.parametrizations.weight.original0"
    refused(tmp_path, stored | {lengths: torch.ones(48)}, r"original0' has shape \[48\], expected \[48, 1, 1\]")
    refused(tmp_path, stored | {f"{stem}.weight": torch.ones(48, 64, 7)}, f"{stem}' is stored in more than one way")


class _Trap:
    """Unpickling it would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_nothing_in_the_file_is_run(tmp_path):
    trap = tmp_path / "trap"
    for write in (torch.save, lambda stored, file: file.write_bytes(pickle.dumps(stored, protocol=2))):
        file = tmp_path / "codec.pth"
        write({"x": _Trap(trap)}, file)
        for use in (codec_weights.check, lambda *given: codec_weights.load(*given, device=CPU, dtype=torch.float32)):
            with pytest.raises(CheckpointError, match=r"codec\.pth is not a readable file of tensors alone"):
                use(file, CONFIG)
    assert not trap.exists()


def test_what_is_no_file_of_tensors_is_refused(tmp_path):
    file = tmp_path / "codec.pth"
    with pytest.raises(CheckpointNotFound, match=r"codec\.pth does not exist"):
        codec_weights.check(file, CONFIG)
    write_codec(file)
    whole = file.read_bytes()
    for content in (b"", b"text", whole[: len(whole) // 2]):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match="not a readable file of tensors alone"):
            codec_weights.load(file, CONFIG, device=CPU, dtype=torch.float32)
    refused(tmp_path, [torch.ones(2)], "holds list; expected tensors by name", CheckpointError)
    refused(tmp_path, {"decoder": 3}, "holds int as 'decoder'; expected tensors by name", CheckpointError)


def test_half_precision_beside_a_half_backbone_on_a_cpu_is_not_used(tmp_path):
    file = tmp_path / "codec.pth"
    write_codec(file)
    codec = codec_weights.load(file, CONFIG, device=CPU, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in codec.parameters()} == {torch.float32}


def test_random_weights_sound_and_speak():
    codec = codec_weights.init_dummy(CONFIG, 0, device=CPU, dtype=torch.float32)
    frames = torch.randint(0, CONFIG.residual_codes, (2, 64, 10), generator=torch.Generator().manual_seed(0))
    audio = codec.decode(frames)
    assert 0.05 < audio.square().mean().sqrt() < 0.5
    assert (audio.abs() > 0.99).float().mean() < 0.01
    again = codec_weights.init_dummy(CONFIG, 0, device=CPU, dtype=torch.float32)
    assert torch.equal(again.decode(frames), audio)
    codes = codec.encode(torch.from_numpy(sound(64 * codec.hop)).float())
    assert codes.shape == (64, 10)
    assert min(len(column.unique()) for column in codes.T) >= 5
