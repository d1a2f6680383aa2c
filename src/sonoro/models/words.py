"""What a model says of its text if its attention shows which word it speaks: an optional protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from sonoro.core.types import OptionValue, SpeechRequest
from sonoro.models.base import Voice
from sonoro.words.heads import WordHeads
from sonoro.words.tracking import Pointing

__all__ = ["MOST_COLUMNS", "ShowsWords"]

MOST_COLUMNS = 4096
"""Positions of a segment's text that are watched: words of a longer one have no times."""


@runtime_checkable
class ShowsWords(Protocol):
    """A `SpeechModel` whose backbone reads the text it speaks, a token a position, one behind the other."""

    word_heads: WordHeads
    """Set before any `allocate`; where it is empty nothing is watched."""

    text_layouts: Mapping[str, Mapping[str, OptionValue]]
    """The layouts of `WordHeads` that the model has, `text_first` and `text_along`, each with the options that ask for
    it."""

    @property
    def attention_heads(self) -> tuple[int, int]:
        """Layers of the backbone, and query heads of each."""

    def pointing(self, request: SpeechRequest, voice: Voice | None) -> Pointing | None:
        """How the model points at the text of a resolved request's segments; None if it does not."""

    def text_start(self, prompt: Any) -> int:
        """The position of the text's first token."""

    def token_spans(self, text: str) -> Sequence[tuple[int, int]]:
        """Of each token of a segment `text`, as it is spelled out, which characters it reads; of one that ends a text
        none of them, at its end."""

    def watching(self, state: Any) -> Any:
        """`state`, none of whose slots is in use, with `word_heads` watched from now on: it shares all tensors."""

    def attention(self, state: Any) -> Tensor | None:
        """What the heads of `word_heads.places` looked at in the last frame, by slot: [N+1, H, W] float32, of W
        positions from the text's first on, as many as a slot has or `MOST_COLUMNS`; None if nothing is watched."""
