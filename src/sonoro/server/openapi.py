"""How routes describe what they take and answer, as JSON schemas."""

from collections.abc import Collection
from typing import Any

from pydantic import BaseModel


def object_of(required: Collection[str], **properties: Any) -> dict[str, Any]:
    """The JSON schema of an object with `properties`."""
    return {"type": "object", "required": list(required), "properties": properties}


def schema_of(kind: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of `kind`, with `$ref`s inlined."""
    schema = kind.model_json_schema()
    inlined: dict[str, Any] = _inline(schema, schema.pop("$defs", {}))
    return inlined


def request_body(kind: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI description of a route that takes `kind` as JSON."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema_of(kind)}}}}


def _inline(part: Any, kinds: dict[str, Any]) -> Any:
    if isinstance(part, dict):
        if "$ref" in part:
            return _inline(kinds[part["$ref"].rpartition("/")[2]], kinds)
        return {name: _inline(inner, kinds) for name, inner in part.items()}
    return [_inline(inner, kinds) for inner in part] if isinstance(part, list) else part
