import pytest
import torch

from sonoro.nn.history import WHOLE, History

LENGTH, WIDTH, SLOTS = 4, 3, 5
CHUNKS = [[1] * 12, [2] * 6, [3] * 4, [4] * 3, [5, 7], [12], [1, 8, 2, 1]]


@pytest.fixture
def history():
    return History({"a": (LENGTH, WIDTH), "b": (2, WIDTH)}, SLOTS, device="cpu", dtype=torch.float64)


def draw(rows, columns=12, seed=0):
    return torch.randn(rows, columns, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def split(x, chunks):
    return x.split(chunks, dim=1)


def scramble(history, seed=1):
    """Leave something of an earlier stream in every row."""
    every = torch.arange(SLOTS + 1)
    rows = history.at(every)
    x = draw(SLOTS + 1, 7, seed)
    rows.extend("a", x, LENGTH)
    rows.extend("b", x, 2)
    rows.recall("a", x)
    rows.advance(7)


def extended(history, slots, x, chunks):
    """What `extend` puts before each chunk, and the chunks themselves."""
    return [history.at(slots).extend("a", chunk, LENGTH) for chunk in split(x, chunks)]


@pytest.mark.parametrize("chunks", CHUNKS)
def test_extend_precedes_each_chunk_with_the_columns_before_it(history, chunks):
    scramble(history)
    slots = torch.tensor([3, 0])
    history.reset(slots)
    x = draw(2)
    whole, start = WHOLE.extend("a", x, LENGTH), 0
    for joined in extended(history, slots, x, chunks):
        assert torch.equal(joined, whole[:, start : start + joined.shape[1]])
        start += joined.shape[1] - LENGTH
    assert start == 12


def test_whole_pads_with_zeros_and_passes_gradients():
    x = draw(2).requires_grad_()
    joined = WHOLE.extend("a", x, LENGTH)
    assert not joined[:, :LENGTH].any()
    assert torch.equal(joined[:, LENGTH:], x)
    joined.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert torch.equal(WHOLE.recall("a", x), x)
    assert WHOLE.positions(3, torch.device("cpu")).tolist() == [[0, 1, 2]]
    assert WHOLE.extend("a", x, 0) is x


@pytest.mark.parametrize("chunks", CHUNKS)
def test_recall_holds_the_last_columns_at_their_positions(history, chunks):
    scramble(history)
    slots = torch.tensor([3, 0])
    history.reset(slots)
    x = draw(2)
    start = 0
    for chunk in split(x, chunks):
        rows, columns = history.at(slots), chunk.shape[1]
        positions = rows.recalled("a", columns, x.device)
        joined = rows.recall("a", chunk)
        rows.advance(columns)
        assert joined.shape[1] == positions.shape[1] == LENGTH + columns
        for row in range(2):
            found = {p: joined[row, i] for i, p in enumerate(positions[row].tolist()) if p >= 0}
            assert sorted(found) == list(range(max(0, start - LENGTH), start + columns))
            assert all(torch.equal(column, x[row, p]) for p, column in found.items())
        start += columns
    assert history.seen[slots].tolist() == [12, 12]


def test_rows_are_independent_when_interleaved_and_shuffled(history):
    x = draw(4)
    whole = WHOLE.extend("a", x, LENGTH)
    streams = {0: 2, 1: 4, 2: 0, 3: 1}
    progress = dict.fromkeys(streams, 0)
    for turn, members in enumerate([[0], [1, 0], [3, 2, 0], [2, 3], [0, 1, 2, 3], [3, 0, 2, 1], [1, 0]]):
        columns = 1 + turn % 3
        chunk = torch.stack([x[m, progress[m] : progress[m] + columns] for m in members])
        rows = history.at(torch.tensor([streams[m] for m in members]))
        joined = rows.extend("a", chunk, LENGTH)
        rows.advance(columns)
        for row, member in enumerate(members):
            start = progress[member]
            assert torch.equal(joined[row], whole[member, start : start + LENGTH + columns])
            progress[member] += columns
    assert {m: history.seen[streams[m]].item() for m in streams} == progress


def test_the_scratch_row_may_repeat_and_disturbs_nobody(history):
    scramble(history)
    before = {key: tensor.clone() for key, tensor in history.columns.items()}
    history.reset(torch.tensor([2]))
    rows = history.at(torch.tensor([2, SLOTS, SLOTS, SLOTS]))
    x = draw(4, 3)
    joined = rows.extend("a", x, LENGTH)
    rows.recall("b", x)
    rows.advance(3)
    assert torch.equal(joined[0], WHOLE.extend("a", x, LENGTH)[0])
    others = [0, 1, 3, 4]
    assert all(torch.equal(history.columns[key][others], before[key][others]) for key in before)


def test_reset_forgets_the_given_rows_alone(history):
    scramble(history)
    history.reset(torch.tensor([1, 4]))
    for tensor in (*history.columns.values(), history.seen):
        assert not tensor[[1, 4]].any()
        assert tensor[[0, 2, 3, 5]].flatten(1).any(1).all() if tensor.ndim > 1 else tensor[[0, 2, 3, 5]].all()


def test_a_saved_row_continues_in_others(history):
    x = draw(1)
    whole = WHOLE.extend("a", x, LENGTH)
    rows = history.at(torch.tensor([1]))
    rows.extend("a", x[:, :7], LENGTH)
    rows.advance(7)
    saved = history.save(torch.tensor([1]))
    scramble(history)
    for slots in (torch.tensor([3]), torch.tensor([0, 4])):
        history.load(slots, saved)
        rows = history.at(slots)
        assert rows.positions(2, x.device).tolist() == [[7, 8]] * len(slots)
        joined = rows.extend("a", x[:, 7:9].expand(len(slots), -1, -1), LENGTH)
        assert torch.equal(joined, whole[:, 7 : 7 + LENGTH + 2].expand(len(slots), -1, -1))


def test_history_keeps_no_graph_and_never_reallocates(history):
    storage = {key: tensor.data_ptr() for key, tensor in history.columns.items()}
    x = draw(1).requires_grad_()
    rows = history.at(torch.tensor([0]))
    rows.extend("a", x, LENGTH)
    rows.recall("b", x)
    rows.advance(12)
    assert not any(tensor.requires_grad for tensor in history.columns.values())
    history.reset(torch.tensor([0]))
    history.load(torch.tensor([0]), history.save(torch.tensor([1])))
    assert {key: tensor.data_ptr() for key, tensor in history.columns.items()} == storage
