"""What the package promises by name."""

import importlib
import pkgutil
from importlib.metadata import version

import pytest

import sonoro

MODULES = [
    module.name
    for module in pkgutil.walk_packages(sonoro.__path__, "sonoro.")
    if not module.ispkg and module.name != "sonoro.__main__"
]


def test_the_package_exports_its_public_face() -> None:
    assert sonoro.__all__ == ["TTS", "Audio", "AudioPiece", "EngineConfig", "SonoroError", "__version__"]
    assert all(hasattr(sonoro, name) for name in sonoro.__all__)
    assert sonoro.__version__ == version("sonoro")


@pytest.mark.parametrize("name", MODULES)
def test_every_module_lists_its_public_names(name: str) -> None:
    module = importlib.import_module(name)
    assert all(hasattr(module, public) for public in module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)
