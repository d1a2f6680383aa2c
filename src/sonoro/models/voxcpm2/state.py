"""Per-slot state: that of `sonoro.models.shared.slots` with both LMs in one paged cache, plus flow and stop options."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sonoro.models.base import Capacity, Pages
from sonoro.models.shared.prompts import RowPrompt
from sonoro.models.shared.slots import (
    BackboneState,
    admit_staged,
    allocate_backbone,
    clear_slots,
    run_prompts,
    stage_prompts,
    staged_tokens,
)
from sonoro.nn.kvcache import PackedPrompts, PagedKVCache
from sonoro.nn.transformer import Rotary
from sonoro.runtime.sampling import Controls, pack_floats, unpack_floats
from sonoro.words.heads import WordHeads

from .backbone import VoxLM
from .config import lm_config


@dataclass(frozen=True, kw_only=True)
class FrameState(BackboneState):
    """State by slot, [N+1, ...] each. Mutated in place by the functions of this folder.

    `patch` [N+1, P, D] is the last patch, zeros after text; `is_audio` [N+1] bool whether `pending` is a patch.
    `options` [N+1, 3] int64: guidance (packed floats), solver steps, minimum length. `cache` holds the base LM's layers
    (`base`), then the residual LM's (`residual`). `still`: identity rotary tables, as that has no positions."""

    patch: Tensor
    is_audio: Tensor
    options: Tensor
    base: PagedKVCache
    residual: PagedKVCache
    still: Rotary

    @property
    def zeroed(self) -> tuple[Tensor, ...]:
        return *super().zeroed, self.patch, self.is_audio

    def read_options(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Guidance float32, solver steps, and the frame after which speech may end, of slots `rows` [B]: [B] each.
        Capturable."""
        options = self.options[rows]
        return unpack_floats(options[:, :1])[:, 0].contiguous(), options[:, 1], options[:, 2]


def allocate(lm: VoxLM, capacity: Capacity, word_heads: WordHeads | None = None) -> FrameState:
    """`SpeechModel.allocate`, with `word_heads` of the base LM watched."""
    config, weight, rows = lm.config, lm.weight, capacity.slots + 1
    capacity.check_positions(config.max_length)
    layers = config.lm_config.num_hidden_layers
    tables = lm.base_lm.config.rotary(torch.arange(capacity.max_positions, device=weight.device), weight.dtype)
    patch = weight.new_zeros(config.patch_size, config.feat_dim)
    common = allocate_backbone(
        lm_config(config, config.paged_layers),
        tables,
        capacity,
        frame=patch.to(torch.promote_types(weight.dtype, torch.float32)),
        ids=[0] * (2 + patch.numel() // 2),
        added=[0] * 3,
        word_heads=word_heads,
    )
    return FrameState(
        **vars(common),
        patch=patch.repeat(rows, 1, 1),
        is_audio=torch.zeros(rows, dtype=torch.bool, device=weight.device),
        options=torch.zeros(rows, 3, dtype=torch.int64, device=weight.device),
        base=common.cache.part(slice(layers)),
        residual=common.cache.part(slice(layers, None)),
        still=(torch.ones_like(tables[0]), torch.zeros_like(tables[1])),
    )


def reset(state: FrameState, slots: Sequence[int]) -> None:
    """Free and clear `slots`. No sync; not capturable."""
    clear_slots(state, slots, (state.options, 0))


def stage(state: FrameState, prompts: Sequence[RowPrompt], slots: Sequence[int], pages: Sequence[Pages]) -> int:
    """Stage `prompts` with their `slots` and `pages`; returns the number of tokens staged. No sync; not capturable."""
    added = [(*prompt.controls.pack(), *_pack(prompt.controls)) for prompt in prompts]
    return stage_prompts(state, prompts, slots, pages, [prompt.rows for prompt in prompts], added)


def admit(state: FrameState, slots: Tensor) -> None:
    """Reset `slots` [B] int64 and write the staged state to them, in order. Capturable; no sync."""
    state.options.index_copy_(0, slots, admit_staged(state, slots))


def is_text_alone(prompts: Sequence[RowPrompt], pages: Sequence[Pages]) -> bool:
    """Whether all tokens of `prompts` after the cached prefixes of `pages` are text."""
    return not any(prompt.rows[own.cached :, 1].any() for prompt, own in zip(prompts, pages, strict=True))


def prompts(lm: VoxLM, state: FrameState, tokens: Tensor) -> PackedPrompts:
    """The prompts of text alone that `prefill` runs, for `frame` to run; each one's last input becomes pending. No
    sync."""
    packed, pending, ids = staged_tokens(state, tokens)
    embedded = lm.base_lm.embed_tokens(ids[:, 0])
    state.pending[pending] = embedded
    for rows in (state.patch, state.is_audio):
        rows.index_fill_(0, pending, 0)
    return PackedPrompts(embedded, packed, is_output_used=True)


def prefill(lm: VoxLM, state: FrameState, tokens: Tensor, *, is_text_alone: bool = False) -> None:
    """`SpeechModel.prefill`; each prompt's last input becomes pending. With `is_text_alone`, a promise about all
    `tokens`, the local encoder does not run. No sync."""
    packed, pending, ids = staged_tokens(state, tokens)
    is_audio, numbers = ids[:, 1] > 0, unpack_floats(ids[:, 2:])
    patches = numbers.unflatten(1, state.patch.shape[1:]).to(state.patch.dtype)
    embedded = lm.base_lm.embed_tokens(ids[:, 0]) if is_text_alone else lm.embed(ids[:, 0], patches, is_audio)
    hidden = run_prompts(state, lm.base_lm, embedded, state.rotary, state.base, packed)
    if not is_text_alone:
        hidden = lm.quantize(hidden, is_audio)
    fused = lm.fuse(hidden, embedded, is_audio)
    run_prompts(state, lm.residual_lm, fused, state.still, state.residual, packed, is_output_used=False)
    state.pending[pending], state.patch[pending], state.is_audio[pending] = embedded, patches, is_audio


def _pack(controls: Controls) -> tuple[int, ...]:
    cfg, steps, min_len = (controls.options[name] for name in ("cfg_value", "solver_steps", "min_len"))
    return int(pack_floats([cfg, 0.0])[0]), int(steps), int(min_len)
