"""The voices of requests besides a model's own: caches them by content digest, and the requests that wait for one.

Encoding a minute of audio takes most of a second, which running streams must not wait for: an executor does it, and
requests hold a future of the voice. Depends on `models.base` and on no model."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import NamedTuple

import msgspec
import torch

from sonoro.audio.references import content_hash
from sonoro.core.config import EngineConfig
from sonoro.core.errors import border
from sonoro.core.types import Reference, SpeechRequest
from sonoro.engine.request import Request
from sonoro.engine.voice_encoder import VoiceEncoder
from sonoro.models.base import EmbeddingModel, SpeechModel, Voice
from sonoro.transport.encoded_voice import EncodedVoice


class Wanted(NamedTuple):
    """The voice of a request, None if it is one of the model's own, and its cast by name, once they are `done`."""

    own: Future[Voice] | None
    cast: dict[str, Future[Voice]]

    @property
    def all(self) -> list[Future[Voice]]:
        return [*([] if self.own is None else [self.own]), *self.cast.values()]

    def done(self) -> bool:
        return all(voice.done() for voice in self.all)


class Voices:
    """The voices of a model besides its own: encoded, loaded and cached, the last `max_voices` used.
    Call it from one thread, where the model may be called; `executor`, `codec_device` and `readers` are those of
    `VoiceEncoder`."""

    def __init__(
        self,
        model: SpeechModel,
        config: EngineConfig,
        executor: Executor,
        codec_device: torch.device,
        readers: Sequence[torch.cuda.Stream],
    ) -> None:
        self._model, self._config = model, config
        self.encoder = VoiceEncoder(model, executor, codec_device, readers)
        self.awaiting: dict[Request, Wanted] = {}
        """Requests that wait for their voices, in order of arrival. Read-only to the caller."""
        self.saving: dict[Future[EncodedVoice], Future[Voice]] = {}
        """Jobs of `encode` that are not done, and the voices they save. The executor's thread takes them off."""
        self.asked: list[str] = []
        """Digests for `take_wanted`. Read-only to the caller."""
        self._cached: OrderedDict[str, Future[Voice]] = OrderedDict()
        self._waiting: Counter[Future[Voice]] = Counter()
        self._wanted: dict[str, Future[Voice]] = {}

    def take_wanted(self) -> list[str]:
        """Digests of voices that requests need and the cache lacks, each returned once. Answer by `load` or `lose`."""
        asked, self.asked = self.asked, []
        return asked

    def ask(self, request: Request) -> None:
        """Get the voices of `request`, which names or brings some that are not the model's own. Unless they are ready
        the request is then one of `awaiting`, until `attach` or `forget`."""
        params = request.params
        has_own = params.references or params.voice_digest is not None or params.speaker_embedding is not None
        own = self._of(params) if has_own else None
        wanted = Wanted(own, {name: self._find(voice) for name, voice in params.cast.items()})
        # The voices replace these fields, and let their audio be freed.
        none = {"voice": None, "voice_digest": None, "references": (), "speaker_embedding": None}
        request.params = msgspec.structs.replace(params, cast={}, **({} if own is None else none))
        self._waiting.update(wanted.all)
        self.awaiting[request] = wanted
        if wanted.done():
            self.attach(request)

    def attach(self, request: Request) -> None:
        """Give `request`, one of `awaiting`, its voices, which are done. Raises what the encoding raised."""
        try:
            own, cast = self.awaiting[request]
            request.voice = None if own is None else own.result(timeout=0)
            request.cast = {name: voice.result(timeout=0) for name, voice in cast.items()}
        finally:
            self.forget(request)

    def forget(self, request: Request) -> None:
        """Take `request` off `awaiting`. If nothing else waits for a voice of it, whose encoding has not begun, that is
        cancelled."""
        for voice in self.awaiting.pop(request).all:
            self._release(voice)

    def _release(self, voice: Future[Voice]) -> None:
        self._waiting[voice] -= 1
        if self._waiting[voice]:
            return
        del self._waiting[voice]
        if voice in list(self.saving.values()):
            return
        if voice.cancel() or _has_failed(voice):
            # Keep no failure: its traceback holds memory.
            for key in [key for key, cached in self._cached.items() if cached is voice]:
                del self._cached[key]

    def encode(self, references: tuple[Reference, ...]) -> Future[EncodedVoice]:
        """Encode `references` for storage outside this process; the voice is cached here as well.
        Raises `InvalidReference` for a recording that the model cannot use or that lacks its transcript; other errors
        come with the future."""
        self._model.spec.check_cloning("ref_audio", references)
        encoder, digest = self.encoder, content_hash(references)
        job = partial(encoder.encode, references)
        # `save` runs next, so the voice must not be one that is still to be fetched.
        voice = encoder.submit(job) if digest in self._wanted else self._get(digest, partial(encoder.submit, job))
        saved = encoder.submit(partial(encoder.save, digest, voice))
        self.saving[saved] = voice
        saved.add_done_callback(self.saving.pop)
        return saved

    def load(self, digest: str, data: bytes) -> None:
        """Load the wanted voice of `digest` from `data`. If that fails, so do the requests that wait for it."""
        voice = self._wanted.pop(digest, None)
        if voice is not None and voice.set_running_or_notify_cancel():
            loaded = self.encoder.submit(partial(self.encoder.load, data))
            loaded.add_done_callback(partial(_hand_on, voice))

    def lose(self, digest: str, error: Exception) -> None:
        """Fail the requests that wait for the voice of `digest` with `error`."""
        voice = self._wanted.pop(digest, None)
        if voice is not None and voice.set_running_or_notify_cancel():
            voice.set_exception(error)

    def _of(self, params: SpeechRequest) -> Future[Voice]:
        """A future of the voice that resolved `params` name or bring."""
        if params.speaker_embedding is not None:
            voice: Future[Voice] = Future()
            assert isinstance(self._model, EmbeddingModel)
            voice.set_result(self._model.voice_of(params.speaker_embedding))
            return voice
        assert params.references or params.voice_digest is not None
        return self._find(*params.references or (params.voice_digest,))

    def _find(self, *given: str | Reference | None) -> Future[Voice]:
        """A future of the voice of a digest, or of references."""
        if isinstance(digest := given[0], str):
            return self._get(digest, partial(self._want, digest))
        references = tuple(one for one in given if isinstance(one, Reference))
        job = partial(self.encoder.encode, references)
        return self._get(content_hash(references), partial(self.encoder.submit, job))

    def _want(self, digest: str) -> Future[Voice]:
        """Ask the server for the voice of `digest`."""
        self.asked.append(digest)
        self._wanted[digest] = Future()
        return self._wanted[digest]

    def _get(self, digest: str, make: Callable[[], Future[Voice]]) -> Future[Voice]:
        """The voice of `digest`: cached or on its way, or else what `make` begins."""
        for failed in [cached for cached, voice in self._cached.items() if _has_failed(voice)]:
            # Its traceback holds memory.
            del self._cached[failed]
        if digest not in self._cached:
            self._cached[digest] = make()
            if len(self._cached) > self._config.max_voices:
                self._cached.popitem(last=False)
        self._cached.move_to_end(digest)
        return self._cached[digest]


def _has_failed(voice: Future[Voice]) -> bool:
    return voice.done() and voice.exception() is not None


def _hand_on(voice: Future[Voice], loaded: Future[Voice]) -> None:
    """Copy the result or error of `loaded`, which is done, to `voice`."""
    with border(voice.set_exception):
        voice.set_result(loaded.result())
