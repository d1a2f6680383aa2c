"""Read a checkpoint's configuration, JSON or YAML, into frozen types."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec
import yaml

from sonoro.core.errors import CheckpointError, CheckpointNotFound

T = TypeVar("T")
_ABOVE_ZERO = ("norm_eps", "rms_norm_eps", "rope_base", "rope_theta")


def read_config(kind: type[T], path: Path) -> T:
    """The JSON file `path` as the dataclass `kind`. Raises `CheckpointError` naming the file and key."""
    return build(kind, read_json(path), str(path))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`. Raises `CheckpointNotFound` or `CheckpointError` naming the file."""
    if not path.is_file():
        raise CheckpointNotFound(f"{path} does not exist")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a readable JSON file: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return values


def yaml_values(path: Path) -> Any:
    """What the YAML file `path` holds. Raises `CheckpointError` naming the file."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path} is not a readable YAML file: {error}") from error


def converted(kind: type[T], values: Any, where: str) -> T:
    """`values` as `kind`, by msgspec's rules. Raises `CheckpointError`, which begins with `where`."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{where}: {error}") from error


def read_released(
    kind: type[T], source: Path | str, package: str, expected: Callable[[T], Iterable[tuple[str, object, object]]]
) -> T:
    """The dataclass `kind` from config.json of the folder `source`, or for a name from `configs/<name>.json` of
    `package`. Raises `CheckpointError` naming file and key, also where a value of `expected` (key, value, only
    supported) differs."""
    if isinstance(source, Path):
        config = read_config(kind, source / "config.json")
    else:
        packaged = resources.files(package) / "configs" / f"{source}.json"
        config = build(kind, json.loads(packaged.read_text("utf-8")), source)
    check_values("config.json", expected(config))
    return config


def check_values(where: str, values: Iterable[tuple[str, object, object]]) -> None:
    """Raise `CheckpointError`, which begins with `where`, if one of `values` (key, value, only supported) differs."""
    for name, value, only in values:
        if value != only:
            raise CheckpointError(f"{where}: {name} is {value}; it must be {only}")


def build(kind: type[T], values: dict[str, Any], where: str) -> T:
    """`values` as the dataclass `kind`. Unknown keys are ignored; null counts as absent for a field with a default,
    unless the default is a list.
    Raises `CheckpointError`, which begins with `where`, for a key that is missing, of a wrong type or out of range."""
    config = converted(kind, _without_nulls(values, kind), where)
    _check_numbers(config, where)
    return config


def _without_nulls(values: Any, kind: Any) -> Any:
    if not dataclasses.is_dataclass(kind) or not isinstance(values, dict):
        return values
    kinds, kept = get_type_hints(kind), dict(values)
    for field in dataclasses.fields(kind):
        is_optional = (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
        if field.name in kept and kept[field.name] is None and is_optional and not isinstance(field.default, tuple):
            del kept[field.name]
        elif field.name in kept:
            for inner in (kinds[field.name], *get_args(kinds[field.name])):
                kept[field.name] = _without_nulls(kept[field.name], inner)
    return kept


def _check_numbers(config: Any, where: str) -> None:
    """Raise `CheckpointError` for a negative number, a size of 0, an epsilon or a rotary base that is not above 0."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            _check_numbers(value, f"{where}: {field.name}")
            continue
        least = 0 if field.name.endswith(("_id", "top_k")) or field.default == 0 else 1
        for number in value if isinstance(value, tuple) else (value,):
            if type(number) is int and number < least:
                raise CheckpointError(f"{where}: {field.name} is {number}; it must be at least {least}")
        if field.name in _ABOVE_ZERO and not 0 < value < math.inf:
            raise CheckpointError(f"{where}: {field.name} is {value}; it must be above 0, and finite")
