"""The codec: latents to audio, and recordings to latents for cloning."""

import torch
from torch import Tensor

from sonoro.models.shared.streaming import ModuleDecoder, StreamingCodec

from .compiled_codec import CompiledDecoder
from .config import CodecConfig
from .decoder import CodecDecoder
from .encoder import CodecEncoder


class PocketCodec(StreamingCodec):
    """`sonoro.models.base.Codec` of Pocket TTS. Call `finalize` once after loading."""

    compiled = CompiledDecoder

    def __init__(self, config: CodecConfig) -> None:
        super().__init__(config.sample_rate, CodecDecoder(config), ModuleDecoder)
        self.encoder = CodecEncoder(config)

    @torch.no_grad()
    def encode(self, audio: Tensor) -> Tensor:
        """Encode mono `audio` [S] to latents [V, D] float32, V = ceil(S / hop). No sync."""
        with self.hearing(audio) as heard:
            return self.encoder.encode(heard)
