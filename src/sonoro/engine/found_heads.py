"""Which heads of the model that is served point at its text, where its checkpoint has no table of them.

Once somebody has asked for words they are searched for while nobody speaks, in the engine's own thread, a frame at a
time: whoever comes waits for one at most. What was found is kept in the user's cache by the model's fingerprint, for
every later start; times by it are estimated. Knows the protocols of `models` and no model.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from sonoro.core.config import EngineConfig, word_heads_folder
from sonoro.core.errors import border
from sonoro.engine.calibration import Calibration, HeadSearch
from sonoro.models.base import SpeechModel
from sonoro.models.words import ShowsWords
from sonoro.words.heads import WordHeads, read_table, write_heads

__all__ = ["FoundHeads"]

logger = logging.getLogger(__name__)


class FoundHeads:
    """The heads of `model`, found by steps of `search` once they are `wanted` and nobody speaks.

    Those that were found before are set in the model as this is made, which has to come before any `allocate`.
    `config` says whether any are searched for.
    """

    def __init__(self, model: SpeechModel, config: EngineConfig) -> None:
        self.wanted = False
        """Whether somebody has asked for words."""
        self._model: SpeechModel = model
        self._search: HeadSearch | None = None
        self.is_sought = config.finds_word_heads and isinstance(model, ShowsWords) and not model.word_heads.places
        """Whether nobody knows the heads yet, and they may be searched for."""
        self._file = word_heads_folder() / f"{model.fingerprint}.json" if self.is_sought else None
        if self._file is not None and self._file.is_file():
            self.is_sought = False
            with border(self._note):
                self._recall(self._file)

    def search(self, codec_device: torch.device | None) -> WordHeads | None:
        """A step of the search, about as long as a frame without a graph; what was found, once it ends.

        Whatever goes wrong ends it without heads: words have no times then. To be called while nothing else runs.
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

    def _recall(self, file: Path) -> None:
        assert isinstance(self._model, ShowsWords)
        self._model.word_heads = read_table(file)

    def _note(self, error: Exception) -> None:
        logger.warning("event=word_heads_not_found model=%r error=%r", self._model.spec.name, error)
