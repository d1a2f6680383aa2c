"""The messages between an engine process and its client, as MessagePack, and the settings of such a process.

A tag in each message names its class; nothing is pickled. The ends encode and decode: `transport.launch` in the server,
`transport.channel` in the engine.
"""

from __future__ import annotations

import msgspec

from sonoro.core.config import EngineConfig
from sonoro.core.errors import ConfigError, ErrorFacts
from sonoro.core.types import AudioChunk, Failed, Finished, ModelSpec, Reference, SpeechRequest

__all__ = [
    "DEFAULT_FACTORY",
    "AppendText",
    "Cancel",
    "EncodeVoice",
    "EndText",
    "Fatal",
    "FromEngine",
    "LoadVoice",
    "Pause",
    "Ping",
    "Pong",
    "PrefixCounts",
    "Ready",
    "Resume",
    "Shutdown",
    "Stats",
    "StatsRequest",
    "Submit",
    "ToEngine",
    "VoiceEncoded",
    "VoiceFailed",
    "VoiceLost",
    "VoiceWanted",
    "WorkerSettings",
]

DEFAULT_FACTORY = "sonoro.models.registry:load"


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The model an engine process loads and how its engine is configured.

    `factory` is "module:function" in the import path of the child: called as `sonoro.models.registry.load` is, it
    returns a `LoadedModel`. Another than the default serves a model that the registry does not know.
    """

    model: str | None = None
    device: str = "auto"
    dtype: str | None = None
    load_format: str = "auto"
    config: EngineConfig = msgspec.field(default_factory=EngineConfig)
    factory: str = DEFAULT_FACTORY

    def __post_init__(self) -> None:
        if not isinstance(self.config, EngineConfig):
            raise ConfigError("config", self.config, "it must be an EngineConfig")


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Speak `request`. It is answered by `AudioChunk`s, then by one `Finished` or `Failed`."""

    request: SpeechRequest


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End a request now. It is answered by `Finished`; unknown ids are ignored."""

    request_id: str


class AppendText(msgspec.Struct, frozen=True, tag=True):
    """More text of a live request; unknown ids are ignored."""

    request_id: str
    text: str


class EndText(msgspec.Struct, frozen=True, tag=True):
    """The text of a live request is complete; unknown ids are ignored."""

    request_id: str


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Decode no more audio of a request for now. What was launched still comes."""

    request_id: str


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Continue a paused request."""

    request_id: str


class StatsRequest(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Stats`. `resets` clears the durations, so that the next answer covers the time between."""

    resets: bool = False


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Pong` as soon as the engine looks at its messages: between two ticks."""


class EncodeVoice(msgspec.Struct, frozen=True, tag=True):
    """Encode `references`, to be kept by the server. `VoiceEncoded` or `VoiceFailed` of its number answers it."""

    number: int
    references: tuple[Reference, ...]


class LoadVoice(msgspec.Struct, frozen=True, tag=True):
    """The encoded voice of a digest, as `VoiceWanted` asked for it."""

    digest: str
    data: bytes


class VoiceLost(msgspec.Struct, frozen=True, tag=True):
    """The encoded voice of a digest cannot be had, though `VoiceWanted` asked for it: the facts of the error."""

    digest: str
    facts: ErrorFacts


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the process. What is still running is dropped."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine can be used. Sent again whenever another of the graphs that were to come has been captured.

    `ready_s` counts from the start of the process. `report` says in lines what memory is used for and what each
    captured size took; `phases` are the seconds of each phase of the start, in order, and `kernels_awaited` those in
    which launches waited for kernels, if any did. Both memories are those of this process on a GPU, 0 without one.
    Encoded voices that have the `fingerprint` can be loaded. `graphs_to_come` are not captured yet: until they are,
    batches are padded to larger ones.
    """

    spec: ModelSpec
    ready_s: float
    report: str
    gpu_memory_mib: float
    graph_memory_mib: float
    fingerprint: str = ""
    phases: dict[str, float] = {}
    graphs_to_come: int = 0


class PrefixCounts(msgspec.Struct, kw_only=True):
    """The prefix cache since the engine started.

    Prompt tokens that were prefilled, and those found in cached pages. Prompts with pages that can be shared, by
    whether the first of them was cached. Evicted pages, and the bytes of those cached now.
    """

    rows_prefilled: int = 0
    rows_cached: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    kept_bytes: int = 0


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How an engine is doing.

    `launches` counts by kind of work (`place`, `prefill`, `frame`, `codec`) those from a `graph` and those launched
    `eager`.
    `running` hold a slot; `paused` are among these and the `waiting`. `tick_ms` is the time inside a tick, `frame_ms`
    the time from the end of one to the end of the next while there is work: `p50`, `p95` and `p99` of the last 4096, 0
    if there were none. `broken_samples` were not finite and were sent as silence; `put_back` counts how often a request
    lost its slot for want of pages, before anybody heard it. `fallbacks` counts by operation for
    how many shapes `smaller` blocks or the `reference` serve in place of a kernel that could not be launched;
    `compiled` counts by kernel the variants that were compiled only once they were launched.
    """

    launches: dict[str, dict[str, int]]
    prefixes: PrefixCounts
    running: int
    waiting: int
    paused: int
    free_slots: int
    free_pages: int
    tick_ms: dict[str, float]
    frame_ms: dict[str, float]
    gpu_memory_mib: float
    broken_samples: int
    put_back: int = 0
    fallbacks: dict[str, dict[str, int]] = {}
    compiled: dict[str, int] = {}


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The engine is alive."""


class VoiceEncoded(msgspec.Struct, frozen=True, tag=True):
    """Encoded references: bytes that an engine of the same model can load, and the digest of their content."""

    number: int
    digest: str
    data: bytes


class VoiceWanted(msgspec.Struct, frozen=True, tag=True):
    """Requests wait for the encoded voice of a digest. Answered by `LoadVoice` or `VoiceLost`."""

    digest: str


class VoiceFailed(msgspec.Struct, frozen=True, tag=True):
    """The references could not be encoded: the facts of the error."""

    number: int
    facts: ErrorFacts


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine could not be started: the facts of the error."""

    facts: ErrorFacts


ToEngine = (
    Submit
    | AppendText
    | EndText
    | Cancel
    | Pause
    | Resume
    | StatsRequest
    | Ping
    | EncodeVoice
    | LoadVoice
    | VoiceLost
    | Shutdown
)
FromEngine = Ready | AudioChunk | Finished | Failed | Stats | Pong | VoiceEncoded | VoiceWanted | VoiceFailed | Fatal
