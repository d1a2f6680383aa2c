"""Repositories of the Hugging Face hub, by way of its own cache. Imported once one is asked for: most starts need none.

Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from sonoro.core.errors import CheckpointNotFound

__all__ = ["snapshot"]


def snapshot(hub_id: str, patterns: Sequence[str]) -> Path:
    """The folder of the repository `hub_id`; what it has of `patterns` is downloaded if it is not there.

    Raises `CheckpointNotFound`.
    """
    try:
        return Path(snapshot_download(hub_id, allow_patterns=[*patterns]))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointNotFound(
            f"there is no folder {hub_id!r}, and the hub did not give a repository of that name: {reason}"
        ) from error
