"""The uploaded voices of a server by the names that its callers may use. Knows no route."""

import asyncio
import contextlib

from sonoro.core.errors import UnknownVoice
from sonoro.core.types import ModelSpec
from sonoro.server.config import OPENAI_VOICES, ServerConfig
from sonoro.server.errors import NotReady
from sonoro.server.keys import Caller
from sonoro.server.shared import Shared
from sonoro.server.voice_store import VoiceStore
from sonoro.transport.encoded_voice import VoiceFacts
from sonoro.transport.fleet import Fleet

SCAN_TIMEOUT_S = 10.0
"""How long a request waits for a scan of the folder of voices: mounts and buckets may hang longer than clients wait."""


class VoiceDirectory:
    """The voices in `store`, and `aliases`, which map further names to the model's voices. Call `open` first."""

    def __init__(self, client: Fleet, config: ServerConfig, shared: Shared) -> None:
        engine = client.settings.config
        self._client, self._config, self._changes = client, config, shared.changes("voices")
        location = shared.location("voices", engine.voices_folder)
        self.store = VoiceStore(location, engine.max_registered_voices, self._changes)
        self.aliases: dict[str, str] = {}

    async def open(self) -> None:
        """Read the stored voices of the started model, and let its engines load them. Raises `ConfigError`."""
        await self.store.open(self._client.ready.fingerprint)
        self._client.set_voice_source(self.data)
        self.aliases = self._config.aliases(self._client.spec)

    async def scan(self) -> tuple[VoiceFacts, ...]:
        """Scan the storage and return the uploaded voices, other servers' included. Raises `NotReady` if that takes
        too long."""
        try:
            await asyncio.wait_for(self.store.refresh(), SCAN_TIMEOUT_S)
        except TimeoutError as error:
            raise NotReady(f"the folder of voices was not read in {SCAN_TIMEOUT_S:g} s; try again later") from error
        return self.store.voices

    async def data(self, digest: str) -> bytes:
        """Read an encoded voice. An engine asks all fronts, of which some may not have read of it yet: these scan the
        storage first. Raises `UnknownVoice`, `EngineError`, and `NotReady` as `scan` does."""
        try:
            return await self.store.data(digest)
        except UnknownVoice:
            await self.scan()
            return await self.store.data(digest)

    async def catch_up(self) -> None:
        """Scan the storage if another front has changed the voices. What cannot be scanned stays as it is known."""

        async def read() -> None:
            with contextlib.suppress(NotReady):
                await self.scan()

        await self._changes.catch_up(read)

    def by_name(self, caller: Caller) -> dict[str, VoiceFacts]:
        """The uploaded voices that `caller` may use, by id, and by name if they are the caller's own or everybody's.
        None has a name of the model's voices."""
        reserved = self.reserved_names()
        seen = [facts for facts in self.store.voices if caller.sees(facts) and facts.called not in reserved]
        # The caller's own last, so that it wins over everybody's voice of the same name.
        named = sorted(seen, key=lambda facts: facts.owner == caller.owner)
        names = {facts.called: facts for facts in named if facts.owner in ("", caller.owner)}
        return names | {facts.name: facts for facts in seen if facts.owner}

    def names(self, caller: Caller, spec: ModelSpec) -> list[str]:
        """The voices that `caller` may name: the model's, then uploaded ones by name."""
        return [*spec.voices, *sorted(name for name in self.by_name(caller) if "." not in name)]

    def reserved_names(self) -> set[str]:
        """Names in lower case that no uploaded voice may have: the model's voices, aliases, OpenAI's."""
        return {*self._client.spec.voices, *self.aliases, *OPENAI_VOICES}
