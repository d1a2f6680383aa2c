"""Files of codecs: strict by name and shape in every spelling, nothing run; random weights that sound."""

import pickle
import re
from typing import Any, NamedTuple

import pytest
import tiny_dual_ar
import tiny_fish
import tiny_vox
import tiny_vox_lm
import torch
from torch import nn

from sonoro.core.errors import CheckpointError, CheckpointNotFound, TensorMismatch
from sonoro.models.fish_s2 import codec_weights as fish_weights
from sonoro.models.shared.codec_file import UNIT_NAMES, CodecFile, spread_rates
from sonoro.models.voxcpm2 import codec_weights as vox_weights
from sonoro.nn import torch_file
from sonoro.nn.weights import DummyRule, Fusion

CPU = torch.device("cpu")


class Codec(NamedTuple):
    """A codec's file, and what its tests are made of; `first` and `last` are layers with weight norm."""

    weights: Any
    config: Any
    tiny: Any
    make: Any
    normed: str
    linear: str

    def tensors(self):
        return {name: torch.from_numpy(tensor) for name, tensor in self.tiny.codec_tensors().items()}

    def loaded(self, folder, stored):
        file = folder / self.weights.CODEC_FILE
        torch.save(stored, file)
        self.weights.FILE.check(file, self.config)
        return self.weights.FILE.load(file, self.config, device=CPU, dtype=torch.float32)

    def refused(self, folder, stored, message, error=TensorMismatch):
        """Loading and checking refuse alike."""
        file = folder / self.weights.CODEC_FILE
        torch.save(stored, file)
        for use in self.uses():
            with pytest.raises(error, match=message):
                use(file)

    def uses(self):
        return (
            lambda file: self.weights.FILE.check(file, self.config),
            lambda file: self.weights.FILE.load(file, self.config, device=CPU, dtype=torch.float32),
        )


CODECS = {
    "fish_s2": Codec(
        fish_weights,
        tiny_dual_ar.CONFIG,
        tiny_fish,
        tiny_dual_ar.make_codec,
        "decoder.model.0.conv",
        "quantizer.post_module.layers.1.feed_forward.w3.weight",
    ),
    "voxcpm2": Codec(
        vox_weights,
        tiny_vox_lm.CONFIG,
        tiny_vox,
        tiny_vox_lm.make_codec,
        "decoder.model.1",
        "decoder.sr_cond_model.3.bias_embed.weight",
    ),
}
SPELLINGS = ((".parametrizations.weight.original0", ".parametrizations.weight.original1"), (".weight_g", ".weight_v"))


@pytest.fixture(params=CODECS)
def codec(request):
    return CODECS[request.param]


def other_spelling(stored):
    """Each weight norm as the other kind writes it."""
    (old, new), swapped = SPELLINGS, dict(stored)
    pairs = [*zip(old, new, strict=True), *zip(new, old, strict=True)]
    for name in stored:
        for one, other in pairs:
            if name.endswith(one):
                swapped[name.removesuffix(one) + other] = swapped.pop(name)
                break
    return swapped


def plain(stored):
    """Without weight norm, folded by torch itself."""
    folded = dict(stored)
    for lengths, directions in SPELLINGS:
        for name in [name for name in stored if name.endswith(lengths)]:
            stem = name.removesuffix(lengths)
            folded[f"{stem}.weight"] = torch._weight_norm(folded.pop(stem + directions), folded.pop(name), 0)
    return folded


def test_released_names_and_shapes_are_known(codec):
    assert codec.weights.FILE.stored_shapes(codec.config) == codec.tiny.shapes_of()


@pytest.mark.parametrize("spell", [other_spelling, plain, lambda stored: {"state_dict": stored}])
def test_every_spelling_loads_the_same(tmp_path, codec, spell):
    stored = codec.tensors()
    expected, loaded = codec.make(dtype=torch.float32), codec.loaded(tmp_path, spell(stored))
    for name, tensor in expected.state_dict().items():
        # 1e-6: norms summed in another order.
        torch.testing.assert_close(loaded.state_dict()[name], tensor, atol=1e-6, rtol=1e-6)


