"""Qwen3-TTS as a `SpeechModel`. The variants (CustomVoice, VoiceDesign, Base) differ in their configuration alone."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch import Tensor

from sonoro.core.blends import read_blend
from sonoro.core.errors import InvalidReference
from sonoro.core.options import OptionSpec, OptionValue
from sonoro.core.types import ModelSpec, Reference, SamplingParams, SpeechRequest, TextFormat, VoiceMode
from sonoro.models.base import Capacity, Codec, SavedVoice, Spoken, Voice
from sonoro.models.settings import CONTROL_TOKENS
from sonoro.models.shared.loading import Family
from sonoro.models.shared.slots import check_admission
from sonoro.nn.transformer import bytes_read, widen_layers
from sonoro.nn.weights import fingerprint
from sonoro.runtime.ring import upload
from sonoro.runtime.sampling import Controls
from sonoro.text.splitting import SpokenText, split_text
from sonoro.words.tracking import Pointing

from . import frame, voice, weights
from . import state as by_slot
from .backbone import decoder_config
from .compiled import CompiledFrame, TalkerForms
from .config import (
    RELEASED,
    Configs,
    GenerationConfig,
    ModelConfig,
    read_configs,
    released_configs,
    speaker_descriptions,
    speaker_sexes,
)
from .live_text import LiveSegment
from .prompt import SPLITS, ClonedVoice, PromptBuilder, TalkerPrompt, TextTokenizer
from .state import FrameState, allocate
from .weights import Modules

_VOICE_MODES: dict[str, tuple[VoiceMode, ...]] = {
    "custom_voice": ("named",),
    "voice_design": ("described",),
    "base": ("cloned",),
}

_SPLIT = OptionSpec(
    name="tokenizer_split", type="str", default="qwen2", choices=tuple(SPLITS),
    help="pre-tokenization of texts; for a local folder the default follows the official package 0.1.1",
)  # fmt: skip


class Qwen3TTS(frame.StepsTalker):
    """Talker, code predictor and codec behind the protocols of `models.base`. Holds no per-request state."""

    def __init__(self, name: str, configs: Configs, modules: Modules, tokenizer: TextTokenizer) -> None:
        self.spec = spec_of(name, configs)
        if modules.lm.speaker_encoder is None:
            # Without cloning, the released codec's encoder would waste 190 MB.
            modules.codec.encoder = None
        self.codec: Codec = modules.codec
        self._configs, self._modules, self.backbone = configs, modules, modules.lm.talker.model
        self._prompts = PromptBuilder(configs.model, tokenizer)
        self._forms = TalkerForms(modules.lm.talker)
        if self._forms.is_narrow:
            # Of the weights as they were loaded, which may be widened.
            assert self.fingerprint
        self.position_bytes = self.backbone.config.position_bytes(modules.lm.talker.dtype)

    settings = (CONTROL_TOKENS, _SPLIT)
    text_layouts = MappingProxyType(
        {"text_first": {"non_streaming_mode": True}, "text_along": {"non_streaming_mode": False}}
    )
    reset, stage, admit = staticmethod(by_slot.reset), staticmethod(by_slot.stage), staticmethod(by_slot.admit)
    append_text, save_voice = staticmethod(by_slot.append_text), staticmethod(voice.save_voice)

    def configure(self, values: Mapping[str, OptionValue]) -> None:
        tokenizer = self._prompts.tokenizer
        if _SPLIT.name in values:
            tokenizer.split_by(str(values[_SPLIT.name]))
        if CONTROL_TOKENS.name in values:
            tokenizer.read_control_tokens(is_on=bool(values[CONTROL_TOKENS.name]))

    def segments(
        self, text: str, language: str, text_format: TextFormat = "auto", voice: str | None = None
    ) -> list[SpokenText]:
        """`text`, read if the checkpoint needs that, split into segments of at most `max_segment_letters`."""
        spoken = self._prompts.normalize(text, text_format, voice=voice)
        return split_text(spoken, language, self._configs.model.max_segment_letters)

    def prepare(
        self, request: SpeechRequest, segment: str, index: int, before: Sequence[Spoken], voice: Voice | None
    ) -> TalkerPrompt:
        return self._prompts.build(segment, Controls.of(request, index), **self._layout(request, voice))

    def live_text(self, request: SpeechRequest, voice: Voice | None) -> LiveSegment | None:
        """The tokeniser of a live segment; None if the prompt layout needs all of the text."""
        is_in_context = voice is not None and voice.reference_frames is not None
        if request.options["non_streaming_mode"] or is_in_context:
            return None
        return LiveSegment(self._prompts, request.text_format, request.voice)

    def prepare_live(self, request: SpeechRequest, ids: Sequence[int], index: int, voice: Voice | None) -> TalkerPrompt:
        """The prompt of a segment whose text begins with `ids`; the first is in the prompt, the others are pending."""
        return self._prompts.build_from_ids(ids, Controls.of(request, index), **self._layout(request, voice))

    def _layout(self, request: SpeechRequest, voice: Voice | None) -> dict[str, Any]:
        """Keyword arguments of `PromptBuilder.build` for a request. A blend of speakers is an x-vector: the weighted
        sum of their rows, which stand at the same place."""
        talker = self._modules.lm.talker
        if voice is None and request.voice not in (None, *self.spec.voices) and (of := read_blend(request.voice or "")):
            rows = talker.model.codec_embedding.weight
            ids = self._configs.model.talker_config.spk_id
            blended = functools.reduce(torch.add, (weight * rows[ids[name]].float() for name, weight in of.items()))
            return _layout(msgspec.structs.replace(request, voice=None), Voice(ClonedVoice(blended)))
        return _layout(request, voice)

    def pointing(self, request: SpeechRequest, voice: Voice | None) -> Pointing | None:
        """The pointing heads for text in the prompt, or for text fed one token per frame."""
        if request.options["non_streaming_mode"]:
            return self.word_heads.text_first
        # With a reference in context the text is beside the reference's codes: no heads are known for that layout.
        is_in_context = voice is not None and voice.reference_frames is not None
        return None if is_in_context else self.word_heads.text_along

    def token_spans(self, text: str) -> list[tuple[int, int]]:
        return self._prompts.token_spans(text)

    def encode_voice(self, references: Sequence[Reference]) -> Voice:
        encoder, config = self._modules.lm.speaker_encoder, self._configs.model.speaker_encoder_config
        if encoder is None or config is None:
            raise InvalidReference("ref_audio", "given", f"{self.spec.name} cannot clone voices")
        if self._configs.codec.encoder_config is None and any(reference.use == "prompt" for reference in references):
            raise InvalidReference("ref_text", "given", f"{self.spec.name} can only take the timbre (x-vector only)")
        return voice.encode_voice(references, encoder, config, self.codec)

    def voice_of(self, embedding: Sequence[float]) -> Voice:
        return Voice(ClonedVoice(upload(embedding, torch.float32, self._modules.lm.talker.device)))

    def load_voice(self, saved: SavedVoice) -> Voice:
        size, device = self.spec.speaker_embedding_size, self._modules.lm.talker.device
        return voice.load_voice(saved, size, self._modules.codec, device)

    @functools.cached_property
    def fingerprint(self) -> str:
        return fingerprint(repr(self._configs), self._modules.lm, self._modules.codec)

    def allocate(self, capacity: Capacity) -> FrameState:
        capacity.check_positions(self._configs.model.talker_config.max_position_embeddings)
        pad_id = self._configs.model.tts_pad_token_id
        # Its products are too small to gain from 8 bits in large batches; the copies take 157 MB.
        widen_layers(self._modules.lm.talker.code_predictor, capacity.slots)
        return allocate(self._modules.lm.talker, capacity, pad_id, self.word_heads)

    def compiled_steps(self, state: FrameState) -> CompiledFrame | None:
        """`CompiledModel.compiled_steps`; None on a GPU, and for layouts and dtypes that the compiled code lacks."""
        compiled = self._forms.compiled
        return None if compiled is None else CompiledFrame(compiled, state)

    def check_kernels(self, state: FrameState, batch: int) -> None:
        check_admission(state)
        frame.check_kernels(self._modules.lm.talker, state, batch)

    def parts(self, state: FrameState) -> dict[str, Callable[[Tensor], object]]:
        return frame.parts(self._forms.in_torch, state)

    def frame_bytes(self, batch: int, context: int) -> int:
        # Talker and heads are read once, the predictor's layers once per codebook.
        talker = self._modules.lm.talker
        predictor = talker.code_predictor
        layers = sum(weight.nbytes for weight in talker.model.layers.parameters())
        heads = talker.codec_head.weight.nbytes + sum(weight.nbytes for weight in predictor.lm_head.parameters())
        depth = (talker.codebooks - 1) * bytes_read(predictor.model.layers, batch)
        projection = sum(weight.nbytes for weight in predictor.small_to_mtp_projection.parameters())
        return layers + heads + depth + projection + batch * context * self.position_bytes


def spec_of(name: str, configs: Configs) -> ModelSpec:
    model, generation, codec = configs
    talker = model.talker_config
    is_named = model.tts_model_type == "custom_voice"
    encoder = model.speaker_encoder_config if model.tts_model_type == "base" else None
    return ModelSpec(
        name=name,
        sample_rate=codec.output_sample_rate,
        hop=codec.decode_upsample_rate,
        max_frames=min(generation.max_new_tokens, talker.max_position_embeddings // 2),
        voice_modes=_VOICE_MODES[model.tts_model_type],
        voices=tuple(talker.spk_id) if is_named else (),
        voice_aliases=model.voice_aliases if is_named else {},
        languages=("auto", *(language for language in talker.codec_language_id if "dialect" not in language)),
        sampling=SamplingParams(
            temperature=generation.temperature if generation.do_sample else 0.0,
            top_k=generation.top_k,
            top_p=generation.top_p,
            repetition_penalty=generation.repetition_penalty,
        ),
        options=_options(model, generation),
        # The smaller CustomVoice was not trained on instructions; the official wrapper silently drops them.
        accepts_instructions=model.tts_model_type == "voice_design" or (is_named and model.tts_model_size != "0b6"),
        voice_sexes=speaker_sexes(model) if is_named else {},
        voice_descriptions=speaker_descriptions(model) if is_named else {},
        text_normalizer="english" if model.text_normalizer == "english" else None,
        respellings=model.respellings,
        speaker_embedding_size=0 if encoder is None else encoder.enc_dim,
        lead_in=model.lead_in,
        # Distilled voices know nothing between two: a blend speaks as one or the other (docs/markup.md).
        can_blend=is_named and model.text_normalizer is None,
    )


def _options(model: ModelConfig, generation: GenerationConfig) -> tuple[OptionSpec, ...]:
    codes = model.talker_config.code_predictor_config.vocab_size
    return (
        OptionSpec(
            name="non_streaming_mode", type="bool", default=model.tts_model_type != "base", live_default=False,
            help="prefill the whole text, instead of feeding one text token per frame",
        ),
        OptionSpec(
            name="subtalker_dosample", type="bool", default=generation.subtalker_dosample,
            help="sample the codebooks after the first; false is greedy",
        ),
        OptionSpec(
            name="subtalker_temperature", type="float", default=generation.subtalker_temperature, minimum=0.0,
            maximum=10.0, help="temperature of the codebooks after the first; 0 is greedy",
        ),
        OptionSpec(
            name="subtalker_top_k", type="int", default=generation.subtalker_top_k, minimum=0, maximum=codes,
            help="top-k of the codebooks after the first; 0 is no limit",
        ),
        OptionSpec(
            name="subtalker_top_p", type="float", default=generation.subtalker_top_p, minimum=0.01, maximum=1.0,
            help="top-p of the codebooks after the first",
        ),
    )  # fmt: skip


def _layout(request: SpeechRequest, voice: Voice | None) -> dict[str, Any]:
    """Keyword arguments of `PromptBuilder.build` for a request."""
    return {
        "is_non_streaming": bool(request.options["non_streaming_mode"]),
        "language": request.language,
        "speaker": request.voice,
        "instructions": request.instructions,
        "voice": voice,
    }


def _sizes(configs: Configs) -> dict[str, str | int | float]:
    talker, predictor = configs.model.talker_config, configs.model.talker_config.code_predictor_config
    return {
        "variant": configs.model.tts_model_type,
        "size": configs.model.tts_model_size,
        "talker width": talker.hidden_size,
        "talker layers": talker.num_hidden_layers,
        "predictor width": predictor.hidden_size,
        "predictor layers": predictor.num_hidden_layers,
        "codebooks": talker.num_code_groups,
        "codes": predictor.vocab_size,
        "text ids": talker.text_vocab_size,
        "positions": talker.max_position_embeddings,
        "codec width": configs.codec.decoder_config.decoder_dim,
    }


FAMILY = Family(
    model_type="qwen3_tts",
    configurations=RELEASED,
    hub_files=("*.json", "merges.txt", "*.safetensors"),
    read=lambda source: read_configs(source) if isinstance(source, Path) else released_configs(source),
    files=weights.FILES,
    tokenizer=lambda _, folder: TextTokenizer.stand_in() if folder is None else TextTokenizer.from_folder(folder),
    tokenizer_file="vocab.json",
    model=Qwen3TTS,
    spec=spec_of,
    sizes=_sizes,
    position_bytes=lambda configs, dtype: decoder_config(configs.model.talker_config).position_bytes(dtype),
    # transformers does not apply its Mistral fix to models named by hub id.
    hub_settings={_SPLIT.name: "qwen2"},
)
