"""What is known of kernels beside their code: the plans that were measured on this card, and which kernels fell back.

Reads and writes the user's file of plans; what a plan is, `sonoro.ops.plans` knows.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from sonoro.core.config import QUANTIZATIONS, tuned_folder
from sonoro.ops.device import Card, card, is_recorded, shared_limit
from sonoro.ops.dispatch import fallbacks
from sonoro.ops.plans import use_tuned

__all__ = ["fallbacks", "own_plans", "plans_of", "shared_limit", "use_own_plans"]

logger = logging.getLogger(__name__)


def own_plans(device: torch.device, quantization: str = "none") -> Path:
    """Where `sonoro tune` keeps what it has measured on the card of `device`, of weights as `quantization` says."""
    return plans_of(card(device))[quantization]


def plans_of(on: Card) -> dict[str, Path]:
    """Where the user's own plans for such a card are, if there are any, by what weights are stored as."""
    name = on.name.replace(" ", "_").replace("/", "_")
    suffixes = {one: "" if one == "none" else f"-{one}" for one in QUANTIZATIONS}
    return {one: tuned_folder() / f"{name}{suffix}.json" for one, suffix in suffixes.items()}


def use_own_plans(device: torch.device) -> None:
    """Choose kernels on `device` by the user's own measurements, if there are any; one that cannot be read warns.

    On tensors without memory by those for the card that they stand for.
    """
    if device.type == "cpu" or (device.type == "meta" and not is_recorded()):
        return
    for path in plans_of(card(device)).values():
        if path.is_file():
            try:
                use_tuned(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                logger.warning("event=plans_not_read path=%s error=%r", path, error)
