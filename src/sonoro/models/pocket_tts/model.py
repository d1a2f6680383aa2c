"""Pocket TTS as a `SpeechModel`."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from sonoro.core.errors import InvalidRequest
from sonoro.core.options import OptionSpec, OptionValue
from sonoro.core.types import ModelSpec, Reference, SamplingParams, SpeechRequest, TextFormat
from sonoro.models.base import Codec, SavedVoice, Spoken, Voice
from sonoro.models.settings import CONTROL_TOKENS
from sonoro.models.shared.compiled import PackedWeights
from sonoro.models.shared.loading import Family
from sonoro.models.shared.model_files import MODEL_FILES
from sonoro.models.shared.slots import SpeaksFrames
from sonoro.nn import stored
from sonoro.nn.tokenizer import TextTokenizer
from sonoro.nn.weights import fingerprint
from sonoro.runtime.sampling import Controls
from sonoro.text import read as read_english
from sonoro.text.splitting import SpokenText

from . import frame, voice, weights
from . import state as by_slot
from .compiled import CompiledFrame, packed
from .config import RELEASED, ModelConfig, configuration_file, read
from .flow import FEWEST_STEPS, MOST_STEPS
from .prompt import CONTROLS, PocketPrompt, PromptBuilder, find_tokenizer
from .state import FrameState
from .voice import PocketVoice
from .weights import PocketModules

_MAX_FRAMES = 1024
_STEPS = OptionSpec(
    name="flow_steps", type="int", default=FEWEST_STEPS, minimum=FEWEST_STEPS, maximum=MOST_STEPS,
    help="steps of the flow head per frame, for heads that have times; the released ones were distilled for one",
)  # fmt: skip
_READING = OptionSpec(
    name="reads_english", type="bool", default=False,
    help="read numbers, dates, units and signs as English words, which the official package leaves to the model",
)  # fmt: skip


class PocketTTS(SpeaksFrames):
    """Language model, flow head and codec behind the protocols of `models.base`. Keeps its voices, once asked for."""

    def __init__(self, name: str, config: ModelConfig, modules: PocketModules, tokenizer: TextTokenizer) -> None:
        self.spec, self.position_bytes = spec_of(name, config), config.backbone.position_bytes(modules.lm.weight.dtype)
        self.codec: Codec = modules.codec
        self._config, self._modules, self.backbone = config, modules, modules.lm.transformer
        self._prompts = PromptBuilder(config, tokenizer)
        self.word_heads, can_read = config.word_heads, config.language in ("english", "auto")
        self.settings = (CONTROL_TOKENS, _STEPS, *([_READING] if can_read else []))
        files = (file for file in config.voices.values() if file is not None)
        self._files = {file: voice.checked(config, file, stored.read_all(file)) for file in files}
        self._own: dict[str, PocketVoice] = {}

    frames, states = frame, by_slot
    reset, stage, admit = staticmethod(by_slot.reset), staticmethod(by_slot.stage), staticmethod(by_slot.admit)
    save_voice = staticmethod(voice.save_voice)

    def configure(self, values: Mapping[str, OptionValue]) -> None:
        if CONTROL_TOKENS.name in values:
            self._prompts.control_tokens.accept(is_on=bool(values[CONTROL_TOKENS.name]))
        if _STEPS.name in values:
            self._modules.lm.flow_net.make_times(int(values[_STEPS.name]))
        if _READING.name in values:
            reader = "english" if values[_READING.name] else None
            self.spec = msgspec.structs.replace(self.spec, text_normalizer=reader)

    def encode_voice(self, references: Sequence[Reference]) -> Voice:
        return voice.encode_voice(self._modules.lm, self._modules.codec, references)

    def load_voice(self, saved: SavedVoice) -> Voice:
        return voice.load_voice(self._modules.lm, saved)

    def segments(
        self, text: str, language: str, text_format: TextFormat = "auto", voice: str | None = None
    ) -> list[SpokenText]:
        """`text` in the official chunks; read as English before, if so set."""
        written = SpokenText(text) if self.spec.text_normalizer is None else read_english(text, text_format)
        return self._prompts.rules.chunks(written)

    def prepare(
        self, request: SpeechRequest, segment: str, index: int, before: Sequence[Spoken], voice: Voice | None
    ) -> PocketPrompt:
        """The prompt of `segment`, without those before it. Raises `InvalidRequest` for sampling parameters that choose
        among codes."""
        for name in ("top_k", "top_p", "repetition_penalty"):
            if (given := getattr(request.sampling, name)) != (only := getattr(self.spec.sampling, name)):
                raise InvalidRequest(name, given, f"{self.spec.name} has no codes: it must be {only:g}, or left out")
        state = self._own_voice(request.voice or self.spec.voices[0]) if voice is None else voice.data
        return self._prompts.build(segment, Controls.of(request, index), state)

    def _own_voice(self, name: str) -> PocketVoice:
        if name not in self._own:
            lm, file = self._modules.lm, self._config.voices[name]
            self._own[name] = voice.stand_in(lm) if file is None else voice.read_voice(lm, file, self._files[file])
        return self._own[name]

    @functools.cached_property
    def fingerprint(self) -> str:
        config, codec = self._config, self._config.mimi
        sizes = (config.backbone, config.flow_lm.flow, codec.seanet, codec.transformer, *codec.decoding)
        return fingerprint(repr(sizes), self._modules.lm, self._modules.codec)

    def compiled_steps(self, state: FrameState) -> CompiledFrame | None:
        """`CompiledModel.compiled_steps`; None on a GPU, and for layouts and dtypes that the compiled code lacks."""
        return None if self._packed is None else CompiledFrame(self._modules.lm, self._packed, state)

    @functools.cached_property
    def _packed(self) -> PackedWeights | None:
        return packed(self._modules.lm)


def spec_of(name: str, config: ModelConfig) -> ModelSpec:
    own = tuple(config.voices)
    threshold, after = config.default_eos_threshold, config.model_recommended_frames_after_eos
    return ModelSpec(
        name=name,
        sample_rate=config.mimi.sample_rate,
        hop=config.mimi.hop,
        max_frames=_MAX_FRAMES,
        voice_modes=("named", "cloned") if own else ("cloned",),
        voices=own,
        needs_transcript=False,
        languages=("auto", *(() if config.language == "auto" else (config.language,))),
        sampling=SamplingParams(
            temperature=config.default_temperature, top_k=0, top_p=1.0, repetition_penalty=1.0
        ),
        options=(
            OptionSpec(
                name="eos_threshold", type="float", default=threshold, minimum=-100.0, maximum=100.0,
                help="speech ends once its logit exceeds this; lower ends earlier",
            ),
            OptionSpec(
                name="frames_after_eos", type="int", default=-1 if after is None else after, minimum=-1, maximum=100,
                help="frames spoken from the decision to end on; -1 is 3, or 5 for at most four words",
            ),
        ),
    )  # fmt: skip


def _sizes(config: ModelConfig) -> dict[str, str | int | float]:
    lm, backbone, (net, windows) = config.flow_lm, config.backbone, config.mimi.decoding
    return {
        "licence of the weights": "CC-BY-4.0; recordings of voices have licences of their own",
        "language": config.language,
        "width": backbone.width,
        "layers": backbone.layers,
        "heads": f"{backbone.heads} ({backbone.kv_heads}) x {backbone.head_width}",
        "flow head": f"{lm.flow.type}, {lm.flow.depth} x {lm.flow.dim}",
        "latents": config.latents,
        "text ids": lm.lookup_table.n_bins,
        "codec layers": windows.num_layers,
        "codec width": net.n_filters << len(net.ratios),
    }


def _owns(folder: Path) -> bool:
    """Whether `folder` holds a checkpoint of this family: none has a config.json."""
    file, named = folder / MODEL_FILES, configuration_file(folder) is not None
    return "flow_lm.bos_emb" in stored.headers([file]) if file.is_file() else named


FAMILY = Family(
    model_type="pocket_tts",
    configurations=RELEASED,
    hub_files=("*.safetensors", "tokenizer.*", "*.yaml", "word_heads.json"),
    read=read,
    files=weights.FILES,
    tokenizer=lambda config, folder: (
        TextTokenizer.stand_in({}, first=CONTROLS)
        if folder is None
        else TextTokenizer.from_file(find_tokenizer(config, folder))
    ),
    tokenizer_file=lambda config: config.tokenizer_file,
    model=PocketTTS,
    spec=spec_of,
    sizes=_sizes,
    position_bytes=lambda config, dtype: config.backbone.position_bytes(dtype),
    owns=_owns,
    gather=weights.gather,
)
