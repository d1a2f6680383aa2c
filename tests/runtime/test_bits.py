"""Numbers in the bits of integers come back as they were."""

import numpy as np
import torch

from sonoro.runtime.sampling import pack_floats, unpack_flags, unpack_floats


def test_floats_come_back_in_float32() -> None:
    values = np.random.default_rng(0).standard_normal((5, 8))
    packed = pack_floats(values)
    assert packed.shape == (5, 4)
    assert torch.equal(unpack_floats(torch.from_numpy(packed)), torch.from_numpy(values).float())
    wide = torch.cat((torch.zeros(5, 2, dtype=torch.int64), torch.from_numpy(packed)), dim=1)
    found = unpack_floats(wide[:, 2:])
    assert torch.equal(found, torch.from_numpy(values).float())
    assert found.data_ptr() == wide[:, 2:].data_ptr()


def test_flags_come_back() -> None:
    rows = torch.tensor([[7, 1, 0], [1 << 40, 0, 1]])
    assert unpack_flags(rows[:, 1:]).tolist() == [[True, False], [False, True]]