def test_every_tensor_counts(tmp_path, codec):
    """Each of them missing is told by name."""
    stored, unused = codec.tensors(), "fc_logvar"
    needed = [name for name in codec.tiny.shapes_of() if unused not in name]
    for name in needed[:: len(needed) // 7]:
        rest = {key: tensor for key, tensor in stored.items() if key != name}
        codec.refused(tmp_path, rest, f"tensor '{re.escape(name)}'.* is missing")


def test_foreign_and_misshapen_tensors_are_refused(tmp_path, codec):
    stored, name, stem = codec.tensors(), codec.linear, codec.normed
    rows, columns = stored[name].shape
    codec.refused(tmp_path, stored | {"decoder.model.9.alpha": torch.ones(3)}, "'decoder.model.9.alpha' .* not part")
    message = rf"{name}' has shape \[{rows}, {columns - 1}\], expected \[{rows}, {columns}\]"
    codec.refused(tmp_path, stored | {name: torch.ones(rows, columns - 1)}, message)
    wrong = {name: torch.ones(rows, columns, dtype=torch.int32)}
    codec.refused(tmp_path, stored | wrong, "stored as torch.int32")
    alpha = "encoder.block.1.block.3.alpha"
    codec.refused(tmp_path, stored | {alpha: torch.ones(8)}, r"has shape \[8\], expected \[1, 8, 1\]")
    lengths = next(stem + ends[0] for ends in SPELLINGS if stem + ends[0] in stored)
    count = len(stored[lengths])
    message = rf"{re.escape(lengths)}' has shape \[{count}\], expected \[{count}, 1, 1\]"
    codec.refused(tmp_path, stored | {lengths: torch.ones(count)}, message)
    twice = {f"{stem}.weight": torch.ones(count, 64, 7)}
    codec.refused(tmp_path, stored | twice, f"{stem}' is stored in more than one way")


class _Trap:
    """Unpickling it would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_nothing_in_the_file_is_run(tmp_path, codec):
    trap, file = tmp_path / "trap", tmp_path / codec.weights.CODEC_FILE
    for write in (torch.save, lambda stored, file: file.write_bytes(pickle.dumps(stored, protocol=2))):
        write({"x": _Trap(trap)}, file)
        for use in codec.uses():
            with pytest.raises(CheckpointError, match=rf"{file.name} is not a readable file of tensors alone"):
                use(file)
    assert not trap.exists()


def test_what_is_no_file_of_tensors_is_refused(tmp_path, codec):
    file = tmp_path / codec.weights.CODEC_FILE
    check, load = codec.uses()
    with pytest.raises(CheckpointNotFound, match=rf"{file.name} does not exist"):
        check(file)
    codec.tiny.write_codec(file)
    whole = file.read_bytes()
    for content in (b"", b"text", whole[: len(whole) // 2]):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match="not a readable file of tensors alone"):
            load(file)
    codec.refused(tmp_path, [torch.ones(2)], "holds list; expected tensors by name", CheckpointError)
    codec.refused(tmp_path, {"decoder": 3}, "holds int as 'decoder'; expected tensors by name", CheckpointError)


def test_half_precision_beside_a_half_backbone_on_a_cpu_is_not_used(tmp_path, codec):
    file = tmp_path / codec.weights.CODEC_FILE
    codec.tiny.write_codec(file)
    loaded = codec.weights.FILE.load(file, codec.config, device=CPU, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}


def test_random_weights_sound(codec):
    drawn = [codec.weights.FILE.init_dummy(codec.config, 0, device=CPU, dtype=torch.float32) for _ in range(2)]
    frames = drawn[0].decoder.example(2, 64)
    audio, again = (one.decode(frames) for one in drawn)
    assert 0.05 < audio.square().mean().sqrt() < 0.5
    assert (audio.abs() > 0.99).float().mean() < 0.01
    assert torch.equal(audio, again)


class Toy(nn.Module):
    """All that can be told of a codec's file: a fused layer, weight norm of both kinds, a wide rate."""

    def __init__(self, width):
        super().__init__()
        rate = nn.Module()
        rate.alpha = nn.Parameter(torch.empty(width))
        self.body = nn.ModuleDict({"both": nn.Linear(width, 2 * width), "act1": rate, "conv1": nn.Conv1d(width, 2, 3)})
        self.is_final = False

    def finalize(self):
        self.is_final = True


WIDTH, SIDES = 4, ("left", "right")


TOY = CodecFile(
    make=Toy,
    renames={r"^body\.": "net.", r"^net\.(left|right)": r"net.part.\1", r"\.(?=conv1\.)": ".main."} | UNIT_NAMES,
    fusions=lambda width: (Fusion("body.", "both", {"left": 1, "right": 1}),),
    shape_of=spread_rates,
    norms={r"net\.main\.block\.1": 0, r"net\.part\..*": 1},
    unused=lambda width: {"net.spare": (width,)},
    arrange=lambda codec, name, value: value.flip(0) if name == "body.both.bias" else value,
    is_wide=lambda name: name.endswith(".alpha"),
    rules=(DummyRule(r"\.alpha$", mean=5.0, std=0.1),),
)
TOY_SHAPES = {
    "net.part.left.weight_g": (4, 1),
    "net.part.left.weight_v": (4, 4),
    "net.part.right.weight_g": (4, 1),
    "net.part.right.weight_v": (4, 4),
    "net.part.left.bias": (4,),
    "net.part.right.bias": (4,),
    "net.block.0.alpha": (1, 4, 1),
    "net.main.block.1.parametrizations.weight.original0": (2, 1, 1),
    "net.main.block.1.parametrizations.weight.original1": (2, 4, 3),
    "net.main.block.1.bias": (2,),
    "net.spare": (4,),
}
"""By released name, weight norms as each layer is told to have them."""


@pytest.fixture
def toy():
    """What a release of it holds."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in TOY_SHAPES.items()}


def test_a_release_is_described_by_its_own_names():
    assert TOY.stored_shapes(WIDTH) == TOY_SHAPES


@pytest.mark.parametrize("is_spare", [True, False])
def test_stored_tensors_become_those_of_the_module(tmp_path, toy, is_spare):
    if not is_spare:
        del toy["net.spare"]
    file = tmp_path / "toy.pth"
    torch.save({name: tensor.half() for name, tensor in toy.items()}, file)
    toy = {name: tensor.half().float() for name, tensor in toy.items()}
    codec = TOY.load(file, WIDTH, device=CPU, dtype=torch.float32)
    found = codec.state_dict()
    sides = [torch._weight_norm(toy[f"net.part.{side}.weight_v"], toy[f"net.part.{side}.weight_g"]) for side in SIDES]
    torch.testing.assert_close(found["body.both.weight"], torch.cat(sides), atol=1e-6, rtol=1e-6)
    biases = torch.cat([toy[f"net.part.{side}.bias"] for side in SIDES])
    assert torch.equal(found["body.both.bias"], biases.flip(0))
    assert torch.equal(found["body.act1.alpha"], toy["net.block.0.alpha"].flatten())
    lengths, directions = (toy[f"net.main.block.1.parametrizations.weight.original{part}"] for part in (0, 1))
    expected = torch._weight_norm(directions, lengths)
    torch.testing.assert_close(found["body.conv1.weight"], expected, atol=1e-6, rtol=1e-6)
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    assert codec.is_final


def test_checking_computes_no_values(tmp_path, toy, monkeypatch):
    file, devices, fold = tmp_path / "toy.pth", [], torch_file.fold_norms
    torch.save(toy, file)

    def fold_and_note(tensors, file):
        devices.extend(tensor.device.type for tensor in tensors.values())
        return fold(tensors, file)

    monkeypatch.setattr(torch_file, "fold_norms", fold_and_note)
    assert TOY.check(file, WIDTH) == TOY_SHAPES
    assert set(devices) == {"meta"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"net.part.right.weight_v": None}, r"'net\.part\.right\.weight_v' is missing, half of a weight norm"),
        ({"net.part.right.bias": None}, r"'net\.part\.right\.bias' \[4\] is missing"),
        ({"net.block.0.alpha": torch.ones(4)}, r"'net\.block\.0\.alpha' has shape \[4\], expected \[1, 4, 1\]"),
        ({"net.spare": torch.ones(5)}, r"'net\.spare' has shape \[5\], expected \[4\]"),
        ({"net.both.bias": torch.ones(8)}, r"'net\.both\.bias' \[8\] is not part of the model"),
    ],
)
def test_what_is_wrong_is_said_in_released_names(tmp_path, toy, changes, message):
    file = tmp_path / "toy.pth"
    torch.save({name: tensor for name, tensor in (toy | changes).items() if tensor is not None}, file)
    for use in (TOY.check, lambda *given: TOY.load(*given, device=CPU, dtype=torch.float32)):
        with pytest.raises(TensorMismatch, match=rf"toy\.pth: .*{message}"):
            use(file, WIDTH)


def test_random_weights_follow_the_rules():
    codec = TOY.init_dummy(WIDTH, 3, device=CPU, dtype=torch.bfloat16)
    assert codec.is_final
    assert (codec.body["act1"].alpha - 5).abs().max() < 1
    assert codec.body["both"].weight.std() > 0.1
    again, other = (TOY.init_dummy(WIDTH, seed, device=CPU, dtype=torch.bfloat16) for seed in (3, 4))
    assert torch.equal(again.body["both"].weight, codec.body["both"].weight)
    assert not torch.equal(other.body["both"].weight, codec.body["both"].weight)


def test_weights_are_counted_in_their_own_dtypes():
    assert TOY.weight_bytes(WIDTH, torch.float16) == 2 * (8 * 4 + 8 + 2 * 4 * 3 + 2) + 4 * 4
