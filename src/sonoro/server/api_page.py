"""The API reference at /docs: a static page rendered from the OpenAPI description, without scripts or other hosts."""

import functools
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.responses import HTMLResponse

_STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; vertical-align: top; padding: .2rem .6rem }
tr { border-top: 1px solid #8884 } h2 { margin-top: 2.5rem } code { font-size: .95em }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def api_page_routes(app: FastAPI) -> APIRouter:
    """The page at /docs, rendered on first use."""
    router = APIRouter(include_in_schema=False)
    page = functools.cache(lambda: _page(app.openapi()))

    @router.get("/docs")
    async def reference() -> HTMLResponse:
        return HTMLResponse(page(), headers={"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"})

    return router


def _page(description: dict[str, Any]) -> str:
    title = escape(f"{description['info']['title']} {description['info']['version']}")
    operations = [
        _operation(f"{method.upper()} {path}", operation)
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f'<h1>{title}</h1><p>Machine-readable: <a href="openapi.json">openapi.json</a>. '
        f'To listen: <a href=".">the playground</a>.</p>{"".join(operations)}</html>'
    )


def _operation(name: str, operation: dict[str, Any]) -> str:
    parts = [f"<h2><code>{escape(name)}</code></h2><p>{escape(operation['description'])}</p>"]
    for kind, body in operation.get("requestBody", {}).get("content", {}).items():
        needed = body["schema"].get("required", ())
        rows = [
            (f"<code>{escape(field)}</code>{' (required)' * (field in needed)}", _type(schema), _about(schema))
            for field, schema in body["schema"]["properties"].items()
        ]
        parts.append(f"<p><code>{escape(kind)}</code></p>{_table(rows)}")
    answers = [
        (status, " ".join(map(escape, answer.get("content", ()))), escape(answer["description"]))
        for status, answer in operation["responses"].items()
    ]
    return "".join((*parts, "<p>Answers</p>", _table(answers)))


def _table(rows: list[tuple[str, str, str]]) -> str:
    lines = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _type(schema: dict[str, Any]) -> str:
    kinds = [kind.get("type") for kind in (schema, *schema.get("anyOf", ()))]
    names = [name for kind in kinds for name in (kind if isinstance(kind, list) else [kind])]
    return escape(" or ".join(name for name in names if name not in (None, "null")))


def _about(schema: dict[str, Any]) -> str:
    notes = [schema.get("description", "")]
    if "enum" in schema:
        notes.append("one of " + ", ".join(str(word) for word in schema["enum"] if word is not None))
    kinds = [schema, *schema.get("anyOf", ())]
    notes += [f"{word} {kind[word]:,}" for kind in kinds for word in ("minimum", "maximum") if word in kind]
    notes += [f"default {schema['default']}"] if schema.get("default") is not None else []
    return escape("; ".join(filter(None, notes)))
