"""A request option of one model, and how a voice of it sounds, as the model describes them."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from sonoro.core.errors import InvalidRequest

OptionValue = bool | int | float | str


class VoiceDescription(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a voice sounds: its accent or language, and adjectives; the `locale` that it reads numbers by ("en-US"); and
    its loudness in LUFS, if that was measured."""

    accent: str = ""
    adjectives: tuple[str, ...] = ()
    locale: str = ""
    loudness_lufs: float | None = None


class OptionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A request option of one model: type, inclusive bounds, default, and the default for live text if that differs."""

    name: str
    type: Literal["bool", "int", "float", "str"]
    default: OptionValue
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    help: str = ""
    live_default: OptionValue | None = None

    def check(self, value: object) -> OptionValue:
        """Convert `value` to the option's type. Raises `InvalidRequest` naming the option and its bounds."""
        if self.type == "bool" and isinstance(value, bool):
            return value
        if self.type == "str" and isinstance(value, str) and (not self.choices or value in self.choices):
            return value
        if self.type in ("int", "float") and isinstance(value, (int, float)) and not isinstance(value, bool):
            low, high = self.minimum, self.maximum
            is_inside = (low is None or value >= low) and (high is None or value <= high) and math.isfinite(value)
            if is_inside and (self.type == "float" or float(value).is_integer()):
                return float(value) if self.type == "float" else int(value)
        raise InvalidRequest(self.name, value, f"it must be {self.limit}")

    @property
    def limit(self) -> str:
        """The accepted values in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.type == "bool":
            return "true or false"
        bounds = [f">= {self.minimum:g}"] if self.minimum is not None else []
        bounds += [f"<= {self.maximum:g}"] if self.maximum is not None else []
        kind = {"int": "a whole number", "float": "a number", "str": "a string"}[self.type]
        return " ".join([kind, " and ".join(bounds)]).strip()
