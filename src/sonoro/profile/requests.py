"""What a benchmark loads or launches, and requests that any model can speak, whatever its voices."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sonoro.core.config import EngineConfig
from sonoro.core.types import ModelSpec, Reference, SpeechRequest
from sonoro.transport.client import EngineClient
from sonoro.transport.messages import DEFAULT_FACTORY, WorkerSettings

_REFERENCE_S = 3


@dataclass(frozen=True)
class Subject:
    """The model to measure, as `sonoro.models.registry.load` takes it, and the file written after every result."""

    model: str | None = None
    load_format: str = "auto"
    device: str = "auto"
    dtype: str | None = None
    quantization: str | None = None
    out: Path | None = None
    commit: str | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the result depends on, for its file."""
        return {name: value for name, value in asdict(self).items() if name not in ("out", "commit", "config")}


@dataclass(frozen=True)
class Launched(Subject):
    """A model launched in an engine process: with `config`, or the defaults if None. `factory` as in
    `sonoro.transport.messages.WorkerSettings`."""

    config: EngineConfig | None = None
    factory: str = DEFAULT_FACTORY

    def launch(self, config: EngineConfig) -> EngineClient:
        """Launch an engine process with `config`, and this `quantization` if given."""
        config = config.over(quantization=self.quantization)
        names = ("model", "device", "dtype", "load_format", "factory")
        return EngineClient(WorkerSettings(config=config, **{name: getattr(self, name) for name in names}))


def speech_request(spec: ModelSpec, number: int, text: str, frames: int) -> SpeechRequest:
    """A resolved request for exactly `frames` frames of `text`, with `number` as id and seed, in the model's first
    voice.
    A model that only clones gets 3 s of noise as reference."""
    is_described = "described" in spec.voice_modes and spec.accepts_instructions
    references: tuple[Reference, ...] = ()
    if "named" not in spec.voice_modes and "cloned" in spec.voice_modes:
        noise = 0.1 * np.random.default_rng(0).standard_normal(_REFERENCE_S * spec.sample_rate)
        references = (Reference(pcm=noise.astype("<f4").tobytes(), sample_rate=spec.sample_rate, use="reference"),)
    request = SpeechRequest(
        id=f"bench-{number}",
        text=text,
        instructions="A calm voice." if is_described else None,
        references=references,
        seed=number,
        max_frames=frames,
        ignore_eos=True,
    )
    return spec.resolve(request)
