"""Codebooks against their definition: what a code adds, which is nearest, and what is left to the next."""

import pytest
import torch
import torch.nn.functional as F

from sonoro.nn.codebooks import Codebooks, VectorQuantizer, encode, joint_table

WIDTH, INNER = 12, 3


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def filled(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for tensor in module.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return module.double()


def sound(rows=2, columns=30):
    return torch.randn(rows, columns, WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def test_a_code_adds_its_vector_through_the_projection():
    level = filled(VectorQuantizer(7, WIDTH, INNER))
    codes = torch.tensor([[6, 0, 3]])
    vectors = level.out_proj(level.codebook(codes).mT).mT
    torch.testing.assert_close(level.table()[codes], vectors, atol=1e-12, rtol=0)


def test_the_nearest_code_is_that_of_the_smallest_angle():
    level, x = filled(VectorQuantizer(7, WIDTH, INNER)), sound()
    inner = level.in_proj(x.mT).mT
    angles = F.cosine_similarity(inner[:, :, None], level.codebook.weight[None, None], dim=-1)
    found = level.nearest(x)
    assert found.dtype == torch.int64
    assert torch.equal(found, angles.argmax(-1))
    assert len(found.unique()) > 3
    # However long its vectors are.
    level.codebook.weight.mul_(torch.rand(7, 1, dtype=torch.float64) + 0.1)
    assert torch.equal(level.nearest(x), found)


def test_each_codebook_codes_what_those_before_it_left_over():
    levels, x = filled(Codebooks(4, 7, WIDTH, INNER)).levels, sound()
    codes = encode(levels, x)
    assert codes.shape == (2, 30, 4)
    left = x
    for book, level in enumerate(levels):
        assert torch.equal(codes[..., book], level.nearest(left))
        left = left - level.table()[codes[..., book]]
    assert not torch.equal(codes[..., 1], levels[1].nearest(x))


def test_a_single_column_is_coded_as_it_is_among_others():
    levels, x = filled(Codebooks(4, 7, WIDTH, INNER)).levels, sound()
    assert torch.equal(encode(levels, x[1:, 17:18])[0, 0], encode(levels, x)[1, 17])


def test_a_shorter_codebook_repeats_its_last_row():
    short, long = filled(VectorQuantizer(4, WIDTH, INNER)), filled(VectorQuantizer(7, WIDTH, INNER), seed=1)
    table = joint_table([long, short])
    assert table.shape == (2, 7, WIDTH)
    assert torch.equal(table[0], long.table())
    assert torch.equal(table[1], short.table()[torch.tensor([0, 1, 2, 3, 3, 3, 3])])


def test_levels_are_the_quantizers_in_the_order_of_their_names():
    books = Codebooks(3, 7, WIDTH, INNER)
    assert [*books.state_dict()][::5] == [f"quantizers.{number}.codebook.weight" for number in range(3)]
    assert all(level is books.quantizers[number] for number, level in enumerate(books.levels))
