"""State by slot: that of `sonoro.models.slots`, with one sampler. A prompt token is a column of the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sonoro.core.errors import ConfigError
from sonoro.models.base import Capacity, Pages
from sonoro.models.slots import BackboneState, DepthState, allocate_depth, fill_backbone, stage_prompts
from sonoro.words.heads import WordHeads

from .backbone import DualAR
from .prompt import FishPrompt

__all__ = ["allocate", "prefill", "stage"]


def allocate(lm: DualAR, capacity: Capacity, word_heads: WordHeads | None = None) -> DepthState:
    """Free slots for `capacity.slots` requests, `word_heads` of the slow AR being watched.

    Raises `ConfigError` for more positions than the model has.
    """
    most = lm.config.text_config.max_seq_len
    if capacity.max_positions > most:
        raise ConfigError("max_positions", capacity.max_positions, f"at most {most} for this model")
    books = lm.codebooks
    return allocate_depth(lm.slow, lm.fast, capacity, codebooks=books, ids=[0] * (1 + books), word_heads=word_heads)


def stage(state: BackboneState, prompts: Sequence[FishPrompt], slots: Sequence[int], pages: Sequence[Pages]) -> int:
    """Lay out what `slots` need to speak `prompts` on `pages`; how many prompt tokens. No sync; not capturable."""
    added = [((prompt.controls.sampling_controls,), ()) for prompt in prompts]
    return stage_prompts(state, prompts, slots, pages, [prompt.columns for prompt in prompts], added)


def prefill(lm: DualAR, state: BackboneState, tokens: Tensor) -> None:
    """Run the staged tokens `tokens` [T] int64 and leave each prompt's last one pending. Capturable; no sync."""
    fill_backbone(state, tokens, lm.slow, lm.embed)
