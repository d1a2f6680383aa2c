"""The messages between an engine process and its client, as MessagePack, and the settings of such a process.

A tag in each message names its class; nothing is pickled. `transport.process` encodes and decodes them in the server,
`transport.channel` in the engine."""

import msgspec

from sonoro.core.config import EngineConfig
from sonoro.core.errors import ConfigError, ErrorFacts
from sonoro.core.script import Said
from sonoro.core.types import AudioChunk, Failed, Finished, ModelSpec, Reference, SpeechRequest

DEFAULT_FACTORY = "sonoro.models.registry:load"


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The model an engine process loads and how its engine is configured.
    `factory` is "module:function" on the process's import path, a function with the signature and result of
    `sonoro.models.registry.load`. Name another to serve a model that the registry does not know. An engine that
    `has_fronts` listens for front processes too."""

    model: str | None = None
    device: str = "auto"
    dtype: str | None = None
    load_format: str = "auto"
    config: EngineConfig = msgspec.field(default_factory=EngineConfig)
    factory: str = DEFAULT_FACTORY
    has_fronts: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.config, EngineConfig):
            raise ConfigError("config", self.config, "it must be an EngineConfig")


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Speak `request`. It is answered by `AudioChunk`s, then by one `Finished` or `Failed`."""

    request: SpeechRequest


class _OfRequest(msgspec.Struct, frozen=True, tag=True):
    """A message about a submitted request; ignored if there is none of that id."""

    request_id: str


class Cancel(_OfRequest, frozen=True, tag=True):
    """End a request now. It is answered by `Finished`."""


class AppendText(_OfRequest, frozen=True, tag=True):
    """More text of a live request, and what lexicons say in place of characters of it."""

    text: str
    said: tuple[Said, ...] = ()


class EndText(_OfRequest, frozen=True, tag=True):
    """The text of a live request is complete."""


class Pause(_OfRequest, frozen=True, tag=True):
    """Generate no more of a request for now. Audio already launched still arrives."""


class Resume(_OfRequest, frozen=True, tag=True):
    """Continue a paused request."""


class StatsRequest(msgspec.Struct, frozen=True, tag=True):
    """Ask for `Stats`. `resets` clears the durations, so that the next answer covers the time between the two."""

    resets: bool = False


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Ask for `Pong`, which the engine sends between two ticks."""


class EncodeVoice(msgspec.Struct, frozen=True, tag=True):
    """Encode `references`, for the server to store. Answered by `VoiceEncoded` or `VoiceFailed` of its number."""

    number: int
    references: tuple[Reference, ...]


class LoadVoice(msgspec.Struct, frozen=True, tag=True):
    """The encoded voice that `VoiceWanted` asked for."""

    digest: str
    data: bytes


class VoiceLost(msgspec.Struct, frozen=True, tag=True):
    """The encoded voice that `VoiceWanted` asked for is not available: the facts of the error."""

    digest: str
    facts: ErrorFacts


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the process. Requests still running are dropped."""


class FrontEnded(msgspec.Struct, frozen=True, tag=True):
    """The front process of that name has ended: nobody hears its requests any more."""

    front: str


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine can be used. Sent again after each later capture of a graph.

    `ready_s` counts from the start of the process. `report` has lines on memory by part and on each captured size.
    `phases` maps each phase of the start to its seconds, in order; `kernels_awaited` is the time for which launches
    waited for kernels. Both memories are this process's on its GPUs, 0 without one. Voices encoded under the same
    `fingerprint` can be loaded. `graphs_to_come` sizes are not captured yet; batches are padded to larger ones."""

    spec: ModelSpec
    ready_s: float
    report: str
    gpu_memory_mib: float
    graph_memory_mib: float
    fingerprint: str = ""
    phases: dict[str, float] = {}
    graphs_to_come: int = 0


class PrefixCounts(msgspec.Struct, kw_only=True):
    """Counters of the prefix cache since the engine started.

    `tokens_prefilled`, `tokens_cached`: prompt tokens that were prefilled, and those that cached pages held. `hits`,
    `misses`: prompts with shareable pages whose first page was cached, or not. `evictions`: pages. `kept_bytes`: cached
    now."""

    tokens_prefilled: int = 0
    tokens_cached: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    kept_bytes: int = 0


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Load, durations and counters of an engine.

    `launches`: by kind of work (`admit`, `prefill`, `frame`, `codec`, ...), as `GraphSets` does. `running`: requests
    with a slot; `waiting`: without one; `paused`: among both. `tick_ms`: time inside a tick; `frame_ms`: from the end
    of one tick to the end of the next under load; each `p50`, `p95`, `p99` of the last 4096, 0 without data.
    `broken_samples`: non-finite samples, sent as silence. `preemptions`: for want of pages, before any audio was sent.
    `fallbacks`: by operation, the number of shapes served by `smaller` blocks or by the `reference` because a kernel
    could not be launched. `compiled`: by kernel, the variants that were compiled at their launch."""

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
    preemptions: int = msgspec.field(default=0, name="put_back")
    fallbacks: dict[str, dict[str, int]] = {}
    compiled: dict[str, int] = {}


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The engine is alive."""


class VoiceEncoded(msgspec.Struct, frozen=True, tag=True):
    """A voice encoded from references: bytes that an engine of the same model can load, and the content digest."""

    number: int
    digest: str
    data: bytes


class VoiceWanted(msgspec.Struct, frozen=True, tag=True):
    """Ask for the encoded voice of a digest, for which requests wait. Answered by `LoadVoice` or `VoiceLost`."""

    digest: str


class VoiceFailed(msgspec.Struct, frozen=True, tag=True):
    """The references could not be encoded: the facts of the error."""

    number: int
    facts: ErrorFacts


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine could not be started: the facts of the error."""

    facts: ErrorFacts


_ToRequest = AppendText | EndText | Cancel | Pause | Resume
ToEngine = Submit | _ToRequest | EncodeVoice | LoadVoice | VoiceLost | StatsRequest | Ping | FrontEnded | Shutdown
FromEngine = Ready | AudioChunk | Finished | Failed | Stats | Pong | VoiceEncoded | VoiceWanted | VoiceFailed | Fatal
