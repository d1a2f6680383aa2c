"""The checkpoint's own configuration files as frozen dataclasses; keys that no part of the model uses are ignored.

Field names are those of the released config.json files. Nothing here has a default that a released checkpoint sets: the
official code's defaults differ from the released values nearly everywhere.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sonoro.core.errors import CheckpointError, CheckpointNotFound

__all__ = [
    "CodecConfig",
    "CodecDecoderConfig",
    "CodecEncoderConfig",
    "GenerationConfig",
    "ModelConfig",
    "PredictorConfig",
    "SpeakerEncoderConfig",
    "TalkerConfig",
    "read_configs",
]

T = TypeVar("T")

SUPPRESSED_IDS = 1024
"""The last 1024 ids of the talker's vocabulary are control ids; only the end-of-speech id among them may be sampled."""

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
    max_new_tokens: int = 8192


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


def read_configs(folder: Path) -> tuple[ModelConfig, GenerationConfig, CodecConfig]:
    """The three configuration files of a checkpoint folder. Raises `CheckpointError` naming the file and key."""
    generation = folder / "generation_config.json"
    return (
        read_config(ModelConfig, folder / "config.json"),
        read_config(GenerationConfig, generation) if generation.exists() else GenerationConfig(),
        read_config(CodecConfig, folder / "speech_tokenizer" / "config.json"),
    )


def read_config(kind: type[T], path: Path) -> T:
    """The file at `path` as `kind`."""
    if not path.is_file():
        raise CheckpointNotFound(f"{path} does not exist; a checkpoint folder holds config.json and speech_tokenizer/")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a readable JSON file: {error}") from error
    return build(kind, values, str(path))


_NESTED: dict[str, type] = {
    "talker_config": TalkerConfig,
    "code_predictor_config": PredictorConfig,
    "speaker_encoder_config": SpeakerEncoderConfig,
    "decoder_config": CodecDecoderConfig,
    "encoder_config": CodecEncoderConfig,
}


def build(kind: type[T], values: dict[str, Any], where: str) -> T:
    """`values` as the dataclass `kind`: nested objects built, lists made tuples, missing keys refused by name."""
    if not isinstance(values, dict):
        raise CheckpointError(f"{where} must hold an object, found {type(values).__name__}")
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name not in values:
            if field.default is dataclasses.MISSING:
                raise CheckpointError(f"{where} lacks the key {field.name!r}")
            continue
        value = values[field.name]
        if field.name in _NESTED and value is not None:
            value = build(_NESTED[field.name], value, f"{where}: {field.name}")
        arguments[field.name] = tuple(value) if isinstance(value, list) else value
    return kind(**arguments)
