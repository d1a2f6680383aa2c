"""Frames by slot to audio: on the stream of the model, on one beside it, or on a device of its own.

Beside the model, what decodes the frames of a step waits for that step, and the next step does not wait for it: it
writes other columns. Apart, on another device, the codec works on a copy of the frames: after each step the newest
frame of every slot is sent over, and what decodes them is the very same. All that is sent is ordered on both devices by
torch, which lets a copy between two devices wait for the current stream of either, and either for the copy. The host
waits for nothing. Knows the protocols of `models.base` and no model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from sonoro.core.config import EngineConfig
from sonoro.engine.device_state import CodecState
from sonoro.models.base import Codec, Voice
from sonoro.runtime.graphs import GraphPool, GraphSet
from sonoro.runtime.ring import upload

__all__ = ["Decoding", "to_pcm16"]


class Decoding:
    """The codec's state by slot and its graphs, with the sizes of `config`, to be run while `active`.

    `decodes` by frames give the PCM16 [B, frames * hop] of the next frames of slots, these, and how many of the samples
    [B] int64 were not finite, and are silent. With a stream of its own, `admits` reset slots; apart from the model,
    `receives` store for slots what was sent. They are captured by the caller.

    `pool` is that of the graphs of all else, and `stream` theirs, which is the current one when this is made; the codec
    shares both unless it `has_own_stream`: on a device of its own, where it `is_apart`, or as `codec_overlap` asks.
    """

    def __init__(
        self, codec: Codec, state: CodecState, config: EngineConfig, pool: GraphPool, stream: torch.cuda.Stream | None
    ) -> None:
        self._codec, self._state, self.device = codec, state, state.device
        self.stream, self.is_apart, self._most_beside = stream, state.is_apart, config.codec_overlap
        self.has_own_stream = state.is_apart or (stream is not None and config.codec_overlap > 0)
        if self.has_own_stream and stream is not None:
            pool, self.stream = GraphPool(), torch.cuda.Stream(self.device, priority=-1)
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        scratch, is_eager = state.decoded.shape[0] - 1, config.is_eager

        def graphs(name: str, function: Callable[[Tensor], Any], sizes: Sequence[int]) -> GraphSet:
            return GraphSet(name, function, sizes, scratch, self.device, pool=pool, is_eager=is_eager)

        with self.active():
            self.decodes = {
                frames: graphs(f"codec {frames}", self._decoder(frames), config.codec_batches)
                for frames in config.chunk_frames
            }
            self.admits = graphs("codec place", self._admit, config.frame_batches)
            self.receives = graphs("codec receive", self._receive, config.frame_batches)

    @property
    def sets(self) -> dict[str, list[GraphSet]]:
        """All graphs that are used, by kind, the shortest chunks first."""
        moves = [self.admits, self.receives] if self.is_apart else [self.admits] if self.has_own_stream else []
        return {"codec": [*self.decodes.values()]} | ({"transfer": moves} if moves else {})

    def active(self) -> AbstractContextManager[Any]:
        """Where its device and stream are the current ones."""
        return torch.cuda.stream(self.stream) if self.has_own_stream else contextlib.nullcontext()

    @property
    def beside(self) -> list[torch.cuda.Stream]:
        """Its stream, if that is a second one on the device of the model."""
        return [self.stream] if self.has_own_stream and not self.is_apart and self.stream is not None else []

    def follow(self) -> None:
        """Let what is decoded from here on wait for what the current stream was given. No sync."""
        for stream in self.beside:
            stream.wait_stream(torch.cuda.current_stream(self.device))

    def lead(self, stepped: int) -> None:
        """Let what the current stream is given from here on wait for the codec, if more requests were `stepped` than
        it may run beside. No sync."""
        for stream in self.beside if stepped > self._most_beside else ():
            torch.cuda.current_stream(self.device).wait_stream(stream)

    def clear(self, slots: Tensor) -> None:
        """Clear the history of `slots`. Capturable, on the codec's device."""
        self._codec.reset(self._state.history, slots)
        self._state.decoded.index_fill_(0, slots, 0)

    def prime(self, slots: Sequence[int], voices: Sequence[Voice | None]) -> None:
        """Prime each of `slots`, which have been cleared, with its voice's reference if it has one. No sync."""
        for slot, voice in zip(slots, voices, strict=True):
            if voice is not None and voice.reference_frames is not None:
                self._codec.prime(self._state.history, upload([slot], torch.int64, self.device), voice)

    def newest(self, frames: Tensor, slots: Tensor, length: Tensor) -> tuple[Tensor, ...]:
        """What to send after a step: of `slots` [B] int64, whose `length` [B] is known, the last of `frames`.

        Nothing unless the codec is apart. Capturable, on the device of `frames`.
        """
        return (frames[slots, (length - 1).clamp(min=0)],) if self.is_apart else ()

    def send(self, length: Tensor, newest: Tensor) -> None:
        """Copy the `newest` frames of a step, padded, to the codec's device, for `receives` to store. No sync."""
        assert self._state.arrived is not None
        for here, there in zip(self._state.arrived, (length, newest), strict=True):
            here[: there.shape[0]].copy_(there, non_blocking=True)

    def _admit(self, slots: Tensor) -> None:
        self.clear(slots)
        if self.is_apart:
            self._state.frames.index_fill_(0, slots, 0)

    def _receive(self, slots: Tensor) -> None:
        """A slot that has ended stores its last frame again; one that never made any, its first column."""
        assert self._state.arrived is not None
        length, newest = (arrived[: slots.shape[0]] for arrived in self._state.arrived)
        self._state.frames[slots, (length - 1).clamp(min=0)] = newest

    def _decoder(self, frames: int) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
        """A function of slots that gives what `decodes` do."""
        codec, state = self._codec, self._state
        offsets = torch.arange(frames, device=self.device)
        last = state.frames.shape[1] - 1

        def decode(slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            first = state.decoded[slots]
            columns = (first[:, None] + offsets).clamp(max=last)
            made = state.frames[slots[:, None], columns]
            pcm = codec.decode(made, slots, state.history)
            # The scratch slot may repeat: it is given the same number each time.
            state.decoded.index_copy_(0, slots, first + frames)
            is_finite = pcm.isfinite()
            return to_pcm16(pcm.where(is_finite, 0.0)), made, frames * codec.hop - is_finite.sum(1)

        return decode


def to_pcm16(pcm: Tensor) -> Tensor:
    """Float `pcm` in [-1, 1] as int16, exactly as `sonoro.core.audio.to_pcm16` rounds and clips."""
    return (pcm * 32768.0).round().clamp(-32768, 32767).to(torch.int16)
