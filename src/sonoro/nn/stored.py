"""Read a checkpoint's files as tensors by name, in any supported format, and decide which of them a module needs.

Formats are safetensors and `torch.save` (tensors only). An int8 tensor with a tensor `<name>_scale` [rows] beside it
is dequantised: it counts as one float tensor."""

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sonoro.core.errors import CheckpointError, CheckpointNotFound, TensorMismatch
from sonoro.nn import torch_file

logger = logging.getLogger(__name__)

Shape = tuple[int, ...]

_FLOATS = ("F64", "F32", "F16", "BF16", *map(str, (torch.float64, torch.float32, torch.float16, torch.bfloat16)))
SCALE = "_scale"
_EIGHT_BITS = ("I8", str(torch.int8))
_INTEGERS = re.compile(r"(torch\.)?(U|I|u?int|BOOL|bool)\d*")
_LISTED = 5
"""Names listed per kind of mismatch; the rest are counted."""

_DERIVED = re.compile(
    r"""(^|\.)(
        rotary\w* | rope\w* | \w*inv_freq | freqs(_cis)? | (cos|sin)(_cache[ds]?)?  # tables of rotary embeddings
        | \w*_?mask                                                                 # of attention
        | initialized | inited | embed_avg                                          # statistics of codebooks
        | (model_)?ema | teacher | \w*discriminators? | \w*loss(es)? | criterion | optimizer\w*   # training
    )(\.|$)""",
    re.VERBOSE,
)
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output|head)\.weight$")
_WRAPPER = "model."
_ADAPTER = re.compile(r"(^|[._])lora([._]|$)", re.IGNORECASE)


class Entry(NamedTuple):
    """A tensor's file, dtype (spelled as in the file's format) and shape."""

    file: Path
    dtype: str
    shape: Shape


def find(file: Path) -> list[Path]:
    """The files that hold the tensors of `file`: `file` itself, its shards by their index, or the same in another
    format.
    Safetensors come first, then `pytorch_model.bin` and the like; `[file]` if there are none. Raises
    `CheckpointError` for an unreadable index."""
    for name in (f"{file.stem}.safetensors", f"pytorch_{file.stem}.bin", f"{file.stem}.bin", f"{file.stem}.pth"):
        index = file.with_name(f"{name}.index.json")
        if index.is_file():
            return _shards(index)
        if (found := file.with_name(name)).is_file():
            return [found]
    return [file]


