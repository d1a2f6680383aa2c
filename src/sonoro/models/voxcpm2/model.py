"""VoxCPM2 as a `SpeechModel`."""

import functools
import math
import re
from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from sonoro.core.errors import InvalidRequest
from sonoro.core.options import OptionSpec, OptionValue
from sonoro.core.types import ModelSpec, Reference, SamplingParams, SpeechRequest, TextFormat
from sonoro.models.base import Codec, SavedVoice, Spoken, Voice
from sonoro.models.settings import CONTROL_TOKENS
from sonoro.models.shared.loading import Family
from sonoro.models.shared.prompts import RowPrompt
from sonoro.models.shared.slots import PacksPrompts
from sonoro.nn.tokenizer import TextTokenizer
from sonoro.nn.weights import fingerprint
from sonoro.runtime.sampling import Controls
from sonoro.text.splitting import SpokenText, joined

from . import frame, voice, weights
from . import state as by_slot
from .config import RELEASED, ModelConfig, lm_config, read
from .flow import FEWEST_STEPS, MOST_STEPS, OFFICIAL_STEPS
from .prompt import PromptBuilder, stand_in
from .state import FrameState
from .weights import VoxModules

_MAX_FRAMES = 4096
_SAMPLING = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0)
"""The model samples no codes, only noise."""

_ATTEMPTS = 3
_STEPS = OptionSpec(
    name="solver_steps", type="int", default=10, minimum=FEWEST_STEPS, maximum=MOST_STEPS,
    help="flow-matching solver steps per frame; fewer save no time, 1 gives noise; most_solver_steps allows more",
)  # fmt: skip
_MOST_STEPS = OptionSpec(
    name="most_solver_steps", type="int", default=MOST_STEPS, minimum=MOST_STEPS, maximum=OFFICIAL_STEPS,
    help="largest solver_steps of a request; every frame takes the time of that many steps",
)  # fmt: skip
_PRIMING = OptionSpec(
    name="codec_priming", type="str", default="whole", choices=("whole", "last", "none"),
    help="which part of a continued recording primes the codec; the official package uses its last 3 patches, or none "
    "when it streams",
)  # fmt: skip
_PATCHES = {"whole": None, "last": 3, "none": 0}

_OPTIONS = (
    OptionSpec(
        name="cfg_value", type="float", default=2.0, minimum=0.1, maximum=10.0,
        help="classifier-free guidance scale; 1 is no guidance, 1 to 3 are useful",
    ),
    _STEPS,
    OptionSpec(
        name="min_len", type="int", default=2, minimum=0, maximum=_MAX_FRAMES,
        help="index of the last frame, from 0, at which the stop head is ignored",
    ),
)  # fmt: skip


