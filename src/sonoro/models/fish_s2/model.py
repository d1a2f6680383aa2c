"""Fish Audio S2 Pro as a `SpeechModel`."""

import functools
import math
from collections.abc import Mapping, Sequence

from sonoro.core.errors import InvalidRequest
from sonoro.core.options import OptionValue
from sonoro.core.types import ModelSpec, Reference, SamplingParams, SpeechRequest, TextFormat
from sonoro.models.base import Codec, SavedVoice, Spoken, Voice
from sonoro.models.settings import CONTROL_TOKENS
from sonoro.models.shared.loading import Family
from sonoro.models.shared.prompts import RowPrompt
from sonoro.models.shared.slots import PacksPrompts, admit_staged, clear_slots
from sonoro.nn.tokenizer import TextTokenizer
from sonoro.nn.weights import fingerprint
from sonoro.runtime.sampling import Controls
from sonoro.text.splitting import SpokenText

from . import frame, voice, weights
from . import state as by_slot
from .config import RELEASED, ModelConfig, decoder_config, model_config
from .prompt import PHONEME_TOKENS, ConversationBuilder, split_turns, stand_in
from .weights import FishModules

_MAX_FRAMES = 2048
_SAMPLING = SamplingParams(temperature=0.8, top_k=30, top_p=0.8, repetition_penalty=1.0)
"""The official server's sampling defaults. It accepts a repetition penalty and ignores it."""


class FishS2(PacksPrompts):
    """Slow AR, fast AR and codec behind the protocols of `models.base`. Holds no per-request state."""

    def __init__(self, name: str, config: ModelConfig, modules: FishModules, tokenizer: TextTokenizer) -> None:
        self.spec = spec_of(name, config)
        self.codec: Codec = modules.codec
        self._modules, self.backbone = modules, modules.lm.slow
        self._prompts = ConversationBuilder(config, tokenizer)
        self.position_bytes = self.backbone.config.position_bytes(modules.lm.head.weight.dtype)

    frames, states = frame, by_slot
    settings = (CONTROL_TOKENS,)
    reset, stage, admit = staticmethod(clear_slots), staticmethod(by_slot.stage), staticmethod(admit_staged)
    save_voice = staticmethod(voice.save_voice)

    def configure(self, values: Mapping[str, OptionValue]) -> None:
        self._prompts.control_tokens.accept(is_on=bool(values[CONTROL_TOKENS.name]))

    def segments(
        self, text: str, language: str, text_format: TextFormat = "auto", voice: str | None = None
    ) -> list[SpokenText]:
        """`text` as one segment, or a few speaker turns per segment."""
        return split_turns(text)

    def prepare(
        self, request: SpeechRequest, segment: str, index: int, before: Sequence[Spoken], voice: Voice | None
    ) -> RowPrompt:
        """The prompt of `segment` as the next turn after `before`. Raises `InvalidRequest` for a repetition penalty."""
        penalty = request.sampling.repetition_penalty
        if penalty != 1.0:
            raise InvalidRequest("repetition_penalty", penalty, f"{self.spec.name} does not support it: leave it out")
        return self._prompts.build(segment, Controls.of(request, index), before, voice)

    @functools.cached_property
    def fingerprint(self) -> str:
        return fingerprint(repr(self._modules.lm.config), self._modules.lm, self._modules.codec)

    def encode_voice(self, references: Sequence[Reference]) -> Voice:
        for reference in references:
            self._prompts.check_transcript(reference.text or "")
        return voice.encode_voice(references, self._modules.codec, self._modules.lm.device)

    def load_voice(self, saved: SavedVoice) -> Voice:
        return voice.load_voice(self._modules.lm.codebooks, self._modules.lm.codes, saved)

    def frame_bytes(self, batch: int, context: int) -> int:
        # The slow AR and its head are read once, the fast AR's layers once per codebook.
        lm = self._modules.lm
        slow, fast = (sum(weight.nbytes for weight in stack.layers.parameters()) for stack in (lm.slow, lm.fast))
        depth = (lm.codebooks - 1) * (fast + lm.fast.output.weight.nbytes)
        return slow + lm.head.weight.nbytes + depth + batch * context * self.position_bytes


def spec_of(name: str, config: ModelConfig) -> ModelSpec:
    codec = config.codec_config
    return ModelSpec(
        name=name,
        sample_rate=codec.sample_rate,
        hop=math.prod((*codec.decoder_rates, *codec.downsample)),
        max_frames=min(_MAX_FRAMES, config.text_config.max_seq_len // 2),
        voice_modes=("named", "cloned"),
        # Without references the voice depends on the seed.
        voices=("default",),
        languages=("auto",),
        sampling=_SAMPLING,
        is_continued=True,
        arpabet=PHONEME_TOKENS,
        cues=("[", "]"),
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


FAMILY = Family(
    model_type="fish_qwen3_omni",
    configurations=RELEASED,
    hub_files=("*.json", "*.safetensors", "codec.pth"),
    read=model_config,
    files=weights.FILES,
    tokenizer=lambda config, folder: stand_in(config) if folder is None else TextTokenizer.from_folder(folder),
    tokenizer_file="tokenizer.json",
    model=FishS2,
    spec=spec_of,
    sizes=_sizes,
    position_bytes=lambda config, dtype: decoder_config(config, config.text_config).position_bytes(dtype),
)
