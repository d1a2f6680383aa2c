"""Find and load a model by name: a folder, a hub id, the built-in voice or a released configuration.

A family is one line in `FAMILIES`. `model_type` in config.json, or else `architecture`, names a checkpoint's."""

import json
import logging
import re
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import torch

from sonoro.core.errors import CheckpointError, CheckpointNotFound, ConfigError, suggestion
from sonoro.models.base import Description, LoadedModel
from sonoro.models.fish_s2 import model as fish_s2
from sonoro.models.pocket_tts import model as pocket_tts
from sonoro.models.qwen3_tts import model as qwen3_tts
from sonoro.models.settings import configure
from sonoro.models.shared.loading import Family
from sonoro.models.shared.remote import snapshot
from sonoro.models.voxcpm2 import model as voxcpm2
from sonoro.ops.device import Card, card, is_recorded
from sonoro.runtime.kernels import use_own_plans
from sonoro.runtime.memory import compact_heap, map_in_pieces
from sonoro.runtime.threads import one_thread

logger = logging.getLogger(__name__)

BUILTIN = "builtin"

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_OTHER_FORMATS = ("*.bin", "*.pth")
"""Patterns of weight files to download if there is no safetensors file."""

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

FAMILIES: tuple[Family, ...] = (qwen3_tts.FAMILY, fish_s2.FAMILY, voxcpm2.FAMILY, pocket_tts.FAMILY)


class _Source(NamedTuple):
    """Where a model comes from: a folder or a released configuration (`origin`), and the model's `name`."""

    family: Family
    origin: Path | str
    name: str
    is_hub: bool = False


def names() -> tuple[str, ...]:
    """Names that `load` accepts: the built-in voice, then the released configurations (random weights only)."""
    return (BUILTIN, *(name for family in FAMILIES for name in family.configurations))


def load(
    model: str | Path | None = None,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype | None = None,
    load_format: str = "auto",
    quantization: str = "none",
) -> LoadedModel:
    """Load `model`: a folder, a hub id, or one of `names()`; None is the built-in voice.

    `device` "auto" is CUDA if available. `dtype` None is float32 on a CPU and bfloat16 on a GPU; below compute
    capability 8.0 float16 for families that it holds, else float32. `load_format` "dummy" gives random weights in the
    shapes of `model`. `quantization` "int8" or "fp8" keeps layer weights in 8 bits. Raises `CheckpointNotFound`, which
    lists known models, `CheckpointError` for an unusable folder, `ConfigError` for an empty name, a bad device, dtype
    or format, or a quantisation that the model or card lacks."""
    if load_format not in ("auto", "dummy"):
        raise ConfigError("load_format", load_format, "it must be auto or dummy")
    torch_device = _device(device)
    if torch_device.type == "cuda":
        map_in_pieces()
    use_own_plans(torch_device)
    source = _find(model, is_dummy=load_format == "dummy")
    _check_quantization(quantization, source.family, torch_device)
    torch_dtype = _dtype(dtype, torch_device, source.family)
    how = (source.name, torch_device, torch_dtype, quantization)
    if load_format == "dummy":
        return source.family.from_random(source.origin, *how)
    if isinstance(source.origin, Path):
        with ExitStack() as stack:
            if torch_device.type == "cpu":
                stack.enter_context(one_thread())
                stack.enter_context(compact_heap())
            loaded = source.family.from_folder(source.origin, *how)
        if source.is_hub:
            configure(loaded.model, source.family.hub_settings)
        return loaded
    hub_id = source.family.configurations[source.origin]
    raise CheckpointNotFound(f"{source.name} is a configuration without weights: name {hub_id}, or ask for dummy ones")


def describe(
    model: str | Path | None = None, *, device: str | torch.device = "auto", dtype: str | torch.dtype | None = None
) -> Description:
    """Sizes, parameters and memory of `model`, named as for `load`, without allocating weights. Raises as `load`."""
    source = _find(model, is_dummy=False)
    return source.family.describe(source.origin, source.name, _dtype(dtype, _device(device), source.family))


def locate(model: str | Path | None = None) -> Path | None:
    """The folder that `load` reads `model` from; None for a released configuration. Raises as `load`."""
    origin = _find(model, is_dummy=False).origin
    return origin if isinstance(origin, Path) else None


def check_units(quantization: str, on: Card) -> None:
    """Raise `ConfigError` if the card `on` has no units for weights in `quantization`."""
    if not _has_units(quantization, on):
        reason = f"{on.name} has no units for it (compute capability 8.9 has); int8 runs on it"
        raise ConfigError("quantization", quantization, reason)


def offered(model: str | Path | None = None, on: Card | None = None) -> tuple[str, ...]:
    """The quantisations that `load` takes for `model` on the card `on` (None: any), "none" first. Raises as `load`."""
    return _offered(_find(model, is_dummy=True).family, on)


def _offered(family: Family, on: Card | None) -> tuple[str, ...]:
    return ("none", *(one for one in family.quantizations if on is None or _has_units(one, on)))


def _has_units(quantization: str, on: Card) -> bool:
    return quantization != "fp8" or on.has_e4m3