class VoxCPM2(PacksPrompts):
    """Both language models, flow and codec behind the protocols of `models.base`. Holds no per-request state."""

    def __init__(self, name: str, config: ModelConfig, modules: VoxModules, tokenizer: TextTokenizer) -> None:
        self.spec, self.position_bytes = spec_of(name, config), _position_bytes(config, modules.lm.weight.dtype)
        self.codec: Codec = modules.codec
        self._modules, self.backbone = modules, modules.lm.base_lm
        self._prompts = PromptBuilder(config, tokenizer)
        self._config, self._priming = config, _PRIMING.default

    frames, states = frame, by_slot
    settings = (CONTROL_TOKENS, _MOST_STEPS, _PRIMING)
    reset, stage, admit = staticmethod(by_slot.reset), staticmethod(by_slot.stage), staticmethod(by_slot.admit)
    is_text_alone, save_voice = staticmethod(by_slot.is_text_alone), staticmethod(voice.save_voice)

    def configure(self, values: Mapping[str, OptionValue]) -> None:
        if CONTROL_TOKENS.name in values:
            self._prompts.control_tokens.accept(is_on=bool(values[CONTROL_TOKENS.name]))
        if _MOST_STEPS.name in values:
            flow, most = self._modules.lm.feat_decoder, int(values[_MOST_STEPS.name])
            flow.most_steps = most
            with torch.no_grad():
                flow.make_tables()
            steps = msgspec.structs.replace(_STEPS, maximum=most)
            options = tuple(steps if one.name == steps.name else one for one in self.spec.options)
            self.spec = msgspec.structs.replace(self.spec, options=options)
        self._priming = values.get(_PRIMING.name, self._priming)

    def encode_voice(self, references: Sequence[Reference]) -> Voice:
        for reference in references:
            self._prompts.check_transcript(reference.text or "")
        codec, device = self._modules.codec, self._modules.lm.weight.device
        return voice.encode_voice(self._config, codec, device, references, _PATCHES[str(self._priming)])

    def load_voice(self, saved: SavedVoice) -> Voice:
        return voice.load_voice(self._config, saved, _PATCHES[str(self._priming)])

    def segments(
        self, text: str, language: str, text_format: TextFormat = "auto", voice: str | None = None
    ) -> list[SpokenText]:
        """`text` as one segment, with white space collapsed as in the official front end."""
        whole = SpokenText(text)
        return [joined([whole.part(*found.span()) for found in re.finditer(r"\S+", text)], " ")]

    def prepare(
        self, request: SpeechRequest, segment: str, index: int, before: Sequence[Spoken], voice: Voice | None
    ) -> RowPrompt:
        """The prompt of `segment` as the continuation of `before`. Raises `InvalidRequest` for sampling parameters."""
        for name in ("temperature", "top_k", "top_p", "repetition_penalty"):
            if (given := getattr(request.sampling, name)) != (only := getattr(_SAMPLING, name)):
                raise InvalidRequest(name, given, f"{self.spec.name} samples nothing: it must be {only:g}, or left out")
        return self._prompts.build(segment, Controls.of(request, index), before, voice, request.instructions)

    @functools.cached_property
    def fingerprint(self) -> str:
        # Saved voices depend on the priming setting.
        primed = "" if self._priming == _PRIMING.default else f" {self._priming}"
        return fingerprint(repr(self._modules.lm.config) + primed, self._modules.lm, self._modules.codec)

    def prefill_text(self, state: FrameState, tokens: Tensor) -> None:
        by_slot.prefill(self._modules.lm, state, tokens, is_text_alone=True)


def spec_of(name: str, config: ModelConfig) -> ModelSpec:
    codec = config.codec
    return ModelSpec(
        name=name,
        sample_rate=codec.out_sample_rate,
        hop=math.prod(codec.decoder_rates) * config.patch_size,
        max_frames=min(_MAX_FRAMES, config.max_length // 2),
        voice_modes=("named", "described", "cloned"),
        # Without a recording the voice depends on the seed and the instructions.
        voices=("default",),
        languages=("auto",),
        sampling=_SAMPLING,
        options=_OPTIONS,
        accepts_instructions=True,
        is_continued=True,
        attempts=_ATTEMPTS,
    )


def _sizes(config: ModelConfig) -> dict[str, str | int | float]:
    lm, local, flow = config.lm_config, config.encoder_config, config.dit_config
    return {
        "licence of the weights": "Apache License 2.0",
        "width": lm.hidden_size,
        "base layers": lm.num_hidden_layers,
        "residual layers": config.residual_lm_num_layers,
        "local encoder layers": local.num_layers,
        "flow layers": flow.num_layers,
        "patch": f"{config.patch_size} x {config.feat_dim}",
        "text ids": lm.vocab_size,
        "positions": config.max_length,
    }


def _position_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return lm_config(config, config.paged_layers).position_bytes(dtype)


FAMILY = Family(
    model_type="voxcpm2",
    configurations=RELEASED,
    hub_files=("*.json", "*.safetensors", "audiovae.pth"),
    read=read,
    files=weights.FILES,
    tokenizer=lambda config, folder: stand_in(config) if folder is None else TextTokenizer.from_folder(folder),
    tokenizer_file="tokenizer.json",
    model=VoxCPM2,
    spec=spec_of,
    sizes=_sizes,
    position_bytes=_position_bytes,
    # int8 fails its gate: docs/hardware.md, "Does it sound the same?".
    quantizations=("fp8",),
)
