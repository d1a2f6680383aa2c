"""`sonoro voices`: the voices of a model."""

from sonoro.cli.common import DataType, Device, NamedModel
from sonoro.cli.streams import show
from sonoro.core.types import ModelSpec


def voices(model: NamedModel = None, *, device: Device = "auto", dtype: DataType = None) -> None:
    """List a model's voices, one per line, and how they sound, where that is known."""
    from sonoro.models import registry

    spec = registry.describe(model, device=device, dtype=dtype).spec
    if not spec.voices:
        needs = {"cloned": "a reference recording (--ref-audio)", "described": "a description (--instructions)"}
        show(f"{spec.name} has no voices of its own; give " + " or ".join(needs[mode] for mode in spec.voice_modes))
    show(*(_described(name, spec) for name in spec.voices))


def _described(name: str, spec: ModelSpec) -> str:
    """A voice and, where that is known, its accent, sex and three adjectives."""
    described, sex = spec.voice_descriptions.get(name), spec.voice_sexes.get(name, "voice")
    if described is None:
        return name
    return f"{name:{max(map(len, spec.voices))}}  {described.accent}, {sex}: {', '.join(described.adjectives)}"
