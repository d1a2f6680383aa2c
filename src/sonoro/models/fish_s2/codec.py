"""The codec: frames of codes to audio, and reference audio to frames."""

import torch
from torch import Tensor

from sonoro.core.errors import CheckpointError
from sonoro.models.shared.streaming import StreamingCodec

from .decoder import CodecConfig, CodecDecoder, FusedDecoder
from .encoder import CodecEncoder


class FishCodec(StreamingCodec):
    """`sonoro.models.base.Codec` of Fish S2.
    Call `finalize` once after loading. Raises `CheckpointError` for an inconsistent configuration."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__(config.sample_rate, CodecDecoder(config), FusedDecoder)
        self.encoder = CodecEncoder(config)
        for what, ours, theirs in (
            ("hop", self.encoder.hop, self.hop),
            ("width", config.encoder_dim << len(config.encoder_rates), config.transformer.width),
            ("transformer's width", config.encoder_transformer.width, config.transformer.width),
        ):
            if ours != theirs:
                raise CheckpointError(f"codec_config: the encoder's {what} is {ours}, but the decoder's is {theirs}")

    @torch.no_grad()
    def encode(self, audio: Tensor) -> Tensor:
        """Encode mono `audio` [S] at `sample_rate` to frames [T, K] int64, T = ceil(S / hop). No sync."""
        with self.hearing(audio) as heard:
            return self.encoder.encode(heard, self.decoder.quantizer)
