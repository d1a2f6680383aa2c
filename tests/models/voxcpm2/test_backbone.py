"""Each part of the language models and of the flow against the official ones, on the same weights and inputs."""

import dataclasses
from pathlib import Path

import pytest
import torch
from parity import Case
from tiny_vox_lm import cases, tiny_lm
from torch import Tensor

from sonoro.core.errors import CheckpointError
from sonoro.models.voxcpm2.backbone import VoxLM
from sonoro.models.voxcpm2.config import lm_config, local_config, read
from sonoro.models.voxcpm2.flow import MOST_STEPS
from sonoro.nn.flow import schedule
from sonoro.nn.transformer import causal_attention, rotate

STEPS = range(2, MOST_STEPS + 1)


@pytest.fixture(scope="module")
def lm() -> VoxLM:
    return tiny_lm()


def tensors_of(case: Case) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in case.tensors.items()}


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Float32, other orders of sums; values are about 1 to 10."""
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_the_local_encoder_and_the_quantiser_are_the_official_ones(lm: VoxLM, reference_root: Path) -> None:
    given = tensors_of(cases("modules", reference_root)["parts"])
    assert_near(lm.feat_encoder(given["patches"]), given["encoded"])
    assert_near(lm.fsq_layer(given["hidden"]), given["quantised"])
    assert_near(lm.stop_logits(given["hidden"]), given["stop"])
    audio = torch.tensor([index % 2 == 0 for index in range(9)])
    expected = torch.where(audio[:, None], given["quantised"], given["hidden"])
    assert_near(lm.quantize(given["hidden"], audio), expected)


def test_both_language_models_are_the_official_ones(lm: VoxLM, reference_root: Path) -> None:
    """The base LM turns by longrope's angles, the residual one by none."""
    given = tensors_of(cases("modules", reference_root)["parts"])
    turns = lm.base_lm.config.rotary(torch.arange(9), torch.float32)
    still = torch.ones_like(turns[0]), torch.zeros_like(turns[1])
    assert_near(lm.base_lm(given["hidden"][None], turns, causal_attention)[0], given["base"])
    assert_near(lm.residual_lm(given["hidden"][None], still, causal_attention)[0], given["residual"])


def test_halves_are_rounded_to_even() -> None:
    """Of nineteen levels, ninths. In bfloat16 a half is not rare."""
    quantizer = tiny_lm(torch.bfloat16).fsq_layer
    quantizer.in_proj = quantizer.out_proj = torch.nn.Identity()
    given = torch.linspace(-4, 4, 4001).bfloat16()
    scaled = (given.tanh() * 9).tolist()
    assert {abs(value) % 2 for value in scaled} >= {0.5, 1.5}
    levels = (quantizer(given) * 9).round()
    # Python's `round` is to even too.
    assert levels.tolist() == [round(value) for value in scaled]
    assert len(levels.unique()) == 19


def test_one_call_is_the_official_one(lm: VoxLM, reference_root: Path) -> None:
    given = tensors_of(cases("modules", reference_root)["call"])
    dit = lm.feat_decoder.estimator
    tokens = dit.fixed_tokens(given["mu"].view(3, 2, -1), given["cond"])
    # Without condition only what the language models say is left out; time and patch are not there yet.
    assert not tokens[3:, :2].any()
    assert torch.equal(tokens[3:, 2:], tokens[:3, 2:])
    tokens[:, 2], tokens[:3, -4:] = dit.embed_times(given["time"]).repeat(2, 1), dit.in_proj(given["noise"])
    found = dit.velocities(tokens).view(6, 4, -1)[:3] + dit.out_proj.bias
    assert_near(found, given["velocity"])


@pytest.mark.parametrize("name", ["2_2.0", "3_1.0", "6_3.0", "10_1.0", "10_2.0", "10_3.5"])
def test_the_sampler_is_the_official_one(lm: VoxLM, reference_root: Path, name: str) -> None:
    case, stored = cases("modules", reference_root)[f"sampler_{name}"], cases("modules", reference_root)["call"]
    given, made = tensors_of(stored), torch.from_numpy(case.tensors["made"])
    cfg, steps = torch.full((3,), case.facts["cfg"]), torch.full((3,), case.facts["steps"])
    found = lm.feat_decoder.sample(given["mu"].view(3, 2, -1), given["cond"], given["noise"], cfg, steps)
    # Nine calls, each of which rounds.
    torch.testing.assert_close(found, made, atol=1e-4, rtol=0)


