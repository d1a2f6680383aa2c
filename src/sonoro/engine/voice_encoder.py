"""Encodes, loads and saves voices on CUDA streams of its own. Depends on `models.base` and on no model.

A saved voice is safetensors bytes, which a server stores and sends back: named tensors and facts, bound to the
fingerprint of the model that encoded it."""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np
import safetensors.torch
import torch

from sonoro.audio.references import MAX_REFERENCE_S
from sonoro.core.errors import EngineError, InvalidReference, border
from sonoro.core.types import Reference
from sonoro.models.base import CloningModel, SavedVoice, SpeechModel, Voice
from sonoro.transport.encoded_voice import FORMAT, EncodedVoice, read_metadata, with_metadata

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_WARM_UPS_S = (MAX_REFERENCE_S, 25.6, 10.0, 3.0, 1.28)
"""Durations to warm up with. Kernels are chosen by length, and compiled apart for sizes that are multiples of 16 (25.6
s are 320 frames of 80 ms)."""


class VoiceEncoder:
    """Makes the voices of `model` in the thread of `executor`, which must run one job at a time, in order.
    A voice is complete on its device once its job is done. `readers` are the CUDA streams of the ticks, which read
    voices, that of the model last; on a CPU there are none. The codec is on `codec_device`."""

    def __init__(
        self, model: SpeechModel, executor: Executor, codec_device: torch.device, readers: Sequence[torch.cuda.Stream]
    ) -> None:
        self._model, self._executor, self._codec_device, self._readers = model, executor, codec_device, readers
        # The default priority is the lowest. These streams must wait for the weights loaded on the current one.
        self._streams = [torch.cuda.Stream(device) for device in dict.fromkeys(stream.device for stream in readers)]
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """Run `job`, one of the methods below, in the executor's thread."""
        return self._executor.submit(self._run, job)

    def encode(self, references: tuple[Reference, ...]) -> Voice:
        """The voice of `references`, with its codec history primed, so that a tick only copies that."""
        return self._share(self._primed(self._cloning.encode_voice(references)))

    def load(self, data: bytes) -> Voice:
        """The voice that `save` made `data` of. Raises `EngineError` if another model did."""
        saved = parse(data, self._model.fingerprint)
        return self._share(self._primed(self._cloning.load_voice(saved)))

    def save(self, digest: str, encoded: Future[Voice]) -> EncodedVoice:
        """The voice of `digest` for storage; `encoded` was submitted before."""
        # Jobs run in order, so `encoded` is done.
        saved = self._cloning.save_voice(encoded.result(timeout=0))
        return EncodedVoice(digest, dump(saved, self._model.spec.name, self._model.fingerprint))

    def warm_up(self) -> None:
        """Encode noise of several durations, so that kernels and memory are ready. Does nothing on a CPU.
        Otherwise running streams would wait for that at the first cloned voice."""
        if self._codec_device.type == "cpu" or "cloned" not in self._model.spec.voice_modes:
            return
        started_s, rate = time.perf_counter(), self._model.spec.sample_rate
        for duration_s in _WARM_UPS_S:
            noise = 0.1 * np.random.default_rng(0).standard_normal(round(duration_s * rate))
            pcm = noise.astype("<f4").tobytes()
            # If memory does not suffice, only references of that length will fail.
            with border(partial(logger.warning, "event=voice_warm_up_failed reference_s=%g reason=%r", duration_s)):
                self.submit(partial(self._encode_any, pcm, rate)).result()
        logger.info("event=voices_warmed_up seconds=%.2f", time.perf_counter() - started_s)

    @property
    def _cloning(self) -> CloningModel:
        """The model as a `CloningModel`; only for models whose `ModelSpec` has cloned voices."""
        assert isinstance(self._model, CloningModel)
        return self._model

    def _run(self, job: Callable[[], Result]) -> Result:
        """Run `job` on the streams for voices and synchronise them, in the executor's thread."""
        with torch.inference_mode(), contextlib.ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            result = job()
            for stream in self._streams:
                stream.synchronize()
            return result

    def _encode_any(self, pcm: bytes, rate: int) -> Voice:
        """The voice of `pcm`, as a prompt with a transcript or, if the model cannot do that, as a reference."""
        try:
            return self.encode((Reference(pcm=pcm, sample_rate=rate, text="Noise.", use="prompt"),))
        except InvalidReference:
            return self.encode((Reference(pcm=pcm, sample_rate=rate, use="reference"),))

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


def dump(saved: SavedVoice, model: str, fingerprint: str) -> bytes:
    """Serialise `saved`, a voice of the model named `model`. Deterministic: equal voices give equal bytes."""
    metadata = {
        "format": FORMAT,
        "model": model,
        "fingerprint": fingerprint,
        "voice": msgspec.json.encode(dict(saved.facts)).decode(),
    }
    tensors = {name: tensor.cpu().contiguous() for name, tensor in saved.tensors.items()}
    return with_metadata(safetensors.torch.save(tensors), metadata)


def parse(data: bytes, fingerprint: str) -> SavedVoice:
    """Parse the output of `dump`. Raises `EngineError` if it is damaged or of another `fingerprint`."""
    metadata = read_metadata(data, fingerprint)
    try:
        facts = msgspec.json.decode(metadata.get("voice", ""), type=dict[str, str])
        return SavedVoice(safetensors.torch.load(data), facts)
    except (msgspec.MsgspecError, safetensors.SafetensorError, ValueError, KeyError) as error:
        raise EngineError(f"the voice cannot be read: {error}") from error
