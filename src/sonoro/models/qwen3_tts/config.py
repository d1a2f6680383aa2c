"""The configuration files of a Qwen3-TTS checkpoint as frozen dataclasses; unused keys are ignored.

Field names are those of the released config.json files, defaults those of the official classes, which leave out values
equal to their defaults when they save a checkpoint."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from sonoro.core.errors import CheckpointError, InvalidRequest
from sonoro.core.options import VoiceDescription
from sonoro.core.types import SamplingParams, VoiceSex
from sonoro.nn.configs import build, converted, read_config, read_json

SUPPRESSED_IDS = 1024
"""The last 1024 ids of the talker's vocabulary are control ids; only the end-of-speech id among them may be sampled."""

VARIANTS = ("custom_voice", "voice_design", "base")
"""The values of `tts_model_type`."""

MIN_FRAMES = 2
"""The end-of-speech id is banned for the first two decisions (fixed in the official code)."""


@dataclass(frozen=True, kw_only=True)
class PredictorConfig:
    """The code predictor: one small transformer run 15 times within a frame."""

    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 5
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 2048
    num_code_groups: int = 32
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0


@dataclass(frozen=True, kw_only=True)
class TalkerConfig:
    """The talker: the transformer stepped once per frame."""

    hidden_size: int = 1024
    intermediate_size: int = 2048
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int
    vocab_size: int = 3072
    text_vocab_size: int
    text_hidden_size: int = 2048
    num_code_groups: int = 32
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    codec_pad_id: int = 4196
    codec_bos_id: int = 4197
    codec_eos_token_id: int = 4198
    codec_think_id: int = 4202
    codec_nothink_id: int = 4203
    codec_think_bos_id: int = 4204
    codec_think_eos_id: int = 4205
    codec_language_id: dict[str, int] = field(default_factory=dict)
    spk_id: dict[str, int] = field(default_factory=dict)
    spk_is_dialect: dict[str, bool | str | None] = field(default_factory=dict)
    code_predictor_config: PredictorConfig = PredictorConfig()


@dataclass(frozen=True, kw_only=True)
class SpeakerEncoderConfig:
    """The x-vector network. Released files give `enc_dim` alone; the rest are the official code's defaults."""

    enc_dim: int = 1024
    sample_rate: int = 24000
    mel_dim: int = 128
    enc_channels: tuple[int, ...] = (512, 512, 512, 512, 1536)
    enc_kernel_sizes: tuple[int, ...] = (5, 3, 3, 3, 1)
    enc_dilations: tuple[int, ...] = (1, 2, 3, 4, 1)
    enc_attention_channels: int = 128
    enc_res2net_scale: int = 8
    enc_se_channels: int = 128


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """config.json. `speaker_encoder_config` is present only in the Base variant."""

    tts_model_size: str = ""
    tts_model_type: str
    im_start_token_id: int = 151644
    im_end_token_id: int = 151645
    assistant_token_id: int = 77091
    tts_pad_token_id: int = 151671
    tts_bos_token_id: int = 151672
    tts_eos_token_id: int = 151673
    talker_config: TalkerConfig
    speaker_encoder_config: SpeakerEncoderConfig | None = None
    voice_aliases: dict[str, str] = field(default_factory=dict)
    """Our own key: further names, in lower case, of speakers of `spk_id`."""
    text_normalizer: str | None = None
    """Our own key, absent from released checkpoints: `english` normalises text before it is tokenised."""
    respellings: dict[str, str] = field(default_factory=dict)
    """Our own key: spellings for words that the model mispronounces, both in lower case; needs a `text_normalizer`."""
    heteronyms: dict[str, str] = field(default_factory=dict)
    """Our own key: spellings of words that are written alike and said apart, by reading ("read:past")."""
    max_segment_letters: int = 400
    """Our own key: the longest text of a segment, in letters as `sonoro.text.splitting` counts them (400 take 30 s)."""
    lead_in: int = 0
    """Our own key: samples of silence at the start of a request's audio, which are cut; less than a frame."""
    spk_sex: dict[str, VoiceSex] = field(default_factory=dict)
    """Our own key: perceived sex of each voice; configs/speakers.json holds those of released voices."""
    spk_description: dict[str, VoiceDescription] = field(default_factory=dict)
    """Our own key: accent and adjectives of each voice; configs/speakers.json has those of the released cards."""


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


