"""What the training loops share: a descent that nothing can spoil, and rates that a resumed run still sets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from builtin_voice.training import Average, Captured, Course, Run, Unfinished, adam, descend, set_rate, steps_of


def test_a_gradient_that_is_not_finite_moves_nothing() -> None:
    torch.manual_seed(0)
    module, given = nn.Linear(3, 2), torch.randn(4, 3)
    optimizer = adam(module, (0.9, 0.98), 0.1)
    set_rate(optimizer, 0.01)
    descend(module, optimizer, module(given).square().mean())
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for spoiled in (float("nan"), float("inf")):
        norm = descend(module, optimizer, (module(given) * spoiled).mean())
        assert not norm.isfinite()
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor, before[name])
    descend(module, optimizer, module(given).square().mean())
    for name, tensor in module.state_dict().items():
        assert tensor.isfinite().all()
        assert not torch.equal(tensor, before[name])


def test_a_course_that_ends_before_its_rate_does_is_the_beginning_of_the_whole_one(tmp_path: Path) -> None:
    def rates(steps: int, decay_steps: int | None) -> list[float]:
        course = Course(steps, learning_rate=2.0, warmup_steps=5, seed=0, decay_steps=decay_steps)
        run = Run(float("inf"), lambda record: None, tmp_path / "state.pt")
        return [step.rate for step in steps_of(course, run, {})]

    assert rates(30, 50) == rates(50, None)[:30]
    assert rates(30, None)[-1] < 0.1 < rates(30, 50)[-1]


def test_a_fitted_run_takes_the_steps_there_is_time_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 2 s in 100 s: the rate falls with the time, and what was learned is kept every minute."""
    now, module = [50.0], nn.Linear(1, 1)
    monkeypatch.setattr("builtin_voice.training.time.monotonic", lambda: now[0])
    course = Course(steps=9999, learning_rate=1.0, warmup_steps=4, seed=0)
    run = Run(150.0, lambda record: None, tmp_path / "state.pt", is_fitted=True, snapshot=tmp_path / "snapshot.pt")
    steps, kept = [], []
    for step in steps_of(course, run, {"module": module}, lambda: {"module": module.state_dict()}):
        steps.append(step)
        now[0] += 2
        kept.append((tmp_path / "snapshot.pt").exists())
        module.weight.data.fill_(step.number)
    assert [step.number for step in steps] == list(range(50))
    assert [step.progress for step in steps] == pytest.approx([number / 50 for number in range(50)])
    assert steps[0].rate == pytest.approx(0.25)
    assert steps[25].rate == pytest.approx(0.51)
    assert steps[-1].rate < 0.03
    assert kept == [False] * 31 + [True] * 19
    learned = torch.load(tmp_path / "snapshot.pt", weights_only=True)["module"]["weight"]
    assert learned.dtype == torch.float16
    assert learned.item() == 30


def test_an_average_follows_the_weights_and_forgets_where_they_began() -> None:
    module = nn.Linear(1, 1, bias=False)
    module.weight.data.fill_(100.0)
    average = Average(module, 0.9)
    for step in range(200):
        module.weight.data.fill_(1.0 if step < 100 else 2.0)
        average.follow(step)
        if step == 99:
            assert average.module.weight.item() == pytest.approx(1.0, abs=0.01)
    assert average.module.weight.item() == pytest.approx(2.0, abs=0.01)
    assert not average.module.weight.requires_grad


@pytest.mark.gpu
def test_a_recorded_step_of_a_resumed_run_takes_the_rate_that_is_set(tmp_path: Path) -> None:
    """A rate on the CPU would be recorded as the number it was."""
    device, given = torch.device("cuda"), torch.ones(1, 3, device="cuda")
    course = Course(steps=40, learning_rate=0.1, warmup_steps=1, seed=0)
    for deadline_s in (float("-inf"), float("inf")):
        module = nn.Linear(3, 2).to(device)
        optimizer = adam(module, (0.9, 0.98), 0.0)
        parts = {"module": module, "optimizer": optimizer}
        run = Run(deadline_s, lambda record: None, tmp_path / "state.pt")
        if deadline_s < 0:
            with pytest.raises(Unfinished):
                next(steps_of(course, run, parts))
            continue

        def learn(x: torch.Tensor, module: nn.Module = module, optimizer: torch.optim.AdamW = optimizer):
            return {"norm": descend(module, optimizer, module(x).square().mean())}

        captured = Captured(learn)
        for step in steps_of(course, run, parts):
            set_rate(optimizer, step.rate if step.number < 20 else 0.0)
            before = module.weight.detach().clone()
            captured(given)
            assert torch.equal(module.weight, before) == (step.number >= 20)
