"""How far two orders of summation move a decision: a batch and its rows alone, fed the same frames."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from speaking import begin
from torch import Tensor

from sonoro.models.base import Capacity, Prompt, SpeechModel

SPREAD = {"float32": 1.6e-5, "bfloat16": 0.035}
"""How far two orders move the gap of the two best logits: root mean square, in standard deviations of the logits.

Measured, a batch against its rows alone. In bfloat16 on a CPU .010 to .024 at tiny sizes (3 layers, 32 to 64 wide)
and .029 at the released size of Qwen3-TTS 0.6B (28 layers, 1024 wide), on an H200 .032 for Qwen3-TTS 1.7B and .033
for Fish S2 Pro; a fourteenth is added to the largest. The best logits are 2 to 4 deviations, where a step is 2^-6,
and the median is one or two steps, whatever the depth. In float32 1e-6 and 5e-6; the largest seen was 3 to 7 times
the root mean square.
"""

NEAR_TIE = {dtype: 6 * spread for dtype, spread in SPREAD.items()}
"""A gap that is narrower may be decided either way."""


class Moved(NamedTuple):
    """Of each decision [B, T, K]: the gap of the two best logits alone, and how much wider the batch has it, both over
    the standard deviation of the logits. `by` is NaN where a code before it in its frame was another in the batch."""

    gaps: Tensor
    by: Tensor

    @property
    def rms(self) -> float:
        """Of all that is known."""
        return float(self.by[self.by.isfinite()].square().mean().sqrt())

    @property
    def most(self) -> float:
        return float(self.by[self.by.isfinite()].abs().max())


def rows_of(state: Any) -> list[Tensor]:
    """What has a row for every slot, but for its pages and controls."""
    values = (getattr(state, item.name) for item in fields(state))
    return [value for value in values if isinstance(value, Tensor) and value.shape[0] == len(state.done)]


@torch.inference_mode()
def moved(model: SpeechModel, prompts: Sequence[Prompt], room: Capacity, frames: int) -> Moved:
    """Step greedy `prompts` as one batch and each alone; after each frame what the batch said is fed to both."""
    slots = list(range(len(prompts)))
    together, singles = model.allocate(room), [model.allocate(room) for _ in prompts]
    begin(model, together, prompts, slots)
    for state, prompt in zip(singles, prompts, strict=True):
        begin(model, state, [prompt], [0])
    device, gaps, by = together.done.device, list[Tensor](), list[Tensor]()
    for frame in range(frames):
        record: list[Tensor] = []
        model.frame(together, torch.tensor(slots, device=device), record)
        for slot, single in zip(slots, singles, strict=True):
            own: list[Tensor] = []
            model.frame(single, torch.zeros(1, dtype=torch.int64, device=device), own)
            # Ids beyond the codes, which come first, cannot be drawn.
            codes = min(values.shape[1] for values in own)
            mine = torch.stack([values[0, :codes].double() for values in own])
            theirs = torch.stack([values[slot, :codes].double() for values in record])
            best, spread = mine.topk(2).indices, mine.std(dim=1)
            narrow, wide = (-values.gather(1, best).diff(dim=1)[:, 0] / spread for values in (mine, theirs))
            is_other = single.frames[0, frame] != together.frames[slot, frame]
            # What was drawn before it in this frame is what a decision is made from.
            is_off = is_other.long().cumsum(0) - is_other.long() > 0
            gaps.append(narrow)
            by.append((wide - narrow).masked_fill(is_off, torch.nan))
            for ours, others in zip(rows_of(single), rows_of(together), strict=True):
                ours[0] = others[slot]
    shape = (frames, len(slots), -1)
    return Moved(*(torch.stack(values).view(shape).transpose(0, 1).cpu() for values in (gaps, by)))
