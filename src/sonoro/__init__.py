"""Text in, streamed speech out. `TTS().generate("Hello.").save("out.wav")` is all it takes to begin."""

from sonoro.api import TTS, Audio, AudioPiece
from sonoro.core.config import EngineConfig
from sonoro.core.errors import SonoroError
from sonoro.core.version import VERSION

__all__ = ["TTS", "Audio", "AudioPiece", "EngineConfig", "SonoroError", "__version__"]

__version__ = VERSION
