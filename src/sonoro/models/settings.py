"""Settings of a model that an operator chooses for all requests: declared by the model, validated here."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from sonoro.core.errors import ConfigError, InvalidRequest, suggestion
from sonoro.core.options import OptionSpec, OptionValue

CONTROL_TOKENS = OptionSpec(
    name="reads_control_tokens",
    type="bool",
    default=False,
    help="read control tokens written in a text as control tokens, as the official package does",
)
"""A setting that every family has."""


@runtime_checkable
class Configurable(Protocol):
    """A `SpeechModel` that has settings."""

    settings: tuple[OptionSpec, ...]

    def configure(self, values: Mapping[str, OptionValue]) -> None:
        """Set `values`, valid values of `settings`; others keep theirs. Call it before any `allocate`."""


def configure(model: object, values: Mapping[str, OptionValue]) -> None:
    """Validate `values` and set them on `model`. Raises `ConfigError` naming a setting that is unknown or invalid."""
    known = {one.name: one for one in model.settings} if isinstance(model, Configurable) else {}
    checked = {}
    for name, value in values.items():
        if name not in known:
            nearest = suggestion(name, known)
            limit = f"{nearest}{' ' * bool(nearest)}settings of this model: {', '.join(sorted(known)) or 'none'}"
            raise ConfigError(f"model_settings.{name}", value, limit)
        try:
            checked[name] = known[name].check(value)
        except InvalidRequest as error:
            raise ConfigError(f"model_settings.{name}", value, f"it must be {known[name].limit}") from error
    if isinstance(model, Configurable) and checked:
        model.configure(checked)
