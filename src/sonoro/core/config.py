"""The engine's configuration: declared here once, validated when constructed, read from YAML.

Only this module and `folders` read or set environment variables. Knows no model."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Self, get_type_hints

import msgspec
import yaml

from sonoro.core.errors import ConfigError, suggestion

LOG_LEVEL_VARIABLE = "SONORO_LOG_LEVEL"
_LOG_FORMAT_VARIABLE = "SONORO_LOG_FORMAT"
_METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
SECTIONS = ("engine", "server")
"""Of a server's configuration file."""
CODEC_DTYPES = ("auto", "float16", "bfloat16", "float32")
QUANTIZATIONS = ("none", "int8", "fp8")


class Settings:
    """Base of frozen dataclasses of settings; checks types and bounds, refuses unknown keys. Raises `ConfigError`."""

    REMOVED: ClassVar[Mapping[str, str]] = {}
    """Keys of earlier versions, and what replaces each."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """The defaults updated by `values`. Raises `ConfigError` for a key that is not a field."""
        known = [entry.name for entry in _settings(cls)]
        for key, value in values.items():
            if key in cls.REMOVED:
                raise ConfigError(str(key), value, f"it was removed: {cls.REMOVED[key]}")
            if key not in known:
                nearest = suggestion(str(key), known)
                limit = f"there is no such key; {nearest}{' ' * bool(nearest)}known keys: {', '.join(known)}"
                raise ConfigError(str(key), value, limit)
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})

    def over(self, **given: Any) -> Self:
        """These settings updated by those `given` that are not None."""
        known = {name: value for name, value in given.items() if value is not None}
        return dataclasses.replace(self, **known)  # type: ignore[type-var]

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for entry in _settings(type(self)):
            name, value, metadata = entry.name, getattr(self, entry.name), entry.metadata
            shown, choices = value if entry.repr else "...", metadata["choices"]
            ConfigError.unless(_is_of(value, hints[name]), name, shown, "it must be " + _KINDS[hints[name]])
            if metadata["low"] is not None:
                self._check(name, metadata["low"], metadata["high"])
            ConfigError.unless(not choices or value in choices, name, value, "it must be " + " or ".join(choices))

    def _check(self, name: str, low: float, high: float, reason: str = "") -> None:
        value, because = getattr(self, name), f" ({reason})" if reason else ""
        limit = f"it must be at least {low:.15g} and at most {high:.15g}{because}"
        ConfigError.unless(low <= value <= high, name, value, limit)


def setting(
    default: Any,
    help: str,
    low: float | None = None,
    high: float | None = None,
    *,
    choices: tuple[str, ...] = (),
    flag: str = "",
) -> Any:
    """A field of `Settings`. `low` and `high` bound a number, `choices` are the values of a string. Its command line
    option, explained by `help`, has the field's name, or is `flag`, which gives one of several entries."""
    metadata = {"help": help, "low": low, "high": high, "choices": choices, "flag": flag}
    if isinstance(default, Mapping):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata, repr=flag not in ("api_key", "admin_key"))


def _settings(kind: Any) -> list[dataclasses.Field[Any]]:
    """The fields of `kind` that a file may set."""
    return [entry for entry in dataclasses.fields(kind) if entry.metadata]


def _is_of(value: object, hint: Any) -> bool:
    """Whether `value` is of type `hint`. A string must hold no NUL, a list no empty string."""
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    return not (isinstance(value, str) and "\0" in value) and not (isinstance(value, tuple) and "" in value)


_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    tuple[int, ...]: "a list of whole numbers",
    tuple[str, ...]: "a list of strings that are not empty",
    Mapping[str, str]: "a mapping of names to strings",
    Mapping[str, bool | int | float | str]: "a mapping of names to settings",
    Mapping[str, Mapping[str, int]]: "a mapping of names to mappings of names to whole numbers",
}
"""The types of fields in words."""


MIN_BOUND_S = 5.0
"""The least bound of a segment: a single word may be drawn out, or follow a breath."""

MIN_SEGMENT_LETTERS = 16
"""The lowest `segment_letters`."""


