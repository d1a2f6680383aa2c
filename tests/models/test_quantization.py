"""Weights in 8 bits: what is kept so and what is not, that speech is that of the rounded weights, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import TinyFamily, tiny
from parity import begin, capacity

from sonoro.core.config import EngineConfig
from sonoro.core.errors import ConfigError
from sonoro.models import registry
from sonoro.models.base import LoadedModel
from sonoro.nn.linear import Linear
from sonoro.nn.transformer import DecoderLayer
from sonoro.ops.device import TYPICAL, Card, recorded
from sonoro.ops.eight_bits import EIGHT_BITS, dequantized

__all__ = ["tiny"]

CPU = torch.device("cpu")
FORMATS = ("int8", "fp8")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def modules(tiny: TinyFamily, folder: Path, quantization: str, dtype: torch.dtype = torch.float64) -> Any:
    tiny.write(folder)
    config = tiny.family.read(folder)
    return tiny.family.files.load(folder, config, device=CPU, dtype=dtype, quantization=quantization)


def layers(lm: torch.nn.Module) -> dict[str, Linear]:
    """The products of all layers by name."""
    stacks = {name: part for name, part in lm.named_modules() if isinstance(part, DecoderLayer)}
    return {
        f"{stack}.{name}": part
        for stack, layer in stacks.items()
        for name, part in layer.named_modules()
        if isinstance(part, Linear)
    }


@pytest.mark.parametrize("quantization", FORMATS)
def test_the_weights_of_layers_alone_are_in_8_bits(tiny: TinyFamily, quantization: str, tmp_path: Path) -> None:
    plain, made = (modules(tiny, tmp_path, name, torch.bfloat16) for name in ("none", quantization))
    products = layers(made.lm)
    assert len(products) >= 4 * 2
    for name, part in products.items():
        assert part.weight.dtype == EIGHT_BITS[quantization]
        assert part.scale is not None
        assert part.scale.shape == (part.out_features,)
        original = layers(plain.lm)[name].weight.float()
        apart = dequantized(part.weight, part.scale, torch.float32) - original
        # Row by row, those of fused projections too: half a step, or a part of 16 of the number itself.
        assert bool(
            (apart.abs().amax(1) <= original.abs().amax(1) * (1 / 250 if quantization == "int8" else 1 / 15)).all()
        )
    kept = {f"{name}.weight" for name in products}
    rest = {name: tensor for name, tensor in made.lm.state_dict().items() if name not in kept}
    assert all(torch.equal(tensor, plain.lm.state_dict()[name]) for name, tensor in rest.items())
    assert all(
        torch.equal(t, plain.codec.decoder.state_dict()[name]) for name, t in made.codec.decoder.state_dict().items()
    )


@torch.inference_mode()
def spoken(model: Any, prompts: list[Any]) -> torch.Tensor:
    """Some frames of `prompts`."""
    state = model.allocate(capacity(len(prompts), 256, 20, 64))
    slots = torch.arange(len(prompts))
    begin(model, state, prompts, slots)
    for _ in range(4):
        model.frame(state, slots)
    frames: torch.Tensor = state.frames[:-1].double()
    return frames


@pytest.mark.parametrize("quantization", FORMATS)
def test_speech_is_that_of_the_rounded_weights(tiny: TinyFamily, quantization: str, tmp_path: Path) -> None:
    made, rounded = modules(tiny, tmp_path, quantization), modules(tiny, tmp_path, "none")
    with torch.no_grad():
        for name, part in layers(rounded.lm).items():
            source = layers(made.lm)[name]
            part.weight.copy_(dequantized(source.weight, source.scale, torch.float64))
    config = tiny.family.read(tmp_path)
    models = [
        tiny.family.model("tiny", config, one, tiny.family.tokenizer(config, tmp_path)) for one in (made, rounded)
    ]
    found, expected = (spoken(model, tiny.prompts_of_all_kinds()[:2]) for model in models)
    assert bool((expected != 0).any())
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_the_bytes_are_those_told(tiny: TinyFamily, tmp_path: Path) -> None:
    for quantization in ("none", *FORMATS):
        made = modules(tiny, tmp_path, quantization, torch.bfloat16)
        tensors = [*made.lm.state_dict().values(), *(p.scale for p in layers(made.lm).values() if p.scale is not None)]
        told = tiny.family.files.weight_bytes(tiny.family.read(tmp_path), torch.bfloat16, quantization)
        codec = tiny.family.files.codec.weight_bytes(
            tiny.family.files.codec_config(tiny.family.read(tmp_path)), torch.float32
        )
        assert told - codec == sum(tensor.nbytes for tensor in tensors)


def test_random_weights_are_kept_so_too(tiny: TinyFamily, tmp_path: Path) -> None:
    tiny.write(tmp_path)
    loaded: LoadedModel = tiny.family.from_random(tmp_path, "tiny", CPU, torch.float32, "int8")
    assert loaded.quantization == "int8"


def test_a_format_that_a_family_or_a_card_does_not_have_is_refused(
    tiny: TinyFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write(tmp_path)
    formats = tiny.family.quantizations
    assert registry.offered(tmp_path) == registry.offered(tmp_path, TYPICAL[8, 9]) == ("none", *formats)
    with pytest.raises(ConfigError, match=r"quantization.*int4.*offered as none or .*fp8"):
        registry.load(tmp_path, device="cpu", quantization="int4")
    with pytest.raises(ConfigError, match=r"quantization.*int4"):
        EngineConfig(quantization="int4")
    monkeypatch.setattr(registry, "_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(registry, "use_own_plans", lambda device: None)

    def on(card: Card) -> None:
        monkeypatch.setattr(registry, "card", lambda device: card)

    for kind in ((7, 5), (8, 0), (8, 6), "gfx942", "gfx1100"):
        on(TYPICAL[kind])
        with pytest.raises(
            ConfigError, match=f"fp8.*{tiny.family.model_type} is offered as none( or int8)? on "
        ) as refusal:
            registry.load(tmp_path, quantization="fp8")
        assert TYPICAL[kind].name in str(refusal.value)
        assert registry.offered(tmp_path, TYPICAL[kind]) == ("none", *(one for one in formats if one == "int8"))
    only = tiny.family.__class__(**{**vars(tiny.family), "quantizations": ("int8",)})
    monkeypatch.setattr(registry, "FAMILIES", (only,))
    on(TYPICAL[9, 0])
    with pytest.raises(ConfigError, match=f"{only.model_type} is offered as none or int8"):
        registry.load(tmp_path, quantization="fp8")


def test_a_format_that_failed_its_gate_is_not_offered() -> None:
    """Every format whose logits are measured at full size is offered exactly if they hold."""
    measured = 0
    for family in registry.FAMILIES:
        for name in family.configurations:
            for quantization in FORMATS:
                for path in RESULTS.glob(f"quantization-logits-{name}-{quantization}.json"):
                    holds = json.loads(path.read_text(encoding="utf-8"))["holds"]
                    assert (quantization in registry.offered(name)) == holds, path.name
                    measured += 1
    assert measured >= 5
    for how in ({"load_format": "dummy"}, {}):
        with pytest.raises(
            ConfigError, match=r"quantization: 'int8' is not allowed; voxcpm2 is offered as none or fp8$"
        ):
            registry.load("voxcpm2", device="cpu", quantization="int8", **how)


def test_a_card_without_bfloat16_has_another_dtype_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu, family = torch.device("cuda"), registry.FAMILIES[0]
    holds = replace(family, holds_float16=True)
    for kind, expected in (((7, 5), torch.float32), ((8, 0), torch.bfloat16), ("gfx942", torch.bfloat16)):
        monkeypatch.setattr(registry, "card", lambda device, on=TYPICAL[kind]: on)
        caplog.clear()
        assert registry._dtype(None, gpu, family) == expected
        assert ("Tesla T4 has no units for bfloat16" in caplog.text) == (kind == (7, 5))
        assert registry._dtype(None, gpu, holds) == (torch.float16 if kind == (7, 5) else torch.bfloat16)
        # What is asked for is taken.
        assert registry._dtype("bfloat16", gpu, family) == torch.bfloat16
        # Kernels that are compiled elsewhere are those of the same dtype.
        with recorded(TYPICAL[kind]):
            assert registry._dtype(None, torch.device("meta"), family) == expected
