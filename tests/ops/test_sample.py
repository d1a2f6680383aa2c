"""Draws: the generator against published vectors, its addressing, and every processor against a plain computation."""

import math

import pytest
import torch
from torch import Tensor

from sonoro.ops.sample import gumbel_noise, keep_top_k, keep_top_p, penalize_seen, philox_words, pick

# Random123, kat_vectors: philox4x32, 10 rounds; counter, key, words.
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
INF = torch.inf


def words(text: str) -> list[Tensor]:
    return [torch.tensor([int(word, 16)]) for word in text.split()]


def uniform(noise: Tensor) -> Tensor:
    """The uniform numbers behind Gumbel noise."""
    return (-(-noise.double()).exp()).exp()


def rows(*values: int) -> Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_words_match_the_published_answers(counter: str, key: str, expected: str) -> None:
    found = philox_words(words(counter), words(key))
    assert [f"{word.item():08x}" for word in found] == expected.split()


def test_words_broadcast_and_ignore_high_bits() -> None:
    block, book = torch.arange(5), torch.arange(3)[:, None]
    zero = torch.zeros(1, dtype=torch.int64)
    found = torch.stack([word.expand(3, 5) for word in philox_words((block, book, zero, zero), (zero, zero))])
    for index in range(5):
        for other in range(3):
            counter = (rows(index + (7 << 32)), rows(other), rows(3 << 40), zero)
            alone = philox_words(counter, (rows(1 << 33), zero))
            assert found[:, other, index].tolist() == [word.item() for word in alone]


def test_noise_is_addressed_as_documented() -> None:
    seed, segment, frame = (7 << 32) + 0xFFFFFFF0, 3, 1000
    noise = gumbel_noise(rows(1, seed), rows(0, segment), rows(5, frame), 4, 11)
    assert noise.shape == (2, 4, 11)
    assert noise.dtype == torch.float32
    for codebook in range(4):
        for v in range(11):
            counter = (rows(v // 4), rows(codebook), rows(frame), rows(segment))
            word = philox_words(counter, (rows(0xFFFFFFF0), rows(7)))[v % 4].item()
            expected = -math.log(-math.log(((word >> 9) + 0.5) * 2.0**-23))
            # Relative to the larger of the two logarithms' rounding in float32.
            assert noise[1, codebook, v].item() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_noise_of_an_address_does_not_depend_on_what_else_is_drawn() -> None:
    seed, segment, frame = rows(3, 4, 2**63 - 1), rows(0, 1, 2), rows(9, 9, 0)
    whole = gumbel_noise(seed, segment, frame, 16, 2151)
    for row in (2, 0, 1):
        one = slice(row, row + 1)
        assert torch.equal(gumbel_noise(seed[one], segment[one], frame[one], 5, 130)[0], whole[row, :5, :130])


def test_every_part_of_the_address_changes_the_noise() -> None:
    base = {"seed": 5, "segment": 2, "frame": 7}
    start = gumbel_noise(rows(5), rows(2), rows(7), 2, 512)
    assert not torch.isclose(start[0, 0], start[0, 1]).any()
    for change in ({"seed": 6}, {"seed": 5 + 2**32}, {"segment": 3}, {"frame": 8}):
        given = base | change
        other = gumbel_noise(rows(given["seed"]), rows(given["segment"]), rows(given["frame"]), 2, 512)
        # 2**23 values: a few of 1024 may agree by chance.
        assert torch.isclose(start, other, rtol=0, atol=0).sum() <= 2


def test_noise_is_uniform_and_neighbours_are_uncorrelated() -> None:
    seed = torch.arange(4).repeat_interleave(16)
    frame = torch.arange(16).repeat(4)
    u = uniform(gumbel_noise(seed, torch.zeros(64, dtype=torch.int64), frame, 16, 512))
    count = u.numel()
    assert torch.isfinite(u).all()
    assert abs(u.mean().item() - 0.5) < 5 * math.sqrt(1 / 12 / count)
    # Chi square of 255 degrees of freedom: mean 255, deviation sqrt(510); five deviations.
    seen = torch.histc(u.float(), bins=256, min=0, max=1)
    chi_square = ((seen - count / 256) ** 2 / (count / 256)).sum().item()
    assert abs(chi_square - 255) < 5 * math.sqrt(510)
    centred = u.view(4, 16, 16, 512) - 0.5
    for axis in range(4):
        length = centred.shape[axis] - 1
        product = centred.narrow(axis, 0, length) * centred.narrow(axis, 1, length)
        assert abs(product.mean().item()) < 5 / 12 / math.sqrt(product.numel())


def test_noise_is_finite_at_both_ends() -> None:
    noise = gumbel_noise(torch.arange(512), torch.zeros(512, dtype=torch.int64), torch.arange(512), 4, 2048)
    assert torch.isfinite(noise).all()
    assert noise.max() < 17
    assert noise.min() > -3


def test_penalty_moves_seen_ids_down_whatever_their_sign() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0], [2.0, -2.0, 0.0, 1.0]])
    seen = torch.tensor([[True, True, False, False], [True, True, True, False]])
    found = penalize_seen(logits, seen, torch.tensor([[2.0], [1.0]]))
    assert found.tolist() == [[1.0, -4.0, 2.0, -2.0], [2.0, -2.0, 0.0, 1.0]]