@dataclass(frozen=True)
class Tuning:
    """Constants of an engine that tests and benchmarks vary. No file and no option sets them."""

    page_positions: int = 32
    """Positions of a KV cache page, a power of two."""
    is_prefill_fused: bool = True
    """Prefill with the operations of a decode step; else with those of training."""
    codec_frames: int = 0
    """Maximum of frames decoded to audio per tick; 0 for four times the slots."""
    codec_wait: int = 4
    """Ticks for which a chunk may wait to be batched with others, if the listener's lead allows it."""
    codec_overlap: int = 256
    """With at most so many requests in a decode step, or nearly as many as there are slots, the codec runs on a second
    stream, beside the next tick's prefills and step. Never on a CPU. Beside 512 requests: 4% more audio (H100)."""
    max_queued: int = 1024
    """Requests that may wait in the engine for a slot."""
    finds_word_heads: bool = True
    """For a checkpoint without a table of word heads, search for them while idle, after the first request for words."""


_REMOVED = {
    "max_characters": "it is called segment_letters",
    "max_text": "it follows from max_frames",
    "max_waiting": "max_waiting of the section server bounds the requests that wait",
    "max_live_characters": "it is always 100000",
    "live_max_s": "it is always 60",
    "page_positions": "it is always 32",
    "is_prefill_fused": "it is always true",
    "codec_frames": "it is always four times slots",
    "codec_wait": "it is always 4",
    "codec_overlap": "it is always 256",
    "finds_word_heads": "heads are always searched for; a table made by `sonoro calibrate` saves the search",
}
"""Keys of earlier versions of `EngineConfig`, and what replaces each."""


