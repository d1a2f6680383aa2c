"""The engine behind `sonoro.api`: it runs in the caller's process, shared by its threads."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from sonoro.api_audio import AudioPiece
from sonoro.audio.pcm import from_pcm16
from sonoro.core.errors import EngineBusy, EngineClosed, SonoroError
from sonoro.core.types import Event, Failed, Finished, SpeechRequest

if TYPE_CHECKING:
    from sonoro.engine.engine import Engine


class SharedEngine:
    """An engine for several threads. A thread that waits for audio ticks the engine, for the requests of all."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._queues: dict[str, deque[Event]] = {}
        self._abandoned: deque[tuple[str, deque[Event]]] = deque()
        self._lock = threading.Lock()

    @property
    def engine(self) -> Engine:
        """The engine itself. Raises `EngineClosed` after `close`."""
        if self._engine is None:
            raise _closed()
        return self._engine

    def close(self) -> None:
        """Let go of the engine. Running and later requests raise `EngineClosed`."""
        with self._lock:
            if self._engine is not None:
                self._engine = None
                for request_id, queue in self._queues.items():
                    queue.append(Failed.of(request_id, _closed()))

    @contextlib.contextmanager
    def running(self, requests: Sequence[SpeechRequest]) -> Iterator[None]:
        """Submit `requests`; those still running at the end of the block are cancelled."""
        held: list[tuple[str, deque[Event]]] = []
        try:
            for number, request in enumerate(requests):
                with self._lock, noting_item(number if len(requests) > 1 else None):
                    self._cancel_abandoned()
                    self._submit(request)
                    queue = self._queues[request.id] = deque()
                    held.append((request.id, queue))
            yield
        finally:
            # Not under the lock: the garbage collector may close a stream in a thread that is inside a tick.
            self._abandoned.extend(held)

    def pieces(self, request_id: str) -> Generator[AudioPiece, None, Finished]:
        """Yield the audio of a running request, ticking the engine while its queue is empty."""
        queue = self._queues[request_id]
        sample_rate = self.engine.spec.sample_rate
        while True:
            while not queue:
                with self._lock:
                    # Another thread may have filled it while this one waited.
                    if not queue:
                        self._tick()
            event = queue.popleft()
            if isinstance(event, Finished):
                return event
            if isinstance(event, Failed):
                raise event.facts.error
            facts = event.index, event.characters, event.words, event.pause_s, event.marks, event.voice
            yield AudioPiece(from_pcm16(event.pcm), sample_rate, *facts)

    def _submit(self, request: SpeechRequest) -> None:
        """Submit `request`, ticking the engine while its queue is full."""
        while True:
            try:
                self.engine.submit(request if request.is_resolved else self.engine.spec.resolve(request))
            except EngineBusy:
                self._tick()
            else:
                return

    def _cancel_abandoned(self) -> None:
        """Cancel the requests abandoned since the last call. An id may be in use again, with another queue."""
        while self._abandoned:
            request_id, queue = self._abandoned.popleft()
            if self._queues.get(request_id) is queue:
                del self._queues[request_id]
                self.engine.cancel(request_id)

    def _tick(self) -> None:
        self._cancel_abandoned()
        assert self.engine.has_work, "a request is awaited that the engine does not hold"
        for event in self.engine.tick():
            # Cancelled requests have no queue.
            if event.request_id in self._queues:
                self._queues[event.request_id].append(event)


def _closed() -> EngineClosed:
    return EngineClosed("this TTS was closed; make another")


@contextlib.contextmanager
def noting_item(number: int | None) -> Iterator[None]:
    """Add a note with the number of the batch item to errors, unless `number` is None."""
    try:
        yield
    except SonoroError as error:
        if number is not None:
            error.add_note(f"in item {number} of the batch")
        raise
