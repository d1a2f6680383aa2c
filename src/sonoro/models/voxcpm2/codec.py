"""The codec: patches of latents to audio, and recordings to patches."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from sonoro.core.errors import CheckpointError
from sonoro.models.streaming import StreamingCodec
from sonoro.nn.vocoder import finalize

from .decoder import CodecConfig, CodecDecoder, FusedDecoder
from .encoder import CodecEncoder

__all__ = ["CodecConfig", "VoxCodec"]


class VoxCodec(StreamingCodec):
    """Patches to audio and back; implements `sonoro.models.base.Codec`. It hears less than it speaks: 16 kHz, not 48.

    Call `finalize` once after loading. Raises `CheckpointError` for a configuration that is another codec's.
    """

    def __init__(self, config: CodecConfig) -> None:
        super().__init__(config.out_sample_rate, CodecDecoder(config), FusedDecoder)
        self.encoder, patch = CodecEncoder(config), config.patch_size
        for name, value, only in (
            ("depthwise", config.depthwise, True),
            ("use_noise_block", config.use_noise_block, False),
            ("cond_out_layer", config.cond_out_layer, False),
            ("encoder's frame rate", config.sample_rate / self.encoder.hop, config.out_sample_rate * patch / self.hop),
            ("decoder_dim, modulo that of its last width", config.decoder_dim % (1 << len(config.decoder_rates)), 0),
        ):
            if value != only:
                raise CheckpointError(f"audio_vae_config: {name} is {value}; it must be {only}")

    def finalize(self) -> None:
        """Make what is derived from the loaded weights, of both halves. Not capturable."""
        self.requires_grad_(False).eval()
        super().finalize()
        finalize(self.encoder)

    def encode(self, audio: Tensor, silence: Literal["before", "after"] = "after") -> Tensor:
        """Encode mono `audio` [S] at the encoder's rate to patches [N, P, D] float32, filled up by silence on one side.

        Synchronises nothing.
        """
        patch, width = self.decoder.patch
        missing = -len(audio) % (patch * self.encoder.hop)
        filled = F.pad(audio, (missing, 0) if silence == "before" else (0, missing))
        return self.encoder.encode(filled).view(-1, patch, width)
