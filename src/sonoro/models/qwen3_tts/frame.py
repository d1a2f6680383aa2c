"""The decode step: talker, sampling of codebook 0, code predictor, feedback. Its state is in `state.py`.

Slots that are done are replaced by the scratch slot (`models.shared.step`), so they stay unchanged without a branch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from sonoro.models.shared.slots import ReadsText, depth_passes
from sonoro.models.shared.step import PendingText, StepState, begin_step, finish_step
from sonoro.models.shared.step import check_kernels as check_step
from sonoro.nn.kvcache import PackedPrompts
from sonoro.nn.linear import Linear
from sonoro.ops.sample import gumbel_noise, sample, sample_and_embed
from sonoro.runtime.sampling import BatchSampling

from . import sampling
from .backbone import Talker
from .sampling import mask_first
from .state import FrameState, prefill, prompts_of


def frame(
    talker: Talker,
    state: FrameState,
    slots: Tensor,
    record: list[Tensor] | None = None,
    prompts: PackedPrompts | None = None,
) -> None:
    """`SpeechModel.frame`; `record` gets the logits [B, V] of the talker, then of each predictor pass. `prompts` are
    prefilled on the way."""
    assert not torch.is_grad_enabled()
    stepped = _step_state(talker, state)
    start = begin_step(slots, stepped)
    hidden, logits = _step_talker(talker, state, start.slots, start.inputs, start.position, prompts)
    decided = [logits]
    sampler = _Sampler.of(talker, state, start.slots, start.length)
    fed = [talker.code_predictor.small_to_mtp_projection(hidden), sampler.first(logits)]
    for book, depth_logits in enumerate(_depth_logits(talker, state, start.slots, fed), start=1):
        fed.append(sampler.rest(book, depth_logits))
        decided.append(depth_logits)
    if record is not None:
        record.extend(decided)
    finish_step(sampler.codes, start, sampler.first_controls.max_frames, stepped, talker.feedback)


def check_kernels(talker: Talker, state: FrameState, batch: int) -> None:
    """Compare each fused kernel of a step of `batch` slots with its reference. Synchronises; `state` is unchanged."""
    talker.model.check_kernels(batch, state.cache.page_table, state.cache.page_positions, watch=state.watch)
    for tokens in (1, 2):
        talker.code_predictor.model.check_kernels(batch, state.loop.page_table, state.loop.page_positions, tokens)
    decidable, codes = state.is_end.shape[0], talker.config.code_predictor_config.vocab_size
    inputs = talker.code_predictor.inputs(0)
    sampling.check_kernels(batch, decidable, inputs[: talker.codes])
    sampling.check_kernels(batch, codes, inputs)
    check_step(batch, _step_state(talker, state), talker.feedback)


def parts(talker: Talker, state: FrameState) -> dict[str, Callable[[Tensor], object]]:
    """`ProfiledModel.parts`: `backbone`, `depth` (without sampling), and `sample` (of all codebooks)."""
    codes = torch.zeros(state.scratch + 1, dtype=torch.int64, device=state.done.device)

    def backbone(slots: Tensor) -> Tensor:
        return _step_talker(talker, state, slots, state.pending[slots], state.position[slots])[1]

    def depth(slots: Tensor) -> list[Tensor]:
        predictor = talker.code_predictor
        hidden = predictor.small_to_mtp_projection(state.pending[slots])
        fed = [hidden, *(predictor.embed(book, codes[slots]) for book in range(talker.codebooks - 1))]
        return list(_depth_logits(talker, state, slots, fed))

    def sample(slots: Tensor) -> list[Tensor]:
        length = state.length[slots]
        first = talker.codec_head(state.pending[slots])
        rest = first[:, : talker.config.code_predictor_config.vocab_size].contiguous()
        sampler = _Sampler.of(talker, state, slots, length)
        sampler.first(first)
        for book in range(1, talker.codebooks):
            sampler.rest(book, rest)
        return list(sampler.codes.unbind(1))

    return {"backbone": backbone, "depth": depth, "sample": sample}


class StepsTalker(ReadsText):
    """The prefill and the decode step of a model whose talker, with modules for torch, is `_forms.in_torch`."""

    _forms: Any

    def prefill(self, state: FrameState, tokens: Tensor) -> None:
        prefill(self._forms.in_torch, state, tokens)

    def frame(self, state: FrameState, slots: Tensor, record: list[Tensor] | None = None) -> None:
        frame(self._forms.in_torch, state, slots, record)

    def prefill_and_frame(self, state: FrameState, tokens: Tensor, slots: Tensor) -> None:
        talker = self._forms.in_torch
        frame(talker, state, slots, prompts=prompts_of(talker, state, tokens))


class _Sampler(NamedTuple):
    """Samples the `codes` [B, K] of one step, from its slots' controls, Gumbel `noise` [B, K, V] and `seen` ids.
    `first` and `rest` return the predictor's inputs [B, width] for the sampled codes; None after the last codebook."""

    codes: Tensor
    first_controls: BatchSampling
    rest_controls: BatchSampling
    noise: Tensor
    seen: Tensor
    length: Tensor
    state: FrameState
    talker: Talker

    @classmethod
    def of(cls, talker: Talker, state: FrameState, slots: Tensor, length: Tensor) -> _Sampler:
        first, rest = (sampler.read(slots) for sampler in state.samplers)
        ids = max(state.is_end.shape[0], talker.config.code_predictor_config.vocab_size)
        noise = gumbel_noise(first.seed, first.segment, length, talker.codebooks, ids)
        codes = torch.empty((slots.shape[0], talker.codebooks), dtype=torch.int64, device=slots.device)
        return cls(codes, first, rest, noise, state.seen[slots], length, state, talker)

    def first(self, logits: Tensor) -> Tensor | None:
        """Sample codebook 0 from the talker's `logits` [B, V]; the last of the ids considered is the end of speech."""
        decidable, state = self.seen.shape[1], self.state
        scores = mask_first(
            logits[:, :decidable],
            self.first_controls,
            self.seen,
            self.length,
            suppressed=state.suppressed,
            is_end=state.is_end,
        )
        # The table has no control ids: after an end of speech the slot continues as with code 0.
        table = self.talker.code_predictor.inputs(0)[: self.talker.codes]
        noise, sampling = self.noise[:, 0, :decidable], self.first_controls.sampling
        embedded: Tensor = sample_and_embed(scores, noise, sampling, table, self.codes[:, 0])
        return embedded

    def rest(self, book: int, logits: Tensor) -> Tensor | None:
        """Sample codebook `book` from the predictor's `logits` [B, V]."""
        given, ids = (logits, self.noise[:, book, : logits.shape[1]], self.rest_controls.sampling), self.codes[:, book]
        if book == self.talker.codebooks - 1:
            sample(*given, ids)
            return None
        embedded: Tensor = sample_and_embed(*given, self.talker.code_predictor.inputs(book), ids)
        return embedded


