"""The decode step: slow AR, sampling of codebook 0, fast AR, between the two kernels of `sonoro.models.shared.step`."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from sonoro.models.shared.slots import DepthState, depth_passes
from sonoro.models.shared.step import StepState, begin_step, finish_step
from sonoro.models.shared.step import check_kernels as check_step
from sonoro.nn.kvcache import PackedPrompts
from sonoro.ops.repetition_aware import Resample, sample_repetition_aware
from sonoro.ops.repetition_aware import check_kernels as check_sampling
from sonoro.ops.sample import gumbel_noise
from sonoro.runtime.sampling import BatchSampling

from .backbone import DualAR

_WINDOW = 10
"""Window of repetition-aware sampling: earlier codes of codebook 0, never including the first frame's."""


def frame(
    lm: DualAR,
    state: DepthState,
    slots: Tensor,
    record: list[Tensor] | None = None,
    prompts: PackedPrompts | None = None,
) -> None:
    """`SpeechModel.frame`; `record` gets the logits [B, V] of the slow AR, then of each pass of the fast AR. `prompts`
    are prefilled on the way."""
    assert not torch.is_grad_enabled()
    stepped = StepState.of(state)
    start = begin_step(slots, stepped)
    controls = state.samplers[0].read(start.slots)
    hidden, logits = _step_slow(lm, state, start.slots, start.inputs, start.position, prompts)
    codes, sample_book = _sampler(lm, state, start.slots, start.length, controls)
    decided, fed = [logits], [hidden, sample_book(0, logits)]
    for book, depth_logits in enumerate(_depth_logits(lm, state, start.slots, fed), start=1):
        decided.append(depth_logits)
        fed.append(sample_book(book, depth_logits))
    if record is not None:
        record.extend(decided)
    finish_step(codes, start, controls.max_frames, stepped, lm.feedback)


def check_kernels(lm: DualAR, state: DepthState, batch: int) -> None:
    """Compare each fused kernel of a step of `batch` slots with its reference. Synchronises; `state` is unchanged."""
    lm.slow.check_kernels(batch, state.cache.page_table, state.cache.page_positions, watch=state.watch)
    for tokens in (1, 2):
        lm.fast.check_kernels(batch, state.loop.page_table, state.loop.page_positions, tokens)
    check_step(batch, StepState.of(state), lm.feedback)
    check_sampling(batch, lm.codes + 1, lm.fast.embeddings.weight, _WINDOW)


def parts(lm: DualAR, state: DepthState) -> dict[str, Callable[[Tensor], object]]:
    """`ProfiledModel.parts`: `backbone`, `depth` (without sampling), and `sample` (of all codebooks)."""

    def backbone(slots: Tensor) -> Tensor:
        return _step_slow(lm, state, slots, state.pending[slots], state.position[slots])[1]

    def depth(slots: Tensor) -> list[Tensor]:
        embedded = lm.fast.embeddings(state.length[slots] % lm.codes)
        return list(_depth_logits(lm, state, slots, [state.pending[slots]] + [embedded] * (lm.codebooks - 1)))

    def sample(slots: Tensor) -> list[Tensor]:
        codes, sample_book = _sampler(lm, state, slots, state.length[slots], state.samplers[0].read(slots))
        logits = lm.head(state.pending[slots])
        for book in range(lm.codebooks):
            sample_book(book, logits[:, : lm.codes + (book == 0)])
        return list(codes.unbind(1))

    return {"backbone": backbone, "depth": depth, "sample": sample}


def _sampler(
    lm: DualAR, state: DepthState, slots: Tensor, length: Tensor, controls: BatchSampling
) -> tuple[Tensor, Callable[[int, Tensor], Tensor]]:
    """The step's codes [B, K], and a function (codebook, logits [B, V]) that samples into them and returns the fast
    AR's next inputs [B, H].
    The last id of codebook 0 is the end of speech, which the fast AR gets as code 0."""
    codes, noise = slots.new_empty(slots.shape[0], lm.codebooks), _noise(lm, controls, length)
    again = Resample(noise[:, -1], state.frames[:, :, 0], slots, length, top_p=0.9, window=_WINDOW, first=1)

    def sample_book(book: int, logits: Tensor) -> Tensor:
        given = (logits, noise[:, book, : logits.shape[1]], controls.sampling)
        more = () if book else (controls.ignore_eos, again)
        embedded: Tensor = sample_repetition_aware(*given, lm.fast.embeddings.weight, codes[:, book], *more)
        return embedded

    return codes, sample_book


def _step_slow(  # noqa: PLR0917 (what the stack is given)
    lm: DualAR,
    state: DepthState,
    slots: Tensor,
    inputs: Tensor,
    position: Tensor,
    prompts: PackedPrompts | None = None,
) -> tuple[Tensor, Tensor]:
    """Step the slow AR with `inputs` [B, H]: normed hidden states [B, H], for the fast AR, and logits [B, V]."""
    norm, given = lm.slow.norm, (inputs, state.rotary, state.cache, slots, position)
    outputs = lm.slow.step(*given, watch=state.watch, prompts=prompts)
    return norm.fused(outputs), lm.head.after_norm(outputs, norm)


def _depth_logits(lm: DualAR, state: DepthState, slots: Tensor, fed: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the logits [B, V] of codebooks 1 to K - 1; `fed` are the inputs, as `depth_passes` takes them."""
    for outputs in depth_passes(state, lm.fast, slots, fed):
        yield lm.fast.output.after_norm(outputs, lm.fast.norm)


def _noise(lm: DualAR, controls: BatchSampling, length: Tensor) -> Tensor:
    """Gumbel noise [B, K + 1, V] of a frame, by codebook; the last is for resampling codebook 0."""
    return gumbel_noise(controls.seed, controls.segment, length, lm.codebooks + 1, lm.codes + 1)