def _find(model: str | Path | None, *, is_dummy: bool) -> _Source:
    if model is None or model == BUILTIN:
        return _from_folder(_builtin(), BUILTIN)
    if model == "":
        # Path("") is the current folder.
        raise ConfigError("model", model, "it must be a folder, a hub id or one of: " + ", ".join(names()))
    for family in FAMILIES:
        if model in family.configurations:
            return _Source(family, str(model), str(model))
    try:
        folder = Path(model).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except OSError as error:
        raise CheckpointNotFound(f"there is no folder {str(model)!r}: {error.strerror}") from error
    except RuntimeError as error:  # "~" of a user who has no home
        raise CheckpointNotFound(f"there is no folder {str(model)!r}: {error}") from error
    if is_folder:
        return _from_folder(folder, folder.resolve().name)
    for family in FAMILIES:
        if (gathered := family.gather(str(model), is_dummy)) is not None:
            return _Source(family, gathered, gathered.name, is_hub=not exists)
    if exists:
        raise CheckpointNotFound(f"{model} is not a folder; a checkpoint is a folder with config.json in it")
    if isinstance(model, str) and _HUB_ID.fullmatch(model):
        return _from_hub(model, is_dummy=is_dummy)
    known = [pair for family in FAMILIES for pair in family.configurations.items()]
    if nearest := suggestion(str(model), [BUILTIN, *(name for pair in known for name in pair)]):
        raise CheckpointNotFound(f"there is no folder {str(model)!r}; {nearest}")
    dummies, hub_ids = zip(*([*family.configurations.items()][-1] for family in FAMILIES), strict=True)
    some = f"{BUILTIN}; on the hub: {', '.join(hub_ids)}; with random weights: {', '.join(dummies)}"
    raise CheckpointNotFound(f"there is no folder {str(model)!r}; known models: {some}; docs/checkpoints.md lists all")


def _builtin() -> Path:
    folder = Path(str(resources.files("sonoro"))) / "builtin_voice"
    if not folder.is_dir():
        raise CheckpointNotFound(f"the built-in voice is missing from this installation ({folder}); name a model")
    return folder


def _from_folder(folder: Path, name: str) -> _Source:
    config = folder / "config.json"
    if not config.is_file():
        for family in FAMILIES:
            if family.owns(folder):
                return _Source(family, folder, name)
        raise CheckpointNotFound(f"{config} does not exist; a checkpoint is a folder with config.json in it")
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{config} is not a readable JSON file: {error}") from error
    named = values if isinstance(values, dict) else {}
    model_type = named.get("model_type", named.get("architecture"))
    for family in FAMILIES:
        if model_type == family.model_type:
            return _Source(family, folder, name)
    known = ", ".join(family.model_type for family in FAMILIES)
    raise CheckpointError(f"{config}: model_type is {model_type!r}; known: {known}")


def _from_hub(hub_id: str, *, is_dummy: bool) -> _Source:
    """The source in the hub's local cache, after downloading what is missing."""
    # config.json first: it shows whether the rest, gigabytes, is supported.
    source = _from_folder(snapshot(hub_id, ["config.json"]), hub_id.split("/")[1])
    files = [name for name in source.family.hub_files if not (is_dummy and name.endswith((".safetensors", ".pth")))]
    folder = snapshot(hub_id, files)
    if not is_dummy and not any(folder.glob("*.safetensors")):
        folder = snapshot(hub_id, [*files, *_OTHER_FORMATS])
    return source._replace(origin=folder, is_hub=True)


def _device(device: str | torch.device) -> torch.device:
    if isinstance(device, torch.device):
        return device
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        parsed = torch.device(device)
    except RuntimeError:
        parsed = None
    if parsed is None or parsed.type not in ("cpu", "cuda"):
        raise ConfigError("device", device, "it must be auto, cpu, cuda or cuda:N")
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        limit = f"this machine has {torch.cuda.device_count()} CUDA devices for PyTorch; auto takes what is there"
        raise ConfigError("device", device, limit)
    return parsed


def _dtype_of_gpu(device: torch.device, family: Family) -> torch.dtype:
    """bfloat16 if the card has units for it; otherwise float16 or float32, with a warning that says why."""
    on = card(device) if device.type == "cuda" or is_recorded() else None
    if on is None or on.has_bfloat16:
        return torch.bfloat16
    chosen, finding = (torch.float16, "holds") if family.holds_float16 else (torch.float32, "is not known to hold")
    reason = f"{on.name} has no units for bfloat16, and float16 {finding} the peaks of this family"
    logger.warning("event=dtype chosen=%s reason=%r", str(chosen).removeprefix("torch."), reason)
    return chosen


def _check_quantization(quantization: str, family: Family, device: torch.device) -> None:
    on = card(device) if device.type == "cuda" or is_recorded() else None
    if quantization in (allowed := _offered(family, on)):
        return
    where = ""
    if on is not None and not _has_units(quantization, on):
        where = f" on {on.name}, which has no units for it (compute capability 8.9 has)"
    raise ConfigError("quantization", quantization, f"{family.model_type} is offered as {' or '.join(allowed)}{where}")


def _dtype(dtype: str | torch.dtype | None, device: torch.device, family: Family) -> torch.dtype:
    if dtype is None or dtype == "auto":
        return torch.float32 if device.type == "cpu" else _dtype_of_gpu(device, family)
    chosen = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen not in _DTYPES.values():
        # float16 is not offered: activations of released code predictors overflow in it.
        raise ConfigError("dtype", str(dtype), f"it must be {' or '.join(_DTYPES)}")
    assert chosen is not None
    return chosen
