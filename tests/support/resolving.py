"""An engine for tests that hand it requests as they were asked for: it resolves them, as whoever takes them in does."""

from sonoro.core.types import SpeechRequest
from sonoro.engine import engine

__all__ = ["Engine", "resolved"]


def resolved(spec, request: SpeechRequest) -> SpeechRequest:
    """`request` completed by `spec`, the voice of its digest being registered."""
    known = {request.voice: request.voice_digest} if request.voice and request.voice_digest else {}
    return request if request.is_resolved else spec.resolve(request, known)


class Engine(engine.Engine):
    """Takes any request."""

    def submit(self, request: SpeechRequest) -> None:
        super().submit(resolved(self.spec, request))
