"""The structures of C code for ctypes, read from where they are declared: each field is declared once."""

import ctypes
import re
from collections.abc import Mapping
from ctypes import Structure
from pathlib import Path
from typing import Any

_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_STRUCTURE = re.compile(r"typedef struct \{(.*?)\} (\w+);", re.DOTALL)
_FIELD = re.compile(r"(\*?)(\w+)(?:\[(\d+)\])?")
_NUMBERS = {"float": ctypes.c_float, "int64_t": ctypes.c_int64}


def structures(file: Path) -> dict[str, Any]:
    """Those that the C code in `file` declares, and those of all C code here, by name: subclasses of `Structure`.
    A pointer to structures takes an array of them, any other an address."""
    return SHARED | _declared(file, SHARED)


def _declared(file: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """The structures in `file`, whose fields may be `known` ones and those before them."""
    made: dict[str, Any] = {}
    for body, name in _STRUCTURE.findall(_COMMENT.sub("", file.read_text(encoding="utf-8"))):
        fields = []
        for declaration in filter(None, map(str.strip, body.split(";"))):
            kind, names = declaration.removeprefix("const ").split(maxsplit=1)
            of_kind = {**known, **made}.get(kind)
            for star, field, count in _FIELD.findall(names):
                pointer = ctypes.c_void_p if of_kind is None else ctypes.POINTER(of_kind)
                one: Any = pointer if star else of_kind or _NUMBERS[kind]
                fields.append((field, one * int(count) if count else one))
        made[name] = type(name, (Structure,), {"_fields_": fields})
    return made


SHARED: dict[str, Any] = {}
for _header in ("kernels.h", "stack.h", "window.h"):
    SHARED |= _declared(Path(__file__).with_name(_header), SHARED)