def test_top_k_is_per_row_keeps_ties_and_zero_keeps_all() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 0.0]]).repeat(5, 1)
    top_k = torch.tensor([[1], [2], [4], [0], [9]])
    kept = keep_top_k(logits, top_k, limit=64) > -INF
    assert kept.tolist() == [
        [True, False, False, False, False],
        [True, False, True, True, False],
        [True, True, True, True, False],
        [True] * 5,
        [True] * 5,
    ]
    assert torch.equal(keep_top_k(logits[:2], top_k[:2], limit=2) > -INF, kept[:2])


def test_top_k_leaves_banned_ids_banned() -> None:
    logits = torch.tensor([[-INF, 1.0, -INF, 0.0]])
    assert keep_top_k(logits, torch.tensor([[3]]), limit=4).tolist() == logits.tolist()


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.8, 0.999])
def test_top_p_matches_a_plain_loop(top_p: float) -> None:
    logits = 3 * torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    found = keep_top_p(logits, torch.full((6, 1), top_p)) > -INF
    for row in range(6):
        probabilities = logits[row].double().softmax(-1)
        total, kept = 0.0, set(range(40))
        for index in probabilities.argsort().tolist()[:-1]:
            total += probabilities[index].item()
            if total > 1 - top_p:
                break
            kept.discard(index)
        assert set(found[row].nonzero().flatten().tolist()) == kept


def test_top_p_is_per_row_and_one_keeps_all() -> None:
    logits = torch.tensor([[5.0, 4.0, -30.0, 0.0]]).repeat(2, 1)
    found = keep_top_p(logits, torch.tensor([[1.0], [1e-6]]))
    assert found[0].tolist() == logits[0].tolist()
    assert (found[1] > -INF).tolist() == [True, False, False, False]


def test_greedy_rows_take_the_first_of_the_largest() -> None:
    logits = torch.tensor([[0.0, 4.0, 4.0, 1.0], [0.0, 4.0, 4.0, 1.0]])
    noise = torch.tensor([[0.0, 0.0, 9.0, 0.0], [9.0, 0.0, 0.0, 0.0]])
    assert pick(logits, noise, torch.tensor([[True], [False]])).tolist() == [1, 0]


def test_drawn_ids_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, -INF, 2.0, -1.0])
    draws = 20000
    frames = torch.arange(draws)
    noise = gumbel_noise(torch.full((draws,), 11), torch.zeros_like(frames), frames, 1, 5)[:, 0]
    found = pick(logits.expand(draws, 5), noise, torch.zeros(draws, 1, dtype=torch.bool))
    seen = torch.bincount(found, minlength=5).double() / draws
    expected = logits.double().softmax(-1)
    assert seen[2] == 0
    assert ((seen - expected).abs() <= 5 * (expected * (1 - expected) / draws).sqrt()).all()
