"""Released sizes on a GPU, with random weights: graphs against eager launches, and a batch against single rows."""

from collections.abc import Callable, Iterator

import pytest
import torch
from parity import NEAR_TIE, SPREAD, begin, capacity, moved
from torch import Tensor

from sonoro.core.types import SamplingParams, SpeechRequest
from sonoro.models import registry
from sonoro.models.base import LoadedModel, Prompt, SpeechModel
from sonoro.ops.e4m3 import e4m3_linear, e4m3_linear_add_norm, quantize_rows
from sonoro.runtime.graphs import GraphSet

pytestmark = pytest.mark.gpu

FRAMES = 12
POSITIONS = 256


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["qwen3-tts-1.7b-customvoice", "fish-s2-pro"])
def loaded(request: pytest.FixtureRequest, dtype: str) -> Iterator[LoadedModel]:
    torch.backends.cuda.matmul.allow_tf32 = False
    yield registry.load(request.param, device="cuda", dtype=dtype, load_format="dummy")
    torch.cuda.empty_cache()


@pytest.fixture
def model(loaded: LoadedModel) -> SpeechModel:
    return loaded.model


@pytest.fixture(autouse=True)
def _own_stream() -> Iterator[None]:
    """Graphs cannot be captured on the default stream."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
        torch.cuda.synchronize()


def prompts_of(model: SpeechModel, count: int, *, is_greedy: bool) -> list[Prompt]:
    sampling = SamplingParams(temperature=0, repetition_penalty=1) if is_greedy else SamplingParams(temperature=0.9)
    options = {option.name: False for option in model.spec.options if is_greedy and option.name.endswith("dosample")}
    prompts = []
    for number in range(count):
        request = SpeechRequest(
            id="1",
            text=f"Number {number}.",
            seed=number,
            max_frames=FRAMES,
            ignore_eos=True,
            sampling=sampling,
            options=options,
        )
        request = model.spec.resolve(request)
        prompts.append(model.prepare(request, request.text, 0, [], None))
    return prompts


def speak(model: SpeechModel, batch: int, padded: int, *, is_greedy: bool, is_eager: bool) -> Tensor:
    """Frames [B, T, K] of `batch` prompts in shuffled slots, stepped at size `padded`."""
    with torch.inference_mode():
        state = model.allocate(capacity(padded, POSITIONS, FRAMES, 64))
        model.check_kernels(state, padded)
        slots = torch.randperm(padded, generator=torch.Generator().manual_seed(1))[:batch].tolist()
        begin(model, state, prompts_of(model, batch, is_greedy=is_greedy), slots)
        step = GraphSet(
            "frame", lambda rows: model.frame(state, rows), [padded], padded, state.done.device, is_eager=is_eager
        )
        step.capture()
        for _ in range(FRAMES):
            step.run(slots)
        assert (step.eager_launches, step.graph_launches) == ((FRAMES, 0) if is_eager else (0, FRAMES))
        return state.frames[slots].cpu()


@pytest.mark.parametrize(("batch", "padded"), [(1, 1), (3, 4), (64, 64)])
def test_graph_equals_eager_bit_by_bit(model: SpeechModel, batch: int, padded: int) -> None:
    eager, graph = (speak(model, batch, padded, is_greedy=False, is_eager=arm) for arm in (True, False))
    assert eager.any(dim=-1).all()
    assert torch.equal(eager, graph)


@pytest.mark.parametrize("name", ["qwen3-tts-1.7b-customvoice", "fish-s2-pro"])
def test_in_fp8_graph_equals_eager_and_kernels_agree(name: str) -> None:
    """At sizes with rows in E4M3, and with 16-bit copies of the depth model's weights."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("products of E4M3 want compute capability 8.9")
    model = registry.load(name, device="cuda", load_format="dummy", quantization="fp8").model
    for batch in (20, 64):
        eager, graph = (speak(model, batch, batch, is_greedy=False, is_eager=arm) for arm in (True, False))
        assert torch.equal(eager, graph)
    failed = [operation.name for operation in (quantize_rows, e4m3_linear, e4m3_linear_add_norm) if operation.failure]
    assert not failed
    assert e4m3_linear.difference is not None


def test_a_batch_fed_the_same_frames_decides_as_its_rows_alone(
    model: SpeechModel, dtype: str, record_property: Callable[[str, object], None]
) -> None:
    found = moved(model, prompts_of(model, 6, is_greedy=True), capacity(6, POSITIONS, FRAMES, 64), 6)
    record_property("gaps_moved", (found.rms, found.most))
    assert found.rms < SPREAD[dtype]
    assert found.most < NEAR_TIE[dtype]


def test_a_batch_speaks_as_its_rows_do_alone(
    model: SpeechModel, dtype: str, record_property: Callable[[str, object], None]
) -> None:
    """Greedy codes are equal up to the first near tie: another size rounds differently, and a flip changes the rest."""
    batch, flipped = 16, 0
    together = speak(model, batch, batch, is_greedy=True, is_eager=False)
    for row, prompt in enumerate(prompts_of(model, batch, is_greedy=True)):
        codes, gaps = alone(model, prompt)
        # Decisions are made in this order: frame by frame, codebook by codebook.
        differs = (codes != together[row]).flatten().nonzero().flatten()
        if len(differs):
            flipped += 1
            assert gaps.flatten()[differs[0]] < NEAR_TIE[dtype], (row, int(differs[0]))
    print(f"rows that met a near tie: {flipped} of {batch}")
    record_property("near_ties", flipped)


def alone(model: SpeechModel, prompt: Prompt) -> tuple[Tensor, Tensor]:
    """Codes [T, K] of one prompt by itself, and the gap of the two best logits over their spread at each decision."""
    with torch.inference_mode():
        state, gaps = model.allocate(capacity(1, POSITIONS, FRAMES, 64)), []
        begin(model, state, [prompt], [0])
        for _ in range(FRAMES):
            record: list[Tensor] = []
            model.frame(state, torch.zeros(1, dtype=torch.int64, device=state.done.device), record)
            # Ids beyond the codes, which come first, cannot be drawn.
            codes = min(values.shape[1] for values in record)
            logits = torch.stack([values[0, :codes].float() for values in record])
            best = logits.topk(2).values
            gaps.append((best[:, 0] - best[:, 1]) / logits.std(dim=1))
        return state.frames[0].cpu(), torch.stack(gaps).cpu()


def test_codes_vary_and_can_be_heard(model: SpeechModel) -> None:
    frames = speak(model, 16, 16, is_greedy=False, is_eager=False)
    assert all(len(codes.unique()) >= 20 for codes in frames.flatten(0, 1).T)
    with torch.inference_mode():
        audio = model.codec.decode(frames[:4].cuda())
    assert 0.05 < audio.std() < 0.5
    assert (audio.abs() > 0.99).float().mean() < 0.01
