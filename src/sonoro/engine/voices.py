"""Encodes the voices of requests from reference audio, loads stored ones, and caches them by content digest.

Encoding a minute of audio takes most of a second, which running streams must not wait for: `executor` does it, on a
CUDA stream of its own, and requests hold a future of the voice. Depends on `models.base` and on no model.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from sonoro.audio.files import MAX_REFERENCE_S
from sonoro.core.config import EngineConfig
from sonoro.core.errors import InvalidReference, border
from sonoro.core.types import Reference, SpeechRequest
from sonoro.engine.saved_voices import dump, parse
from sonoro.models.base import CloningModel, EmbeddingModel, SpeechModel, Voice
from sonoro.transport.encoded_voice import EncodedVoice

logger = logging.getLogger(__name__)

Made = TypeVar("Made")

_WARM_UPS_S = (MAX_REFERENCE_S, 25.6, 10.0, 3.0, 1.28)
"""Durations to warm up with. Kernels are chosen by length, and compiled apart for sizes that are multiples of 16 (25.6
s are 320 frames of 80 ms)."""


class Inline(Executor):
    """An executor that runs each job at once, in the submitting thread."""

    def submit(self, function: Callable[..., Made], /, *args: Any, **kwargs: Any) -> Future[Made]:
        future: Future[Made] = Future()
        with border(future.set_exception):
            future.set_result(function(*args, **kwargs))
        return future


class Voices:
    """The voices of a model besides its built-in ones: encoded, loaded and cached, the last `max_voices` used.

    Call it from one thread; `executor` must run one job at a time. A voice is complete on its device once its future is
    done. `readers` are the CUDA streams of the ticks, which read voices: none on a CPU, the model's last. The codec is
    on `codec_device`.
    """

    def __init__(
        self,
        model: SpeechModel,
        config: EngineConfig,
        executor: Executor,
        codec_device: torch.device,
        readers: Sequence[torch.cuda.Stream],
    ) -> None:
        self._model, self._config, self._executor, self._codec_device = model, config, executor, codec_device
        self._readers = readers
        # The default priority is the lowest. These streams must wait for the weights loaded on the current one.
        self._streams = [torch.cuda.Stream(device) for device in dict.fromkeys(stream.device for stream in readers)]
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        self._kept: OrderedDict[str, Future[Voice]] = OrderedDict()
        self._waiting: Counter[Future[Voice]] = Counter()
        self._saving: dict[Future[EncodedVoice], Future[Voice]] = {}
        self._wanted: dict[str, Future[Voice]] = {}
        self._asked: list[str] = []

    @property
    def saving(self) -> int:
        """How many voices are being encoded by `encode`."""
        self._saving = {saved: voice for saved, voice in self._saving.items() if not saved.done()}
        return len(self._saving)

    def take_wanted(self) -> list[str]:
        """Digests of voices that requests need and the cache lacks, each returned once. Answer by `load` or `lose`."""
        asked, self._asked = self._asked, []
        return asked

    def of(self, request: SpeechRequest) -> Future[Voice] | None:
        """A future of the voice of a resolved `request`, encoded unless cached; None for one of the model's own voices.

        Pair each call with `leave`. Call it where the model may be called.
        """
        if request.speaker_embedding is not None:
            voice: Future[Voice] = Future()
            assert isinstance(self._model, EmbeddingModel)
            voice.set_result(self._model.voice_of(request.speaker_embedding))
        elif request.references:
            voice = self._get(content_hash(request.references), partial(self._encode, request.references))
        elif request.voice_digest is not None:
            voice = self._known(request.voice_digest)
        else:
            return None
        self._waiting[voice] += 1
        return voice

    def leave(self, voice: Future[Voice]) -> None:
        """Stop waiting for `voice`. If nothing else waits for it and its encoding has not begun, it is cancelled."""
        self._waiting[voice] -= 1
        if self._waiting[voice]:
            return
        del self._waiting[voice]
        if self.saving and voice in self._saving.values():
            return
        if voice.cancel() or _has_failed(voice):
            # Keep no failure: its traceback holds memory.
            for key in [key for key, kept in self._kept.items() if kept is voice]:
                del self._kept[key]

    def encode(self, references: tuple[Reference, ...]) -> Future[EncodedVoice]:
        """Encode `references` for storage outside this process; the voice is cached here as well.

        Raises `InvalidReference` for a recording that the model cannot use or that lacks its transcript; other errors
        come with the future.
        """
        self._model.spec.check_cloning("ref_audio")
        for reference in references:
            reference.check()
        digest, make = content_hash(references), partial(self._encode, references)
        # `_save` runs next, so the voice must not be one that is still to be fetched.
        voice = self._submit(make) if digest in self._wanted else self._get(digest, make)
        saved = self._submit(partial(self._save, digest, voice))
        self._saving[saved] = voice
        return saved

    def load(self, digest: str, data: bytes) -> None:
        """Load the wanted voice of `digest` from `data`. If that fails, so do the requests that wait for it."""
        voice = self._wanted.pop(digest, None)
        if voice is not None and voice.set_running_or_notify_cancel():
            self._submit(partial(self._load, data)).add_done_callback(partial(_hand_on, voice))

    def lose(self, digest: str, error: Exception) -> None:
        """Fail the requests that wait for the voice of `digest` with `error`."""
        voice = self._wanted.pop(digest, None)
        if voice is not None and voice.set_running_or_notify_cancel():
            voice.set_exception(error)

    def warm_up(self) -> None:
        """Encode noise of several durations, so that kernels and memory are ready. Does nothing on a CPU.

        Otherwise running streams would wait for that at the first cloned voice.
        """
        if self._codec_device.type == "cpu" or "cloned" not in self._model.spec.voice_modes:
            return
        started_s, rate = time.perf_counter(), self._model.spec.sample_rate
        for duration_s in _WARM_UPS_S:
            noise = 0.1 * np.random.default_rng(0).standard_normal(round(duration_s * rate))
            pcm = noise.astype("<f4").tobytes()
            # If memory does not suffice, only references of that length will fail.
            with border(partial(logger.warning, "event=voice_warm_up_failed reference_s=%g reason=%r", duration_s)):
                self._submit(partial(self._encode_any, pcm, rate)).result()
        logger.info("event=voices_warmed_up seconds=%.2f", time.perf_counter() - started_s)

    @property
    def _cloning(self) -> CloningModel:
        """The model as a `CloningModel`; only for models whose `ModelSpec` has cloned voices."""
        assert isinstance(self._model, CloningModel)
        return self._model

    def _submit(self, make: Callable[[], Made]) -> Future[Made]:
        return self._executor.submit(self._run, make)

    def _run(self, make: Callable[[], Made]) -> Made:
        """Run `make` on the streams for voices and synchronise them, in the executor's thread."""
        with torch.inference_mode(), contextlib.ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            made = make()
            for stream in self._streams:
                stream.synchronize()
            return made

    def _get(self, digest: str, make: Callable[[], Voice]) -> Future[Voice]:
        """The voice of `digest`: cached or on its way, or else submitted as `make`."""
        return self._keep(digest, lambda: self._submit(make))

    def _known(self, digest: str) -> Future[Voice]:
        """The voice of `digest`: cached or on its way, or else wanted from the server."""

        def want() -> Future[Voice]:
            self._asked.append(digest)
            self._wanted[digest] = Future()
            return self._wanted[digest]

        return self._keep(digest, want)

    def _keep(self, digest: str, make: Callable[[], Future[Voice]]) -> Future[Voice]:
        for failed in [kept for kept, voice in self._kept.items() if _has_failed(voice)]:
            # Its traceback holds memory.
            del self._kept[failed]
        if digest not in self._kept:
            self._kept[digest] = make()
            if len(self._kept) > self._config.max_voices:
                self._kept.popitem(last=False)
        self._kept.move_to_end(digest)
        return self._kept[digest]

    def _encode(self, references: tuple[Reference, ...]) -> Voice:
        """The voice of `references`, with its codec history primed, so that a tick only copies that."""
        return self._share(self._primed(self._cloning.encode_voice(references)))

    def _encode_any(self, pcm: bytes, rate: int) -> Voice:
        """The voice of PCM16 `pcm`, as a prompt with a transcript or, if the model cannot do that, as a reference."""
        try:
            return self._encode((Reference(pcm=pcm, sample_rate=rate, text="Noise.", use="prompt"),))
        except InvalidReference:
            return self._encode((Reference(pcm=pcm, sample_rate=rate, use="reference"),))

    def _load(self, data: bytes) -> Voice:
        saved = parse(data, self._model.fingerprint)
        return self._share(self._primed(self._cloning.load_voice(saved)))

    def _save(self, digest: str, encoded: Future[Voice]) -> EncodedVoice:
        # The executor runs jobs in order, so `encoded` is done.
        saved = self._cloning.save_voice(encoded.result(timeout=0))
        return EncodedVoice(digest, dump(saved, self._model.spec.name, self._model.fingerprint))

    def _primed(self, voice: Voice) -> Voice:
        if voice.reference_frames is not None:
            slot = torch.zeros(1, dtype=torch.int64, device=self._codec_device)
            with torch.cuda.device_of(slot):
                self._model.codec.prime(self._model.codec.allocate(1), slot, voice)
        return voice

    def _share(self, voice: Voice) -> Voice:
        """Record the voice's tensors on the `readers`, so that their memory is not reused while a tick reads it."""
        if self._readers:
            primed = [tensor for saved in voice.primed.values() for tensor in saved.tensors]
            for tensor in (*self._cloning.save_voice(voice).tensors.values(), *primed):
                for stream in self._readers if tensor.is_cuda else ():
                    if stream.device == tensor.device:
                        tensor.record_stream(stream)
        return voice


def content_hash(references: tuple[Reference, ...]) -> str:
    """SHA-256 of audio, sample rate, transcript and use of `references`, as hex."""
    digest = hashlib.sha256()
    for reference in references:
        digest.update(repr((reference.sample_rate, reference.text, reference.use, reference.digest)).encode())
    return digest.hexdigest()


def _has_failed(voice: Future[Voice]) -> bool:
    return voice.done() and voice.exception() is not None


def _hand_on(voice: Future[Voice], loaded: Future[Voice]) -> None:
    """Copy the result or error of `loaded`, which is done, to `voice`."""
    error = loaded.exception()
    if error is None:
        voice.set_result(loaded.result())
    else:
        voice.set_exception(error)
