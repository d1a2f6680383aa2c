"""The configuration of a checkpoint: the YAML that the official package has for it, or one of the released ones.

A released folder has no configuration: `configs/released.yaml` holds those of all releases, by folder name."""

import functools
import math
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml

from sonoro.core.errors import CheckpointError
from sonoro.nn.configs import check_values, converted, yaml_values
from sonoro.nn.transformer import DecoderConfig
from sonoro.nn.window import WindowConfig
from sonoro.words.heads import WordHeads

CONFIG_FILES = ("config.yaml", "model.yaml")
"""Where a folder may have its configuration."""

HUB = "kyutai/pocket-tts"
PREFIX = "pocket-"
MOST_POSITIONS = 16384  # The model has no limit, but was trained on single sentences.

Size = Annotated[int, msgspec.Meta(ge=1)]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Unknown keys are errors, as in the official package."""


class FlowConfig(_Strict, frozen=True, kw_only=True):
    """The flow head. `lsd` has two time conditions; `pointwise` and `drifting` have none."""

    dim: Size
    depth: Size
    type: Literal["lsd", "drifting", "pointwise"] = "lsd"


class TransformerConfig(_Strict, frozen=True, kw_only=True):
    """Sizes of the language model."""

    d_model: Size
    num_heads: Size
    num_layers: Size
    hidden_scale: Size
    max_period: Size
    attn_dim: Size | None = None
    num_kv_heads: Size | None = None
    dim_feedforward: Size | None = None


class TableConfig(_Strict, frozen=True, kw_only=True):
    """The embedding of text ids, as rows of `rank` numbers and a projection if it has a rank."""

    dim: Size
    n_bins: Size
    tokenizer: Literal["tokenizers", "sentencepiece"]
    tokenizer_path: str
    rank: Size | None = None


class LanguageConfig(_Strict, frozen=True, kw_only=True):
    """`flow_lm` of the configuration. With `z_dim`, a projection to so many numbers follows the last norm."""

    dtype: str
    flow: FlowConfig
    transformer: TransformerConfig
    lookup_table: TableConfig
    z_dim: Size | None = None
    insert_bos_before_voice: bool = False
    weights_path: str | None = None


class ConvolutionsConfig(_Strict, frozen=True, kw_only=True):
    """Sizes of the codec's convolutions, in one direction or in both."""

    dimension: Size
    channels: Size
    n_filters: Size
    n_residual_layers: Size
    ratios: tuple[Size, ...]
    kernel_size: Size
    residual_kernel_size: Size
    last_kernel_size: Size
    dilation_base: Size
    pad_mode: str
    compress: Size


class WindowsConfig(_Strict, frozen=True, kw_only=True):
    """Sizes of the codec's transformer, whose columns see `context` columns."""

    d_model: Size
    input_dimension: Size
    output_dimensions: tuple[Size, ...]
    num_heads: Size
    num_layers: Size
    layer_scale: float
    context: Size
    dim_feedforward: Size
    max_period: float = 10000.0

    @property
    def window(self) -> WindowConfig:
        sizes = self.d_model, self.dim_feedforward, self.num_layers, self.num_heads, self.num_heads
        return WindowConfig(
            *sizes, self.d_model // self.num_heads, norm_eps=1e-5, rope_theta=self.max_period, window=self.context
        )


class QuantizerConfig(_Strict, frozen=True, kw_only=True):
    """Widths of what is left of a quantiser: a projection of latents."""

    dimension: Size
    output_dimension: Size


class CodecConfig(_Strict, frozen=True, kw_only=True):
    """`mimi` of the configuration. The encoder is that of `seanet` and `transformer`, and so is the decoder unless it
    has its own."""

    dtype: str
    sample_rate: Size
    channels: Size
    frame_rate: float
    inner_dim: Size
    outer_dim: Size
    seanet: ConvolutionsConfig
    transformer: WindowsConfig
    quantizer: QuantizerConfig
    decoder_seanet: ConvolutionsConfig | None = None
    decoder_transformer: WindowsConfig | None = None
    weights_path: str | None = None

    @property
    def hop(self) -> int:
        """Samples per frame."""
        return int(self.sample_rate / self.frame_rate)

    @property
    def decoding(self) -> tuple[ConvolutionsConfig, WindowsConfig]:
        return self.decoder_seanet or self.seanet, self.decoder_transformer or self.transformer

    @property
    def columns(self) -> int:
        """Columns of the codec's transformer per frame."""
        return self.hop // math.prod(self.seanet.ratios)


class YamlConfig(_Strict, frozen=True, kw_only=True):
    """What a configuration file may have."""

    flow_lm: LanguageConfig
    mimi: CodecConfig
    weights_path: str | None = None
    weights_path_without_voice_cloning: str | None = None
    pad_with_spaces_for_short_inputs: bool = False
    remove_semicolons: bool = False
    append_terminal_punctuation: bool = True
    capitalize_first_letter: bool = True
    replace_characters: dict[str, str] = {}
    model_recommended_frames_after_eos: Annotated[int, msgspec.Meta(ge=0)] | None = None
    default_temperature: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.3
    default_eos_threshold: float = -4.0

    @property
    def tokenizer_file(self) -> str:
        return "tokenizer.json" if self.flow_lm.lookup_table.tokenizer == "tokenizers" else "tokenizer.model"


