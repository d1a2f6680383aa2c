"""Read tensors from a `torch.save` file, without running its code, or a safetensors file; fold weight norm."""

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sonoro.core.errors import CheckpointError, CheckpointNotFound, TensorMismatch

NORM_SPELLINGS = (
    (".parametrizations.weight.original0", ".parametrizations.weight.original1"),
    (".weight_g", ".weight_v"),
)
"""Suffixes that weight norm stores in place of `.weight`: lengths of the rows, then their directions."""

_UNREADABLE = (OSError, EOFError, RuntimeError, ValueError, LookupError, pickle.UnpicklingError, SafetensorError)


def read(file: Path, device: str) -> dict[str, Tensor]:
    """The tensors of `file`, or of the dictionary `state_dict` in it, by name; on the meta device without values.
    The suffix .safetensors decides the format. Raises `CheckpointNotFound`, or `CheckpointError` for a file that
    cannot be read or holds anything but tensors."""
    if not file.is_file():
        raise CheckpointNotFound(f"{file} does not exist")
    try:
        stored = _read_safetensors(file, device) if file.suffix == ".safetensors" else _read_pickle(file, device)
    except _UNREADABLE as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise CheckpointError(f"{file} is not a readable file of tensors alone: {reason}") from error
    if isinstance(stored, dict) and isinstance(stored.get("state_dict"), dict):
        stored = stored["state_dict"]
    if not isinstance(stored, dict):
        raise CheckpointError(f"{file} holds {type(stored).__name__}; expected tensors by name")
    for name, tensor in stored.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(f"{file} holds {type(tensor).__name__} as {name!r}; expected tensors by name")
    return stored


def _read_pickle(file: Path, device: str) -> Any:
    is_mapped = device == "cpu" and zipfile.is_zipfile(file)
    return torch.load(file, map_location=device, weights_only=True, mmap=is_mapped)


def _read_safetensors(file: Path, device: str) -> dict[str, Tensor]:
    # On a CPU the file is memory-mapped: tensors that are not used are not read.
    return {name: tensor.to(device) for name, tensor in load_file(file).items()}


def folded_name(name: str) -> str:
    """The name that `fold_norms` gives the tensor stored as `name`."""
    for end in (end for ends in NORM_SPELLINGS for end in ends):
        if name.endswith(end):
            return f"{name.removesuffix(end)}.weight"
    return name


def fold_norms(tensors: Mapping[str, Tensor], file: Path) -> dict[str, Tensor]:
    """`tensors` with each weight norm folded into its weight, float32: unit rows (dimension 0) times their lengths.
    Raises `TensorMismatch`, naming `file`, if half of a norm is missing or misshapen, or the weight is stored twice."""
    folded = dict(tensors)
    for ends in NORM_SPELLINGS:
        stems = {name.removesuffix(end): None for name in tensors for end in ends if name.endswith(end)}
        for stem in stems:
            for end in ends:
                if stem + end not in tensors:
                    raise TensorMismatch(f"{file}: tensor {stem + end!r} is missing, half of a weight norm")
            lengths, directions = (folded.pop(stem + end).float() for end in ends)
            expected = (*directions.shape[:1], *(1,) * (directions.ndim - 1))
            if lengths.shape != expected:
                sizes = f"has shape {[*lengths.shape]}, expected {[*expected]}"
                raise TensorMismatch(f"{file}: tensor {stem + ends[0]!r} {sizes}")
            if f"{stem}.weight" in folded:
                raise TensorMismatch(f"{file}: the weight of {stem!r} is stored in more than one way")
            folded[f"{stem}.weight"] = directions if directions.is_meta else _rows(lengths, directions)
    return folded


def _rows(lengths: Tensor, directions: Tensor) -> Tensor:
    """`directions` scaled to norms `lengths`. Not for the meta device: its first norm imports a compiler (1 s)."""
    norms = torch.linalg.vector_norm(directions, dim=tuple(range(1, directions.ndim)), keepdim=True)
    return directions * (lengths / norms)
