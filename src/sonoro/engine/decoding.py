"""Runs the codec: frames of slots to PCM16, on the model's stream, on a second stream, or on a device of its own.

On a second stream a codec launch waits for the decode step that output its frames. The next step need not wait for the
codec, as it writes other columns. On a device of its own the codec reads a copy of the frames: after each step the
newest frame of every stepped slot is copied over. Torch orders such a copy after and before the current streams of both
devices. No sync. Depends on the protocols of `models.base` and on no model."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from sonoro.core.config import EngineConfig
from sonoro.engine.device_state import CodecState
from sonoro.models.base import Codec, CompiledCodec, Voice
from sonoro.runtime.graphs import Compiled, GraphPool, GraphSet
from sonoro.runtime.kernels import begin_chunk, end_chunk
from sonoro.runtime.ring import upload

_Decode = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


class Decoding:
    """The codec's graphs over its per-slot state, with the sizes of `config`; run them while `active`.

    `decodes[T]` maps slots [B] to PCM16 [B, T * hop] of their next T frames, these frames [B, T, ...], and the count
    of non-finite samples [B] int64, which are silenced. `admits` resets slots, if the codec has its own stream;
    `receives` stores what `send` copied, if it `is_apart`. The caller captures them.

    The codec shares graph pool `pool` and `stream`, the current one, with the model unless it `has_own_stream`: if it
    `is_apart`, on its own device, or if `codec_overlap` is set."""

    def __init__(
        self, codec: Codec, state: CodecState, config: EngineConfig, pool: GraphPool, stream: torch.cuda.Stream | None
    ) -> None:
        self._codec, self._state, self.device = codec, state, state.device
        self.is_apart, self._that_wait = state.is_apart, range(config.tuning.codec_overlap + 1, config.slots * 15 // 16)
        self.has_own_stream = state.is_apart or (stream is not None and config.tuning.codec_overlap > 0)
        self.own_stream: torch.cuda.Stream | None = None
        """The CUDA stream to be `active`; None if the codec shares the model's, and on a CPU."""
        if self.has_own_stream and stream is not None:
            pool, self.own_stream = GraphPool(), torch.cuda.Stream(self.device, priority=-1)
            self.own_stream.wait_stream(torch.cuda.current_stream(self.device))
        self.beside = None if self.is_apart else self.own_stream
        """The codec's stream, if it is a second one on the model's device: then call `follow` and `lead`."""
        scratch, is_eager = state.decoded.shape[0] - 1, config.is_eager

        def graphs(
            name: str, function: Callable[[Tensor], Any], sizes: Sequence[int], compiled: Compiled | None = None
        ) -> GraphSet:
            how: dict[str, Any] = {"pool": pool, "is_eager": is_eager, "compiled": compiled}
            return GraphSet(name, function, sizes, scratch, self.device, **how)

        with self.active():
            self._compiled = None
            if isinstance(codec, CompiledCodec) and not is_eager:
                self._compiled = codec.compiled_decode(state.history, max(config.chunk_frames))
            self.decodes = {
                frames: graphs(f"codec {frames}", self._eager(frames), config.codec_batches, self._in_one_call(frames))
                for frames in config.chunk_frames
            }
            self.admits = graphs("codec admit", self._admit, config.frame_batches)
            self.receives = graphs("codec receive", self._receive, config.frame_batches)

    @property
    def sets(self) -> dict[str, list[GraphSet]]:
        """The graph sets in use, by kind, the shortest chunks first."""
        moves = [self.admits, self.receives] if self.is_apart else [self.admits] if self.has_own_stream else []
        return {"codec": [*self.decodes.values()]} | ({"transfer": moves} if moves else {})

    def active(self) -> AbstractContextManager[Any]:
        """A context with the codec's device and stream as the current ones."""
        return torch.cuda.stream(self.own_stream)

    def follow(self) -> None:
        """Make later codec launches `beside` wait for all work now on the current stream. No sync."""
        assert self.beside is not None
        self.beside.wait_stream(torch.cuda.current_stream(self.device))

    def lead(self, stepped: int) -> None:
        """Make later work on the current stream wait for the codec `beside`, which brings first packets sooner, if more
        than `codec_overlap` requests were `stepped`, but under 15 of 16 slots: there throughput decides. No sync."""
        assert self.beside is not None
        if stepped in self._that_wait:
            torch.cuda.current_stream(self.device).wait_stream(self.beside)

    def clear(self, slots: Tensor) -> None:
        """Clear the history of `slots`. Capturable, on the codec's device."""
        self._codec.reset(self._state.history, slots)
        self._state.decoded.index_fill_(0, slots, 0)

    def prime(self, voices: Sequence[tuple[int, Voice]]) -> None:
        """Prime the history of each cleared slot with its voice's reference frames. No sync."""
        for slot, voice in voices:
            self._codec.prime(self._state.history, upload([slot], torch.int64, self.device), voice)

    def newest(self, frames: Tensor, slots: Tensor, length: Tensor) -> tuple[Tensor, ...]:
        """The newest of `frames` [N+1, T, ...] of each of `slots` [B] int64, whose frame counts are `length` [B].
        For `send`; () unless the codec is apart. Capturable, on the device of `frames`."""
        return (frames[slots, (length - 1).clamp(min=0)],) if self.is_apart else ()

    def send(self, length: Tensor, newest: Tensor) -> None:
        """Copy `length` [B] and `newest` [B, ...] of a padded step to the codec's device, for `receives`. No sync."""
        assert self._state.arrived is not None
        for here, there in zip(self._state.arrived, (length, newest), strict=True):
            here[: there.shape[0]].copy_(there, non_blocking=True)

    def _admit(self, slots: Tensor) -> None:
        self.clear(slots)
        if self.is_apart:
            self._state.frames.index_fill_(0, slots, 0)

    def _receive(self, slots: Tensor) -> None:
        """Store what was sent. A slot that has ended stores its last frame again; one without frames, column 0."""
        assert self._state.arrived is not None
        length, newest = (arrived[: slots.shape[0]] for arrived in self._state.arrived)
        self._state.frames[slots, (length - 1).clamp(min=0)] = newest

    def _eager(self, frames: int) -> _Decode:
        codec, history = self._codec, self._state.history
        return self._decoder(frames, lambda chunk, slots: codec.decode(chunk, slots, history))

    def _in_one_call(self, frames: int) -> Compiled | None:
        """`_eager` in compiled code, for a batch of any size."""
        if self._compiled is None:
            return None
        return Compiled(self._decoder(frames, self._compiled), self._state.decoded.shape[0])

    def _decoder(self, frames: int, decoded: Callable[[Tensor, Tensor], Tensor]) -> _Decode:
        """The function of slots that `decodes[frames]` runs: the codec is called as `decoded(frames, slots)`."""
        state = self._state

        def decode(slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            chunk, broken = begin_chunk(state.frames, state.decoded, slots, frames)
            return end_chunk(decoded(chunk, slots), broken), chunk, broken

        return decode