@dataclass(frozen=True)
class EngineConfig(Settings):
    """Capacity, batching and precision of an engine. Raises `ConfigError` naming field, value and limit."""

    slots: int = setting(16, "requests that the engine runs at once", 1, 4096)
    max_positions: int = setting(2048, "backbone positions of a slot: prompt and frames")
    max_frames: int = setting(1024, "frames of a segment", 1, 1_000_000)
    bounds_by_text: bool = setting(True, "limit a segment's frames by the length of its text, unless the request does")
    segment_letters: int = setting(
        300, "letters of a segment, as `text.splitting` counts them", MIN_SEGMENT_LETTERS, 100_000
    )
    max_voices: int = setting(32, "voices that the engine keeps ready", 1, 1_000_000)
    max_registered_voices: int = setting(1000, "uploaded voices", 0, 1_000_000)
    voices_folder: str = setting("", "folder or bucket (s3://...) for uploaded voices; empty: in memory")
    pages: int = setting(
        0,
        "pages of the KV cache, shared by all slots; 0 for as many as a third of the slots (at least four) can use, "
        "within memory_fraction",
    )
    prefix_cache_bytes: int = setting(2**30, "size of the prefix cache; 0 turns it off", 0, 10**15)
    memory_fraction: float = setting(0.9, "part of the GPU's memory that the engine may use", 0.01, 1.0)
    prefill_tokens: int = setting(2048, "prompt tokens of one tick")
    chunk_frames: tuple[int, ...] = setting(
        (1, 4, 12),
        "lengths of codec chunks: a request's first has the first length, later ones grow with the listener's lead",
    )
    codec_device: str = setting("", "a device of its own for the codec, such as cuda:1; empty for the model's")
    codec_dtype: str = setting(
        "auto",
        "auto is float32 on a CPU; else float16 if all activations fit it with a margin, else the next that agrees "
        "with float32",
        choices=CODEC_DTYPES,
    )
    quantization: str = setting(
        "none",
        "storage of the language model's weights, quantised at load: int8, fp8 (E4M3), or none for the compute dtype",
        choices=QUANTIZATIONS,
    )
    max_shared_bytes: int = setting(
        0, "shared memory per block, to make a large card behave like a smaller one; 0 for the GPU's own limit"
    )
    frame_batches: tuple[int, ...] = setting(
        (), "batch sizes of decode steps to capture as CUDA graphs; empty for powers of two up to slots"
    )
    prefill_buckets: tuple[int, ...] = setting(
        (),
        "prompt tokens to capture; empty for powers of two, with midpoints from 64 on, up to 512 or 32 per slot, at "
        "most 2,048",
    )
    codec_batches: tuple[int, ...] = setting((), "batch sizes of the codec to capture; empty for 1, 4, 16 up to 32")
    is_eager: bool = setting(
        False, "no CUDA graphs, but the same kernels, launched one by one; no compiled code on a CPU"
    )
    is_ready_early: bool = setting(False, "be ready with some graphs captured, and capture the others when idle")
    model_settings: Mapping[str, bool | int | float | str] = setting({}, "the model's own (docs/differences.md)")
    tuning: Tuning = Tuning()

    REMOVED = _REMOVED

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """The defaults updated by the YAML file at `path`, or by the section `engine` of a server's file. Raises
        `ConfigError`."""
        values = read_yaml(path)
        return cls.from_mapping(section_of(values, "engine") if values.keys() <= set(SECTIONS) else values)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("max_positions", self.max_frames + 1, 10_000_000, "room for a prompt before max_frames frames")
        if self.pages:
            self._check("pages", self.pages_per_slot, 100_000_000, "one request of max_positions must fit")
        self._check("prefill_tokens", self.max_positions - 1, 1_000_000, "the longest prompt must fit into a tick")
        chunks = self.chunk_frames
        ConfigError.unless(bool(chunks), "chunk_frames", chunks, "it must hold at least one length")
        is_device = re.fullmatch(r"(cpu|cuda:[0-9]{1,3})?", self.codec_device) is not None
        ConfigError.unless(is_device, "codec_device", self.codec_device, 'it must be empty, cpu, or a GPU as "cuda:1"')
        if self.max_shared_bytes:
            self._check("max_shared_bytes", 16_384, 1_048_576)
        largest = {"frame_batches": self.slots, "prefill_buckets": self.prefill_tokens}
        for name, most in {"chunk_frames": 1024, **largest, "codec_batches": 4096}.items():
            self._check_sizes(name, most)
        fits = self.frame_batches[-1:] in ((), (self.slots,))
        ConfigError.unless(fits, "frame_batches", self.frame_batches, f"the largest must be slots, {self.slots}")

    @property
    def page_positions(self) -> int:
        """Positions of a page."""
        return self.tuning.page_positions

    @property
    def max_text(self) -> int:
        """Pending text ids of a slot. A frame takes one."""
        return max(1024, self.max_frames)

    @property
    def codec_frames(self) -> int:
        """Maximum of frames decoded to audio per tick."""
        return self.tuning.codec_frames or 4 * self.slots

    @property
    def shown(self) -> dict[str, Any]:
        """What a file may set."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "tuning"}

    @property
    def pages_per_slot(self) -> int:
        """Pages that hold `max_positions` positions."""
        return -(-self.max_positions // self.page_positions)

    @property
    def long_prefills(self) -> tuple[int, ...]:
        """Prefill sizes above the largest bucket, whose kernels are loaded at start. Needs a resolved configuration."""
        largest = self.prefill_buckets[-1]
        doublings = (self.prefill_tokens // largest).bit_length() - 1
        return tuple(largest << doubling for doubling in range(1, doublings + 1))

    @property
    def first_sizes(self) -> Self:
        """This resolved configuration with only the sizes that an engine captures at start if it `is_ready_early`."""
        return dataclasses.replace(
            self,
            frame_batches=_ends(self.frame_batches),
            prefill_buckets=_ends(self.prefill_buckets, *(size for size in self.prefill_buckets if size <= 512)),
            codec_batches=_ends(self.codec_batches),
        )

    def resolve(self) -> Self:
        """Fill in the sizes that were left empty, except `pages`."""
        prompt_tokens = min(max(512, 32 * self.slots), 2048, self.prefill_tokens)
        return dataclasses.replace(
            self,
            frame_batches=self.frame_batches or _powers_of_two(self.slots),
            prefill_buckets=self.prefill_buckets or _with_halves(_powers_of_two(prompt_tokens, first=16)),
            codec_batches=self.codec_batches or _powers_of_two(min(32, self.slots), factor=4),
        )

    def _check_sizes(self, name: str, most: int) -> None:
        sizes = getattr(self, name)
        ConfigError.unless(list(sizes) == sorted(set(sizes)), name, sizes, "it must ascend, without repeats")
        is_inside = all(1 <= size <= most for size in sizes)
        ConfigError.unless(is_inside, name, sizes, f"each must be at least 1 and at most {most}")


def _ends(sizes: tuple[int, ...], *between: int) -> tuple[int, ...]:
    """The first and the last of `sizes`, and the last of `between`."""
    return tuple(sorted({*sizes[:1], *between[-1:], *sizes[-1:]}))


class StrictLoader(yaml.SafeLoader):  # type: ignore[misc]
    """A YAML loader that refuses duplicate keys, of which YAML silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"{key} is written twice")
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def read_yaml(path: str | Path, what: str = "keys and values") -> dict[str, Any]:
    """Read the mapping in the YAML file at `path`; {} if the file is empty. Raises `ConfigError`, naming `what` it must
    hold."""
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), StrictLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("config", str(path), f"it must be a readable file ({error})") from error
    except yaml.YAMLError as error:
        raise ConfigError("config", str(path), f"it must be YAML ({' '.join(str(error).split())})") from error
    if values is not None and not isinstance(values, dict):
        raise ConfigError("config", str(path), f"it must hold {what}, not a {type(values).__name__}")
    return values or {}


