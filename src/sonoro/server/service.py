"""What the endpoints share: engines started behind the server's back, who may ask them, and what a request becomes.

Knows the engines' client and requests, not the paths they come on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.requests import HTTPConnection

from sonoro.core.errors import EngineClosed, EngineError, InvalidRequest, SonoroError, UnknownVoice
from sonoro.core.text import MIN_BOUND_S, SECONDS_PER_LETTER, is_speakable, spoken_length
from sonoro.core.types import ModelSpec, SpeechRequest, VoiceFacts
from sonoro.server.config import OPENAI_VOICES, ServerConfig
from sonoro.server.encode import Encoder, Encoding, encoder_threads
from sonoro.server.errors import NotReady, Refusal, TooManyRequests, Unauthorized, UnknownModel
from sonoro.server.metrics import EngineState, Metrics, Observation
from sonoro.server.middleware import RequestBodies
from sonoro.server.recordings import Recordings
from sonoro.server.schemas import SpeechBody, read_references, speech_request
from sonoro.server.stream import NO_ENGINE, AudioBody, EventBody, Gate, JSONBody, Speech
from sonoro.server.voice_store import VoiceStore
from sonoro.transport.client import EngineClient
from sonoro.transport.fleet import Fleet

__all__ = ["KEY_PROTOCOL", "Caller", "Service"]

logger = logging.getLogger(__name__)

KEY_PROTOCOL = "openai-insecure-api-key."
"""What a WebSocket's protocol that holds a key begins with, as OpenAI's own clients in browsers have it."""

VOICES_S = 5.0
"""How often a folder of voices is looked at: after so long nobody speaks one that another server has deleted."""

VOICES_TIMEOUT_S = 10.0
"""How long anybody waits for a look at that folder: a mount or a bucket may hang for longer than clients wait."""

ENGINES_S = 0.2
"""How long those who wait may not notice that an engine is back, if nobody else comes or goes."""

STATS_TIMEOUT_S = 2.0
"""How long /metrics waits for an engine before it counts as down."""


@dataclass(frozen=True)
class Caller:
    """Who asks: whose voices are theirs by `owner`, which is empty for everybody's, and whether they see all. Logs call
    their key by its `name`."""

    owner: str
    is_admin: bool = False
    name: str | None = None

    def sees(self, facts: VoiceFacts) -> bool:
        """Whether they may know of a voice, and speak as it."""
        return self.is_admin or (facts.owner in ("", self.owner) and self is not ANONYMOUS)

    def may_delete(self, facts: VoiceFacts) -> bool:
        """Whether it is theirs to delete."""
        return self.is_admin or facts.owner == self.owner


UNKEYED = Caller("")
"""Who asks a server that has no keys."""

ANONYMOUS = Caller("stranger")
"""Who asks one that has keys without any: no voice is theirs, or everybody's to them."""


def _owner(key: str) -> str:
    """Whose a voice is: what a key leaves in its id, and from which nobody learns the key."""
    return hashlib.sha256(b"sonoro voices " + key.encode()).hexdigest()[:16]