def test_rows_of_a_batch_may_differ_in_steps_and_guidance(lm: VoxLM, reference_root: Path) -> None:
    """Each row is what it is with its own options alone, up to the rounding of another batch."""
    given = tensors_of(cases("modules", reference_root)["call"])
    mu, cfg, steps = given["mu"].view(3, 2, -1), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3, 10, 2])
    together = lm.feat_decoder.sample(mu, given["cond"], given["noise"], cfg, steps)
    for row in range(3):
        one = slice(row, row + 1)
        alone = lm.feat_decoder.sample(mu[one], given["cond"][one], given["noise"][one], cfg[one], steps[one])
        # 1e-4, as above: with products up to 8 steps off it is 1.6e-5.
        torch.testing.assert_close(together[one], alone, atol=1e-4, rtol=0)


def test_a_call_beyond_the_steps_of_a_row_goes_nowhere(lm: VoxLM) -> None:
    sizes = lm.feat_decoder.sizes
    assert sizes.shape == (MOST_STEPS + 1, MOST_STEPS - 1)
    for steps in STEPS:
        assert (sizes[steps, : steps - 1] > 0).all()
        assert not sizes[steps, steps - 1 :].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("steps", STEPS)
def test_times_sizes_and_their_tokens_are_the_official_ones(reference_root: Path, dtype: str, steps: int) -> None:
    """Bit by bit in bfloat16, which rounds times so much that nothing else would do; tokens within a rounding."""
    wide = getattr(torch, dtype)
    given = tensors_of(cases("times", reference_root)[f"{dtype}_{steps}"])
    times, sizes = schedule(steps, wide)
    tolerance = {"float32": 1e-6, "bfloat16": 0.0}[dtype]
    torch.testing.assert_close(times.float(), given["times"], atol=tolerance, rtol=0)
    torch.testing.assert_close(sizes.float(), given["sizes"], atol=tolerance, rtol=0)
    tokens = tiny_lm(wide).feat_decoder.times[steps, : steps - 1].float()
    # Some products of another machine may round the other way.
    tolerance = {"float32": 1e-4, "bfloat16": 2**-7}[dtype]
    torch.testing.assert_close(tokens, given["tokens"], atol=tolerance, rtol=tolerance)


def test_angles_are_divided_by_pair() -> None:
    """As the released configuration says, in all four stacks."""
    config = read("voxcpm2")
    sizes = [
        lm_config(config, 1),
        *(local_config(config, local) for local in (config.encoder_config, config.dit_config)),
    ]
    for size in sizes:
        assert size.head_width == 128
        assert size.rope_theta == 10000
        with pytest.raises(CheckpointError, match="1 rotary divisors; heads have 64 rotary pairs"):
            dataclasses.replace(size, divisors=(1.0,))
    tables = [size.rotary(torch.tensor([0, 1, 999]), torch.float64) for size in sizes]
    cos, sin = tables[0]
    assert all(torch.equal(cos, other) and torch.equal(sin, another) for other, another in tables)
    assert cos.shape == (3, 1, 128)
    pair = 37
    angle = 999 / config.lm_config.rope_scaling.short_factor[pair] * 10000 ** (-2 * pair / 128)
    unit = torch.zeros(1, 128, dtype=torch.float64)
    unit[0, pair] = 1
    turned = rotate(unit, (cos[2], sin[2]))[0]
    torch.testing.assert_close(turned[pair], torch.tensor(angle, dtype=torch.float64).cos())
    torch.testing.assert_close(turned[pair + 64], torch.tensor(angle, dtype=torch.float64).sin())
    assert torch.equal(turned.nonzero().flatten(), torch.tensor([pair, pair + 64]))
