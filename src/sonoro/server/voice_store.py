"""The uploaded voices of a server: encoded once by an engine, stored in a folder, a bucket or memory, read by digest.

A voice is a file that names its model's fingerprint. One thread reads and writes the files; the listing may be read at
any time. No torch."""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from sonoro.core.errors import EngineError, InvalidRequest, UnknownVoice, VoiceExists
from sonoro.core.types import Reference
from sonoro.server.errors import NotStored
from sonoro.server.voice_files import Files, Memory, NotAVoice, open_files
from sonoro.transport.encoded_voice import EncodedVoice, VoiceFacts, read_facts, voice_id, with_facts
from sonoro.transport.table import Changes

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_SUFFIX = ".safetensors"


class StoreUnreachable(EngineError):
    """The storage cannot be read at the moment."""


class VoiceStore:
    """At most `max_voices` voices in `location`: a folder, the URL of a bucket, or "" for memory. Call `open` first.
    Other servers may write to the same location; `refresh` reads their changes. Its own are noted in `changes`, which
    all fronts of this server share, and so are those that it finds first."""

    def __init__(self, location: str, max_voices: int, changes: Changes | None = None) -> None:
        self._location, self._max_voices, self._changes = location, max_voices, changes or Changes()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="voices")
        self._files: Files = Memory()
        self._fingerprint = ""
        self._voices: dict[str, VoiceFacts] = {}
        self.voices: tuple[VoiceFacts, ...] = ()
        """The registered voices, sorted by id."""
        self._stamps: dict[str, Hashable] = {}
        self._warned: set[str] = set()
        self._adding: set[str] = set()
        self._work: set[asyncio.Task[Any]] = set()
        self._last_scan: asyncio.Task[None] | None = None
        self._next_scan: asyncio.Task[None] | None = None

    async def open(self, fingerprint: str) -> None:
        """Read the voices of the model with `fingerprint`, skipping others with a warning. Raises `ConfigError` if the
        location cannot be used."""
        self._fingerprint = fingerprint
        await self._in_thread(self._open)

    def close(self) -> None:
        """Drop queued work; running work is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def add(
        self,
        name: str,
        references: tuple[Reference, ...],
        consent: str | None,
        encode: Callable[[tuple[Reference, ...]], Awaitable[EncodedVoice]],
    ) -> VoiceFacts:
        """Encode `references` by `encode` and store the voice by the id `name`. Cancelling the call does not stop it.
        Raises `InvalidRequest` for an invalid name or at `max_voices`, `VoiceExists`, `NotStored`, and what
        `encode` raises."""
        name = voice_id(name)
        if name in self._voices or name in self._adding:
            raise VoiceExists("name", name, "a voice of that name is registered; delete it first")
        if len(self._voices.keys() | self._adding) >= self._max_voices:
            limit = f"{self._max_voices} voices (max_registered_voices) are registered; delete one first"
            raise InvalidRequest("name", name, limit)
        self._adding.add(name)

        async def work() -> VoiceFacts:
            try:
                encoded = await encode(references)
                facts = _facts(name, references, consent, encoded.digest)
                await self._in_thread(self._create, facts, encoded.data)
                self._changes.note()
                return facts
            finally:
                self._adding.discard(name)

        return await asyncio.shield(self._begin(work()))

    def count(self, owner: str) -> int:
        """How many voices of `owner` are registered or being added."""
        return sum(name.partition(".")[2] == owner for name in self._voices.keys() | self._adding)

    async def delete(self, name: str) -> None:
        """Delete a voice by its id; running requests keep it. Raises `UnknownVoice` or `EngineError`."""

        async def work() -> None:
            await self._in_thread(self._delete, name)
            self._changes.note()

        await asyncio.shield(self._begin(work()))

    async def data(self, digest: str) -> bytes:
        """Read the encoded voice of `digest`. Raises `UnknownVoice` if it was deleted, or `EngineError`."""
        return await self._in_thread(self._data, digest)

    async def refresh(self) -> None:
        """Scan the storage for changes by other servers. A scan that fails logs a warning.
        Calls during a scan share one further scan, so that each sees what was written before the call."""
        if not self._location:
            return
        if self._next_scan is None:
            self._next_scan = self._begin(self._scan_after(self._last_scan))
        await asyncio.shield(self._next_scan)

    async def _scan_after(self, previous: asyncio.Task[None] | None) -> None:
        if previous is not None:
            await asyncio.wait({previous})
        self._last_scan, self._next_scan = self._next_scan, None
        knew_all, before = self._changes.are_read, self._voices
        try:
            await self._in_thread(self._scan)
        except OSError as error:
            logger.warning("event=voices_not_read reason=%r", str(error))
        if knew_all and self._voices != before:
            # Another server has changed them. Who asked this front may ask another one next.
            self._changes.note()

    async def _in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def _begin(self, work: Awaitable[Result]) -> asyncio.Task[Result]:
        """Run `work` to its end even if its caller is cancelled."""
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._work.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._work.discard(task)
        if not task.cancelled():
            task.exception()  # mark it as retrieved: the caller may have been cancelled

    # The methods below run in the thread, which alone replaces the listing; readers see the old or the new one.

    def _open(self) -> None:
        if self._location:
            self._files = open_files("voices_folder", self._location)
        self._scan()

    def _create(self, facts: VoiceFacts, data: bytes) -> None:
        file = facts.name + _SUFFIX
        try:
            self._stamps[facts.name] = self._files.create(file, with_facts(data, facts))
        except FileExistsError as error:
            limit = f"the folder of voices holds {file}, of another model or registered just now"
            raise VoiceExists("name", facts.called, limit) from error
        except OSError as error:
            raise NotStored(f"the voice {facts.called!r} could not be stored: {error.strerror or error}") from error
        self._publish({**self._voices, facts.name: facts})

    def _delete(self, name: str) -> None:
        if name not in self._voices:
            raise UnknownVoice("name", name, "no voice of that name is registered")
        try:
            self._files.delete(name + _SUFFIX)
        except OSError as error:
            raise EngineError(f"the voice {name!r} could not be deleted: {error.strerror or error}") from error
        self._publish({known: facts for known, facts in self._voices.items() if known != name})
        # Forget the stamp: the next voice of that name may have the same, as buckets' clocks count seconds.
        self._stamps.pop(name, None)

    def _data(self, digest: str) -> bytes:
        name = next((facts.name for facts in self._voices.values() if facts.digest == digest), None)
        if name is None:
            raise UnknownVoice("voice", "one that was registered", "it has just been deleted")
        facts, data = self._read(name)
        if facts.digest != digest:
            raise UnknownVoice("voice", facts.called, "another has just been registered under its name")
        return data

    def _scan(self) -> None:
        """Read new and changed files, and publish the usable voices."""
        stamps = self._stamped_files()
        known = {name: facts for name, facts in self._voices.items() if name in stamps}
        for name, stamp in stamps.items():
            if name in self._stamps and self._stamps[name] == stamp is not None:
                continue
            self._stamps[name] = stamp
            try:
                if name not in known and len(known) >= self._max_voices:
                    limit = f"max_registered_voices ({self._max_voices}) are registered already"
                    raise InvalidRequest("name", name, limit)
                known[name], _ = self._read(name)
            except (EngineError, InvalidRequest) as error:
                known.pop(name, None)
                if isinstance(error, StoreUnreachable):
                    self._stamps[name] = None  # so that the next scan reads it
                logger.warning("event=voice_passed_over file=%r reason=%r", name + _SUFFIX, str(error))
        self._stamps = {name: stamp for name, stamp in self._stamps.items() if name in stamps}
        self._publish(known)

    def _publish(self, voices: dict[str, VoiceFacts]) -> None:
        self._voices, self.voices = voices, tuple(voices[name] for name in sorted(voices))

    def _stamped_files(self) -> dict[str, Hashable]:
        """Stamps by voice id of the files with the suffix of voices. Warns once of each other file."""
        stamps: dict[str, Hashable] = {}
        for file, stamp in self._files.stamps().items():
            if file.endswith(_SUFFIX):
                stamps[file.removesuffix(_SUFFIX)] = stamp
            elif file not in self._warned:
                self._warned.add(file)
                logger.warning("event=voice_passed_over file=%r reason='its name does not end with %s'", file, _SUFFIX)
        return stamps

    def _read(self, name: str) -> tuple[VoiceFacts, bytes]:
        """Read the facts and bytes of a voice. Raises `StoreUnreachable`, or `EngineError` if the file is no voice."""
        try:
            data = self._files.read(name + _SUFFIX)
        except NotAVoice as error:
            raise EngineError(str(error)) from error
        except OSError as error:
            raise StoreUnreachable(f"the voice {name!r} could not be read: {error.strerror or error}") from error
        facts = read_facts(data, self._fingerprint)
        with contextlib.suppress(InvalidRequest):
            if voice_id(facts.name) == name:
                # Older files do not store a digest.
                return msgspec.structs.replace(facts, digest=facts.digest or hashlib.sha256(data).hexdigest()), data
        raise EngineError(f"it holds the voice {facts.name!r}, not {name!r}")


def _facts(name: str, references: tuple[Reference, ...], consent: str | None, digest: str) -> VoiceFacts:
    return VoiceFacts(
        name=name,
        use="prompt" if any(reference.use == "prompt" for reference in references) else "reference",
        duration_s=round(sum(reference.duration_s for reference in references), 3),
        created_at_s=float(int(time.time())),
        transcript=" ".join(reference.text for reference in references if reference.text) or None,
        consent=consent,
        digest=digest,
    )
