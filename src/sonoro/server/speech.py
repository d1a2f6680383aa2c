"""The speech endpoint: validates and resolves a body, and answers with its speech. The engine may still refuse it."""

from __future__ import annotations

import contextlib
import logging
import re
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from fastapi.params import Depends as Dependency
from fastapi.routing import APIRoute

from sonoro.audio.encoders import CONTENT_TYPES, Encoder, Encoding, encoder_threads, gains_for
from sonoro.core.config import MIN_BOUND_S
from sonoro.core.errors import InvalidRequest, UnknownVoice
from sonoro.core.types import ModelSpec, Reference, SpeechRequest, is_speakable
from sonoro.server.bodies import EventBody, JSONBody
from sonoro.server.config import ServerConfig
from sonoro.server.errors import Answers, AnswerTooLarge, NotReady, TooManyRequests, UnknownModel, refusals
from sonoro.server.gate import NO_ENGINE, Gate
from sonoro.server.keys import Caller
from sonoro.server.lexicons import LexiconStore
from sonoro.server.metrics import Metrics
from sonoro.server.middleware import CLIENT_GONE, Budget, RequestBodies
from sonoro.server.openapi import request_body
from sonoro.server.recordings import Recordings
from sonoro.server.schemas import (
    SpeechBody,
    may_name_voices,
    parse,
    read_references,
    script_of,
    speech_request,
    unknown_fields,
)
from sonoro.server.shared import Shared
from sonoro.server.stream import AudioBody, Observation, Speech, SpeechResponse, cancel_on_disconnect
from sonoro.server.voice_directory import VoiceDirectory
from sonoro.text.script import Lexicon
from sonoro.text.script.dialogue import MAX_VOICES
from sonoro.text.splitting import SECONDS_PER_LETTER, spoken_length
from sonoro.transport.fleet import Fleet

if TYPE_CHECKING:
    from sonoro.server.traces import Traces

logger = logging.getLogger(__name__)

_OPENAI_MODEL = re.compile(r"(tts-1|gpt-[\w.-]*(tts|audio))[\w.-]*", re.ASCII)

QUICK_BYTES = 4096
"""Bodies shorter than this hold no recording."""

MOST_SAID = 4
"""Times `max_characters` that a text may have with its aliases."""

_ANSWERS: Answers = {
    200: {
        "description": "audio, or events with audio, streamed as it is generated",
        "content": {kind: {} for kind in (*CONTENT_TYPES, "text/event-stream")},
        "headers": {"X-Sample-Rate": {"description": "of the audio, in Hz", "schema": {"type": "integer"}}},
    },
    **refusals(400, 401, 403, 404, 408, 413, 429, 503),
}


