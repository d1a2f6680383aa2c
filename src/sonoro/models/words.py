"""The optional protocol of a model whose attention shows which word is being spoken."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from sonoro.core.options import OptionValue
from sonoro.core.types import SpeechRequest
from sonoro.models.base import Voice, WatchedModel
from sonoro.words.request import FollowsText
from sonoro.words.tracking import Pointing


@runtime_checkable
class ShowsWords(WatchedModel, FollowsText, Protocol):
    """A `SpeechModel` whose backbone holds the text at consecutive positions, one token each."""

    text_layouts: Mapping[str, Mapping[str, OptionValue]]
    """The layouts of `WordHeads` that the model has (`text_first`, `text_along`), each with the request options that
    select it."""

    @property
    def attention_heads(self) -> tuple[int, int]:
        """Number of backbone layers, and of query heads per layer."""

    def pointing(self, request: SpeechRequest, voice: Voice | None) -> Pointing | None:
        """How attention points at the text in a resolved request's segments; None if it does not."""

    def text_start(self, prompt: Any) -> int:
        """The position of the text's first token."""
