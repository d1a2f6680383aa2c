"""The talker's per-slot state: that of `models.shared.slots`, plus pending text, seen codes and staged x-vectors.

The ids of a prompt token: the index of its staged x-vector (scratch for none), text id, K code ids."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sonoro.core.types import SamplingParams
from sonoro.models.base import Capacity, Pages
from sonoro.models.shared.slots import (
    DepthState,
    admit_staged,
    allocate_depth,
    clear_slots,
    fill_backbone,
    prompt_inputs,
    stage_prompts,
)
from sonoro.nn.kvcache import PackedPrompts, PackedTokens
from sonoro.runtime.ring import upload
from sonoro.runtime.sampling import Controls
from sonoro.words.heads import WordHeads

from .backbone import Talker
from .prompt import TalkerPrompt


@dataclass(frozen=True)
class StagedVoices:
    """`x_vectors` [N+1, H] by staged prompt, not by slot; the last row is zero."""

    x_vectors: Tensor


@dataclass(frozen=True, kw_only=True)
class FrameState(DepthState):
    """State by slot, [N+1, ...] each, and tables shared by all slots. Mutated in place by the functions of this folder.

    `samplers` are that of codebook 0 and that of the others. `pending` excludes the frame's text; `text_ids`
    [N+1, max_text + 1] int64 are fed from the second frame on, padded with `pad_id`. `seen` [N+1, end id + 1] bool
    marks ids of codebook 0 sampled in this segment. `suppressed` and `is_end` [end id + 1] bool mark banned control ids
    and the end of speech."""

    text_ids: Tensor
    seen: Tensor
    voices: StagedVoices
    suppressed: Tensor
    is_end: Tensor
    pad_id: int

    @property
    def zeroed(self) -> tuple[Tensor, ...]:
        return *super().zeroed, self.seen


def allocate(talker: Talker, capacity: Capacity, pad_id: int, word_heads: WordHeads | None = None) -> FrameState:
    """State of `capacity.slots` free slots. `pad_id` is the text id fed after the end of a slot's text."""
    device, rows, end = talker.device, capacity.slots + 1, talker.config.codec_eos_token_id
    codes, text = torch.arange(end + 1, device=device), [pad_id] * (capacity.max_text + 1)
    zeros = functools.partial(torch.zeros, device=device)
    common = allocate_depth(
        talker.model,
        talker.code_predictor.model,
        capacity,
        codebooks=talker.codebooks,
        ids=[capacity.slots, *[-1] * (1 + talker.codebooks)],
        added=text,
        samplers=2,
        word_heads=word_heads,
    )
    return FrameState(
        **vars(common),
        text_ids=torch.full((rows, len(text)), pad_id, dtype=torch.int64, device=device),
        seen=zeros(rows, end + 1, dtype=torch.bool),
        voices=StagedVoices(zeros(rows, talker.config.hidden_size, dtype=talker.dtype)),
        suppressed=(codes >= talker.codes) & (codes != end),
        is_end=codes == end,
        pad_id=pad_id,
    )


def reset(state: FrameState, slots: Sequence[int]) -> None:
    """Free and clear `slots`. No sync; not capturable."""
    clear_slots(state, slots, (state.text_ids, state.pad_id))


def stage(state: FrameState, prompts: Sequence[TalkerPrompt], slots: Sequence[int], pages: Sequence[Pages]) -> int:
    """`SpeechModel.stage`."""
    added, ids = [], []
    for number, prompt in enumerate(prompts):
        text = np.full(state.text_ids.shape[1], state.pad_id)
        assert prompt.text_ids < len(text), (prompt.text_ids, len(text))
        text[: prompt.text_ids] = prompt.trail.numpy()
        controls = prompt.controls
        added.append(np.concatenate((controls.pack(), controls.pack(rest_sampling(controls)), text)))
        rows = np.empty((prompt.positions, 2 + prompt.code_rows.shape[1]), np.int64)
        rows[:, 0], rows[:, 1], rows[:, 2:] = state.scratch, prompt.text_rows.numpy(), prompt.code_rows.numpy()
        if prompt.x_vector_row is not None:
            assert prompt.voice is not None
            rows[prompt.x_vector_row, 0] = number
            state.voices.x_vectors[number] = prompt.voice.data.x_vector.to(state.done.device)
        ids.append(rows)
    return stage_prompts(state, prompts, slots, pages, ids, added)


def rest_sampling(controls: Controls) -> SamplingParams:
    """How the codebooks after the first are sampled; `controls` must be complete (`ModelSpec.resolve`)."""
    options = controls.options
    return SamplingParams(
        temperature=float(options["subtalker_temperature"]) if options["subtalker_dosample"] else 0.0,
        top_k=int(options["subtalker_top_k"]),
        top_p=float(options["subtalker_top_p"]),
        repetition_penalty=1.0,
    )


def admit(state: FrameState, slots: Tensor) -> None:
    """Reset `slots` [B] int64 and write the staged state to them, in order. Capturable; no sync."""
    state.text_ids.index_copy_(0, slots, admit_staged(state, slots))


def append_text(state: FrameState, slots: Sequence[int], starts: Sequence[int], ids: Sequence[Sequence[int]]) -> None:
    """Write `ids` to the pending text of `slots`, from index `starts` on. No sync; not capturable."""
    most = state.text_ids.shape[1] - 1
    assert all(start + len(new) <= most for start, new in zip(starts, ids, strict=True)), (starts, most)
    written = [
        (slot, start + column, one)
        for slot, start, new in zip(slots, starts, ids, strict=True)
        for column, one in enumerate(new)
    ]
    rows, columns, values = upload(written, torch.int64, state.done.device).unbind(1)
    state.text_ids.index_put_((rows, columns), values)


def prompts_of(talker: Talker, state: FrameState, tokens: Tensor) -> PackedPrompts:
    """The prompts that `prefill` runs, for `frame` to run; each one's last input becomes pending. No sync."""
    return prompt_inputs(state, tokens, functools.partial(_embed, talker, state))


def prefill(
    talker: Talker,
    state: FrameState,
    tokens: Tensor,
    run: Callable[[Tensor, PackedTokens], None] | None = None,
) -> None:
    """`SpeechModel.prefill`; each prompt's last input becomes pending. `run`: as for `fill_backbone`. No sync."""
    fill_backbone(state, tokens, talker.model, functools.partial(_embed, talker, state), run)


def _embed(talker: Talker, state: FrameState, ids: Tensor) -> Tensor:
    """The talker's inputs [T, H] for prompt tokens of `ids` [T, 2 + K]."""
    return talker.embed_rows(ids[:, 1], ids[:, 2:], state.voices.x_vectors[ids[:, 0]])
