"""Download repositories of the Hugging Face hub through its own cache. Imported on first use: most starts need none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from sonoro.core.errors import CheckpointNotFound


def snapshot(hub_id: str, patterns: Sequence[str]) -> Path:
    """The local folder of repository `hub_id`, after downloading missing files that match `patterns`.

    Raises `CheckpointNotFound`.
    """
    try:
        return Path(snapshot_download(hub_id, allow_patterns=[*patterns]))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointNotFound(
            f"there is no folder {hub_id!r}, and the hub returned no repository of that name: {reason}"
        ) from error
