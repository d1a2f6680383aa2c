"""Draws: the generator against published vectors, its addressing, and every processor against a plain computation."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from without_gpu import device_only, in_the_interpreter

from sonoro.ops.sample import (
    Sampling,
    gumbel_argmax,
    gumbel_noise,
    gumbel_noise_kernel,
    gumbel_noise_reference,
    keep_top_k,
    keep_top_p,
    mask_logits,
    mask_logits_kernel,
    mask_logits_reference,
    penalize_seen,
    philox_words,
    sample,
    sample_and_embed,
    sample_and_embed_kernel,
    sample_and_embed_reference,
    sample_kernel,
    sample_reference,
)

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


def test_top_p_keeps_or_drops_equal_values_together() -> None:
    # The two smallest make .2 + .2: dropped together where that fits, else kept together. The largest always stay.
    logits = torch.tensor([[0.2, 0.4, 0.2, 0.2]]).log().repeat(4, 1)
    found = keep_top_p(logits, torch.tensor([[0.35], [0.45], [0.7], [1e-6]])) > -INF
    assert found.tolist() == [[False, True, False, False], [True] * 4, [True] * 4, [False, True, False, False]]
    assert (keep_top_p(torch.zeros(1, 4), torch.tensor([[0.1]])) == 0).all()


def test_greedy_rows_take_the_first_of_the_largest() -> None:
    logits = torch.tensor([[0.0, 4.0, 4.0, 1.0], [0.0, 4.0, 4.0, 1.0]])
    noise = torch.tensor([[0.0, 0.0, 9.0, 0.0], [9.0, 0.0, 0.0, 0.0]])
    assert gumbel_argmax(logits, noise, torch.tensor([[True], [False]])).tolist() == [1, 0]


def test_drawn_ids_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, -INF, 2.0, -1.0])
    draws = 20000
    frames = torch.arange(draws)
    noise = gumbel_noise(torch.full((draws,), 11), torch.zeros_like(frames), frames, 1, 5)[:, 0]
    found = gumbel_argmax(logits.expand(draws, 5), noise, torch.zeros(draws, 1, dtype=torch.bool))
    seen = torch.bincount(found, minlength=5).double() / draws
    expected = logits.double().softmax(-1)
    assert seen[2] == 0
    assert ((seen - expected).abs() <= 5 * (expected * (1 - expected) / draws).sqrt()).all()


def draw_case(count: int, vocabulary: int, device: str = "cpu") -> tuple[Tensor, Tensor, Sampling]:
    """Arguments of `sample`: every k, p and mode in turn; rows with ties, with banned ids, and flat ones."""
    make = torch.Generator().manual_seed(count)
    index = torch.arange(count)
    logits = 3 * torch.randn(count, vocabulary, generator=make)
    logits[::3] = logits[::3].round()
    logits[1::4] /= 30
    logits[:, vocabulary // 2] = -INF
    logits[2::5, 10:] = -INF
    noise = gumbel_noise_reference(index + (9 << 32), index % 3, index, 2, vocabulary)[:, 1]
    temperature = 0.3 + torch.rand(count, 3, generator=make)[:, 1:2]
    top_k = torch.tensor([0, 1, 5, 50, vocabulary + 7])[torch.randint(5, (count, 1), generator=make)]
    top_p = torch.tensor([1, 0.9, 0.3])[torch.randint(3, (count, 1), generator=make)]
    is_greedy = torch.rand(count, 1, generator=make) < 0.2
    sampling = Sampling(*(given.to(device) for given in (temperature, top_k, top_p, is_greedy)))
    return logits.to(device), noise.to(device), sampling


def test_a_draw_is_its_processors_in_order() -> None:
    logits, noise, sampling = draw_case(300, 60)
    temperature, top_k, top_p, is_greedy = sampling
    found = sample(logits, noise, sampling)
    kept = keep_top_p(keep_top_k(logits / temperature, top_k, limit=128), top_p)
    assert torch.equal(found, gumbel_argmax(kept, noise, is_greedy))
    greedy = is_greedy[:, 0]
    assert torch.equal(found[greedy], logits[greedy].argmax(dim=-1))
    assert len(found.unique()) > 20


def test_a_draw_without_filters_is_the_largest_of_logits_and_noise() -> None:
    logits, noise, (temperature, *_) = draw_case(50, 60)
    keep_all = torch.zeros(50, 1, dtype=torch.int64), torch.ones(50, 1), torch.zeros(50, 1, dtype=torch.bool)
    found = sample(logits, noise, Sampling(temperature, *keep_all))
    assert torch.equal(found, (logits / temperature + noise).argmax(dim=-1))


def test_masked_logits_are_penalized_then_banned_in_float32() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0], [2.0, -2.0, 0.0, 1.0]]).bfloat16()
    seen = torch.tensor([[True, True, False, False], [True, True, True, False]])
    penalty = torch.tensor([[2.0], [1.0]])
    shared = mask_logits(logits, seen, penalty, torch.tensor([False, False, False, True]))
    assert shared.dtype == torch.float32
    assert shared.tolist() == [[1.0, -4.0, 2.0, -INF], [2.0, -2.0, 0.0, -INF]]
    own = mask_logits(logits, seen, penalty, torch.tensor([[True, False, False, False], [False] * 4]))
    assert own.tolist() == [[-INF, -4.0, 2.0, -2.0], [2.0, -2.0, 0.0, 1.0]]


def test_a_draw_is_embedded_by_its_table_and_beyond_it_by_its_first_row() -> None:
    given = draw_case(80, 60)
    table, ids = torch.randn(30, 7, dtype=torch.float64), torch.full((80, 3), -1)
    rows = sample_and_embed(*given, table, ids[:, 1])
    assert torch.equal(ids[:, 1], sample(*given))
    assert (ids[:, ::2] == -1).all()
    assert (ids[:, 1] >= 30).any()
    for row, drawn in zip(rows, ids[:, 1].tolist(), strict=True):
        assert torch.equal(row, table[drawn if drawn < 30 else 0])


def test_a_draw_is_written_where_it_belongs() -> None:
    given, ids = draw_case(9, 20), torch.full((9, 3), -1)
    sample(*given, ids[:, 2])
    assert torch.equal(ids[:, 2], sample(*given))
    assert (ids[:, :2] == -1).all()


def test_drawing_may_be_captured() -> None:
    given = draw_case(3, 20, "meta")
    rows = torch.zeros(3, dtype=torch.int64, device="meta")
    with device_only():
        assert sample(*given).shape == (3,)
        assert sample_and_embed(*given, given[0], rows).shape == (3, 20)
        assert gumbel_noise(rows, rows, rows, 2, 20).shape == (3, 2, 20)
        assert mask_logits(given[0], given[0] > 0, given[2].temperature, given[0][0] > 0).shape == (3, 20)


def check_kernels(count: int, vocabulary: int, device: str = "cpu") -> None:
    seed = torch.tensor([0, 1, 2**63 - 1, (7 << 32) + 0xFFFFFFF0], device=device)
    segment = torch.tensor([0, 3, 2**31, 2], device=device)
    frame = torch.tensor([[5, 1000, 2**32 - 1, 0]], device=device).T.expand(4, 2)[:, 1]
    noise, expected = (
        make(seed, segment, frame, 3, vocabulary) for make in (gumbel_noise_kernel, gumbel_noise_reference)
    )
    # Two logarithms, each right to its last bits. Another word would be another number altogether.
    torch.testing.assert_close(noise, expected, atol=1e-6, rtol=1e-6)
    given = draw_case(count, vocabulary, device)
    for logits in (given[0], given[0].bfloat16(), torch.cat((given[0], given[0]), dim=1)[:, :vocabulary]):
        # Sums of top-p in another order could change an id, at one in some 1e5 draws; these seeds have none.
        assert torch.equal(sample_kernel(logits, *given[1:]), sample_reference(logits, *given[1:]))
    # A table that ends within the vocabulary, rows of odd width, dtypes of every size; ids are a column among others.
    for dtype, width in ((torch.float32, 7), (torch.bfloat16, 64), (torch.float64, 1)):
        table = torch.randn(vocabulary - vocabulary // 4, width + 2, device=device).to(dtype)[:, 1:-1]
        found, wanted = (torch.full((count, 3), -1, device=device) for _ in range(2))
        rows = sample_and_embed_kernel(*given, table, found[:, 1])
        assert torch.equal(rows, sample_and_embed_reference(*given, table, wanted[:, 1]))
        assert torch.equal(found, wanted)
    assert torch.equal(sample_kernel(*given, found[:, 2]), sample_kernel(*given))
    assert torch.equal(found[:, 2], sample_kernel(*given))
    seen, banned = given[0] > 0, given[0] < -2
    for ban in (banned, banned[0]):
        masked = mask_logits_kernel(given[0], seen, given[2].temperature, ban)
        assert torch.equal(masked, mask_logits_reference(given[0], seen, given[2].temperature, ban))


@in_the_interpreter
def test_interpreted() -> None:
    check_kernels(45, 60)
    check_kernels(4, 1030)
    logits, noise, sampling = draw_case(6, 12)
    sampling = sampling._replace(top_p=torch.ones(6, 1))
    assert sample_kernel(torch.full_like(logits, -INF), noise, sampling).tolist() == [0] * 6
    # Not a number in, some id out: it must end, and within the vocabulary.
    broken = sample_kernel(torch.full_like(logits, torch.nan), noise, sampling)
    assert ((broken >= 0) & (broken < 12)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 64, 256])
@torch.inference_mode()
def test_the_kernels_equal_the_references_on_a_gpu(rows: int) -> None:
    check_kernels(rows, 2151, "cuda")
    given = draw_case(rows, 2048, "cuda")
    found = sample_kernel(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = sample_kernel(*given)
    for _ in range(3):
        replayed.fill_(-1)
        graph.replay()
        assert torch.equal(replayed, found)


@pytest.mark.gpu
def test_logits_of_nan_are_not_read_past_their_end() -> None:
    """The choice among them may be a number of the padding, which may lie where there is no memory."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(
        [sys.executable, Path(__file__).with_name("memory_edge.py")], env=environment, check=True, timeout=300
    )
