"""The user's tuned kernel plans for a card: where they are stored, and loading them. Plans are in `sonoro.ops.plans`.

Also the way for other packages to `ops`: which kernels fell back, the limit on shared memory, and what is done before
and after a codec."""

import logging
from pathlib import Path

import torch

from sonoro.core.config import QUANTIZATIONS
from sonoro.core.folders import tuned_folder
from sonoro.ops.chunk import begin_chunk, end_chunk, to_pcm16
from sonoro.ops.device import Card, card, is_recorded, shared_limit
from sonoro.ops.dispatch import fallbacks
from sonoro.ops.plans import W8A8, use_tuned

__all__ = [
    "Card",
    "begin_chunk",
    "card",
    "end_chunk",
    "fallbacks",
    "is_recorded",
    "plans_of",
    "shared_limit",
    "to_pcm16",
    "use_own_plans",
]

logger = logging.getLogger(__name__)


def plans_of(on: Card) -> dict[str, Path]:
    """The files of the user's plans for card `on`, by quantization (and `W8A8`); they need not exist."""
    name = on.name.replace(" ", "_").replace("/", "_")
    suffixes = {one: "" if one == "none" else f"-{one}" for one in (*QUANTIZATIONS, W8A8)}
    return {one: tuned_folder() / f"{name}{suffix}.json" for one, suffix in suffixes.items()}


def use_own_plans(device: torch.device) -> None:
    """Use the user's tuned plans for the card of `device`, if there are any. Logs a warning for an unreadable file.
    On the "meta" device, the plans for the card that is being recorded."""
    if device.type == "cpu" or (device.type == "meta" and not is_recorded()):
        return
    for path in plans_of(card(device)).values():
        if path.is_file():
            try:
                use_tuned(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                logger.warning("event=plans_not_read path=%s error=%r", path, error)
