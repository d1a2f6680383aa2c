"""State shared by the endpoints: engines, authorisation, gate, voices, metrics; makes requests from their bodies."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.requests import HTTPConnection

from sonoro.audio.encoders import Encoder, Encoding, encoder_threads
from sonoro.core.config import MIN_BOUND_S
from sonoro.core.errors import EngineClosed, EngineError, InvalidRequest, SonoroError, UnknownVoice
from sonoro.core.logs import log_event
from sonoro.core.types import ModelSpec, SpeechRequest, VoiceFacts, is_speakable
from sonoro.server.config import OPENAI_VOICES, ServerConfig
from sonoro.server.errors import AnswerTooLarge, NotReady, Refusal, Unauthorized, UnknownModel
from sonoro.server.metrics import EngineState, Metrics, Observation
from sonoro.server.middleware import Budget, RequestBodies
from sonoro.server.recordings import Recordings
from sonoro.server.schemas import SpeechBody, read_references, speech_request
from sonoro.server.stream import NO_ENGINE, AudioBody, EventBody, Gate, JSONBody, Speech
from sonoro.server.voice_store import VoiceStore
from sonoro.text.splitting import SECONDS_PER_LETTER, spoken_length
from sonoro.transport.client import EngineClient
from sonoro.transport.fleet import Fleet
from sonoro.transport.launch import cancel_tasks

logger = logging.getLogger(__name__)

KEY_PROTOCOL = "openai-insecure-api-key."
"""The prefix of a WebSocket subprotocol that carries a key, as sent by OpenAI's clients in browsers."""

VOICES_S = 5.0
"""How often the folder of voices is scanned; a voice deleted by another server is usable for at most that long."""

VOICES_TIMEOUT_S = 10.0
"""How long a request waits for such a scan: a mount or a bucket may hang longer than clients wait."""

ENGINES_S = 0.2
"""How often waiting requests are checked against the engines that are ready."""

STATS_TIMEOUT_S = 2.0
"""How long /metrics waits for an engine before it counts as down."""


@dataclass(frozen=True)
class Caller:
    """The client behind an API key: `owner` of its voices ("" for everybody's), and the `name` of the key in logs."""

    owner: str
    is_admin: bool = False
    name: str | None = None

    def sees(self, facts: VoiceFacts) -> bool:
        """Whether the caller may see and use a voice."""
        return self.is_admin or (facts.owner in ("", self.owner) and self is not ANONYMOUS)

    def may_delete(self, facts: VoiceFacts) -> bool:
        """Whether the caller may delete a voice."""
        return self.is_admin or facts.owner == self.owner


UNKEYED = Caller("")
"""Every caller of a server without keys."""

ANONYMOUS = Caller("stranger")
"""A caller without a key on a server with keys: sees no uploaded voice."""


def _owner(key: str) -> str:
    """The owner id of a key: a digest, which does not reveal the key."""
    return hashlib.sha256(b"sonoro voices " + key.encode()).hexdigest()[:16]


