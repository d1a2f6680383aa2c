"""The engine's configuration: declared here once, validated when constructed, read from YAML.

The only module that reads or sets environment variables. Knows no model.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import yaml

from sonoro.core.errors import ConfigError, suggestion

LOG_LEVEL_VARIABLE = "SONORO_LOG_LEVEL"
_LOG_FORMAT_VARIABLE = "SONORO_LOG_FORMAT"
SECTIONS = ("engine", "server")
"""Of a server's configuration file."""
CODEC_DTYPES = ("auto", "float16", "bfloat16", "float32")
QUANTIZATIONS = ("none", "int8", "fp8")


class Settings:
    """Base of frozen dataclasses of settings; checks types and bounds, refuses unknown keys. Raises `ConfigError`."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """The defaults updated by `values`. Raises `ConfigError` for a key that is not a field."""
        known = [entry.name for entry in _fields(cls)]
        for key, value in values.items():
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
        for entry in _fields(type(self)):
            value = getattr(self, entry.name)
            is_right, limit = _KINDS[str(entry.type)]
            if not is_right(value):
                raise ConfigError(entry.name, value if entry.repr else "...", limit)
        for entry in _fields(type(self)):
            low, high, choices = (entry.metadata.get(name) for name in ("low", "high", "choices"))
            if low is not None and high is not None:
                self._check(entry.name, low, high)
            if choices and getattr(self, entry.name) not in choices:
                raise ConfigError(entry.name, getattr(self, entry.name), "it must be " + " or ".join(choices))

    def _check(self, name: str, low: float, high: float, reason: str = "") -> None:
        value = getattr(self, name)
        if not low <= value <= high:
            because = f" ({reason})" if reason else ""
            raise ConfigError(name, value, f"it must be at least {low:.15g} and at most {high:.15g}{because}")


def setting(
    default: Any,
    help: str = "",
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


def _fields(kind: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(kind)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_mapping(value: object, kinds: type | tuple[type, ...]) -> bool:
    return (
        isinstance(value, Mapping)
        and all(isinstance(key, str) for key in value)
        and (all(isinstance(one, kinds) for one in value.values()))
    )


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, bool), "it must be true or false"),
    "int": (_is_whole, "it must be a whole number"),
    "float": (lambda value: isinstance(value, float) or _is_whole(value), "it must be a number"),
    "str": (lambda value: isinstance(value, str) and "\0" not in value, "it must be a string"),
    "tuple[int, ...]": (
        lambda value: isinstance(value, tuple) and all(map(_is_whole, value)),
        "it must be a list of whole numbers",
    ),
    "tuple[str, ...]": (
        lambda value: isinstance(value, tuple) and all(isinstance(word, str) and word for word in value),
        "it must be a list of strings that are not empty",
    ),
    "Mapping[str, str]": (lambda value: _is_mapping(value, str), "it must hold strings by name"),
    "Mapping[str, bool | int | float | str]": (
        lambda value: _is_mapping(value, object),
        "it must hold settings by name",
    ),
}
"""By the declared type of a field: a check of its value, and the message if that fails."""


MIN_BOUND_S = 5.0
"""The least bound of a segment: a single word may be drawn out, or follow a breath."""

MIN_MAX_CHARACTERS = 16
"""The lowest `max_characters`."""


@dataclass(frozen=True)
class EngineConfig(Settings):
    """Capacity, batching and precision of an engine. Raises `ConfigError` naming field, value and limit.

    Capacity. `slots`: requests that run at once; `max_waiting`: requests that may wait for a slot. `max_positions`:
    backbone positions of a slot, prompt and frames; `max_frames`: frames of a segment; `max_text`: pending text ids of
    a slot. `bounds_by_text`: limit a segment's frames by the length of its text, unless the request does.
    `max_characters`: letters of a segment (as `text.splitting` counts). `max_live_characters`: characters of a
    live request; `live_max_s`: seconds of audio of a live segment, which bounds its letters too. `max_voices`: voices
    cached by the engine; `max_registered_voices`: uploaded voices, stored in `voices_folder`, a folder or the URL of a
    bucket (in memory if empty). `page_positions`: positions of a KV cache page; `pages`: pages shared by all slots,
    allocated as positions are used; 0 for as many as a third of the slots (at least four) can use, within
    `memory_fraction` of the GPU. `prefix_cache_bytes`: size of the prefix cache; 0 turns it off.

    Batching. `prefill_tokens`: prompt tokens of one tick; `is_prefill_fused`: prefill with the operations
    of a decode step; without, with those of training, for comparison. `chunk_frames`: the frames of a codec chunk: the
    first of a request has the first length, later ones grow with the listener's lead. `codec_frames`: maximum of frames
    decoded to audio per tick; 0 for four times the slots. `codec_wait`: ticks for which a chunk may wait to be batched
    with others, if the lead allows it.

    Model. `model_settings`: the model's own settings by name, listed in docs/differences.md. `finds_word_heads`: for a
    checkpoint without a table of word heads, search for them while idle, after the first request for words.

    Devices and dtypes. `codec_device`: a device of its own for the codec, such as "cuda:1"; empty for the model's. Then
    `codec_overlap` applies: with at most so many requests in a decode step, the codec runs on a second stream, beside
    the next tick's prefills and step (never on a CPU; more were not measured). `codec_dtype`: float16, bfloat16 or
    float32; auto is float32 on a CPU, else float16 if all activations fit it with a margin, else the next that agrees
    with float32. `quantization`: storage of the language model's weights, int8 or fp8 (E4M3), quantised at load; none
    for the compute dtype. `max_shared_bytes`: shared memory per block, 0 for the GPU's own limit; with
    `memory_fraction` it makes a large card behave like a smaller one.

    CUDA graphs: batch sizes to capture, ascending; empty for powers of two. `frame_batches`: up to `slots`.
    `prefill_buckets`: tokens, up to 512 or 32 per slot and at most 2,048, with midpoints from 64 on. `codec_batches`:
    up to 32. `is_eager`: capture nothing; the same kernels, launched one by one. `is_ready_early`: be ready with some
    sizes captured, and capture the others while idle; an option of `sonoro serve`.
    """

    slots: int = setting(16, low=1, high=4096)
    max_waiting: int = setting(1024, low=0, high=10_000_000)
    max_positions: int = 2048
    max_frames: int = setting(1024, low=1, high=1_000_000)
    max_text: int = setting(1024, low=1, high=1_000_000)
    bounds_by_text: bool = True
    max_characters: int = setting(300, low=MIN_MAX_CHARACTERS, high=100_000)
    max_live_characters: int = setting(100_000, low=1, high=100_000_000)
    live_max_s: float = 60.0
    max_voices: int = setting(32, low=1, high=1_000_000)
    max_registered_voices: int = setting(1000, low=0, high=1_000_000)
    voices_folder: str = ""
    page_positions: int = setting(32, low=16, high=1024)
    pages: int = 0
    prefix_cache_bytes: int = setting(2**30, low=0, high=10**15)
    memory_fraction: float = setting(0.9, low=0.01, high=1.0)
    prefill_tokens: int = 2048
    is_prefill_fused: bool = True
    chunk_frames: tuple[int, ...] = (1, 4, 12)
    codec_frames: int = 0
    codec_wait: int = setting(4, low=0, high=1000)
    codec_device: str = ""
    codec_overlap: int = setting(256, low=0, high=4096)
    codec_dtype: str = setting("auto", choices=CODEC_DTYPES)
    quantization: str = setting("none", choices=QUANTIZATIONS)
    max_shared_bytes: int = 0
    frame_batches: tuple[int, ...] = ()
    prefill_buckets: tuple[int, ...] = ()
    codec_batches: tuple[int, ...] = ()
    is_eager: bool = False
    is_ready_early: bool = False
    finds_word_heads: bool = True
    model_settings: Mapping[str, bool | int | float | str] = field(default_factory=dict)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """The defaults updated by the YAML file at `path`, or by the section `engine` of a server's file. Raises
        `ConfigError`."""
        values = read_yaml(path)
        return cls.from_mapping(section_of(values, "engine") if values.keys() <= set(SECTIONS) else values)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("max_positions", self.max_frames + 1, 10_000_000, "room for a prompt before max_frames frames")
        self._check("live_max_s", MIN_BOUND_S, 100_000, "a single word may be drawn out")
        if self.page_positions & (self.page_positions - 1):
            raise ConfigError("page_positions", self.page_positions, "it must be a power of two")
        if self.pages:
            self._check("pages", self.pages_per_slot, 100_000_000, "one request of max_positions must fit")
        self._check("prefill_tokens", self.max_positions - 1, 1_000_000, "the longest prompt must fit into a tick")
        if not self.chunk_frames:
            raise ConfigError("chunk_frames", self.chunk_frames, "it must hold at least one length")
        if self.codec_frames:
            self._check("codec_frames", self.slots, 10_000_000, "every slot makes a frame in a tick")
        if not re.fullmatch(r"(cpu|cuda:[0-9]{1,3})?", self.codec_device):
            raise ConfigError("codec_device", self.codec_device, 'it must be empty, cpu, or a GPU as "cuda:1"')
        if self.max_shared_bytes:
            self._check("max_shared_bytes", 16_384, 1_048_576)
        largest = {"frame_batches": self.slots, "prefill_buckets": self.prefill_tokens}
        for name, most in {"chunk_frames": 1024, **largest, "codec_batches": 4096}.items():
            self._check_sizes(name, 1, most)
        if self.frame_batches and self.frame_batches[-1] != self.slots:
            raise ConfigError("frame_batches", self.frame_batches, f"the largest must be slots, {self.slots}")

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
            codec_frames=self.codec_frames or 4 * self.slots,
        )

    def _check_sizes(self, name: str, low: int, high: int) -> None:
        sizes = getattr(self, name)
        if list(sizes) != sorted(set(sizes)):
            raise ConfigError(name, sizes, "it must ascend, without repeats")
        if sizes and not low <= sizes[0] <= sizes[-1] <= high:
            raise ConfigError(name, sizes, f"each must be at least {low} and at most {high}")


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


def kernel_cache_folder() -> Path:
    """Triton's cache of compiled kernels: `TRITON_CACHE_DIR`, or its default."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def tuned_folder() -> Path:
    """The folder of the user's tuned kernel plans, with a file per card."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sonoro" / "tuned"


def is_allocator_set() -> bool:
    """Whether the user has configured torch's GPU allocator."""
    return bool({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"} & os.environ.keys())


def word_heads_folder() -> Path:
    """The folder of word heads found while serving, with a file per checkpoint."""
    return tuned_folder().parent / "word_heads"


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
