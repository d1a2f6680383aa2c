"""What the package promises by name."""

from importlib.metadata import version

import sonoro


def test_the_package_exports_its_public_face() -> None:
    assert sonoro.__all__ == ["TTS", "Audio", "AudioPiece", "EngineConfig", "SonoroError", "__version__"]
    assert all(hasattr(sonoro, name) for name in sonoro.__all__)
    assert sonoro.__version__ == version("sonoro")
