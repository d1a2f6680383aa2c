"""Whom requests speak as: reference audio encoded once, and encoded voices that the server keeps; by their content.

To encode a minute of audio takes most of a second, for which no running stream may wait: it happens wherever `executor`
runs it, on a CUDA stream of its own, and who needs a voice holds a future of it. Knows no model beyond `models.base`.
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

from sonoro.core.audio import MAX_REFERENCE_S
from sonoro.core.config import EngineConfig
from sonoro.core.encoded_voice import EncodedVoice
from sonoro.core.errors import InvalidReference, border
from sonoro.core.types import Reference, SpeechRequest
from sonoro.engine.saved_voices import dump, parse
from sonoro.models.base import CloningModel, EmbeddingModel, SpeechModel, Voice

__all__ = ["Inline", "Voices", "content_hash"]

logger = logging.getLogger(__name__)

Made = TypeVar("Made")

_WARM_UPS_S = (MAX_REFERENCE_S, 25.6, 10.0, 3.0, 1.28)
"""Kernels are chosen by length, and compiled by whether sizes are multiples of 16: 25.6 s are 320 frames of 80 ms."""


class Inline(Executor):
    """Runs what is submitted at once, in the thread that submits it."""

    def submit(self, function: Callable[..., Made], /, *args: Any, **kwargs: Any) -> Future[Made]:
        future: Future[Made] = Future()
        with border(future.set_exception):
            future.set_result(function(*args, **kwargs))
        return future


class Voices:
    """What a model can speak as besides its own voices. Called by one thread; `executor` runs one thing at a time.

    Voices are complete on their devices once their future is done, and may be read on `readers`, the CUDA streams of
    the ticks (none on a CPU), the model's last; the codec is on `codec_device`. The `max_voices` used last are kept.
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
        # Of the lowest priority, which is the default. What the current stream loaded must be there before it reads.
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
        """Voices that are being encoded to be kept by others."""
        self._saving = {saved: voice for saved, voice in self._saving.items() if not saved.done()}
        return len(self._saving)

    def take_wanted(self) -> list[str]:
        """The digests of encoded voices that are needed and not here, each told of once: `load` or `lose` them."""
        asked, self._asked = self._asked, []
        return asked

    def of(self, request: SpeechRequest) -> Future[Voice] | None:
        """The voice of a resolved request, encoded unless it is kept; None if it speaks as one of the model's own.

        Whoever does not wait for it any more says so by `leave`. To be called where the model may be.
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
        """One who waited for `voice` has it, or does not want it any more; what nobody wants is not begun."""
        self._waiting[voice] -= 1
        if self._waiting[voice] or (self.saving and voice in self._saving.values()):
            return
        del self._waiting[voice]
        if voice.cancel() or _has_failed(voice):
            # What failed is not kept, nor what its traceback holds.
            for key in [key for key, kept in self._kept.items() if kept is voice]:
                del self._kept[key]

    def encode(self, references: tuple[Reference, ...]) -> Future[EncodedVoice]:
        """Encode `references` to be kept outside of this process, and keep the voice for the first who speaks as it.

        Raises `InvalidReference` for a recording that the model cannot use or that lacks its transcript; the rest comes
        with the future.
        """
        self._model.spec.check_cloning("ref_audio")
        for reference in references:
            reference.check()
        digest = content_hash(references)
        voice = self._get(digest, partial(self._encode, references))
        saved = self._submit(partial(self._save, digest, voice))
        self._saving[saved] = voice
        return saved

    def load(self, digest: str, data: bytes) -> None:
        """The encoded voice that was wanted. What is wrong with it fails who speaks as it."""
        voice = self._wanted.pop(digest, None)
        if voice is not None and voice.set_running_or_notify_cancel():
            self._submit(partial(self._load, data)).add_done_callback(partial(_hand_on, voice))

    def lose(self, digest: str, error: Exception) -> None:
        """The encoded voice that was wanted cannot be had: `error` fails who speaks as it."""
        voice = self._wanted.pop(digest, None)
        if voice is not None and voice.set_running_or_notify_cancel():
            voice.set_exception(error)

    def warm_up(self) -> None:
        """Encode noise of some lengths, but on a CPU: kernels are compiled and loaded, and memory for the longest is
        taken. Running streams would wait for that."""
        if self._codec_device.type == "cpu" or "cloned" not in self._model.spec.voice_modes:
            return
        started_s, rate = time.perf_counter(), self._model.spec.sample_rate
        for duration_s in _WARM_UPS_S:
            noise = 0.1 * np.random.default_rng(0).standard_normal(round(duration_s * rate))
            pcm = noise.astype("<f4").tobytes()
            # The reference that needs as much will fail, and nothing else.
            with border(partial(logger.warning, "event=voice_warm_up_failed reference_s=%g reason=%r", duration_s)):
                self._submit(partial(self._encode_any, pcm, rate)).result()
        logger.info("event=voices_warmed_up seconds=%.2f", time.perf_counter() - started_s)

    @property
    def _cloning(self) -> CloningModel:
        """The model, of which nobody may ask for a recording's voice unless its `ModelSpec` says so."""
        assert isinstance(self._model, CloningModel)
        return self._model

    def _submit(self, make: Callable[[], Made]) -> Future[Made]:
        return self._executor.submit(self._run, make)

    def _run(self, make: Callable[[], Made]) -> Made:
        """What `make` returns, complete on the device: the host waits for it here, and not in a tick."""
        with torch.inference_mode(), contextlib.ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            made = make()
            for stream in self._streams:
                stream.synchronize()
            return made

    def _get(self, digest: str, make: Callable[[], Voice]) -> Future[Voice]:
        """The voice of that digest: kept, wanted by somebody, or else what `make` makes."""
        return self._keep(digest, lambda: self._submit(make))

    def _known(self, digest: str) -> Future[Voice]:
        """The voice of that digest: kept, or wanted from now on."""

        def want() -> Future[Voice]:
            self._asked.append(digest)
            self._wanted[digest] = Future()
            return self._wanted[digest]

        return self._keep(digest, want)

    def _keep(self, digest: str, make: Callable[[], Future[Voice]]) -> Future[Voice]:
        for failed in [kept for kept, voice in self._kept.items() if _has_failed(voice)]:
            # Nor what its traceback holds.
            del self._kept[failed]
        if digest not in self._kept:
            self._kept[digest] = make()
            if len(self._kept) > self._config.max_voices:
                self._kept.popitem(last=False)
        self._kept.move_to_end(digest)
        return self._kept[digest]

    def _encode(self, references: tuple[Reference, ...]) -> Voice:
        """The voice of `references`, its codec history primed: in a tick that is only copied."""
        return self._share(self._primed(self._cloning.encode_voice(references)))

    def _encode_any(self, pcm: bytes, rate: int) -> Voice:
        """The voice of a recording in context, or by its timbre if the model can do no more."""
        try:
            return self._encode((Reference(pcm=pcm, sample_rate=rate, text="Noise.", use="prompt"),))
        except InvalidReference:
            return self._encode((Reference(pcm=pcm, sample_rate=rate, use="reference"),))

    def _load(self, data: bytes) -> Voice:
        saved = parse(data, self._model.fingerprint)
        return self._share(self._primed(self._cloning.load_voice(saved)))

    def _save(self, digest: str, encoded: Future[Voice]) -> EncodedVoice:
        # Encoded, or failed, before: one thing is done after the other.
        saved = self._cloning.save_voice(encoded.result(timeout=0))
        return EncodedVoice(digest, dump(saved, self._model.spec.name, self._model.fingerprint))

    def _primed(self, voice: Voice) -> Voice:
        if voice.reference_frames is not None:
            slot = torch.zeros(1, dtype=torch.int64, device=self._codec_device)
            with torch.cuda.device_of(slot):
                self._model.codec.prime(self._model.codec.allocate(1), slot, voice)
        return voice

    def _share(self, voice: Voice) -> Voice:
        """Let memory that the ticks may still be reading when `voice` is dropped be used again only after that."""
        if self._readers:
            primed = [tensor for saved in voice.primed.values() for tensor in saved.tensors]
            for tensor in (*self._cloning.save_voice(voice).tensors.values(), *primed):
                for stream in self._readers if tensor.is_cuda else ():
                    if stream.device == tensor.device:
                        tensor.record_stream(stream)
        return voice


def content_hash(references: tuple[Reference, ...]) -> str:
    """The same for the same audio, rate, transcript and use; different otherwise."""
    digest = hashlib.sha256()
    for reference in references:
        digest.update(repr((reference.sample_rate, reference.text, reference.use, reference.digest)).encode())
    return digest.hexdigest()


def _has_failed(voice: Future[Voice]) -> bool:
    return voice.done() and voice.exception() is not None


def _hand_on(voice: Future[Voice], loaded: Future[Voice]) -> None:
    """What `loaded`, which is done, came to is what `voice` comes to."""
    error = loaded.exception()
    if error is None:
        voice.set_result(loaded.result())
    else:
        voice.set_exception(error)
