"""Per-slot state: that of `sonoro.models.shared.slots`, with one sampler. The ids of a prompt token are its row."""

from collections.abc import Sequence

from torch import Tensor

from sonoro.models.base import Capacity, Pages
from sonoro.models.shared.prompts import RowPrompt
from sonoro.models.shared.slots import (
    BackboneState,
    DepthState,
    allocate_depth,
    fill_backbone,
    prompt_inputs,
    stage_prompts,
)
from sonoro.nn.kvcache import PackedPrompts
from sonoro.words.heads import WordHeads

from .backbone import DualAR


def allocate(lm: DualAR, capacity: Capacity, word_heads: WordHeads | None = None) -> DepthState:
    """`SpeechModel.allocate`, with `word_heads` of the slow AR watched."""
    capacity.check_positions(lm.config.text_config.max_seq_len)
    books = lm.codebooks
    return allocate_depth(lm.slow, lm.fast, capacity, codebooks=books, ids=[0] * (1 + books), word_heads=word_heads)


def stage(state: BackboneState, prompts: Sequence[RowPrompt], slots: Sequence[int], pages: Sequence[Pages]) -> int:
    """Stage `prompts` with their `slots` and `pages`; returns the number of tokens staged. No sync; not capturable."""
    ids, added = [prompt.rows for prompt in prompts], [prompt.controls.pack() for prompt in prompts]
    return stage_prompts(state, prompts, slots, pages, ids, added)


def prompts(lm: DualAR, state: BackboneState, tokens: Tensor) -> PackedPrompts:
    """The prompts that `prefill` runs, for `frame` to run; each one's last input becomes pending. No sync."""
    return prompt_inputs(state, tokens, lm.embed)


def prefill(lm: DualAR, state: BackboneState, tokens: Tensor) -> None:
    """`SpeechModel.prefill`; each prompt's last input becomes pending. No sync."""
    fill_backbone(state, tokens, lm.slow, lm.embed)
