"""Pinned copies: they arrive whole, entries are handed round and never lost, and nobody waits but who asks to."""

import numpy as np
import pytest
import torch

from sonoro.runtime.ring import PinnedRing, upload

CPU = torch.device("cpu")


def test_tensors_of_every_kind_share_an_entry() -> None:
    entry = PinnedRing(1, 1024, CPU).acquire()
    done, length = torch.tensor([True, False, True]), torch.tensor([[3, -1]])
    pcm = torch.arange(12, dtype=torch.int16).view(4, 3).T
    copies = [entry.copy(tensor) for tensor in (done, length, pcm)]
    length.add_(5)
    entry.close()
    entry.wait()
    assert [copy.dtype for copy in copies] == [np.bool_, np.int64, np.int16]
    assert copies[0].tolist() == [True, False, True]
    assert copies[1].tolist() == [[3, -1]]
    assert copies[2].tolist() == pcm.tolist()


def test_entries_go_round_and_each_keeps_its_own() -> None:
    ring = PinnedRing(2, 64, CPU)
    first, second = ring.acquire(), ring.acquire()
    copies = [entry.copy(torch.full((8,), value)) for value, entry in enumerate((first, second))]
    assert [copy.tolist() for copy in copies] == [[0] * 8, [1] * 8]
    assert ring.free == 0
    with pytest.raises(AssertionError, match="all 2 entries"):
        ring.acquire()
    first.close()
    first.release()
    assert ring.free == 1
    again = ring.acquire()
    assert again.copy(torch.full((8,), 7)).tolist() == [7] * 8
    assert copies[1].tolist() == [1] * 8


def test_an_entry_is_used_as_it_must_be() -> None:
    entry = PinnedRing(1, 64, CPU).acquire()
    with pytest.raises(AssertionError, match="72 bytes do not fit"):
        entry.copy(torch.zeros(9, dtype=torch.float64))
    assert not entry.is_ready
    entry.close()
    assert entry.is_ready
    with pytest.raises(AssertionError):
        entry.copy(torch.zeros(1))
    entry.release()
    with pytest.raises(AssertionError, match="free already"):
        entry.release()


def test_an_entry_given_up_halfway_returns() -> None:
    ring = PinnedRing(1, 64, CPU)
    entry = ring.acquire()
    entry.copy(torch.zeros(2))
    entry.release()
    assert ring.free == 1
    ring.acquire().copy(torch.zeros(16))


@pytest.mark.parametrize("mode", [False, True])
def test_it_serves_in_and_outside_inference_mode(mode: bool) -> None:
    with torch.inference_mode(mode):
        ring = PinnedRing(1, 64, CPU)
    for inside in (True, False):
        with torch.inference_mode(inside):
            entry = ring.acquire()
            assert entry.copy(torch.ones(3)).tolist() == [1, 1, 1]
            entry.release()


def test_uploads_keep_dtype_and_shape() -> None:
    rows = upload([(1, True), (2**62, False)], torch.int64, CPU)
    assert rows.tolist() == [[1, 1], [2**62, 0]]
    assert upload([0.5], torch.float32, CPU).dtype == torch.float32


@pytest.mark.gpu
def test_copies_wait_for_the_device_and_the_host_does_not() -> None:
    device = torch.device("cuda")
    ring, source = PinnedRing(2, 1 << 12, device), torch.zeros(256, device=device, dtype=torch.int64)
    with torch.cuda.stream(torch.cuda.Stream()):
        source.add_(1)
        torch.cuda.synchronize()
        entries, copies = [], []
        for _ in range(2):
            torch.cuda._sleep(400_000_000)
            source.add_(1)
            entries.append(ring.acquire())
            copies.append(entries[-1].copy(source))
            entries[-1].close()
        # What was launched before the second copy still runs: nobody has waited for it.
        assert not entries[1].is_ready
        for value, (entry, copy) in enumerate(zip(entries, copies, strict=True), start=2):
            entry.wait()
            assert (copy == value).all()
            entry.release()


@pytest.mark.gpu
def test_the_first_part_is_waited_for_apart() -> None:
    device = torch.device("cuda")
    ring, source = PinnedRing(1, 1 << 12, device), torch.zeros(256, device=device, dtype=torch.int64)
    with torch.cuda.stream(torch.cuda.Stream()):
        for value in (1, 2):
            entry = ring.acquire()
            source.fill_(value)
            copy = entry.copy(source)
            entry.split()
            torch.cuda._sleep(400_000_000)
            entry.close()
            entry.wait_until_split()
            assert (copy == value).all()
            assert not entry.is_ready
            entry.release()


@pytest.mark.gpu
def test_uploads_in_a_row_do_not_overwrite_each_other() -> None:
    device = torch.device("cuda")
    torch.cuda._sleep(400_000_000)
    uploaded = [upload([value] * 64, torch.int64, device) for value in range(200)]
    assert [int(vector.unique()) for vector in uploaded] == list(range(200))
