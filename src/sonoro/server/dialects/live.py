"""A session whose client speaks another wire format than ours, but says the same with it: one text after the other.

Knows no dialect.
"""

from __future__ import annotations

import logging
from typing import Any

from sonoro.core.errors import UnknownVoice
from sonoro.core.types import SpeechRequest
from sonoro.server.schemas import SpeechBody
from sonoro.server.sessions import LiveSession

__all__ = ["ForeignSession"]

logger = logging.getLogger(__name__)


class ForeignSession(LiveSession):
    """Who derives from it makes our messages of its client's, and its client's of our events."""

    async def _settings_from(self, fields: dict[str, Any]) -> tuple[SpeechBody, SpeechRequest]:
        """As ours; an unknown voice, as those of other servers are, is the default one."""
        try:
            return await super()._settings_from(fields)
        except UnknownVoice:
            body, request = await super()._settings_from({**fields, "voice": None})
            told = (self.id, self.dialect, fields.get("voice"), request.voice)
            logger.info("event=voice_unknown id=%s dialect=%s voice=%.100r spoken_as=%s", *told)
            return body, request