class ModelConfig(YamlConfig, frozen=True, kw_only=True):
    """A checkpoint: its configuration, the language that it speaks, files of voices by name (None: a stand-in), and the
    heads that follow the text, as published for a release."""

    language: str = "auto"
    voices: dict[str, Path | None] = {}
    word_heads: WordHeads = WordHeads()

    @property
    def latents(self) -> int:
        return self.mimi.quantizer.dimension

    @property
    def backbone(self) -> DecoderConfig:
        """Sizes of the language model's stack."""
        sizes = self.flow_lm.transformer
        width = sizes.attn_dim or sizes.d_model
        return DecoderConfig(
            sizes.d_model,
            sizes.dim_feedforward or sizes.d_model * sizes.hidden_scale,
            sizes.num_layers,
            sizes.num_heads,
            sizes.num_kv_heads or sizes.num_heads,
            width // sizes.num_heads,
            norm_eps=1e-5,
            rope_theta=float(sizes.max_period),
        )


def read(source: Path | str) -> ModelConfig:
    """The configuration of a checkpoint folder, or of one of `RELEASED`. A folder without one is a released one by its
    name. Raises `CheckpointError` naming the key."""
    if isinstance(source, str):
        name = source.removeprefix(PREFIX)
        return _of_release(name, source, {_tables()["voices"][_language(name)]: None})
    states = [*sorted(source.glob("embeddings*/*.safetensors")), *sorted(source.glob("voice*.safetensors"))]
    voices: dict[str, Path | None] = {path.stem.lower(): path for path in states}
    name, found = source.resolve().name, configuration_file(source)
    if found is not None:
        return _built(yaml_values(found), str(found), name, voices)
    if name not in _tables()["releases"]:
        reason = f"it has no {CONFIG_FILES[0]}, and is named like none of {', '.join(_tables()['releases'])}"
        raise CheckpointError(f"{source} cannot be read as Pocket TTS: {reason}")
    return _of_release(name, str(source), voices)


def configuration_file(folder: Path) -> Path | None:
    """The configuration in `folder`, if it has one."""
    return next((folder / name for name in CONFIG_FILES if (folder / name).is_file()), None)


@functools.cache
def _tables() -> Any:
    return yaml.safe_load((resources.files(__package__) / "configs" / "released.yaml").read_text("utf-8"))


RELEASED = {PREFIX + name: f"{HUB}/languages/{name}" for name in _tables()["releases"]}
"""Released configurations, and where the hub has their weights."""


def _language(name: str) -> str:
    """The language of a checkpoint by its name; "auto" if that tells none."""
    language = re.split(r"[_\W]", name)[0].lower()
    return language if language in _tables()["voices"] else "auto"


def _of_release(name: str, where: str, voices: dict[str, Path | None]) -> ModelConfig:
    heads = msgspec.convert({"text_first": _tables()["word_heads"].get(name)}, WordHeads)
    return msgspec.structs.replace(_built(_tables()["releases"][name], where, name, voices), word_heads=heads)


def _built(values: Any, where: str, name: str, voices: dict[str, Path | None]) -> ModelConfig:
    """`values` as the configuration `name`, checked. Raises `CheckpointError`, which begins with `where`."""
    given = converted(YamlConfig, values, where)
    own = {name: getattr(given, name) for name in given.__struct_fields__}
    config = ModelConfig(**own, language=_language(name), voices=voices)
    check_values(where, _expected(config))
    return config


def _expected(config: ModelConfig) -> Iterator[tuple[str, object, object]]:
    """Keys with their values and the only supported ones."""
    lm, codec = config.flow_lm, config.mimi
    (net, windows), ratios = codec.decoding, math.prod(codec.seanet.ratios)
    yield "flow_lm.lookup_table.dim", lm.lookup_table.dim, lm.transformer.d_model
    widths = lm.transformer.attn_dim or lm.transformer.d_model, windows.d_model, codec.transformer.d_model
    for width, sizes in zip(widths, (config.backbone, windows.window, codec.transformer.window), strict=True):
        # A rotary embedding turns pairs.
        yield "width of all heads", width, sizes.heads * (width // sizes.heads // 2 * 2)
    yield "mimi.channels", codec.channels, 1
    yield "mimi.frame_rate", codec.frame_rate, codec.sample_rate / codec.hop
    yield "samples per frame, modulo the ratios", codec.hop % ratios, 0
    yield "mimi.outer_dim", codec.outer_dim, codec.quantizer.output_dimension
    yield "mimi.quantizer.output_dimension", codec.quantizer.output_dimension, windows.d_model
    yield "mimi.quantizer.dimension, modulo 2", codec.quantizer.dimension % 2, 0
    yield "mimi.transformer.d_model", codec.transformer.d_model, codec.seanet.dimension
    yield "mimi.decoder_transformer.d_model", windows.d_model, net.dimension
    for part in (codec.seanet, net):
        given = (len(part.ratios), part.n_residual_layers, part.pad_mode, part.compress, part.channels)
        yield "ratios, layers, pad_mode, compress and channels of mimi.seanet", given, (3, 1, "constant", 2, 1)
        yield "product of ratios", math.prod(part.ratios), ratios
