"""Text in, streamed speech out. `TTS().generate("Hello.").save("out.wav")` is all it takes to begin.

A name is imported when it is first asked for: `sonoro say` beside a running server needs none of them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sonoro.core.version import VERSION

if TYPE_CHECKING:
    from sonoro.api import TTS
    from sonoro.api_audio import Audio, AudioPiece
    from sonoro.core.config import EngineConfig
    from sonoro.core.errors import SonoroError

__all__ = ["TTS", "Audio", "AudioPiece", "EngineConfig", "SonoroError", "__version__"]

__version__ = VERSION

_HOMES = {
    "TTS": "sonoro.api",
    "Audio": "sonoro.api_audio",
    "AudioPiece": "sonoro.api_audio",
    "EngineConfig": "sonoro.core.config",
    "SonoroError": "sonoro.core.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