def section_of(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The section `name` of a server's file, {} if it is missing. Raises `ConfigError`."""
    section = values.get(name)
    if section is not None and not isinstance(section, dict):
        raise ConfigError(name, section, f"it must hold keys and values, not a {type(section).__name__}")
    return section or {}


def _powers_of_two(largest: int, first: int = 1, factor: int = 2) -> tuple[int, ...]:
    """`first`, `first` * `factor`, ... below `largest`, then `largest`."""
    sizes = []
    while first < largest:
        sizes.append(first)
        first *= factor
    return (*sizes, largest)


def is_allocator_set() -> bool:
    """Whether the user has configured torch's GPU allocator."""
    return bool({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"} & os.environ.keys())


def log_level(default: str = "WARNING") -> int:
    """The log level in `SONORO_LOG_LEVEL`, or `default`. Raises `ConfigError` for an unknown one."""
    name = os.environ.get(LOG_LEVEL_VARIABLE, default)
    levels = logging.getLevelNamesMapping()
    if name.upper() not in levels:
        raise ConfigError(LOG_LEVEL_VARIABLE, name, "one of " + ", ".join(levels))
    return levels[name.upper()]


def is_log_json() -> bool:
    """Whether the parent process has called `log_as_json`."""
    return os.environ.get(_LOG_FORMAT_VARIABLE) == "json"


def log_as_json(is_json: bool) -> None:
    """Set the log format of processes that this one starts."""
    os.environ[_LOG_FORMAT_VARIABLE] = "json" if is_json else "text"


def with_metrics_folder(folder: Path) -> dict[str, str]:
    """The environment of a process whose metrics are kept in files of `folder`, beside those of others."""
    return {**os.environ, _METRICS_VARIABLE: str(folder)}


def metrics_folder() -> str | None:
    """The folder of `with_metrics_folder`, in such a process."""
    return os.environ.get(_METRICS_VARIABLE)


def see_gpus(*indices: int) -> None:
    """Restrict this process and those it starts to the GPUs of `indices` among the visible ones. Call it before CUDA is
    used."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    chosen = (seen.split(",")[index].strip() if seen else str(index) for index in indices)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)


def _with_halves(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """`sizes`, with the midpoints of neighbours from 64 on."""
    halves = {(low + high) // 2 for low, high in pairwise(sizes) if low >= 64}
    return tuple(sorted({*sizes, *halves}))


def usable_cores() -> int:
    """How many cores this process may run on: its CPU affinity where the system has that, else all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
