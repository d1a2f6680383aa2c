"""The decode step: base LM, residual LM, flow matching of a patch, feedback.

The scratch slot, always done and at length 0, replaces slots that are done: they stay unchanged without a branch."""

from collections.abc import Callable

import torch
from torch import Tensor

from sonoro.models.shared.latents import check_noise, weight_bytes
from sonoro.models.shared.step import StepState, append_frames
from sonoro.nn.kvcache import PackedPrompts
from sonoro.ops.sample import normal_noise
from sonoro.runtime.sampling import BatchSampling

from .backbone import VoxLM
from .state import FrameState


def frame(
    lm: VoxLM,
    state: FrameState,
    slots: Tensor,
    record: list[Tensor] | None = None,
    prompts: PackedPrompts | None = None,
) -> None:
    """`SpeechModel.frame`. The frame that ends speech is audio, and kept. `record` gets the hidden states [B, H] of
    both LMs, the stop logits [B, 2] and the patch [B, P, D]. `prompts` are prefilled on the way."""
    assert not torch.is_grad_enabled()
    slots = slots.masked_fill(state.done[slots], state.scratch)
    length, position, controls = state.length[slots], state.position[slots], state.samplers[0].read(slots)
    cfg, steps, min_len = state.read_options(slots)
    hidden, residual = _step(lm, state, slots, position, prompts)
    noise = _noise(controls, length, state.patch)
    patch = lm.feat_decoder.sample(lm.condition(hidden, residual), state.patch[slots], noise, cfg, steps)
    stop = lm.stop_logits(hidden)
    if record is not None:
        record.extend((hidden, residual, stop, patch))
    is_last = (stop[:, 1] > stop[:, 0]) & (length > min_len) & ~controls.ignore_eos[:, 0]
    most = torch.where(is_last, length + 1, controls.max_frames)
    made, pending = patch.to(state.frames.dtype), lm.embed_patches(patch)
    never = torch.zeros_like(is_last)
    kept = append_frames(StepState.of(state), slots, length, position, made, pending, is_end=never, max_frames=most)
    state.patch[kept] = patch
    state.is_audio.index_fill_(0, kept, True)


def check_kernels(lm: VoxLM, state: FrameState, batch: int) -> None:
    """Compare each fused kernel of a step of `batch` slots with its reference. Synchronises; `state` is unchanged."""
    for stack, watch in ((lm.base_lm, state.watch), (lm.residual_lm, None)):
        stack.check_kernels(batch, state.cache.page_table, state.cache.page_positions, watch=watch)
    lm.feat_encoder.encoder.check_bidirectional(batch)
    lm.feat_decoder.check_kernels(batch)
    check_noise(batch, state.patch[0].numel(), lm.weight.device)


def floor_bytes(lm: VoxLM) -> int:
    """Bytes of weights that one frame must read: all once except the text embedding, the flow's once per call."""
    dit = lm.feat_decoder.estimator
    again = (lm.feat_decoder.calls - 1) * weight_bytes(dit.decoder, dit.in_proj, dit.out_proj)
    return weight_bytes(lm) + again - weight_bytes(lm.base_lm.embed_tokens, dit.time_mlp, dit.delta_time_mlp)


def parts(lm: VoxLM, state: FrameState) -> dict[str, Callable[[Tensor], object]]:
    """`ProfiledModel.parts`: `backbone` (both LMs), `depth` (the flow), and `sample` (noise, stop, feedback)."""

    def backbone(slots: Tensor) -> tuple[Tensor, Tensor]:
        return _step(lm, state, slots, state.position[slots])

    def depth(slots: Tensor) -> Tensor:
        pending, patch = state.pending[slots], state.patch[slots]
        return lm.feat_decoder.sample(lm.condition(pending, pending), patch, patch, *state.read_options(slots)[:2])

    def sample(slots: Tensor) -> tuple[Tensor, Tensor]:
        noise = _noise(state.samplers[0].read(slots), state.length[slots], state.patch)
        return lm.stop_logits(state.pending[slots]), lm.embed_patches(noise)

    return {"backbone": backbone, "depth": depth, "sample": sample}


def _step(
    lm: VoxLM, state: FrameState, slots: Tensor, position: Tensor, prompts: PackedPrompts | None = None
) -> tuple[Tensor, Tensor]:
    """Step both LMs with the pending inputs: hidden states [B, H] after their norms; the base LM's are quantised.
    `prompts` are of text alone."""
    embedded, is_audio = state.pending[slots], state.is_audio[slots]
    base, above, count = lm.base_lm, lm.residual_lm, slots.shape[0]
    outputs = base.step(embedded, state.rotary, state.base, slots, position, watch=state.watch, prompts=prompts)
    normed = base.norm.fused(outputs)
    hidden = lm.quantize(normed[:count], is_audio)
    if prompts is not None:
        text = torch.zeros_like(prompts.tokens.slots, dtype=torch.bool)
        prompts = PackedPrompts(lm.fuse(normed[count:], prompts.rows, text), prompts.tokens)
    fused = lm.fuse(hidden, embedded, is_audio)
    outputs = above.step(fused, state.still, state.residual, slots, position, prompts=prompts)
    return hidden, above.norm.fused(outputs)


def _noise(controls: BatchSampling, length: Tensor, patches: Tensor) -> Tensor:
    """Normal noise [B, P, D] of patch number `length` [B] of each slot, in the dtype of `patches` [.., P, D]."""
    shape = patches.shape[1:]
    return normal_noise(controls.seed, controls.segment, length, shape.numel()).unflatten(1, shape).to(patches.dtype)
