"""Download repositories of the Hugging Face hub through its own cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import huggingface_hub

from sonoro.core.errors import CheckpointNotFound


def snapshot(hub_id: str, patterns: Sequence[str]) -> Path:
    """The local folder of repository `hub_id`, after downloading missing files that match `patterns`.
    Raises `CheckpointNotFound`."""
    try:
        # The attribute is imported at its first use, which takes .2 s: most starts need no hub.
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=[*patterns]))
    except (huggingface_hub.errors.HfHubHTTPError, huggingface_hub.errors.HFValidationError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointNotFound(
            f"there is no folder {hub_id!r}, and the hub returned no repository of that name: {reason}"
        ) from error