class Service:
    """Starts the engines in the background, and holds the state shared by the endpoints.

    `on_failure` is called with the error if the engines cannot be started or none is left.
    """

    def __init__(self, client: Fleet, config: ServerConfig, on_failure: Callable[[SonoroError], None] | None) -> None:
        self.client, self.config, self.metrics = client, config, Metrics()
        wait_s = config.max_queue_wait_ms / 1000
        self.gate = Gate(config.max_concurrency, config.max_waiting, wait_s, lambda: client.ready_share)
        self.bodies = RequestBodies(config.max_total_body_bytes, config.body_timeout_s)
        self.recordings = Recordings(
            max_bytes=config.max_upload_bytes, allows_urls=config.allow_reference_urls, folder=config.reference_folder
        )
        engine = client.settings.config
        self.store = VoiceStore(engine.voices_folder, engine.max_registered_voices)
        self.created_s = int(time.time())
        self.aliases: dict[str, str] = {}
        self.sessions = Budget(config.max_sessions, "{} sessions are open")
        self._encoders = encoder_threads()
        self._callers = {key.encode(): Caller(_owner(key), name=_owner(key)[:8]) for key in config.api_keys}
        self._callers |= {key.encode(): Caller("", is_admin=True, name=_owner(key)[:8]) for key in config.admin_keys}
        self._on_failure, self._failure, self._is_started = on_failure, "", False
        self.is_ending = False
        self._starting: asyncio.Task[None] | None = None
        self._watching: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def running(self, app: FastAPI) -> AsyncIterator[None]:
        """The application's lifespan: start the engines in the background, and end them with the block."""
        self._starting = asyncio.create_task(self._start())
        try:
            yield
        finally:
            self.is_ending = True
            await cancel_tasks(self._starting)
            await cancel_tasks(*self._watching)
            self._encoders.shutdown(wait=False)
            self.recordings.close()
            self.store.close()
            await self.client.close()

    async def _start(self) -> None:
        try:
            await self.client.start()
            await self.store.open(self.client.ready.fingerprint)
            self.client.set_voice_source(self.store.data)
            self.aliases = self.config.aliases(self.client.spec)
        except Exception as error:
            failure = error if isinstance(error, SonoroError) else EngineError(repr(error))
            self._failure = str(failure)
            self._fail(failure)
            return
        self.metrics.model, self._is_started = self.client.spec.name, True
        self._watching = [asyncio.create_task(watch()) for watch in (self._watch_voices, self._watch_engines)]
        ready = self.client.ready
        phases = {f"{name}_s": round(seconds, 1) for name, seconds in ready.phases.items()}
        facts = {"model": ready.spec.name, "ready_s": round(ready.ready_s, 1), "graphs_to_come": ready.graphs_to_come}
        log_event(logger, logging.INFO, "ready", facts | phases)

    async def until_started(self) -> None:
        """Wait until the engines have started or failed; `unready` says which."""
        if self._starting is not None:
            await asyncio.wait({self._starting})

    @property
    def unready(self) -> str | None:
        """Why requests would be refused now; None if they would not."""
        return self._no_model or (None if self.client.is_ready else NO_ENGINE)

    @property
    def _no_model(self) -> str | None:
        """Why there is no model to wait for: no engine has started yet, or none will run again."""
        if self._failure:
            return f"the engine could not be started: {self._failure}"
        if not self._is_started:
            return "the engine is being started"
        if self.client.closed_reason is not None:
            return f"the engine has ended for good: {self.client.closed_reason}"
        return None

    def spec(self) -> ModelSpec:
        """The model's spec, available also while its engine is being replaced. Raises `NotReady`."""
        if (reason := self._no_model) is not None:
            raise NotReady(reason)
        return self.client.spec

    async def authorise(self, connection: HTTPConnection) -> None:
        """Check the connection's API key, if the server has keys, and set `caller` in its state.

        Raises `Unauthorized`. Browsers cannot set headers of a WebSocket: an offered subprotocol may carry the key.
        """
        scheme, _, given = connection.headers.get("authorization", "").partition(" ")
        for protocol in connection.scope.get("subprotocols", ()):
            if protocol.startswith(KEY_PROTOCOL):
                scheme, given = "bearer", protocol.removeprefix(KEY_PROTOCOL)
        self.admit(connection, given if scheme.lower() == "bearer" else "")

    def admit(self, connection: HTTPConnection, given: str) -> None:
        """As `authorise`, with the key `given` ("" if none)."""
        connection.state.caller = UNKEYED
        if not self._callers:
            return
        # Compare all keys, each in constant time, so that timing reveals nothing.
        matches = [key for key in self._callers if hmac.compare_digest(given.strip().encode("latin-1"), key)]
        if not matches:
            raise Unauthorized("give one of the API keys of this server, as Authorization: Bearer KEY")
        connection.state.caller = caller = self._callers[matches[0]]
        connection.state.facts["key"] = caller.name

    async def identify(self, connection: HTTPConnection) -> None:
        """As `authorise`, but a connection without a key is `ANONYMOUS` instead of refused."""
        if self._callers and "authorization" not in connection.headers:
            connection.state.caller = ANONYMOUS
        else:
            await self.authorise(connection)

    def names(self, spec: ModelSpec) -> tuple[str, ...]:
        """All names of the model of `spec`."""
        return tuple(dict.fromkeys((spec.name, *self.config.model_aliases)))

    async def _state(self, engine: EngineClient) -> EngineState:
        """The state of an engine; its stats are None if they do not arrive in time."""
        stats = None
        if self._is_started and engine.is_ready:
            with contextlib.suppress(EngineError, TimeoutError):
                stats = await asyncio.wait_for(engine.stats(), STATS_TIMEOUT_S)
        return EngineState(stats, engine.restarts, engine.settings.config.slots)

    @property
    def replicas(self) -> list[dict[str, Any]]:
        """Device, status, restarts and number of graphs to come of each engine."""
        return [
            {
                "device": engine.settings.device,
                "status": "ready" if engine.is_ready else "starting" if engine.closed_reason is None else "ended",
                "restarts": engine.restarts,
                "graphs_to_come": engine.ready.graphs_to_come if engine.is_ready else 0,
            }
            for engine in self.client.replicas
        ]

    async def speech(
        self, body: SpeechBody, name: str, caller: Caller, *, is_live: bool = False, dialect: str = "native"
    ) -> Speech:
        """Validate `body` and return its speech, with `name` as the client's id of it.

        The text of a live request is still to come. A text without a letter or digit is spoken as silence. In a
        `dialect` other than "native", an unknown voice is replaced by the default one: clients send names of other
        servers. Raises the error of the first invalid field.
        """
        try:
            return await self._speech(body, name, caller, is_live=is_live)
        except UnknownVoice:
            if dialect == "native":
                raise
        speech = await self._speech(body.model_copy(update={"voice": None}), name, caller, is_live=is_live)
        told = name, dialect, body.voice, speech.request.voice
        logger.info("event=voice_unknown id=%s dialect=%s voice=%.100r spoken_as=%s", *told)
        return speech

    async def _speech(self, body: SpeechBody, name: str, caller: Caller, *, is_live: bool) -> Speech:
        is_silent = not is_live and not is_speakable(body.input) and bool(body.input.strip())
        spec, most = self.spec(), self.config.max_characters
        self.check_model(body.model, spec)
        if len(body.input) > most:
            raise InvalidRequest("input", f"{len(body.input)} characters", f"it must have at most {most}")
        references = await read_references(body, self.recordings, spec)
        if is_silent:
            # As live, for which the text is not checked; the other fields are. A live request has no attempts.
            body = body.model_copy(update={"attempts": None, "on_fault": None})
        # Clients may reuse an id; the engine needs unique ones.
        own_name = f"{name}.{uuid.uuid4().hex[:8]}"

        def asked_for(voices: Iterable[VoiceFacts]) -> SpeechRequest:
            registered = self.voices_by_name(caller, voices)
            return speech_request(
                body,
                own_name,
                spec,
                self.aliases,
                references=references,
                registered=registered,
                is_live=is_live or is_silent,
            )

        try:
            request = asked_for(self.store.voices)
        except UnknownVoice:
            request = asked_for(await self.voices())
        made = self._body_of(body, is_live=is_live)
        return Speech(name, request, self.encoding(body), made, is_silent=is_silent)

    def _body_of(self, body: SpeechBody, *, is_live: bool) -> AudioBody:
        """The kind of response body that `body` asks for. Raises `AnswerTooLarge` for one that would be held in memory
        and could exceed its bound."""
        if body.stream_format == "sse":
            return EventBody(body.speed)
        if body.stream_format == "json":
            timed = len(body.input) if body.timestamps else 0
            made = JSONBody(body.speed, body.response_format, self.max_audio_bytes(body), timed)
            if made.max_bytes > (most := self.config.max_answer_bytes):
                raise AnswerTooLarge(
                    f"stream_format: 'json': the answer could have {made.max_bytes} bytes and must have at most "
                    f"{most}; ask for sse or audio, a shorter input, a smaller response_format or sample_rate, more "
                    "speed, or fewer max_new_tokens"
                )
            return made
        if body.timestamps and not is_live:
            raise InvalidRequest(
                "timestamps", body.timestamps, "audio alone cannot hold them: ask for stream_format sse or json"
            )
        return AudioBody()

    async def voices(self) -> tuple[VoiceFacts, ...]:
        """Scan the storage and return the registered voices, other servers' included. Raises `NotReady` if that takes
        too long."""
        try:
            await asyncio.wait_for(self.store.refresh(), VOICES_TIMEOUT_S)
        except TimeoutError as error:
            raise NotReady(f"the folder of voices was not read in {VOICES_TIMEOUT_S:g} s; try again later") from error
        return self.store.voices

    def voices_by_name(self, caller: Caller, voices: Iterable[VoiceFacts]) -> dict[str, VoiceFacts]:
        """The `voices` that `caller` may use, by id, and by name if they are the caller's own or everybody's. None has
        a name of the model's voices."""
        seen = [facts for facts in voices if caller.sees(facts) and facts.called not in self.reserved_names()]
        # The caller's own last, so that it wins over everybody's voice of the same name.
        named = sorted(seen, key=lambda facts: facts.owner == caller.owner)
        names = {facts.called: facts for facts in named if facts.owner in ("", caller.owner)}
        return names | {facts.name: facts for facts in seen if facts.owner}

    def reserved_names(self) -> set[str]:
        """Names in lower case that no uploaded voice may have: the model's voices, aliases, OpenAI's."""
        return {*self.client.spec.voices, *self.aliases, *OPENAI_VOICES}

    async def _watch_voices(self) -> None:
        while True:
            await asyncio.sleep(VOICES_S)
            await self.store.refresh()

    async def _watch_engines(self) -> None:
        while self.client.closed_reason is None:
            await asyncio.sleep(ENGINES_S)
            self.gate.wake_waiters()
        self._fail(EngineClosed(self.client.closed_reason))

    def _fail(self, error: SonoroError) -> None:
        """Log that no engine will run again, and call `on_failure`."""
        logger.error("event=no_engine reason=%r", str(error))
        if self._on_failure is not None:
            self._on_failure(error)

    def encoding(self, body: SpeechBody) -> Encoding:
        """Make the encoder that `body` asks for. Raises `InvalidRequest`."""
        rate = self.spec().sample_rate
        rates = {"out_rate": body.sample_rate, "bit_rate": body.bit_rate}
        encoder = Encoder(body.response_format, rate, speed=body.speed, **rates)
        return Encoding(encoder, self._encoders)

    def max_audio_bytes(self, body: SpeechBody) -> int:
        """An upper bound of the encoded bytes of `body`, at the slowest rate of speech. Raises `InvalidRequest`."""
        spec, config = self.spec(), self.client.settings.config
        encoding = self.encoding(body)
        encoding.close()
        letters = spoken_length(body.input)
        # Two adjacent segments are together longer than one may be; otherwise they would be one.
        segments = 1 + 2 * letters // config.segment_letters
        if body.max_new_tokens is not None:
            audio_s = body.max_new_tokens * spec.frame_s
        else:
            audio_s = segments * min(config.max_frames, spec.max_frames) * spec.frame_s
            if config.bounds_by_text:
                audio_s = min(audio_s, SECONDS_PER_LETTER * letters + segments * MIN_BOUND_S)
        return encoding.encoder.max_bytes(audio_s)

    def count_refusal(self, refused: Refusal, name: str, dialect: str = "native") -> None:
        """Count the request `name` as refused before it ran, and log the reason at debug level."""
        code = refused.error["code"]
        self.metrics.refused(str(code), dialect)
        fields = name, refused.status, code, refused.error["param"]
        logger.debug("event=refused id=%s status=%d code=%s param=%s", *fields)

    async def exposition(self) -> bytes:
        """The metrics of server and engines in Prometheus' text format."""
        engines = await asyncio.gather(*map(self._state, self.client.replicas))
        return self.metrics.exposition(engines, queued=self.gate.waiting)

    @property
    def configuration(self) -> dict[str, Any]:
        """The resolved configuration of engines and server, without secrets and local paths."""
        settings, ready = self.client.settings, self.client.ready
        engine = settings.config.resolve().shown
        load = {name: getattr(settings, name) for name in ("device", "dtype", "load_format")}
        memory = {"gpu_memory_mib": ready.gpu_memory_mib, "graph_memory_mib": ready.graph_memory_mib}
        phases = {name: round(seconds, 3) for name, seconds in ready.phases.items()}
        return {
            "load": load,
            "engine": {**engine, "voices_folder": "set" if engine["voices_folder"] else ""},
            "server": self.config.public,
            "ready": {
                "seconds": ready.ready_s,
                "phases": phases,
                "graphs_to_come": ready.graphs_to_come,
                **memory,
                "report": ready.report.splitlines(),
            },
        }

    def observe(self, speed: float, arrived_s: float, dialect: str = "native") -> Observation:
        """Begin to measure a request that arrived at `arrived_s`."""
        return Observation(self.metrics, self.client.spec.sample_rate, arrived_s, speed, dialect)

    def check_model(self, name: str | None, spec: ModelSpec) -> None:
        """Raise `UnknownModel` unless `name` is None or a name of the model of `spec`."""
        known = self.names(spec)
        if name is not None and name not in known:
            raise UnknownModel("model", name, "known models: " + ", ".join(known))