class SpeechFactory:
    """Makes a `Speech` of a body, and the response to an HTTP request that asks for one.
    Owns what bounds them: the `gate` before the engines, the request `bodies` and the `answers` held in memory."""

    def __init__(
        self,
        client: Fleet,
        config: ServerConfig,
        metrics: Metrics,
        voices: VoiceDirectory,
        lexicons: LexiconStore,
        *,
        shared: Shared,
    ) -> None:
        self.lexicons = lexicons
        self._client, self._config, self._metrics, self._voices = client, config, metrics, voices
        wait_s = config.max_queue_wait_ms / 1000
        self.gate = Gate(
            config.max_concurrency,
            config.max_waiting,
            wait_s,
            lambda: client.ready_share,
            weights=shared.weights,
            table=shared.table,
            quotas=shared.quotas,
        )
        self.bodies = RequestBodies(config.max_total_body_bytes, config.body_timeout_s, shared.count("bodies"))
        held = "responses held in memory have {} bytes"
        self.answers = Budget(config.max_total_answer_bytes, held, count=shared.count("answers"))
        is_shared, shown = len({*config.api_keys, *config.admin_keys}) > 1, "recordings held in memory have {} bytes"
        most_bytes = config.max_total_body_bytes // 2
        self._references = Budget(most_bytes, shown, is_shared=is_shared, count=shared.count("references"))
        self.recordings = Recordings(
            max_bytes=config.max_upload_bytes,
            allows_urls=config.allow_reference_urls,
            folder=config.reference_folder,
            is_shared=is_shared,
        )
        self._encoders = encoder_threads()
        made: Traces | None = import_module("sonoro.server.traces").Traces() if config.traces else None
        self.traces = made
        self.no_start: str | None = "the engine is being started"
        """Why the engines have not started; None once they have."""

    def close(self) -> None:
        """Drop queued work; running work is not waited for."""
        self._encoders.shutdown(wait=False)
        self.recordings.close()
        if self.traces is not None:
            self.traces.close()

    @property
    def no_model(self) -> str | None:
        """Why there is no model to wait for: no engine has started yet, or none will run again. None if there is."""
        if self.no_start is None and self._client.closed_reason is not None:
            return f"the engine has ended for good: {self._client.closed_reason}"
        return self.no_start

    @property
    def unready(self) -> str | None:
        """Why requests would be refused now; None if they would not."""
        return self.no_model or (None if self._client.is_ready else NO_ENGINE)

    def spec(self) -> ModelSpec:
        """The model's spec, available also while its engine is being replaced. Raises `NotReady`."""
        if (reason := self.no_model) is not None:
            raise NotReady(reason)
        return self._client.spec

    def model_names(self, spec: ModelSpec) -> tuple[str, ...]:
        """All names of the model of `spec`."""
        return tuple(dict.fromkeys((spec.name, *self._config.model_aliases)))

    def check_model(self, name: str | None, spec: ModelSpec) -> None:
        """Raise `UnknownModel` unless `name` is None or a name of the model of `spec`: by default also any of OpenAI's
        speech models, whose newer ones clients name by date."""
        known, is_default = self.model_names(spec), self._config.model_aliases == ServerConfig.model_aliases
        is_known = name is None or name in known or (is_default and _OPENAI_MODEL.fullmatch(name))
        if not is_known:
            raise UnknownModel("model", name, "known models: " + ", ".join(known))

    async def respond(self, request: Request, prepare: Callable[[bytes], Coroutine[Any, Any, Speech]]) -> Response:
        """Read the body of `request` and respond with the speech that `prepare` makes of it. Raises what it does."""
        arrived_s, config = time.perf_counter(), self._config
        async with self.bodies.body(request, config.max_body_bytes) as payload:
            # Decoding of a recording stops when the client disconnects. A short body has none, unless by URL or file
            # name.
            is_quick = len(payload) < QUICK_BYTES and not (config.allow_reference_urls or config.reference_folder)
            preparing = prepare(payload)
            speech = await (preparing if is_quick else cancel_on_disconnect(request.receive, preparing))
        if speech is None:
            return Response(status_code=CLIENT_GONE)
        observation = self.observe(speech.encoding.encoder.speed, arrived_s, request.state.dialect)
        return SpeechResponse(speech, self._client, self.gate, observation, config.slow_reader_timeout_s)

    async def make(
        self, body: SpeechBody, name: str, caller: Caller, *, is_live: bool = False, dialect: str = "native"
    ) -> Speech:
        """Validate `body` and return its speech, with `name` as the client's id of it.

        The text of a live request is still to come. A text without a letter or digit is spoken as silence. In a
        `dialect` other than "native", an unknown voice is replaced by the default one: clients send names of other
        servers. Raises the error of the first invalid field."""
        try:
            return await self._make(body, name, caller, is_live=is_live)
        except UnknownVoice:
            if dialect == "native":
                raise
        speech = await self._make(body.model_copy(update={"voice": None}), name, caller, is_live=is_live)
        fields = name, dialect, str(body.voice)[:100], speech.request.voice
        logger.info("event=voice_unknown id=%s dialect=%s voice=%.100r spoken_as=%s", *fields)
        return speech

    async def _make(self, body: SpeechBody, name: str, caller: Caller, *, is_live: bool) -> Speech:
        spec, limit = self.spec(), self._config.max_characters
        self.check_model(body.model, spec)
        if len(body.input) > limit:
            most = f"it must have at most {limit}: send it in parts, or raise the server's max_characters"
            raise InvalidRequest("input", f"{len(body.input)} characters", most)
        is_silent = not is_live and not is_speakable(body.input) and bool(body.input.strip())
        references = await read_references(body, self.recordings, spec, caller.owner)
        cast = await self._cast(body, spec, caller)
        if is_silent:
            # As live, for which the text is not checked; the other fields are. A live request has no attempts.
            body = body.model_copy(update={"attempts": None, "on_fault": None})
        # Clients may reuse an id; the engine needs unique ones.
        has_lexicons = body.lexicons or self.lexicons.always
        lexicons = await self.lexicons.named(caller, body.lexicons or ()) if has_lexicons else ()
        if names_voices := may_name_voices(body):
            await self._voices.catch_up()
        own_name, is_unchecked = f"{name}.{uuid.uuid4().hex[:8]}", is_live or is_silent

        def resolved() -> SpeechRequest:
            return speech_request(
                body,
                own_name,
                spec,
                self._voices.aliases,
                references=references,
                cast=cast,
                registered=self._voices.by_name(caller) if names_voices else {},
                lexicons=lexicons,
                is_live=is_unchecked,
            )

        try:
            request = resolved()
        except UnknownVoice:
            await self._voices.scan()
            request = resolved()
        if request.script is not None:
            is_silent = is_silent or not request.script.lines
            if (said := sum(map(len, request.script.texts))) > MOST_SAID * limit:
                limits = f"with its aliases it must have at most {MOST_SAID * limit}"
                raise InvalidRequest("input", f"{said} characters", limits)
        sent = self._response_body(body, lexicons, is_live=is_live)
        references = (*references, *cast.values())
        texts = (request.instructions or "", *(reference.text or "" for reference in references))
        with contextlib.ExitStack() as held:
            held.enter_context(self.hold(references, caller, sum(map(len, texts))))
            encoding = self.encoding(body, request)
            ignored = unknown_fields(body, spec)
            return Speech(name, request, encoding, sent, is_silent, lexicons, held.pop_all(), caller.owner, ignored)

    async def _cast(self, body: SpeechBody, spec: ModelSpec, caller: Caller) -> dict[str, Reference]:
        """The recordings of `body` by name. Raises `InvalidReference`."""
        given = {name: (one.audio, one.text) for name, one in body.cast.items()}
        if not given:
            return {}
        spec.check_cloning("voices")
        if len(given) > MAX_VOICES:
            raise InvalidRequest("voices", f"{len(given)} recordings", f"at most {MAX_VOICES}")
        return await self.recordings.read_cast(given, caller.owner)

    def hold(
        self, references: Sequence[Reference], caller: Caller, more_bytes: int = 0
    ) -> AbstractContextManager[None]:
        """Count decoded `references` as held by `caller` during a block. Raises `TooManyRequests`."""
        return self._references.take(more_bytes + sum(len(reference.pcm) for reference in references), caller.owner)

    def _response_body(self, body: SpeechBody, lexicons: Sequence[Lexicon], *, is_live: bool) -> AudioBody:
        """The kind of response body that `body` asks for. Raises `AnswerTooLarge` for one that would be held in memory
        and could exceed its bound."""
        if body.stream_format == "sse":
            return EventBody(body.speed)
        if body.stream_format == "json":
            timed = len(body.input) if body.timestamps else 0
            answer = JSONBody(body.speed, body.response_format, self.max_audio_bytes(body, lexicons), timed)
            if answer.max_bytes > (limit := self._config.max_answer_bytes):
                raise AnswerTooLarge(
                    f"stream_format: 'json': the answer could have {answer.max_bytes} bytes and must have at most "
                    f"{limit}; ask for sse or audio, a shorter input, a smaller response_format or sample_rate, more "
                    "speed, or fewer max_new_tokens"
                )
            return answer
        if body.timestamps and not is_live:
            wanted = "audio alone cannot hold them: ask for stream_format sse or json"
            raise InvalidRequest("timestamps", body.timestamps, wanted)
        return AudioBody()

    def encoding(self, body: SpeechBody, request: SpeechRequest | None = None) -> Encoding:
        """Make the encoder that `body` asks for, of the voice of `request`. Raises `InvalidRequest`."""
        spec = self.spec()
        rates = {"out_rate": body.sample_rate, "bit_rate": body.bit_rate}
        gains = None if request is None else gains_for(body.loudness, spec, request)
        encoder = Encoder(body.response_format, spec.sample_rate, speed=body.speed, gains=gains, **rates)
        return Encoding(encoder, self._encoders)

    def max_audio_bytes(self, body: SpeechBody, lexicons: Sequence[Lexicon] = ()) -> int:
        """An upper bound of the encoded bytes of `body`, of which `lexicons` are known, at the slowest rate of speech.
        Raises `InvalidRequest`."""
        spec, config = self.spec(), self._client.settings.config
        encoding = self.encoding(body)
        encoding.close()
        script = script_of(body, spec, self._voices.aliases, lexicons)
        letters = spoken_length(body.input) if script is None else spoken_length(" ".join(script.texts))
        # Two adjacent segments are together longer than one may be; otherwise they would be one.
        segments = 1 + 2 * letters // config.segment_letters + (0 if script is None else len(script.lines))
        if body.max_new_tokens is not None:
            audio_s = body.max_new_tokens * spec.frame_s
        else:
            audio_s = segments * min(config.max_frames, spec.max_frames) * spec.frame_s
            if config.bounds_by_text:
                audio_s = min(audio_s, SECONDS_PER_LETTER * letters + segments * MIN_BOUND_S)
        if script is not None:
            audio_s = audio_s / script.slowest + script.pauses_s
        return encoding.encoder.max_bytes(audio_s)

    def observe(self, speed: float, arrived_s: float, dialect: str = "native") -> Observation:
        """Begin to measure a request that arrived at `arrived_s`."""
        trace = None if self.traces is None else self.traces.begin(arrived_s, dialect)
        return Observation(self._metrics, self._client.spec.sample_rate, arrived_s, speed, dialect, trace=trace)


