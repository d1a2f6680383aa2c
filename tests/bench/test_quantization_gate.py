"""The gate of weights in 8 bits: intervals of paired differences, what fails it, how logits are compared."""

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from families import TinyFamily, tiny
from tiny_vox import write_checkpoint

from quantization import LIMITS, Compared, compare_logits, logits, paired, rounding, verdict

__all__ = ["tiny"]


def reading(
    text: int, errors: tuple[int, int] = (0, 0), p808: tuple[float, float] = (4.0, 4.0), **ends: tuple
) -> Compared:
    found = {"runaway": (False, False), "repeats": (False, False)} | ends
    return Compared(f"text {text}", 10, errors, p808, **found)


def test_an_interval_of_a_mean_holds_it_as_often_as_it_says() -> None:
    random, held = np.random.default_rng(0), 0
    for _ in range(400):
        # Readings of one text are alike: were they taken for independent ones, three in four intervals would hold it.
        of_text = np.repeat(random.normal(0.3, 1.0, 60), 5) + random.normal(0, 0.3, 300)
        interval = paired([str(index // 5) for index in range(300)], of_text.tolist(), [1.0] * 300)
        held += interval.low <= 0.3 <= interval.high
    assert 0.92 <= held / 400 <= 0.98


def test_word_errors_are_weighed_by_words() -> None:
    interval = paired(["a", "b"], [1, 0], [2, 8])
    assert interval.mean == pytest.approx(0.1)
    assert interval.low < 0.1 < interval.high


def test_equal_readings_pass_and_what_is_worse_fails_by_name() -> None:
    equal = [reading(number) for number in range(50)]
    assert verdict(equal)["holds"]
    assert verdict([*equal, reading(50, runaway=(True, True))])["holds"]
    assert verdict([*equal, reading(50, runaway=(False, True))])["fails"] == ["runaway"]
    assert verdict([*equal, reading(50, repeats=(False, True))])["fails"] == ["repeats"]
    assert verdict([reading(number, errors=(0, number % 4 == 0)) for number in range(50)])["fails"] == ["word errors"]
    assert verdict([reading(number, p808=(4.0, 3.95)) for number in range(50)])["fails"] == ["p808"]
    assert verdict([reading(number, p808=(4.0, 3.98)) for number in range(50)])["holds"]


def test_too_few_readings_to_tell_do_not_pass() -> None:
    """The bound is judged, not the mean."""
    errors = [(1, 0), (0, 1), (0, 0), (0, 0)]
    assert verdict([reading(number, errors=pair) for number, pair in enumerate(errors)])["fails"] == ["word errors"]


def test_logits_are_compared_without_what_a_sampler_does_not_see() -> None:
    torch.manual_seed(0)
    plain = torch.randn(4, 1000)
    ratio, variation = compare_logits(plain, plain + 5.0 + 0.01 * torch.randn(4, 1000))
    assert ratio == pytest.approx(40, abs=0.5)
    assert 0.001 < variation < 0.01
    assert compare_logits(plain, plain) == pytest.approx((100.0, 0.0))
    assert compare_logits(torch.tensor([[0.0, -1e4]]), torch.tensor([[-1e4, 0.0]]))[1] == pytest.approx(1.0)
    assert set(LIMITS) == {"int8", "fp8"}


def test_logits_of_every_family_are_compared_from_the_same_state(tiny: TinyFamily, tmp_path: Path) -> None:
    tiny.write(tmp_path)
    # Some families have one logit a frame, that of the end: the formats of a few would rank by chance.
    how = {"device": "cpu", "dtype": None, "load_format": "dummy", "frames": 8, "batch": 8, "commit": None}
    ratios = []
    for quantization, e4m3_rows in (("int8", False), ("fp8", False), ("fp8", True)):
        options = Namespace(model=tmp_path, format=quantization, e4m3_rows=e4m3_rows, **how)
        with rounding(options):
            found = logits(options)
        ratios.append(found["snr_db"])
        assert 0 < found["total_variation"] < 0.2
        assert found["e4m3_rows"] == e4m3_rows
    # Fish's rows are sums of two numbers in E4M3, which lose nothing beside what its weights do: equal within .05 dB.
    is_sum = tiny.family.model_type == "fish_qwen3_omni"
    assert 80 > ratios[0] > ratios[1] > ratios[2] - 0.05 * is_sum > 9
    assert ratios[0] > 15


@pytest.mark.parametrize("stop", ["never", "always"])
def test_the_logits_of_patches_are_those_of_their_end(stop: str, tmp_path: Path) -> None:
    """Whatever 8 bits do to this checkpoint's hidden states and patches, it is as sure of its end as before."""
    write_checkpoint(tmp_path, stop=stop)
    how = {"device": "cpu", "dtype": None, "load_format": "auto", "frames": 4, "batch": 2, "commit": None}
    found = logits(Namespace(model=tmp_path, format="fp8", e4m3_rows=False, **how))
    assert found["holds"]
    assert found["total_variation"] == 0
    assert found["snr_db"] > 40
    assert 5 < found["patches_snr_db"] < 40