def _step_state(talker: Talker, state: FrameState) -> StepState:
    return StepState.of(state, state.seen, PendingText(state.text_ids, talker.text_table, talker.embed_text))


def _step_talker(  # noqa: PLR0917 (what the stack is given)
    talker: Talker,
    state: FrameState,
    slots: Tensor,
    inputs: Tensor,
    position: Tensor,
    prompts: PackedPrompts | None = None,
) -> tuple[Tensor, Tensor]:
    """Hidden states [B, H] and logits [B, V] of `inputs` [B, H] at `position` [B]."""
    given = inputs, state.rotary, state.cache, slots, position
    outputs = talker.model.step(*given, watch=state.watch, prompts=prompts)
    hidden = talker.model.norm.fused(outputs)
    return hidden, talker.codec_head(hidden)


def _depth_logits(talker: Talker, state: FrameState, slots: Tensor, fed: Sequence[Tensor | None]) -> Iterator[Tensor]:
    """Yield the logits [B, V] of codebooks 1 to K - 1; `fed` are the inputs, as `depth_passes` takes them."""
    predictor, norm = talker.code_predictor, talker.code_predictor.model.norm
    for head, outputs in zip(predictor.lm_head, depth_passes(state, predictor.model, slots, fed), strict=True):
        yield cast(Linear, head).after_norm(outputs, norm)
