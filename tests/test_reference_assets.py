"""The stored official results belong to the checkpoints that the other tests draw, and are worth comparing with."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from parity import ROOT, Case, drifted_weights
from tiny_checkpoint import NUM_CODES, NUM_CONTROL_IDS, NUM_GROUPS, VARIANTS

Reference = Callable[[str], dict[str, Case]]


def test_the_weights_drawn_here_are_those_the_official_code_ran_with(reference_root: Path) -> None:
    assert drifted_weights(reference_root) == []


def test_the_assets_in_the_tree_stay_small() -> None:
    assert sum(path.stat().st_size for path in ROOT.iterdir()) < 4_000_000


def test_prompts_cover_every_mode_and_layout(reference: Reference) -> None:
    cases = reference("prompts").values()
    assert len(cases) >= 20
    seen = {(case.facts["mode"], case.facts["non_streaming"], case.facts["instruct"] is not None) for case in cases}
    modes = ("custom_voice", "voice_design", "x_vector", "in_context")
    assert seen == set(itertools.product(modes, (False, True), (False, True)))
    assert {case.facts["topology"] for case in cases} == {"1.7b", "0.6b"}


def test_greedy_runs_are_long_and_lively(reference: Reference) -> None:
    cases = reference("greedy")
    long = {name: case for name, case in cases.items() if name != "ending"}
    assert {case.facts["variant"] for case in long.values()} == set(VARIANTS)
    for name, case in long.items():
        codes = case.tensors["codes"]
        assert codes.shape == (case.facts["frames"], NUM_GROUPS), name
        assert len(codes) >= 32, name
        # A model stuck in one state would agree by accident.
        assert all(len(np.unique(codes[:, group])) >= 10 for group in range(NUM_GROUPS)), name
        assert case.tensors["logits"].shape == (len(case.facts["logit_steps"]), NUM_CODES + NUM_CONTROL_IDS), name
    assert 2 <= cases["ending"].facts["frames"] < 32


@pytest.mark.parametrize("samples", [24000, 1921, 10000, 5759])
def test_encoder_codes_are_lively(reference: Reference, samples: int) -> None:
    case = reference("encoder")[f"samples_{samples}"]
    assert case.tensors["codes"].shape == (-(-samples // 1920), NUM_GROUPS)
    assert len(np.unique(case.tensors["codes"], axis=0)) > 1


def test_waveforms_are_loud_and_unclipped(reference: Reference) -> None:
    for case in (*reference("codec").values(), *reference("clone").values()):
        waveform = case.tensors["waveform"]
        assert len(waveform) == 1920 * len(case.tensors["codes"]), case.name
        assert np.abs(waveform).max() < 1, case.name
        assert waveform.std() > 0.05, case.name