@dataclass(frozen=True, kw_only=True)
class CodecDecoderConfig:
    """speech_tokenizer/config.json, `decoder_config`."""

    latent_dim: int = 1024
    codebook_dim: int
    codebook_size: int = 2048
    num_quantizers: int = 16
    num_semantic_quantizers: int = 1
    decoder_dim: int = 1536
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 8
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    sliding_window: int = 72
    upsample_rates: tuple[int, ...] = (8, 5, 4, 3)
    upsampling_ratios: tuple[int, ...] = (2, 2)


@dataclass(frozen=True, kw_only=True)
class CodecEncoderConfig:
    """speech_tokenizer/config.json, `encoder_config`."""

    hidden_size: int = 512
    intermediate_size: int = 2048
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 8
    head_dim: int
    num_filters: int = 64
    upsampling_ratios: tuple[int, ...] = (8, 6, 5, 4)
    kernel_size: int = 7
    last_kernel_size: int = 3
    residual_kernel_size: int = 3
    compress: int = 2
    dilation_growth_rate: int = 2
    num_residual_layers: int = 1
    codebook_size: int = 2048
    codebook_dim: int = 256
    num_quantizers: int = 32
    num_semantic_quantizers: int = 1
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    sampling_rate: int = 24000


@dataclass(frozen=True, kw_only=True)
class CodecConfig:
    """speech_tokenizer/config.json. A codec without `encoder_config` can speak but not clone."""

    encoder_valid_num_quantizers: int = 16
    input_sample_rate: int = 24000
    output_sample_rate: int = 24000
    encode_downsample_rate: int = 1920
    decode_upsample_rate: int = 1920
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
"""Released configurations (packaged), and the hub repositories of their weights."""


def read_configs(folder: Path) -> Configs:
    """Read and check the configuration files of a checkpoint folder. Raises `CheckpointError` naming file and key."""
    generation = folder / "generation_config.json"
    configs = Configs(
        _in_lower_case(read_config(ModelConfig, folder / "config.json")),
        _read_generation(generation) if generation.exists() else GenerationConfig(),
        read_config(CodecConfig, folder / "speech_tokenizer" / "config.json"),
    )
    _check(configs)
    return configs


def _in_lower_case(model: ModelConfig) -> ModelConfig:
    """`model` with its speakers' names in lower case, as requests name them; fine-tuned checkpoints may have others."""
    talker = model.talker_config
    ids = {name.lower(): value for name, value in talker.spk_id.items()}
    dialects = {name.lower(): value for name, value in talker.spk_is_dialect.items()}
    return replace(model, talker_config=replace(talker, spk_id=ids, spk_is_dialect=dialects))


def _read_generation(path: Path) -> GenerationConfig:
    """Read generation_config.json; null and -1 mean the default, except that a top-k of -1 is off (0)."""
    values = {key: value for key, value in read_json(path).items() if value is not None}
    given = {key: 0 if value == -1 and key.endswith("top_k") else value for key, value in values.items()}
    config = build(GenerationConfig, {key: value for key, value in given.items() if value != -1}, str(path))
    for prefix in ("", "subtalker_"):
        names = ("temperature", "top_k", "top_p") + (() if prefix else ("repetition_penalty",))
        try:
            SamplingParams(**{name: getattr(config, prefix + name) for name in names})
        except InvalidRequest as error:
            raise CheckpointError(f"{path}: {prefix}{error}") from error
    return config


def released_configs(name: str) -> Configs:
    """The configurations of one of `RELEASED`, merged from its common, size and variant files."""
    *_, size, variant = name.split("-")
    values: dict[str, Any] = {}
    for layer in ("common", size, variant):
        values = _merged(values, _packaged(layer))
    if "speaker_encoder_config" in values:
        # The x-vector is added to a prompt token without projection.
        values["speaker_encoder_config"]["enc_dim"] = values["talker_config"]["hidden_size"]
    return Configs(
        build(ModelConfig, values, name),
        build(GenerationConfig, _packaged("generation_config"), name),
        build(CodecConfig, _packaged("speech_tokenizer"), name),
    )


