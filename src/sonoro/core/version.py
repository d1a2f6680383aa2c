"""The version, said once: the metadata of the package is built from it, and a source tree without any knows it too."""

VERSION = "0.1.0"


def extra(name: str) -> str:
    """How to install the extra `name`. The package is not on an index."""
    return f'pip install ".[{name}]" in the checkout of sonoro'
