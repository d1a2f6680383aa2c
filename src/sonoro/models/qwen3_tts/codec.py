"""The codec: frames of codes to audio, and audio to frames for cloning."""

import torch
from torch import Tensor

from sonoro.core.errors import CheckpointError
from sonoro.models.shared.compiled_codec import PackedConvs
from sonoro.models.shared.streaming import StreamingCodec
from sonoro.native.library import PACKING, load
from sonoro.nn.history import History
from sonoro.runtime.memory import compact_heap
from sonoro.runtime.threads import is_small

from .compiled_codec import CompiledDecoder
from .config import CodecConfig
from .decoder import CodecDecoder, FusedDecoder
from .encoder import CodecEncoder


class Qwen3Codec(StreamingCodec):
    """`sonoro.models.base.Codec` of Qwen3-TTS. Its state_dict matches the file in speech_tokenizer.
    Call `finalize` once after loading. Raises `CheckpointError` for an inconsistent configuration."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__(config.output_sample_rate, CodecDecoder(config.decoder_config), FusedDecoder)
        _check_equal("decode_upsample_rate", config.decode_upsample_rate, "product of its rates", self.hop)
        self._packed: PackedConvs | None = None
        self._runs_in_torch = False
        self.encoder = None
        if config.encoder_config is not None:
            self.encoder = CodecEncoder(config.encoder_config, config.encoder_valid_num_quantizers)
            _check_equal("encode_downsample_rate", config.encode_downsample_rate, "encoder's stride", self.encoder.hop)

    def compiled_decode(self, history: History, most_frames: int) -> CompiledDecoder | None:
        """`CompiledCodec.compiled_decode`; None on a GPU, for dtypes other than float32, and for a large decoder, which
        needs more threads."""
        weight = self.decoder.weight
        if weight.dtype != torch.float32 or not weight.is_cpu or not is_small(self.decoder):
            return None
        library = load()
        if library is None:
            return None
        with PACKING, compact_heap():
            self._packed = self._packed or PackedConvs(library, frees=not self._runs_in_torch)
            return CompiledDecoder(self.decoder, history, self._packed, most_frames)

    def move(self, device: torch.device) -> None:
        """`StreamingCodec.move`."""
        self._keep_in_torch()
        super().move(device)

    def _decode(self, frames: Tensor, slots: Tensor | None, history: History | None, rendered: int) -> Tensor:
        self._keep_in_torch()
        return super()._decode(frames, slots, history, rendered)

    def _keep_in_torch(self) -> None:
        """From now on the decoder has its weights in torch, whatever compiled code has packed."""
        if not self._runs_in_torch:
            with PACKING:
                self._runs_in_torch = True
                if self._packed is not None:
                    self._packed.restore()

    @torch.no_grad()
    def encode(self, audio: Tensor) -> Tensor:
        """Encode mono `audio` [S] at `sample_rate` to frames [T, K] int64, T = ceil(S / hop). No sync.
        Raises `CheckpointError` if the checkpoint has no encoder."""
        if self.encoder is None:
            raise CheckpointError("speech_tokenizer/config.json has no encoder_config: this codec cannot encode audio")
        with self.hearing(audio) as heard:
            return self.encoder.encode(heard)


def _check_equal(field: str, value: int, what: str, derived: int) -> None:
    if value != derived:
        raise CheckpointError(f"speech_tokenizer/config.json: {field} is {value}, but the {what} is {derived}")
