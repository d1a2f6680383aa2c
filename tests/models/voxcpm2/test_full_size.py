"""The released size on a GPU, with random weights: graphs against eager launches, and audio that can be heard."""

from collections.abc import Iterator

import pytest
import torch
from parity import begin, capacity
from torch import Tensor

from sonoro.core.types import SpeechRequest
from sonoro.models import registry
from sonoro.models.base import SpeechModel
from sonoro.runtime.graphs import GraphSet

pytestmark = pytest.mark.gpu

FRAMES = 8


@pytest.fixture(scope="module")
def model() -> SpeechModel:
    return registry.load("voxcpm2", device="cuda", dtype="bfloat16", load_format="dummy").model


@pytest.fixture(autouse=True)
def _own_stream() -> Iterator[None]:
    """Graphs cannot be captured on the default stream."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
        torch.cuda.synchronize()


def speak(model: SpeechModel, batch: int, padded: int, *, is_eager: bool) -> Tensor:
    """Frames [B, T, P, D] of `batch` prompts with options of their own in shuffled slots, stepped at size `padded`."""
    with torch.inference_mode():
        state = model.allocate(capacity(padded, 96, FRAMES, 1))
        model.check_kernels(state, padded)
        slots = torch.randperm(padded, generator=torch.Generator().manual_seed(1))[:batch].tolist()
        prompts = []
        for index in range(batch):
            options = {"cfg_value": 1.0 + index % 3, "solver_steps": 10 - index % 4}
            fields = {"seed": index, "max_frames": FRAMES, "ignore_eos": True, "options": options}
            request = model.spec.resolve(SpeechRequest(id="1", text=f"Number {index}.", **fields))
            prompts.append(model.prepare(request, request.text, 0, [], None))
        begin(model, state, prompts, slots)
        step = GraphSet(
            "frame", lambda rows: model.frame(state, rows), [padded], padded, state.done.device, is_eager=is_eager
        )
        step.capture()
        for _ in range(FRAMES):
            step.run(slots)
        assert (step.eager_launches, step.graph_launches) == ((FRAMES, 0) if is_eager else (0, FRAMES))
        return state.frames[slots].clone()


@pytest.mark.parametrize(("batch", "padded"), [(1, 1), (3, 4), (32, 32)])
def test_graph_equals_eager_bit_by_bit(model: SpeechModel, batch: int, padded: int) -> None:
    eager, graph = (speak(model, batch, padded, is_eager=arm) for arm in (True, False))
    assert eager.isfinite().all()
    assert torch.equal(eager, graph)


def test_patches_vary_and_can_be_heard(model: SpeechModel) -> None:
    frames = speak(model, 16, 16, is_eager=False)
    assert frames.flatten(2).std(dim=(0, 1)).min() > 0.1
    with torch.inference_mode():
        audio = model.codec.decode(frames[:4])
    assert 0.05 < audio.std() < 0.5
    assert (audio.abs() > 0.99).float().mean() < 0.01
