"""The codec: patches of latents to audio, and recordings to patches."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from sonoro.core.errors import CheckpointError
from sonoro.models.shared.streaming import StreamingCodec

from .decoder import CodecConfig, CodecDecoder, FusedDecoder
from .encoder import CodecEncoder


class VoxCodec(StreamingCodec):
    """`sonoro.models.base.Codec` of VoxCPM2. The encoder takes 16 kHz, the decoder makes 48 kHz.
    Call `finalize` once after loading. Raises `CheckpointError` for an inconsistent configuration."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__(config.out_sample_rate, CodecDecoder(config), FusedDecoder)
        self.encoder = CodecEncoder(config)
        heard = config.sample_rate / (self.encoder.hop * config.patch_size)
        if heard != (spoken := config.out_sample_rate / self.hop):
            raise CheckpointError(f"audio_vae_config: {heard:g} patches a second are encoded, but {spoken:g} decoded")

    def encode(self, audio: Tensor, silence: Literal["before", "after"] = "after") -> Tensor:
        """Encode mono `audio` [S] at the encoder's rate to patches [N, P, D] float32, padded with silence to whole
        patches on one side. No sync."""
        patch, width = self.decoder.patch
        missing = -len(audio) % (patch * self.encoder.hop)
        filled = F.pad(audio, (missing, 0) if silence == "before" else (0, missing))
        with self.hearing(filled) as heard:
            return self.encoder.encode(heard).view(-1, patch, width)
