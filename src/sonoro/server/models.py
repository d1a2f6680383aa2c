"""The routes that describe the loaded model and how it is served."""

from typing import Any

from fastapi import APIRouter

from sonoro.core.types import ModelSpec
from sonoro.server.config import ServerConfig
from sonoro.server.errors import refusals
from sonoro.server.service import Service
from sonoro.text.script import honoured
from sonoro.transport.fleet import Fleet


def model_routes(service: Service) -> APIRouter:
    """The routes of models; on a server with keys, only the list of names needs none."""
    router, speech = APIRouter(prefix="/v1"), service.speech

    def described(spec: ModelSpec) -> list[dict[str, Any]]:
        facts = {"object": "model", "created": service.created_s, "owned_by": "sonoro", "root": spec.name}
        able = {
            "sample_rate": spec.sample_rate,
            "voice_modes": spec.voice_modes,
            "languages": spec.languages,
            "accepts_instructions": spec.accepts_instructions,
            "markup": honoured(spec),
            "blends_voices": spec.can_blend,
            "phoneme_alphabets": ["ipa", "cmu"] if spec.arpabet is not None else [],
            "options": {option.name: option.limit for option in spec.options},
            "max_characters": service.config.max_characters,
        }
        return [{"id": name, **facts, **able} for name in speech.model_names(spec)]

    @router.get("/models", responses=refusals(401, 403, 503), dependencies=service.keys.required)
    async def models() -> dict[str, Any]:
        """The loaded model under each of its names, and the server's configuration."""
        data = described(speech.spec())
        configuration = _configuration(service.client, service.config)
        return {"object": "list", "data": data, "configuration": configuration}

    @router.get("/models/{name:path}", responses=refusals(401, 403, 404, 503), dependencies=service.keys.required)
    async def model(name: str) -> dict[str, Any]:
        """The loaded model by one of its names."""
        spec = speech.spec()
        speech.check_model(name, spec)
        return {**described(spec)[0], "id": name}

    @router.get("/audio/models", responses=refusals(401, 403, 503), dependencies=service.keys.optional)
    async def speech_models() -> dict[str, Any]:
        """The names of the loaded model, for Open WebUI, which sends no key here."""
        return {"models": [{"id": name, "name": name} for name in speech.model_names(speech.spec())]}

    return router


def _configuration(client: Fleet, config: ServerConfig) -> dict[str, Any]:
    """The resolved configuration of engines and server, without secrets and local paths."""
    settings, ready, engine = client.settings, client.ready, client.settings.config.resolve().shown
    return {
        "load": {name: getattr(settings, name) for name in ("device", "dtype", "load_format")},
        "engine": {**engine, "voices_folder": "set" if engine["voices_folder"] else ""},
        "server": config.public,
        "ready": {
            "seconds": ready.ready_s,
            "phases": {name: round(seconds, 3) for name, seconds in ready.phases.items()},
            "graphs_to_come": ready.graphs_to_come,
            "gpu_memory_mib": ready.gpu_memory_mib,
            "graph_memory_mib": ready.graph_memory_mib,
            "report": ready.report.splitlines(),
        },
    }
