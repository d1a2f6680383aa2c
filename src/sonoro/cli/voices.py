"""`sonoro voices`: the voices of a model."""

from sonoro.cli.common import DataType, Device, NamedModel
from sonoro.cli.streams import show


def voices(model: NamedModel = None, *, device: Device = "auto", dtype: DataType = None) -> None:
    """List a model's voices, one per line."""
    from sonoro.models import registry

    spec = registry.describe(model, device=device, dtype=dtype).spec
    if not spec.voices:
        needs = {"cloned": "a reference recording (--ref-audio)", "described": "a description (--instructions)"}
        show(f"{spec.name} has no voices of its own; give " + " or ".join(needs[mode] for mode in spec.voice_modes))
    show(*spec.voices)
