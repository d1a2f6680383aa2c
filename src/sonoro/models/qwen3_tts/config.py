"""The checkpoint's own configuration files as frozen dataclasses; keys that no part of the model uses are ignored.

Field names are those of the released config.json files. Nothing here has a default that a released checkpoint sets: the
official code's defaults differ from the released values nearly everywhere.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from sonoro.core.errors import CheckpointError
from sonoro.nn.configs import build, read_config

__all__ = [
    "MIN_FRAMES",
    "RELEASED",
    "SUPPRESSED_IDS",
    "VARIANTS",
    "CodecConfig",
    "CodecDecoderConfig",
    "CodecEncoderConfig",
    "Configs",
    "GenerationConfig",
    "ModelConfig",
    "PredictorConfig",
    "SpeakerEncoderConfig",
    "TalkerConfig",
    "read_configs",
    "released_configs",
]

SUPPRESSED_IDS = 1024
"""The last 1024 ids of the talker's vocabulary are control ids; only the end-of-speech id among them may be sampled."""

VARIANTS = ("custom_voice", "voice_design", "base")
"""The values of `tts_model_type`."""

MIN_FRAMES = 2
"""The end-of-speech id is banned for the first two decisions (fixed in the official code)."""


@dataclass(frozen=True)
class PredictorConfig:
    """The code predictor: one small transformer run 15 times within a frame."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_code_groups: int
    rms_norm_eps: float
    rope_theta: float


@dataclass(frozen=True)
class TalkerConfig:
    """The talker: the transformer stepped once per frame."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    text_vocab_size: int
    text_hidden_size: int
    num_code_groups: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    codec_pad_id: int
    codec_bos_id: int
    codec_eos_token_id: int
    codec_think_id: int
    codec_nothink_id: int
    codec_think_bos_id: int
    codec_think_eos_id: int
    codec_language_id: dict[str, int]
    spk_id: dict[str, int]
    spk_is_dialect: dict[str, bool | str]
    code_predictor_config: PredictorConfig


@dataclass(frozen=True)
class SpeakerEncoderConfig:
    """The x-vector network; everything but `enc_dim` is the official code's default unless the file says otherwise."""

    enc_dim: int
    sample_rate: int = 24000
    mel_dim: int = 128
    enc_channels: tuple[int, ...] = (512, 512, 512, 512, 1536)
    enc_kernel_sizes: tuple[int, ...] = (5, 3, 3, 3, 1)
    enc_dilations: tuple[int, ...] = (1, 2, 3, 4, 1)
    enc_attention_channels: int = 128
    enc_res2net_scale: int = 8
    enc_se_channels: int = 128


@dataclass(frozen=True)
class ModelConfig:
    """config.json. `speaker_encoder_config` is present only in the Base variant."""

    tts_model_size: str
    tts_model_type: str
    im_start_token_id: int
    im_end_token_id: int
    assistant_token_id: int
    tts_pad_token_id: int
    tts_bos_token_id: int
    tts_eos_token_id: int
    talker_config: TalkerConfig
    speaker_encoder_config: SpeakerEncoderConfig | None = None
    text_normalizer: str | None = None
    """Our own key, absent from released checkpoints: `english` has text normalised before it is tokenised."""
    max_segment_letters: int = 400
    """Our own key: the longest text prompted at once, in letters as `sonoro.core.text` counts (400 take 30 s)."""


@dataclass(frozen=True)
class GenerationConfig:
    """generation_config.json. `do_sample=False` is greedy, as is `subtalker_dosample=False` for the predictor."""

    do_sample: bool = True
    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05
    subtalker_dosample: bool = True
    subtalker_temperature: float = 0.9
    subtalker_top_k: int = 50
    subtalker_top_p: float = 1.0
    max_new_tokens: int = 2048


@dataclass(frozen=True)
class CodecDecoderConfig:
    """speech_tokenizer/config.json, `decoder_config`."""

    latent_dim: int
    codebook_dim: int
    codebook_size: int
    num_quantizers: int
    num_semantic_quantizers: int
    decoder_dim: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    sliding_window: int
    upsample_rates: tuple[int, ...]
    upsampling_ratios: tuple[int, ...]


