"""The decode step: language model, end of speech, flow head, feedback.

The scratch slot, always done and at length 0, replaces slots that are done: they stay unchanged without a branch."""

from collections.abc import Callable

import torch
from torch import Tensor

from sonoro.models.shared.latents import check_noise, weight_bytes
from sonoro.models.shared.step import StepState, append_frames
from sonoro.ops.sample import normal_noise
from sonoro.runtime.sampling import BatchSampling, unpack_floats

from .backbone import FlowLM
from .state import FrameState

EARLIEST_END = 6  # the first frame at which speech may be decided to end: it may seem to end before it begins


def frame(lm: FlowLM, state: FrameState, slots: Tensor, record: list[Tensor] | None = None) -> None:
    """`SpeechModel.frame`. A segment ends some frames after the decision. `record` gets what the head is given [B, Z],
    the threshold and the logit of the end [B, 2], and the normalised latent [B, 1, D]."""
    assert not torch.is_grad_enabled()
    slots = slots.masked_fill(state.done[slots], state.scratch)
    length, position, controls = state.length[slots], state.position[slots], state.samplers[0].read(slots)
    options = state.options[slots]
    threshold, after = unpack_floats(options[:, :1])[:, 0], options[:, 1]
    hidden = _step(lm, state, slots, position)
    stop = torch.cat((threshold[:, None].to(hidden), lm.out_eos(hidden)), dim=1)
    latent = lm.flow_net(_noise(lm, controls, length), hidden)
    if record is not None:
        record.extend((hidden, stop, latent[:, None]))
    decides = (stop[:, 1] > stop[:, 0]) & (length >= EARLIEST_END) & ~controls.ignore_eos[:, 0]
    last = state.last[slots]
    last = torch.where(decides, torch.minimum(last, length + after), last)
    made = lm.denormalize(latent)[:, None].to(state.frames.dtype)
    kept = append_frames(
        StepState.of(state),
        slots,
        length,
        position,
        made,
        lm.embed_latents(latent),
        is_end=last <= length,
        max_frames=torch.minimum(last, controls.max_frames),
    )
    state.last[kept] = last


def check_kernels(lm: FlowLM, state: FrameState, batch: int) -> None:
    """Compare each fused kernel of a step of `batch` slots with its reference. Synchronises; `state` is unchanged."""
    lm.transformer.check_kernels(batch, state.cache.page_table, state.cache.page_positions, watch=state.watch)
    check_noise(batch, lm.config.latents, lm.weight.device)


def floor_bytes(lm: FlowLM) -> int:
    """Bytes of weights that one frame must read: all once but the text embedding, the head's once a step."""
    head, unread = lm.flow_net, weight_bytes(lm.conditioner, lm.speaker_proj, lm.flow_net.time_embed)
    again = weight_bytes(head) - weight_bytes(head.time_embed)
    return weight_bytes(lm) - unread + (len(head.times) - 1) * again


def parts(lm: FlowLM, state: FrameState) -> dict[str, Callable[[Tensor], object]]:
    """`ProfiledModel.parts`: `backbone`, `depth` (the flow head), and `sample` (noise, end, feedback)."""

    def backbone(slots: Tensor) -> Tensor:
        return _step(lm, state, slots, state.position[slots])

    def depth(slots: Tensor) -> Tensor:
        hidden = lm.read_out(state.pending[slots])
        return lm.flow_net(state.frames[slots, 0, 0].to(hidden.dtype), hidden)

    def sample(slots: Tensor) -> tuple[Tensor, Tensor]:
        noise = _noise(lm, state.samplers[0].read(slots), state.length[slots])
        return lm.out_eos(lm.read_out(state.pending[slots])), lm.embed_latents(noise)

    return {"backbone": backbone, "depth": depth, "sample": sample}


def _step(lm: FlowLM, state: FrameState, slots: Tensor, position: Tensor) -> Tensor:
    """Step the language model with the pending inputs: what the head is given, [B, Z]."""
    inputs = state.pending[slots]
    return lm.read_out(lm.transformer.step(inputs, state.rotary, state.cache, slots, position, watch=state.watch))


def _noise(lm: FlowLM, controls: BatchSampling, length: Tensor) -> Tensor:
    """Normal noise [B, D] of frame number `length` [B] of each slot; the temperature is its variance."""
    sampling = controls.sampling
    spread = sampling.temperature.sqrt().masked_fill(sampling.is_greedy, 0.0)
    noise = normal_noise(controls.seed, controls.segment, length, lm.config.latents)
    return (noise * spread).to(lm.bos_emb.dtype)
