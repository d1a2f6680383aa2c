"""The order of processors: the distributions that the official implementation drew from, and the rules around them."""

from collections.abc import Callable

import pytest
import torch
from parity import Case
from tiny_talker import controls, tiny_config
from torch import Tensor

from sonoro.models.qwen3_tts.config import TalkerConfig
from sonoro.models.qwen3_tts.sampling import mask_first
from sonoro.models.qwen3_tts.state import rest_sampling
from sonoro.ops.sample import keep_top_k, keep_top_p, sample
from sonoro.runtime.sampling import BatchSampling, Controls, SamplingState

CONFIG: TalkerConfig = tiny_config().talker_config
CODES = CONFIG.vocab_size - 1024
END = CONFIG.codec_eos_token_id


Packed = tuple[int, ...]


def sampling_controls(given: Controls) -> tuple[Packed, Packed]:
    return given.pack(), given.pack(rest_sampling(given))


def row(given: Packed, count: int) -> BatchSampling:
    rows = SamplingState(1, torch.device("cpu"))
    rows.set([0], [given])
    return rows.read(torch.zeros(count, dtype=torch.int64))


def kept(scores: Tensor, parameters: BatchSampling) -> Tensor:
    """What `sample` draws from; that it draws from nothing else is tested below and with the kernel."""
    sampling = parameters.sampling
    values = keep_top_k(scores.float() / sampling.temperature, sampling.top_k, scores.shape[1])
    return keep_top_p(values, sampling.top_p)


def first(logits: Tensor, given: Packed, history: Tensor | None = None, start: int = 0) -> Tensor:
    """What consecutive decisions `logits` [T, V] are drawn from, the first of them after `start` frames."""
    count = len(logits)
    seen = torch.zeros(count, END + 1, dtype=torch.bool)
    for step in range(count if history is not None else 0):
        assert history is not None
        seen[step, history[:step]] = True
    ids, parameters = torch.arange(END + 1), row(given, count)
    scores = mask_first(
        logits[:, : END + 1],
        parameters,
        seen,
        torch.arange(start, start + count),
        suppressed=(ids >= CODES) & (ids != END),
        is_end=ids == END,
    )
    return kept(scores, parameters)


@pytest.mark.parametrize("name", ["default", "narrow"])
def test_distributions_match_the_official_ones(reference: Callable[[str], dict[str, Case]], name: str) -> None:
    case = reference("sampling")[name]
    tensors = {key: torch.from_numpy(value) for key, value in case.tensors.items()}
    settings, codes = case.facts["settings"], tensors["codes"]
    rest = {f"subtalker_{key}": value for key, value in settings.items() if key != "repetition_penalty"}
    given, given_rest = sampling_controls(controls(**settings, **rest))
    assert codes[:, 0].unique().numel() > 1
    found = first(tensors["logits"], given, codes[:, 0]).softmax(-1)
    # Float32 softmax of at most 65 terms.
    torch.testing.assert_close(found, tensors["probabilities"][:, : END + 1], atol=1e-6, rtol=0)
    assert not tensors["probabilities"][:, END + 1 :].any()
    depth = tensors["depth_logits"].flatten(0, 1)
    found_rest = kept(depth, row(given_rest, len(depth))).softmax(-1)
    torch.testing.assert_close(found_rest, tensors["depth_probabilities"].flatten(0, 1), atol=1e-6, rtol=0)


def test_only_codes_and_end_of_speech_can_be_drawn() -> None:
    given, _ = sampling_controls(controls(top_k=0))
    scores = first(torch.randn(3, CONFIG.vocab_size), given, start=2)
    allowed = scores.isfinite()
    assert allowed[:, :CODES].all()
    assert allowed[:, END].all()
    assert not allowed[:, CODES:END].any()


def test_end_of_speech_is_banned_for_the_first_two_decisions() -> None:
    given, _ = sampling_controls(controls(top_k=0))
    scores = first(torch.randn(4, CONFIG.vocab_size), given)
    assert scores[:, END].isfinite().tolist() == [False, False, True, True]


def test_end_of_speech_is_never_drawn_where_it_is_ignored() -> None:
    given, _ = sampling_controls(controls(top_k=0, ignore_eos=True))
    scores = first(torch.randn(4, CONFIG.vocab_size), given)
    assert not scores[:, END].isfinite().any()
    assert scores[:, :CODES].isfinite().all()


def test_top_k_counts_after_the_bans() -> None:
    logits = torch.zeros(1, CONFIG.vocab_size)
    logits[0, CODES : END + 1] = 9.0
    logits[0, 5] = 1.0
    given, _ = sampling_controls(controls(top_k=1))
    assert first(logits, given)[0].isfinite().nonzero().flatten().tolist() == [5]


def test_the_penalty_comes_before_the_temperature_and_once_per_id() -> None:
    logits = torch.zeros(1, CONFIG.vocab_size)
    logits[0, :4] = torch.tensor([3.0, -3.0, 3.0, -3.0])
    given, _ = sampling_controls(controls(temperature=0.5, top_k=0, repetition_penalty=1.5))
    found = first(logits.repeat(3, 1), given, torch.tensor([0, 1, 1]), start=5)
    assert found[2, :4].tolist() == [4.0, -9.0, 6.0, -6.0]


def test_the_other_codebooks_have_their_own_controls() -> None:
    both = controls(temperature=0.7, subtalker_temperature=0.3, subtalker_top_k=4, seed=9)
    given, rest = both.sampling, rest_sampling(both)
    assert (given.temperature, given.top_k, given.repetition_penalty) == (0.7, 50, 1.05)
    assert (rest.temperature, rest.top_k, rest.repetition_penalty) == (0.3, 4, 1.0)
    assert [row(packed, 1).seed.item() for packed in sampling_controls(both)] == [9, 9]
    assert rest_sampling(controls(subtalker_dosample=False)).temperature == 0
    assert rest_sampling(controls(temperature=0, subtalker_dosample=True)).temperature == 0.9


def test_bfloat16_logits_are_widened_first() -> None:
    logits = torch.randn(3, CONFIG.vocab_size).bfloat16()
    given, rest = sampling_controls(controls())
    assert torch.equal(first(logits, given), first(logits.float(), given))
    assert torch.equal(kept(logits, row(rest, 3)), kept(logits.float(), row(rest, 3)))


def test_what_is_drawn_is_the_likeliest_of_what_is_kept_and_its_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, noise = torch.randn(2, 500, 64, generator=generator)
    for given in sampling_controls(controls(top_k=7, top_p=0.7, subtalker_top_k=3)):
        parameters = row(given, 500)
        expected = (kept(logits, parameters) + noise).argmax(-1)
        assert torch.equal(sample(logits, noise, parameters.sampling), expected)