def _shards(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [index.with_name(name) for name in sorted(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a readable index of files of tensors: {error!r}") from error


def headers(files: Iterable[Path]) -> dict[str, Entry]:
    """The entries of all tensors in `files` by name; reads no values. Raises `CheckpointNotFound` for a missing file,
    `CheckpointError` for a damaged one, `TensorMismatch` for a tensor in more than one."""
    entries = (_header(file) if _is_safe(file) else entries_of(torch_file.read(file, "meta"), file) for file in files)
    return _whole(_joined(entries))


def _joined(headers: Iterable[Mapping[str, Entry]]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for header in headers:
        if twice := sorted(header.keys() & found.keys()):
            name = twice[0]
            raise TensorMismatch(f"tensor {name!r} is in {found[name].file} and again in {header[name].file}")
        found |= header
    return found


def _whole(found: dict[str, Entry]) -> dict[str, Entry]:
    """The entries of `found` but for scales; a tensor that has one has its dtype."""
    scaled = _scaled(found)
    scales = {name + SCALE for name in scaled}
    whole = {name: found[name]._replace(dtype=found[name + SCALE].dtype) for name in scaled}
    return {name: whole.get(name, entry) for name, entry in found.items() if name not in scales}


def _scaled(found: Mapping[str, Entry]) -> set[str]:
    """Names of the int8 tensors that have a scale per row."""
    return {
        name
        for name, entry in found.items()
        if entry.dtype in _EIGHT_BITS
        and (scale := found.get(name + SCALE)) is not None
        and (scale.dtype in _FLOATS and scale.shape == entry.shape[:1] != ())
    }


def entries_of(tensors: Mapping[str, Tensor], file: Path) -> dict[str, Entry]:
    """The entries of `tensors`, as `headers` returns them for `file`."""
    return {name: Entry(file, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}


class Contents(NamedTuple):
    """The `entries` of files, and functions from name to tensor, memory-mapped: `get` gives floats, `narrow` an int8
    tensor and its scale [rows] float32, or None for other dtypes."""

    entries: dict[str, Entry]
    get: Callable[[str], Tensor]
    narrow: Callable[[str], tuple[Tensor, Tensor] | None]


@contextmanager
def opened(files: Sequence[Path]) -> Iterator[Contents]:
    """A context that gives the contents of `files`. Raises as `headers`."""
    pickled = {file: torch_file.read(file, "cpu") for file in files if not _is_safe(file)}
    found = _joined(entries_of(pickled[file], file) if file in pickled else _header(file) for file in files)
    scaled = _scaled(found)
    with ExitStack() as stack:
        handles = {
            file: pickled[file].__getitem__
            if file in pickled
            else stack.enter_context(safe_open(file, framework="pt")).get_tensor
            for file in files
        }

        def read(name: str) -> Tensor:
            return handles[found[name].file](name)

        def narrow(name: str) -> tuple[Tensor, Tensor] | None:
            return (read(name), read(name + SCALE).float()) if name in scaled else None

        def get(name: str) -> Tensor:
            if (stored := narrow(name)) is None:
                return read(name)
            tensor, scale = stored
            return tensor.float() * scale.view(-1, *[1] * (tensor.ndim - 1))

        try:
            yield Contents(_whole(found), get, narrow)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{', '.join(map(str, files))}: cannot be read: {error}") from error


def read_all(file: Path) -> dict[str, Tensor]:
    """All tensors of `file` by name, memory-mapped. Raises as `headers`."""
    with opened([file]) as contents:
        return {name: contents.get(name) for name in contents.entries}


def _is_safe(file: Path) -> bool:
    return file.suffix == ".safetensors"


def sort_out(
    found: Mapping[str, Entry], expected: Mapping[str, Shape], unused: Mapping[str, Shape], *, where: str
) -> tuple[str, ...]:
    """Check the tensors `found` in files against those `expected`; returns the names that can be skipped.

    Skipped are derived tensors (rotary tables, masks, integers, a head tied to an embedding: `check_tied`), training
    state, and whole modules that the model lacks. `unused` tensors may be present, in their shape. Raises
    `TensorMismatch`, which begins with `where`, for an expected tensor that is missing, misshapen or no float, and for
    any other tensor within a module of the model: ignoring it would change the model's output."""
    own = {_module(name) for name in expected}
    skipped = tuple(
        name
        for name, entry in sorted(found.items())
        if name not in expected
        and name not in unused
        and not _ADAPTER.search(name)
        and (
            _DERIVED.search(name)
            or _INTEGERS.fullmatch(entry.dtype)
            or _tied(name, entry.shape, expected)
            or _module(name) not in own
        )
    )
    problems = (
        [
            f"tensor {name!r} has shape {list(entry.shape)}, expected {list(wanted)}"
            for name, entry in found.items()
            if (wanted := expected.get(name, unused.get(name))) is not None and wanted != entry.shape
        ],
        [
            f"tensor {name!r} is stored as {found[name].dtype}; expected a floating-point type of 16 bits or more"
            for name in expected
            if name in found and found[name].dtype not in _FLOATS
        ],
        [f"tensor {name!r} {list(shape)} is missing" for name, shape in expected.items() if name not in found],
        [
            f"tensor {name!r} {list(found[name].shape)} is not part of the model"
            for name in sorted(found.keys() - {*expected, *unused, *skipped})
        ],
    )
    lines = [
        line
        for kind in problems
        for line in kind[:_LISTED] + ([f"... {len(kind) - _LISTED} more"] if len(kind) > _LISTED else [])
    ]
    if lines:
        raise TensorMismatch(f"{where}: " + "; ".join(lines))
    return skipped


def _module(name: str) -> str:
    """The outermost module in the tensor name `name`, without the wrapper `model.`."""
    return name.removeprefix(_WRAPPER).split(".")[0]


def _tied(head: str, shape: Shape, expected: Mapping[str, Shape]) -> list[str]:
    """Names of the embeddings of the same shape that `head` may be tied to; none if it is no head of this model."""
    is_ours = head.count(".") == 1 or _module(head) in {_module(name) for name in expected}
    if not is_ours or not _HEAD.search(head):
        return []
    return [name for name, own in expected.items() if "embed" in name and own == shape]


def check_tied(skipped: Iterable[str], expected: Mapping[str, Shape], get: Callable[[str], Tensor], where: str) -> None:
    """Raise `TensorMismatch` if a head among the `skipped` tensors differs from every embedding it may be tied to."""
    for name in filter(_HEAD.search, skipped):
        head = get(name)
        alike = _tied(name, tuple(head.shape), expected)
        if alike and not any(torch.equal(head, get(other).to(head.dtype)) for other in alike):
            raise TensorMismatch(f"{where}: tensor {name!r} is not part of the model, and no copy of {alike[0]!r}")


def warn(model: str, skipped: Sequence[str]) -> None:
    """Log the `skipped` tensors of `model` in one warning, if there are any."""
    if skipped:
        logger.warning("event=tensors_skipped model=%s count=%d names=%s", model, len(skipped), summary(skipped))


def summary(names: Iterable[str]) -> str:
    """`names` joined by commas, with layer numbers collapsed: `layers.*.rotary_emb.inv_freq`."""
    return ",".join(dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in names))


def _header(file: Path) -> dict[str, Entry]:
    """The entries in a safetensors file's header. Raises `CheckpointError`; for a cut file it names the cut tensor."""
    if not file.is_file():
        raise CheckpointNotFound(f"{file} does not exist")
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > size - 8:
                raise CheckpointError(f"{file} is truncated or not a safetensors file: header of {length} bytes")
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            spans = {name: entry["data_offsets"] for name, entry in header.items()}
            entries = {name: Entry(file, entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is not a readable safetensors file: {error}") from error
    for name, (_, end) in sorted(spans.items(), key=lambda span: span[1]):
        if (ends := 8 + length + end) > size:
            raise CheckpointError(f"{file} is truncated: tensor {name!r} ends at byte {ends}, the file has {size}")
    return entries