def stack_sizes(config: PredictorConfig | TalkerConfig | CodecDecoderConfig) -> dict[str, Any]:
    """The sizes of a transformer by the names of `DecoderConfig`."""
    return {
        "width": config.hidden_size,
        "intermediate": config.intermediate_size,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_width": config.head_dim,
        "norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
    }


def speaker_sexes(model: ModelConfig) -> dict[str, VoiceSex]:
    """Perceived sex of the voices of `model`, where known."""
    known = {name: facts["sex"] for name, facts in _packaged("speakers").items()} | model.spk_sex
    return {name: known[name] for name in model.talker_config.spk_id if name in known}


def speaker_descriptions(model: ModelConfig) -> dict[str, VoiceDescription]:
    """Accents and adjectives of the voices of `model`, where known."""
    packaged = converted(dict[str, VoiceDescription], _packaged("speakers"), "speakers")
    known = packaged | model.spk_description
    return {name: known[name] for name in model.talker_config.spk_id if name in known}


def _packaged(layer: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((resources.files(__package__) / "configs" / f"{layer}.json").read_text("utf-8"))
    return values


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`below` updated with `above`, recursively."""
    return below | {
        key: _merged(below[key], value) if isinstance(value, dict) and key in below else value
        for key, value in above.items()
    }


def _check(configs: Configs) -> None:
    """Raise `CheckpointError` if the configuration files are inconsistent."""
    for problems in (_size_problems(configs), _id_problems(configs.model), _voice_problems(configs.model)):
        for problem in problems:
            raise CheckpointError(f"config.json: {problem}")


def _size_problems(configs: Configs) -> Iterator[str]:
    """Sizes that do not fit each other."""
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
    yield from (f"{key} is {value}, but {name} is {other}" for key, value, name, other in equal if value != other)
    if model.lead_in >= (hop := codec.decode_upsample_rate):
        yield f"lead_in is {model.lead_in}; it must be below speech_tokenizer decode_upsample_rate {hop}"


def _id_problems(model: ModelConfig) -> Iterator[str]:
    """Ids of a prompt that no embedding holds, or an end of speech that is a code."""
    talker = model.talker_config
    codes, end = talker.vocab_size - SUPPRESSED_IDS, talker.codec_eos_token_id
    if not codes <= end < talker.vocab_size:
        yield f"codec_eos_token_id is {end}; it must be at least {codes} and below vocab_size {talker.vocab_size}"
    spoken = {name: value for name, value in vars(talker).items() if name.startswith("codec_") and type(value) is int}
    for key in ("codec_language_id", "spk_id"):
        spoken |= {f"{key}.{name}": index for name, index in getattr(talker, key).items()}
    written = {name: value for name, value in vars(model).items() if name.endswith("_token_id")}
    for ids, limit in ((spoken, "vocab_size"), (written, "text_vocab_size")):
        size = getattr(talker, limit)
        outside = [(key, index) for key, index in ids.items() if not 0 <= index < size]
        yield from (f"{key} is {index}; it must be below {limit} {size}" for key, index in outside)


def _voice_problems(model: ModelConfig) -> Iterator[str]:
    """A variant without what it needs, and speakers with unknown dialects or names."""
    talker, variant = model.talker_config, model.tts_model_type
    if variant not in VARIANTS:
        yield f"tts_model_type is {variant!r}; known: {', '.join(VARIANTS)}"
    if variant == "custom_voice" and not talker.spk_id:
        yield "spk_id is empty; tts_model_type 'custom_voice' needs a speaker"
    if variant == "base" and model.speaker_encoder_config is None:
        yield "lacks speaker_encoder_config, which tts_model_type 'base' needs"
    for speaker in talker.spk_id:
        dialect = talker.spk_is_dialect.get(speaker)
        if dialect is True or (dialect and dialect not in talker.codec_language_id):
            yield f"spk_is_dialect of {speaker!r} is {dialect!r}; it must be false or a key of codec_language_id"
    for name, speaker in model.voice_aliases.items():
        if speaker not in talker.spk_id or name in talker.spk_id or name != name.lower():
            limit = "it must be another name, in lower case, of a key of spk_id"
            yield f"voice_aliases of {name!r} is {speaker!r}; {limit}"