class _DirectRoute(APIRoute):
    """A route of a function that takes the request alone, behind dependencies that do too: FastAPI's way to call both
    would take a quarter of what a request to speak costs."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        checks, endpoint = [each.dependency for each in self.dependencies], self.endpoint

        async def answer(request: Request) -> Response:
            for check in checks:
                assert check is not None
                await check(request)
            response: Response = await endpoint(request)
            return response

        return answer


def speech_routes(factory: SpeechFactory, dependencies: Sequence[Dependency]) -> APIRouter:
    """The route that speaks a text."""
    router = APIRouter(prefix="/v1", dependencies=dependencies, route_class=_DirectRoute)

    @router.post("/audio/speech", response_class=Response, responses=_ANSWERS, openapi_extra=request_body(SpeechBody))
    async def speech(request: Request) -> Response:
        """Speak a text; the audio is streamed as it is generated."""

        async def prepare(payload: bytes) -> Speech:
            body = parse(SpeechBody, payload)
            speech = await factory.make(body, request.state.request_id, request.state.caller)
            try:
                speech.held.enter_context(factory.answers.take(speech.body.max_bytes))
            except TooManyRequests:
                speech.encoding.close()
                speech.held.close()
                raise
            return speech

        return await factory.respond(request, prepare)

    return router
