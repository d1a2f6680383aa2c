"""The codec: frames of codes to audio, and audio to frames for cloning."""

import torch
from torch import Tensor

from sonoro.core.errors import CheckpointError
from sonoro.models.shared.streaming import StreamingCodec

from .compiled_codec import CompiledDecoder
from .config import CodecConfig
from .decoder import CodecDecoder, FusedDecoder
from .encoder import CodecEncoder


class Qwen3Codec(StreamingCodec):
    """`sonoro.models.base.Codec` of Qwen3-TTS. Its state_dict matches the file in speech_tokenizer.
    Call `finalize` once after loading. Raises `CheckpointError` for an inconsistent configuration."""

    compiled = CompiledDecoder

    def __init__(self, config: CodecConfig) -> None:
        super().__init__(config.output_sample_rate, CodecDecoder(config.decoder_config), FusedDecoder)
        _check_equal("decode_upsample_rate", config.decode_upsample_rate, "product of its rates", self.hop)
        self.encoder = None
        if config.encoder_config is not None:
            self.encoder = CodecEncoder(config.encoder_config, config.encoder_valid_num_quantizers)
            _check_equal("encode_downsample_rate", config.encode_downsample_rate, "encoder's stride", self.encoder.hop)

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
