"""Checkpoints on the hub, and those whose files lie apart: gathered in one folder of links."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import huggingface_hub

from sonoro.core.errors import CheckpointNotFound
from sonoro.core.folders import tuned_folder

_SCHEME = "hf://"


def snapshot(hub_id: str, patterns: Sequence[str]) -> Path:
    """The local folder of repository `hub_id`, with files that match `patterns`. Raises `CheckpointNotFound`."""
    try:
        # The attribute is imported at its first use, which takes .2 s: most starts need no hub.
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=[*patterns]))
    except (huggingface_hub.errors.HfHubHTTPError, huggingface_hub.errors.HFValidationError, OSError) as error:
        reason = f"the hub returned no repository of that name: {str(error).splitlines()[0]}"
        raise CheckpointNotFound(f"there is no folder {hub_id!r}, and {reason}") from error


def local_file(path: str, beside: Path) -> Path:
    """The local file of `path`: hf://OWNER/NAME/FILE[@REVISION], downloaded, or a path, from the folder `beside` on.
    Raises `CheckpointNotFound`."""
    if not path.startswith(_SCHEME):
        found = beside / Path(path).expanduser()
        if not found.is_file():
            raise CheckpointNotFound(f"{found} does not exist")
        return found
    name, _, revision = path.removeprefix(_SCHEME).partition("@")
    owner, repository, *parts = name.split("/")
    try:
        made = huggingface_hub.hf_hub_download(f"{owner}/{repository}", "/".join(parts), revision=revision or None)
    except (huggingface_hub.errors.HfHubHTTPError, huggingface_hub.errors.HFValidationError, OSError) as error:
        raise CheckpointNotFound(f"the hub returned no {path}: {str(error).splitlines()[0]}") from error
    return Path(made)


def gathered(name: str, files: Mapping[str, Path]) -> Path:
    """A folder called `name` that has links to those of `files` that exist, by the names that they have in it."""
    files = {link: path for link, path in files.items() if path.exists()}
    facts = repr([(link, str(path.absolute())) for link, path in sorted(files.items())])
    folder = tuned_folder().with_name("checkpoints") / hashlib.sha256(facts.encode()).hexdigest()[:16] / name
    folder.mkdir(parents=True, exist_ok=True)
    for link, path in files.items():
        if not (folder / link).exists():
            (folder / link).unlink(missing_ok=True)
            (folder / link).symlink_to(path.absolute())
    return folder
