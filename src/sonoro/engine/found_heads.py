"""Finds the attention heads that follow the text, for a served model whose checkpoint has no table of them.

After the first request for words, the search runs in the engine's thread while it is idle, one frame at a time, so a
new request waits for one frame at most. The result is stored in the user's cache by the model's fingerprint. Word times
from found heads are marked as estimated. Depends on the protocols of `models` and on no model.
"""

from __future__ import annotations

import logging

import torch

from sonoro.core.config import EngineConfig, word_heads_folder
from sonoro.core.errors import border
from sonoro.engine.calibration import Calibration, HeadSearch
from sonoro.models.base import SpeechModel
from sonoro.models.words import ShowsWords
from sonoro.words.heads import WordHeads, read_table, write_heads

logger = logging.getLogger(__name__)


class FoundHeads:
    """The search for the word heads of `model`, advanced by `search` once they are `wanted`.

    The constructor sets heads of an earlier search in the model, so make it before any `allocate`. It searches only if
    `config.tuning.finds_word_heads`.
    """

    def __init__(self, model: SpeechModel, config: EngineConfig) -> None:
        self.wanted = False
        """Whether a request has asked for words."""
        self._model: SpeechModel = model
        self._search: HeadSearch | None = None
        self.is_sought = (
            config.tuning.finds_word_heads and isinstance(model, ShowsWords) and not model.word_heads.places
        )
        """Whether the heads are unknown and may be searched for."""
        self._file = word_heads_folder() / f"{model.fingerprint}.json" if self.is_sought else None
        if self._file is not None and self._file.is_file():
            self.is_sought = False
            with border(self._note):
                assert isinstance(model, ShowsWords)
                model.word_heads = read_table(self._file)

    def search(self, codec_device: torch.device | None) -> WordHeads | None:
        """Run one step of the search, about as long as an eager frame; return the heads once it ends, else None.

        An error ends the search without heads: words then have no times. Call it only while the engine is idle.
        """
        assert self.is_sought
        assert self.wanted
        found: Calibration | None = None
        self.is_sought = False
        with border(self._note):
            self._search = self._search or HeadSearch(self._model, codec_device=codec_device)
            found = self._search.step()
            self.is_sought = found is None
        if not self.is_sought:
            self._search = None
        if found is None:
            return None
        with border(self._note):
            assert self._file is not None
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_heads(self._file, found.heads)
        return found.heads

    def _note(self, error: Exception) -> None:
        logger.warning("event=word_heads_not_found model=%r error=%r", self._model.spec.name, error)