class Service:
    """Engines that are started behind its back, and what the endpoints share.

    `on_failure` is told what was wrong with an engine that could not be started, or why there is none any more.
    """

    def __init__(self, client: Fleet, config: ServerConfig, on_failure: Callable[[SonoroError], None] | None) -> None:
        self.client, self.config, self.metrics = client, config, Metrics()
        wait_s = config.max_queue_wait_ms / 1000
        self.gate = Gate(config.max_concurrency, config.max_waiting, wait_s, lambda: client.ready_share)
        self.bodies = RequestBodies(config.max_total_body_bytes, config.body_timeout_s)
        self.recordings = Recordings(
            max_bytes=config.max_upload_bytes,
            allows_urls=config.allow_reference_urls,
            folder=config.reference_folder,
        )
        engine = client.settings.config
        self.store = VoiceStore(engine.voices_folder, engine.max_registered_voices)
        self.created_s = int(time.time())
        self.aliases: dict[str, str] = {}
        self._encoders, self._sessions = encoder_threads(), 0
        self._callers = {key.encode(): Caller(_owner(key), name=_owner(key)[:8]) for key in config.api_keys}
        self._callers |= {key.encode(): Caller("", is_admin=True, name=_owner(key)[:8]) for key in config.admin_keys}
        self._on_failure, self._failure, self._is_started = on_failure, "", False
        self.is_ending = False
        self._starting: asyncio.Task[None] | None = None
        self._watching: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def running(self, app: FastAPI) -> AsyncIterator[None]:
        """Start the engines in the background; end them with the block."""
        self._starting = asyncio.create_task(self._start())
        try:
            yield
        finally:
            self.is_ending = True
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
            for task in self._watching:
                task.cancel()
            await asyncio.gather(*self._watching, return_exceptions=True)
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
        logger.info("event=ready model=%s ready_s=%.1f", self.client.spec.name, self.client.ready.ready_s)

    async def until_started(self) -> None:
        """Wait until the engines have been started or could not be; `unready` says which."""
        if self._starting is not None:
            await asyncio.wait({self._starting})

    @property
    def unready(self) -> str | None:
        """Why nothing can be spoken now; None if it can."""
        return self._no_model or (None if self.client.is_ready else NO_ENGINE)

    @property
    def _no_model(self) -> str | None:
        """Why there is nothing to wait for: no engine yet, or none any more."""
        if self._failure:
            return f"the engine could not be started: {self._failure}"
        if not self._is_started:
            return "the engine is being started"
        if self.client.closed_reason is not None:
            return f"the engine has ended for good: {self.client.closed_reason}"
        return None

    def spec(self) -> ModelSpec:
        """What the model can do, known while its engine is being replaced too. Raises `NotReady`."""
        if (reason := self._no_model) is not None:
            raise NotReady(reason)
        return self.client.spec

    async def authorise(self, connection: HTTPConnection) -> None:
        """Raises `Unauthorized` unless the connection comes with one of the keys, if there are any.
        Whose it is becomes the `caller` in its state.

        A browser cannot give a WebSocket headers: there one of the protocols offered may hold the key.
        """
        scheme, _, given = connection.headers.get("authorization", "").partition(" ")
        for protocol in connection.scope.get("subprotocols", ()):
            if protocol.startswith(KEY_PROTOCOL):
                scheme, given = "bearer", protocol.removeprefix(KEY_PROTOCOL)
        self.admit(connection, given if scheme.lower() == "bearer" else "")

    def admit(self, connection: HTTPConnection, given: str) -> None:
        """As `authorise`, of a connection that came with the key `given`, however it did."""
        connection.state.caller = UNKEYED
        if not self._callers:
            return
        # Each is compared, in full: how long it takes must not tell how much of a key was right.
        matches = [key for key in self._callers if hmac.compare_digest(given.strip().encode("latin-1"), key)]
        if not matches:
            raise Unauthorized("give one of the API keys of this server, as Authorization: Bearer KEY")
        connection.state.caller = caller = self._callers[matches[0]]
        connection.state.facts["key"] = caller.name

    async def identify(self, connection: HTTPConnection) -> None:
        """As `authorise`, but whoever comes without any key is a `ANONYMOUS` where there are keys."""
        if self._callers and "authorization" not in connection.headers:
            connection.state.caller = ANONYMOUS
        else:
            await self.authorise(connection)

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """One of `max_sessions` until the block ends. Raises `TooManyRequests`."""
        if self._sessions >= self.config.max_sessions:
            raise TooManyRequests(f"{self._sessions} sessions are open already; try again later")
        self._sessions += 1
        try:
            yield
        finally:
            self._sessions -= 1

    def names(self, spec: ModelSpec) -> tuple[str, ...]:
        """What the model of `spec` may be called."""
        return tuple(dict.fromkeys((spec.name, *self.config.model_aliases)))

    async def _state(self, engine: EngineClient) -> EngineState:
        """How an engine is doing; its stats are None if it does not say."""
        stats = None
        if self._is_started and engine.is_ready:
            with contextlib.suppress(EngineError, TimeoutError):
                stats = await asyncio.wait_for(engine.stats(), STATS_TIMEOUT_S)
        return EngineState(stats, engine.restarts, engine.settings.config.slots)

    @property
    def replicas(self) -> list[dict[str, Any]]:
        """Of each engine where it runs, and whether."""
        return [
            {
                "device": engine.settings.device,
                "status": "ready" if engine.is_ready else "starting" if engine.closed_reason is None else "ended",
                "restarts": engine.restarts,
            }
            for engine in self.client.replicas
        ]

    async def speech(self, body: SpeechBody, name: str, caller: Caller, *, is_live: bool = False) -> Speech:
        """What `body` asks for, of a request that its client knows as `name`. Raises what is wrong with it.

        The text of a live request is still to come. One without letter or digit is silence.
        """
        is_silent = not is_live and not is_speakable(body.input) and bool(body.input.strip())
        spec, most = self.spec(), self.config.max_characters
        self.check_model(body.model, spec)
        if len(body.input) > most:
            raise InvalidRequest("input", f"{len(body.input)} characters", f"it must have at most {most}")
        references = await read_references(body, self.recordings, spec)
        if is_silent:
            # Everything else about it must be right all the same.
            body = body.model_copy(update={"attempts": None})
        # The engine must tell apart what clients may give the same name.
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
        return Speech(
            name, request, self.encoding(body), self._put_together(body, is_live=is_live), is_silent=is_silent
        )

    def _put_together(self, body: SpeechBody, *, is_live: bool) -> AudioBody:
        """What the answer to `body` is put together by."""
        if body.stream_format == "sse":
            return EventBody(body.speed)
        if body.stream_format == "json":
            return JSONBody(body.speed, body.response_format)
        if body.timestamps and not is_live:
            raise InvalidRequest(
                "timestamps", body.timestamps, "audio alone cannot hold them: ask for stream_format sse or json"
            )
        return AudioBody()

    async def voices(self) -> tuple[VoiceFacts, ...]:
        """The registered voices, those that somebody else has put into the folder a moment ago among them.

        Raises `NotReady` if that could not be found out in time.
        """
        try:
            await asyncio.wait_for(self.store.refresh(), VOICES_TIMEOUT_S)
        except TimeoutError as error:
            raise NotReady(f"the folder of voices was not read in {VOICES_TIMEOUT_S:g} s; try again later") from error
        return self.store.voices

    def voices_by_name(self, caller: Caller, voices: Iterable[VoiceFacts]) -> dict[str, VoiceFacts]:
        """Those of `voices` that `caller` may use, by what they may be called: their ids, and by name their
        own and everybody's. A name that stands for a voice of the model is none of theirs."""
        seen = [facts for facts in voices if caller.sees(facts) and facts.called not in self.reserved_names()]
        # Their own last: it is theirs though everybody's came to have its name.
        named = sorted(seen, key=lambda facts: facts.owner == caller.owner)
        names = {facts.called: facts for facts in named if facts.owner in ("", caller.owner)}
        return names | {facts.name: facts for facts in seen if facts.owner}

    def reserved_names(self) -> set[str]:
        """What stands for voices of the model, in lower case: no uploaded voice may be called so."""
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
        """There is no engine and will be none: whoever runs this server is to end it."""
        logger.error("event=no_engine reason=%r", str(error))
        if self._on_failure is not None:
            self._on_failure(error)

    def encoding(self, body: SpeechBody) -> Encoding:
        """What makes of the model's audio what `body` asks for. Raises what is wrong with that."""
        rate = self.spec().sample_rate
        encoder = Encoder(body.response_format, rate, speed=body.speed, out_rate=body.sample_rate)
        return Encoding(encoder, self._encoders)

    def max_audio_bytes(self, body: SpeechBody) -> int:
        """The most that the audio of `body` can take, encoded, if each letter is spoken as slowly as may be.

        Raises what is wrong with its format."""
        spec, config = self.spec(), self.client.settings.config
        encoding = self.encoding(body)
        encoding.close()
        letters = spoken_length(body.input)
        # Each but the last is longer than half of what a segment may be, together with the one after it.
        segments = 1 + 2 * letters // config.max_characters
        if body.max_new_tokens is not None:
            audio_s = body.max_new_tokens * spec.frame_s
        else:
            audio_s = segments * min(config.max_frames, spec.max_frames) * spec.frame_s
            if config.bounds_by_text:
                audio_s = min(audio_s, SECONDS_PER_LETTER * letters + segments * MIN_BOUND_S)
        return encoding.max_bytes(audio_s)

    def count_refusal(self, refused: Refusal, name: str, dialect: str = "native") -> None:
        """Count that the request `name` was turned away before it was under way. Its line says so."""
        code = refused.error["code"]
        self.metrics.refused(str(code), dialect)
        fields = name, refused.status, code, refused.error["param"]
        logger.debug("event=refused id=%s status=%d code=%s param=%s", *fields)

    async def exposition(self) -> bytes:
        """The metrics of server and engines."""
        engines = await asyncio.gather(*map(self._state, self.client.replicas))
        return self.metrics.exposition(engines, queued=self.gate.waiting)

    @property
    def configuration(self) -> dict[str, Any]:
        """What was decided about engines and server, without what is secret or tells of this machine's folders."""
        settings, ready = self.client.settings, self.client.ready
        engine = dataclasses.asdict(settings.config.resolve())
        load = {name: getattr(settings, name) for name in ("device", "dtype", "load_format")}
        memory = {"gpu_memory_mib": ready.gpu_memory_mib, "graph_memory_mib": ready.graph_memory_mib}
        return {
            "load": load,
            "engine": {**engine, "voices_folder": "set" if engine["voices_folder"] else ""},
            "server": self.config.public,
            "ready": {"seconds": ready.ready_s, **memory, "report": ready.report.splitlines()},
        }

    def observe(self, speed: float, arrived_s: float, dialect: str = "native") -> Observation:
        """A request that arrived at `arrived_s` is under way."""
        return Observation(self.metrics, self.client.spec.sample_rate, arrived_s, speed, dialect)

    def check_model(self, name: str | None, spec: ModelSpec) -> None:
        """Raises `UnknownModel` unless the model of `spec` goes by `name`, or none is given."""
        known = self.names(spec)
        if name is not None and name not in known:
            raise UnknownModel("model", name, "known models: " + ", ".join(known))
