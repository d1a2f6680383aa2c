"""Fish Audio S2 Pro as a `SpeechModel`: the parts of this folder put together."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

from sonoro.core.errors import InvalidRequest
from sonoro.core.types import ModelSpec, OptionValue, SamplingParams, SpeechRequest
from sonoro.models.base import Codec, Controls, Spoken, Voice, WholeSegments
from sonoro.models.loading import Parts, make_family
from sonoro.models.settings import CONTROL_TOKENS
from sonoro.models.slots import DepthState, admit_staged, clear_slots
from sonoro.nn.tokenizer import TextTokenizer
from sonoro.nn.weights import fingerprint

from . import frame, voice, weights
from .config import RELEASED, ModelConfig, decoder_config, model_config
from .prompt import ConversationBuilder, FishPrompt, split_turns, stand_in
from .state import allocate, prefill, stage
from .weights import FishModules

__all__ = ["FAMILY", "FishS2", "spec_of"]

_MAX_FRAMES = 2048
_SAMPLING = SamplingParams(temperature=0.8, top_k=30, top_p=0.8, repetition_penalty=1.0)
"""What the official server draws with. It accepts a repetition penalty and ignores it."""


class FishS2(WholeSegments):
    """Slow AR, fast AR and codec behind the protocol `SpeechModel`. Holds no state of a request."""

    def __init__(self, name: str, config: ModelConfig, modules: FishModules, tokenizer: TextTokenizer) -> None:
        self.spec = spec_of(name, config)
        self.codec: Codec = modules.codec
        self._modules, lm, bound = modules, modules.lm, functools.partial
        self._conversations = ConversationBuilder(config, tokenizer)
        self.position_bytes = lm.slow.config.position_bytes(lm.head.weight.dtype)
        self.encode_voice = bound(voice.encode_voice, codec=modules.codec, device=lm.device)
        self.save_voice, self.load_voice = voice.save_voice, bound(voice.load_voice, lm.codebooks, lm.codes)
        self.reset, self.stage, self.admit = clear_slots, stage, admit_staged
        self.allocate, self.prefill = bound(allocate, lm), bound(prefill, lm)
        self.frame, self.parts = bound(frame.frame, lm), bound(frame.parts, lm)

    settings = (CONTROL_TOKENS,)

    def configure(self, values: Mapping[str, OptionValue]) -> None:
        """Take `values` of `settings`."""
        self._conversations.read_control_tokens(is_on=bool(values[CONTROL_TOKENS.name]))

    def segments(self, text: str, language: str) -> list[str]:
        """`text` as a whole, or the turns of its speakers, a few at a time."""
        return split_turns(text)

    def prepare(
        self, request: SpeechRequest, segment: str, index: int, before: Sequence[Spoken], voice: Voice | None
    ) -> FishPrompt:
        """The prompt of `segment` as the next turn after those `before`; `request.max_frames` is its limit."""
        penalty = request.sampling.repetition_penalty
        if penalty != 1.0:
            raise InvalidRequest("repetition_penalty", penalty, f"{self.spec.name} has none: leave it out")
        return self._conversations.build(segment, Controls.of(request, index), before, voice)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of the configuration, and of every tensor its name, shape, dtype and first numbers."""
        return fingerprint(repr(self._modules.lm.config), self._modules.lm, self._modules.codec)

    def check_kernels(self, state: DepthState, rows: int) -> None:
        """Run each fused kernel of a frame of `rows` rows once against its reference."""
        frame.check_kernels(self._modules.lm, state, rows)

    def frame_bytes(self, rows: int, context: int) -> int:
        """What one frame of `rows` rows must read: slow AR and its head once, fast layers once a codebook."""
        lm = self._modules.lm
        slow, fast = (sum(weight.nbytes for weight in stack.layers.parameters()) for stack in (lm.slow, lm.fast))
        depth = (lm.codebooks - 1) * (fast + lm.fast.output.weight.nbytes)
        return slow + lm.head.weight.nbytes + depth + rows * context * self.position_bytes


def spec_of(name: str, config: ModelConfig) -> ModelSpec:
    """What a checkpoint with this config.json can do."""
    codec = config.codec_config
    return ModelSpec(
        name=name,
        sample_rate=codec.sample_rate,
        hop=math.prod((*codec.decoder_rates, *codec.downsample)),
        max_frames=min(_MAX_FRAMES, config.text_config.max_seq_len // 2),
        voice_modes=("named", "cloned"),
        # Without references the model speaks as whom it likes, by the seed.
        voices=("default",),
        languages=("auto",),
        sampling=_SAMPLING,
    )


def _sizes(config: ModelConfig) -> dict[str, str | int | float]:
    text, audio = config.text_config, config.audio_decoder_config
    return {
        "licence of the weights": "Fish Audio Research License (non-commercial)",
        "width": text.dim,
        "slow layers": text.n_layer,
        "fast layers": audio.n_layer,
        "codebooks": audio.num_codebooks,
        "codes": audio.vocab_size,
        "text ids": text.vocab_size,
        "positions": text.max_seq_len,
    }


FAMILY = make_family(
    "fish_qwen3_omni",
    RELEASED,
    ("*.json", "*.safetensors", "codec.pth"),
    Parts(
        read=model_config,
        weights=weights,
        tokenizer=lambda config, folder: stand_in(config) if folder is None else TextTokenizer.from_folder(folder),
        tokenizer_file="tokenizer.json",
        model=FishS2,
        spec=spec_of,
        sizes=_sizes,
        position_bytes=lambda config, dtype: decoder_config(config, config.text_config).position_bytes(dtype),
    ),
)
