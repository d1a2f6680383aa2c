"""config.json of VoxCPM2: released field names and official defaults; unused keys are ignored."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sonoro.core.errors import CheckpointError
from sonoro.nn.configs import read_released
from sonoro.nn.transformer import DecoderConfig, Rotary, rotary_of_angles

from .codec import CodecConfig

RELEASED = {"voxcpm2": "openbmb/VoxCPM2"}
"""Released configuration (packaged, byte for byte), and the hub repository of its weights."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """LongRoPE: divisors of each rotary pair's angle. Only the short factors apply: the context is not extended."""

    type: str
    short_factor: tuple[float, ...]
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class LMConfig:
    """Sizes of the base LM. The residual LM differs only in its number of layers."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    kv_channels: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    vocab_size: int
    use_mup: bool = True


@dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """Sizes of LocEnc or LocDiT; key/value heads, epsilon and rotary embedding are the base LM's."""

    hidden_dim: int = 1024
    ffn_dim: int = 4096
    num_heads: int = 16
    num_layers: int = 4
    kv_channels: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """config.json. A patch is `patch_size` latents of `feat_dim` numbers."""

    lm_config: LMConfig
    encoder_config: LocalConfig
    dit_config: LocalConfig
    patch_size: int = 4
    feat_dim: int = 64
    residual_lm_num_layers: int = 8
    residual_lm_no_rope: bool = False
    scalar_quantization_latent_dim: int = 512
    scalar_quantization_scale: int = 9
    max_length: int = 8192
    audio_vae_config: CodecConfig = field(default_factory=CodecConfig)

    @property
    def codec(self) -> CodecConfig:
        """The codec's configuration, with `patch_size`."""
        return dataclasses.replace(self.audio_vae_config, patch_size=self.patch_size)

    @property
    def paged_layers(self) -> int:
        """Number of layers with paged KV: those of both LMs."""
        return self.lm_config.num_hidden_layers + self.residual_lm_num_layers


def read(source: Path | str) -> ModelConfig:
    """Read and check the configuration of a folder or of one of `RELEASED`. Raises `CheckpointError` naming the key."""
    return read_released(ModelConfig, source, __package__, _expected)


@dataclass(frozen=True)
class _Config(DecoderConfig):
    """Sizes of a stack whose rotary angles are divided by `divisors`, one for each pair."""

    divisors: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.divisors) != (pairs := self.head_width // 2):
            raise CheckpointError(f"{len(self.divisors)} rotary divisors; heads have {pairs} rotary pairs")

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        wide = torch.promote_types(dtype, torch.float32)
        divisors = torch.tensor(self.divisors, dtype=wide, device=positions.device)
        scaled = positions[..., None, None].to(wide) * (1.0 / divisors)
        return rotary_of_angles(scaled, self.head_width, self.rope_theta, dtype)


def lm_config(config: ModelConfig, layers: int) -> DecoderConfig:
    """The `DecoderConfig` of `layers` layers of the base or the residual LM."""
    lm = config.lm_config
    return _stack(config, lm.hidden_size, lm.intermediate_size, layers, lm.num_attention_heads)


def local_config(config: ModelConfig, local: LocalConfig) -> DecoderConfig:
    """The `DecoderConfig` of LocEnc or LocDiT."""
    return _stack(config, local.hidden_dim, local.ffn_dim, local.num_layers, local.num_heads)


def _stack(config: ModelConfig, width: int, intermediate: int, layers: int, heads: int) -> DecoderConfig:
    lm = config.lm_config
    alike = lm.num_key_value_heads, lm.kv_channels, lm.rms_norm_eps, lm.rope_theta
    return _Config(width, intermediate, layers, heads, *alike, divisors=lm.rope_scaling.short_factor)


def _expected(config: ModelConfig) -> list[tuple[str, object, object]]:
    """Keys of config.json with their values and the only supported ones."""
    lm, scaling, wide = config.lm_config, config.lm_config.rope_scaling, config.lm_config.max_position_embeddings
    for local in (config.encoder_config, config.dit_config):
        local_config(config, local)
    lm_config(config, config.paged_layers)
    return [
        ("lm_config.use_mup", lm.use_mup, False),
        ("lm_config.rope_scaling.type", scaling.type, "longrope"),
        ("lm_config.rope_scaling.original_max_position_embeddings", scaling.original_max_position_embeddings, wide),
        ("residual_lm_no_rope", config.residual_lm_no_rope, True),
        ("audio_vae_config.latent_dim", config.audio_vae_config.latent_dim, config.feat_dim),
        # A prompt token holds a patch as pairs of float32; a time embedding is half sines, half cosines.
        ("patch_size times feat_dim, modulo 2", config.patch_size * config.feat_dim % 2, 0),
        ("dit_config.hidden_dim, modulo 2", config.dit_config.hidden_dim % 2, 0),
        ("encoder_config.kv_channels", config.encoder_config.kv_channels, lm.kv_channels),
        ("dit_config.kv_channels", config.dit_config.kv_channels, lm.kv_channels),
        ("max_length", config.max_length, min(config.max_length, wide)),
    ]
