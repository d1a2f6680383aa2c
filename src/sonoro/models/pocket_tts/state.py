"""Per-slot state: that of `sonoro.models.shared.slots`, plus when a segment ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sonoro.models.base import Capacity, Pages
from sonoro.models.shared import slots as shared
from sonoro.nn.kvcache import PackedTokens
from sonoro.runtime.sampling import pack_floats
from sonoro.words.heads import WordHeads

from .backbone import FlowLM
from .config import MOST_POSITIONS
from .prompt import PocketPrompt

_NEVER = 2**40


@dataclass(frozen=True, kw_only=True)
class FrameState(shared.BackboneState):
    """State by slot, [N+1, ...] each. Mutated in place by the functions of this folder.

    `last` [N+1] int64 is the number of frames at which the segment ends, once that is decided. `options` [N+1, 2]
    int64: the threshold of the end's logit (packed floats), and the frames after the decision."""

    last: Tensor
    options: Tensor


def allocate(lm: FlowLM, capacity: Capacity, word_heads: WordHeads | None = None) -> FrameState:
    """`SpeechModel.allocate`, with `word_heads` watched."""
    capacity.check_positions(MOST_POSITIONS)
    weight, sizes = lm.weight, lm.config.backbone
    tables = sizes.rotary(torch.arange(capacity.max_positions, device=weight.device), weight.dtype)
    common = shared.allocate_backbone(
        sizes,
        tables,
        capacity,
        frame=lm.emb_mean.new_zeros(1, lm.config.latents),
        ids=[0],
        added=[0] * 2,
        word_heads=word_heads,
    )
    rows = capacity.slots + 1
    return FrameState(
        **vars(common),
        last=torch.full((rows,), _NEVER, device=weight.device),
        options=torch.zeros(rows, 2, dtype=torch.int64, device=weight.device),
    )


def reset(state: FrameState, slots: Sequence[int]) -> None:
    """Free and clear `slots`. No sync; not capturable."""
    shared.clear_slots(state, slots, (state.last, _NEVER), (state.options, 0))


def stage(state: FrameState, prompts: Sequence[PocketPrompt], slots: Sequence[int], pages: Sequence[Pages]) -> int:
    """Stage `prompts` with their `slots` and `pages`; returns the number of tokens staged. No sync; not capturable."""
    ends = [(int(pack_floats([prompt.threshold, 0.0])[0]), prompt.frames_after_end) for prompt in prompts]
    added = [(*prompt.controls.pack(), *end) for prompt, end in zip(prompts, ends, strict=True)]
    rows, stored = [prompt.rows for prompt in prompts], [prompt.state for prompt in prompts]
    return shared.stage_prompts(state, prompts, slots, pages, rows, added, stored)


def admit(state: FrameState, slots: Tensor) -> None:
    """Reset `slots` [B] int64 and write the staged state to them, in order. Capturable; no sync."""
    state.options.index_copy_(0, slots, shared.admit_staged(state, slots))
    state.last.index_fill_(0, slots, _NEVER)


def prefill(
    lm: FlowLM, state: FrameState, tokens: Tensor, run: Callable[[Tensor, PackedTokens], None] | None = None
) -> None:
    """`SpeechModel.prefill`, with `run`, if given, in place of the transformer. No sync."""
    shared.fill_backbone(state, tokens, lm.transformer, lambda ids: lm.embed(ids[:, 0]), run)
