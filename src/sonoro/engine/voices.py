"""Whom requests speak as: reference audio encoded once and kept by its content, and voices registered by name.

To encode a minute of audio takes most of a second, for which no running stream may wait: it happens wherever `executor`
runs it, on a CUDA stream of its own, and who needs a voice holds a future of it. Knows no model beyond `models.base`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from sonoro.core.audio import MAX_REFERENCE_S
from sonoro.core.config import EngineConfig
from sonoro.core.errors import InvalidReference, InvalidRequest, UnknownVoice, VoiceExists
from sonoro.core.types import Reference, SpeechRequest, VoiceFacts, voice_id
from sonoro.engine.voice_store import OutOfReach, store_at
from sonoro.models.base import SpeechModel, Voice

__all__ = ["Inline", "Voices", "content_hash"]

logger = logging.getLogger(__name__)

Made = TypeVar("Made")

_WARM_UPS_S = (MAX_REFERENCE_S, 25.6, 10.0, 3.0, 1.28)
"""Kernels are chosen by length, and compiled by whether sizes are multiples of 16: 25.6 s are 320 frames of 80 ms."""


class Inline(Executor):
    """Runs what is submitted at once, in the thread that submits it."""

    def submit(self, function: Callable[..., Made], /, *args: Any, **kwargs: Any) -> Future[Made]:
        future: Future[Made] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Voices:
    """What a model can speak as besides its own voices. Called by one thread; `executor` runs one thing at a time.

    Voices are complete on their devices once their future is done, and may be read on `readers`, the CUDA streams of
    the ticks (none on a CPU), the model's last; the codec is on `codec_device`. What was registered before is loaded at
    once; whatever else is in the folder is passed over with a warning. Raises `ConfigError` if the folder cannot be
    used.
    """

    def __init__(
        self,
        model: SpeechModel,
        config: EngineConfig,
        executor: Executor,
        codec_device: torch.device,
        readers: Mapping[torch.device, torch.cuda.Stream],
    ) -> None:
        self._model, self._config, self._executor, self._codec_device = model, config, executor, codec_device
        self._readers = readers
        # Of the lowest priority, which is the default. What the current stream loaded must be there before it reads.
        self._streams = [torch.cuda.Stream(device) for device in readers]
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        self._kept: OrderedDict[str, Future[Voice]] = OrderedDict()
        self._waiting: Counter[Future[Voice]] = Counter()
        self._adding: dict[str, Future[Voice]] = {}
        self._contents: dict[str, str] = {}
        self.registered: dict[str, VoiceFacts] = {}
        self._store = store_at(config.voices_folder, model.spec.name, model.fingerprint)
        self._stamps: dict[str, Hashable] = {}
        self._run(self._look)

    @property
    def adding(self) -> int:
        """Voices that are being registered."""
        return len(self._adding)

    def of(self, request: SpeechRequest) -> Future[Voice] | None:
        """The voice of a resolved request, encoded unless it is kept; None if it speaks as one of the model's own.

        Whoever does not wait for it any more says so by `leave`. To be called where the model may be.
        """
        if request.speaker_embedding is not None:
            voice: Future[Voice] = Future()
            voice.set_result(self._model.voice_of(request.speaker_embedding))
        elif request.references:
            voice = self._get(content_hash(request.references), partial(self._encode, request.references))
        elif request.voice in self.registered:
            voice = self._get(self._key(request.voice), partial(self._load, request.voice))
        else:
            return None
        self._waiting[voice] += 1
        return voice

    def leave(self, voice: Future[Voice]) -> None:
        """One who waited for `voice` has it, or does not want it any more; what nobody wants is not begun."""
        self._waiting[voice] -= 1
        if self._waiting[voice] or any(voice is added for added in list(self._adding.values())):
            return
        del self._waiting[voice]
        if voice.cancel() or _has_failed(voice):
            # What failed is not kept, nor what its traceback holds.
            for key in [key for key, kept in self._kept.items() if kept is voice]:
                del self._kept[key]

    def add(self, name: str, references: tuple[Reference, ...], consent: str | None = None) -> Future[VoiceFacts]:
        """Register the voice of `references`; it can be named once this is done.

        Raises `InvalidRequest` or `VoiceExists` for the name, `InvalidReference` for a recording that the model cannot
        use or that lacks its transcript; the rest comes with the future.
        """
        name = voice_id(name)
        self._model.spec.check_cloning("ref_audio")
        for reference in references:
            reference.check()
        if name in self._model.spec.voices:
            raise InvalidRequest("name", name, f"{self._model.spec.name} has a voice of that name of its own")
        if name in self.registered or name in self._adding:
            raise VoiceExists("name", name, "a voice of that name is registered; delete it first")
        if len(self.registered) + len(self._adding) >= self._config.max_registered_voices:
            most = self._config.max_registered_voices
            raise InvalidRequest(
                "name", name, f"{most} voices (max_registered_voices) are registered; delete one first"
            )
        content = content_hash(references)
        # Kept for the first who speaks as it, under its name or with the recording itself.
        self._adding[name] = voice = self._get(content, partial(self._encode, references))
        return self._submit(partial(self._register, name, references, consent, voice, content))

    def delete(self, name: str) -> Future[None]:
        """Forget a registered voice; what has been given its voice goes on. Raises `UnknownVoice`."""
        facts = self.registered.pop(name.lower(), None)
        if facts is None:
            raise UnknownVoice("name", name, "no voice of that name is registered")
        self._kept.pop(self._key(facts.name), None)
        return self._submit(partial(self._remove, facts))

    def refresh(self) -> Future[None]:
        """Register what other engines have put into the folder, and forget what they have taken from it."""
        return self._submit(self._look)

    def warm_up(self) -> None:
        """Encode noise of some lengths on a GPU: kernels are compiled and loaded, and memory for the longest is taken.
        Running streams would wait for that."""
        if not self._streams or "cloned" not in self._model.spec.voice_modes:
            return
        started_s, rate = time.perf_counter(), self._model.spec.sample_rate
        for duration_s in _WARM_UPS_S:
            noise = 0.1 * np.random.default_rng(0).standard_normal(round(duration_s * rate))
            pcm = noise.astype("<f4").tobytes()
            try:
                self._submit(partial(self._encode_any, pcm, rate)).result()
            except Exception as error:  # the reference that needs as much will fail, and nothing else
                logger.warning("event=voice_warm_up_failed reference_s=%g reason=%r", duration_s, str(error))
        logger.info("event=voices_warmed_up seconds=%.2f", time.perf_counter() - started_s)

    def _key(self, name: str) -> str:
        """What a registered voice is kept under: its content's hash if this engine has encoded it, else what changes
        once another voice has the name."""
        return self._contents.get(name) or f"name {name} {self._stamps.get(name)}"

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

    def _get(self, key: str, make: Callable[[], Voice]) -> Future[Voice]:
        for failed in [kept for kept, voice in self._kept.items() if _has_failed(voice)]:
            # Nor what its traceback holds.
            del self._kept[failed]
        if key not in self._kept:
            self._kept[key] = self._submit(make)
            if len(self._kept) > self._config.max_voices:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _encode(self, references: tuple[Reference, ...]) -> Voice:
        """The voice of `references`, its codec history primed: in a tick that is only copied."""
        return self._share(self._primed(self._model.encode_voice(references)))

    def _encode_any(self, pcm: bytes, rate: int) -> Voice:
        """The voice of a recording in context, or by its timbre if the model can do no more."""
        try:
            return self._encode((Reference(pcm=pcm, sample_rate=rate, text="Noise.", use="prompt"),))
        except InvalidReference:
            return self._encode((Reference(pcm=pcm, sample_rate=rate, use="reference"),))

    def _load(self, name: str) -> Voice:
        if name not in self.registered:
            raise UnknownVoice("voice", name, "it has just been deleted")
        return self._share(self._primed(self._model.load_voice(self._store.read(name)[1])))

    def _primed(self, voice: Voice) -> Voice:
        if voice.reference_frames is not None:
            slot = torch.zeros(1, dtype=torch.int64, device=self._codec_device)
            with torch.cuda.device_of(slot):
                self._model.codec.prime(self._model.codec.allocate(1), slot, voice)
        return voice

    def _share(self, voice: Voice) -> Voice:
        """Let memory that the ticks may still be reading when `voice` is dropped be used again only after that."""
        if self._readers:
            primed = [tensor for row in voice.primed.values() for tensor in row.tensors]
            for tensor in (*self._model.save_voice(voice).tensors.values(), *primed):
                if tensor.is_cuda:
                    tensor.record_stream(self._readers[tensor.device])
        return voice

    def _register(
        self,
        name: str,
        references: tuple[Reference, ...],
        consent: str | None,
        encoded: Future[Voice],
        content: str,
    ) -> VoiceFacts:
        try:
            # Encoded before: one thing is done after the other.
            voice = encoded.result(timeout=0)
            facts = VoiceFacts(
                name=name,
                use="prompt" if any(reference.use == "prompt" for reference in references) else "reference",
                duration_s=round(sum(reference.duration_s for reference in references), 3),
                created_at_s=float(int(time.time())),
                transcript=" ".join(reference.text for reference in references if reference.text) or None,
                consent=consent,
            )
            self._stamps[name] = self._store.write(facts, self._model.save_voice(voice))
            self._contents[name] = content
            self.registered[name] = facts
            return facts
        finally:
            self._adding.pop(name, None)

    def _remove(self, facts: VoiceFacts) -> None:
        try:
            self._store.delete(facts.name)
            # Which somebody who looked in the meantime has registered again.
            self.registered.pop(facts.name, None)
            self._stamps.pop(facts.name, None)
            self._contents.pop(facts.name, None)
        except Exception:
            self.registered[facts.name] = facts
            raise

    def _look(self) -> None:
        """Register what the store holds, what is new or another than before read once to see that it can be used."""
        stamps = self._store.stamps()
        for name in (self._stamps.keys() | self.registered.keys()) - stamps.keys():
            self.registered.pop(name, None)
            # The next of that name may have the same: clocks of buckets count seconds.
            self._stamps.pop(name, None)
            self._contents.pop(name, None)
        for name, stamp in stamps.items():
            if self._stamps.get(name) == stamp:
                continue
            self._stamps[name] = stamp
            self._contents.pop(name, None)
            try:
                self.registered[name] = self._read(name)
            except Exception as error:  # whatever lies in a folder, the engine runs
                self.registered.pop(name, None)
                if isinstance(error, OutOfReach):
                    self._stamps[name] = None  # so it is read the next time
                logger.warning("event=voice_passed_over file=%r reason=%r", f"{name}.safetensors", str(error))

    def _read(self, name: str) -> VoiceFacts:
        if name not in self.registered and len(self.registered) >= self._config.max_registered_voices:
            raise InvalidRequest("name", name, "as many voices as may (max_registered_voices) are registered")
        if name in self._model.spec.voices:
            raise InvalidRequest("name", name, "the model has a voice of that name of its own")
        facts, saved = self._store.read(name)
        self._model.load_voice(saved)
        return facts


def content_hash(references: tuple[Reference, ...]) -> str:
    """The same for the same audio, rate, transcript and use; different otherwise."""
    digest = hashlib.sha256()
    for reference in references:
        digest.update(repr((reference.sample_rate, reference.text, reference.use, reference.digest)).encode())
    return digest.hexdigest()


def _has_failed(voice: Future[Voice]) -> bool:
    return voice.done() and voice.exception() is not None