@dataclass(frozen=True)
class CodecEncoderConfig:
    """speech_tokenizer/config.json, `encoder_config`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_filters: int
    upsampling_ratios: tuple[int, ...]
    kernel_size: int
    last_kernel_size: int
    residual_kernel_size: int
    compress: int
    dilation_growth_rate: int
    num_residual_layers: int
    codebook_size: int
    codebook_dim: int
    num_quantizers: int
    num_semantic_quantizers: int
    norm_eps: float
    rope_theta: float
    sampling_rate: int


@dataclass(frozen=True)
class CodecConfig:
    """speech_tokenizer/config.json. A codec without `encoder_config` can speak but not clone."""

    encoder_valid_num_quantizers: int
    input_sample_rate: int
    output_sample_rate: int
    encode_downsample_rate: int
    decode_upsample_rate: int
    decoder_config: CodecDecoderConfig
    encoder_config: CodecEncoderConfig | None = None


class Configs(NamedTuple):
    """The three configuration files of a checkpoint."""

    model: ModelConfig
    generation: GenerationConfig
    codec: CodecConfig


RELEASED = {
    "qwen3-tts-0.6b-base": "Qwen/Qwen3-TTS-12Hz-0.6B-Base",
    "qwen3-tts-0.6b-customvoice": "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice",
    "qwen3-tts-1.7b-base": "Qwen/Qwen3-TTS-12Hz-1.7B-Base",
    "qwen3-tts-1.7b-customvoice": "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice",
    "qwen3-tts-1.7b-voicedesign": "Qwen/Qwen3-TTS-12Hz-1.7B-VoiceDesign",
}
"""The released configurations, which are in the package, and the hub repositories of their weights."""


def read_configs(folder: Path) -> Configs:
    """The three configuration files of a checkpoint folder. Raises `CheckpointError` naming the file and key."""
    generation = folder / "generation_config.json"
    configs = Configs(
        read_config(ModelConfig, folder / "config.json"),
        read_config(GenerationConfig, generation) if generation.exists() else GenerationConfig(),
        read_config(CodecConfig, folder / "speech_tokenizer" / "config.json"),
    )
    _check(configs)
    return configs


def released_configs(name: str) -> Configs:
    """The configuration files of one of `RELEASED`, put together from what is common, its size and its variant."""
    *_, size, variant = name.split("-")
    values: dict[str, Any] = {}
    for layer in ("common", size, variant):
        values = _merged(values, _packaged(layer))
    if "speaker_encoder_config" in values:
        # An x-vector is added to a prompt row as it is.
        values["speaker_encoder_config"]["enc_dim"] = values["talker_config"]["hidden_size"]
    return Configs(
        build(ModelConfig, values, name),
        build(GenerationConfig, _packaged("generation_config"), name),
        build(CodecConfig, _packaged("speech_tokenizer"), name),
    )


def _packaged(layer: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((resources.files(__package__) / "configs" / f"{layer}.json").read_text("utf-8"))
    return values


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`, objects key by key."""
    return below | {
        key: _merged(below[key], value) if isinstance(value, dict) and key in below else value
        for key, value in above.items()
    }


def _check(configs: Configs) -> None:
    """Refuse configuration files that contradict themselves or one another."""
    model, _, codec = configs
    talker = model.talker_config
    predictor, decoder, x_vector = talker.code_predictor_config, codec.decoder_config, model.speaker_encoder_config
    codes, groups = talker.vocab_size - SUPPRESSED_IDS, talker.num_code_groups
    equal = [
        ("num_code_groups", groups, "code_predictor_config.num_code_groups", predictor.num_code_groups),
        ("num_code_groups", groups, "speech_tokenizer num_quantizers", decoder.num_quantizers),
        (f"vocab_size less {SUPPRESSED_IDS}", codes, "code_predictor_config.vocab_size", predictor.vocab_size),
        (f"vocab_size less {SUPPRESSED_IDS}", codes, "speech_tokenizer codebook_size", decoder.codebook_size),
    ]
    if codec.encoder_config is not None:
        encoded = codec.encoder_valid_num_quantizers
        equal.append(("num_code_groups", groups, "speech_tokenizer encoder_valid_num_quantizers", encoded))
    if x_vector is not None:
        equal.append(("hidden_size", talker.hidden_size, "speaker_encoder_config.enc_dim", x_vector.enc_dim))
    for field, value, other_field, other in equal:
        if value != other:
            raise CheckpointError(f"config.json: {field} is {value}, but {other_field} is {other}")
    if not codes <= talker.codec_eos_token_id < talker.vocab_size:
        limit = f"it must be at least {codes} and below vocab_size {talker.vocab_size}"
        raise CheckpointError(f"config.json: codec_eos_token_id is {talker.codec_eos_token_id}; {limit}")
    if model.tts_model_type not in VARIANTS:
        raise CheckpointError(f"config.json: tts_model_type is {model.tts_model_type!r}; known: {', '.join(VARIANTS)}")
    if model.tts_model_type == "custom_voice" and not talker.spk_id:
        raise CheckpointError("config.json: spk_id is empty; tts_model_type 'custom_voice' needs a speaker")
    if model.tts_model_type == "base" and model.speaker_encoder_config is None:
        raise CheckpointError("config.json lacks speaker_encoder_config, which tts_model_type 'base' needs")
    for speaker in talker.spk_id:
        dialect = talker.spk_is_dialect.get(speaker)
        if dialect is None or dialect is True or (dialect and dialect not in talker.codec_language_id):
            limit = "it must be false or a key of codec_language_id"
            raise CheckpointError(f"config.json: spk_is_dialect of {speaker!r} is {dialect!r}; {limit}")
