"""Reference audio encoded once and kept by its content. Knows no model beyond `SpeechModel.encode_voice`."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from sonoro.core.types import Reference
from sonoro.models.base import SpeechModel, Voice

__all__ = ["VoiceCache", "content_hash"]


class VoiceCache:
    """At most `capacity` voices; the least recently used one goes first."""

    def __init__(self, model: SpeechModel, capacity: int) -> None:
        assert capacity > 0
        self._model, self._capacity = model, capacity
        self._voices: OrderedDict[str, Voice] = OrderedDict()

    def __len__(self) -> int:
        return len(self._voices)

    def get(self, references: tuple[Reference, ...]) -> Voice:
        """The voice of `references`, encoded unless it is kept. Raises `InvalidReference` as the model does."""
        key = content_hash(references)
        if key not in self._voices:
            self._voices[key] = self._model.encode_voice(references)
            if len(self._voices) > self._capacity:
                self._voices.popitem(last=False)
        self._voices.move_to_end(key)
        return self._voices[key]


def content_hash(references: tuple[Reference, ...]) -> str:
    """The same for the same audio, rate, transcript and use; different otherwise."""
    digest = hashlib.sha256()
    for reference in references:
        head = repr((reference.sample_rate, reference.text, reference.use, len(reference.pcm)))
        digest.update(head.encode())
        digest.update(reference.pcm)
    return digest.hexdigest()
