"""The tensors of a checkpoint folder: its modules, their released names and shapes, loading, random filling, export.

Two files: model.safetensors (talker, speaker encoder) and speech_tokenizer/model.safetensors (codec).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from sonoro.nn import weights
from sonoro.nn.stored import find
from sonoro.nn.weights import DummyRule, Fusion, Shape

from .backbone import Talker
from .codec import CodecDecoder, Qwen3Codec
from .config import CodecConfig, Configs, ModelConfig, read_configs
from .encoder import CodecEncoder
from .voice import SpeakerEncoder

__all__ = [
    "CODEC_FILE",
    "MODEL_FILE",
    "Modules",
    "check",
    "count_parts",
    "export_checkpoint",
    "init_dummy",
    "load",
    "released_shapes",
    "stored_shapes",
    "unused_shapes",
    "weight_bytes",
]

MODEL_FILE = "model.safetensors"
CODEC_FILE = "speech_tokenizer/model.safetensors"

PARTS = {
    "talker layers": ("talker.model.layers.", "talker.model.norm."),
    "text embedding": ("talker.model.text_embedding.",),
    "text projection": ("talker.text_projection.",),
    "codec embedding": ("talker.model.codec_embedding.",),
    "codec head": ("talker.codec_head.",),
    "predictor layers": ("talker.code_predictor.model.layers.", "talker.code_predictor.model.norm."),
    "predictor embeddings": ("talker.code_predictor.model.codec_embedding.",),
    "predictor heads": ("talker.code_predictor.lm_head.",),
    "predictor projection": ("talker.code_predictor.small_to_mtp_projection.",),
    "speaker encoder": ("speaker_encoder.",),
    "codec decoder": ("decoder.",),
    "codec encoder": ("encoder.",),
}
"""The parts of a model by the prefixes of their tensors. Every tensor belongs to exactly one."""


@dataclass(frozen=True)
class Modules:
    """Everything with weights; `skipped` are the stored tensors that nothing reads.

    Only the Base variant has a speaker encoder.
    """

    talker: Talker
    speaker_encoder: SpeakerEncoder | None
    codec: Qwen3Codec
    skipped: tuple[str, ...] = ()

    @classmethod
    def empty(cls, configs: Configs) -> Modules:
        """On the meta device: names and shapes without memory."""
        speaker = configs.model.speaker_encoder_config
        with weights.shapes_alone():
            return cls(
                Talker(configs.model.talker_config),
                None if speaker is None else SpeakerEncoder(speaker),
                Qwen3Codec(configs.codec),
            )

    @property
    def main(self) -> nn.ModuleDict:
        """What the model file holds, under its names."""
        return _named(talker=self.talker, speaker_encoder=self.speaker_encoder)

    def finalize(self) -> None:
        """Derive the tables that speaking needs, once the weights are final."""
        for module in (self.main, self.codec):
            module.requires_grad_(False).eval()
        self.talker.finalize()
        self.codec.finalize()


def load(folder: Path, configs: Configs, *, device: torch.device, dtype: torch.dtype) -> Modules:
    """The modules of a checkpoint folder, ready to speak. Raises `CheckpointError` naming tensors and files."""
    modules = Modules.empty(configs)
    skipped = weights.load(
        modules.main,
        find(folder / MODEL_FILE),
        dtype_of=lambda name: _dtype_of(name, dtype, torch.float32),
        device=device,
        fusions=_main_fusions(configs.model),
    )
    modules.codec.skipped = weights.load(
        modules.codec,
        find(folder / CODEC_FILE),
        dtype_of=lambda _: torch.float32,
        device=device,
        fusions=_codec_fusions(configs.codec),
        unused=unused_shapes(configs.codec),
    )
    modules.codec.model_dtype = dtype
    modules.finalize()
    return replace(modules, skipped=(*skipped, *modules.codec.skipped))


def init_dummy(configs: Configs, seed: int, *, device: torch.device, dtype: torch.dtype) -> Modules:
    """Modules of random weights at any size, ready to speak: sound that is loud but not clipped, codes that vary."""
    modules = Modules.empty(configs)
    for module in (modules.main, modules.codec):
        weights.init_dummy(
            module, seed, rules=_DUMMY_RULES, dtype_of=lambda name: _dtype_of(name, dtype, torch.float32), device=device
        )
    modules.codec.model_dtype = dtype
    modules.finalize()
    return modules


def export_checkpoint(
    folder: Path,
    talker: Talker,
    decoder: CodecDecoder,
    *,
    dtype: torch.dtype,
    codec_dtype: torch.dtype,
    speaker_encoder: SpeakerEncoder | None = None,
    encoder: CodecEncoder | None = None,
    is_in_8_bits: Callable[[str, torch.Tensor], bool] = lambda name, value: False,
    shard_bytes: int | None = None,
) -> None:
    """Write both files as they are released, less the tensors that nothing reads, into a folder of configuration files.

    `is_in_8_bits` and `shard_bytes` are as `sonoro.nn.weights.export` takes them. Raises `OutputError`, and
    `TensorMismatch` if the configuration files call for other tensors.
    """
    configs = read_configs(folder)
    main, codec = _named(talker=talker, speaker_encoder=speaker_encoder), _named(decoder=decoder, encoder=encoder)
    for module, file, own_dtype, fusions in (
        (main, MODEL_FILE, dtype, _main_fusions(configs.model)),
        (codec, CODEC_FILE, codec_dtype, _codec_fusions(configs.codec)),
    ):
        weights.export(
            module, folder / file, dtype=own_dtype, fusions=fusions, is_in_8_bits=is_in_8_bits, shard_bytes=shard_bytes
        )
    check(folder, configs)


def check(folder: Path, configs: Configs) -> dict[str, dict[str, Shape]]:
    """By file: names and shapes of the tensors in `folder` that a release has, having raised what `load` would."""
    modules = Modules.empty(configs)
    return {
        MODEL_FILE: weights.check(modules.main, find(folder / MODEL_FILE), fusions=_main_fusions(configs.model)),
        CODEC_FILE: weights.check(
            modules.codec,
            find(folder / CODEC_FILE),
            fusions=_codec_fusions(configs.codec),
            unused=unused_shapes(configs.codec),
        ),
    }


def released_shapes(configs: Configs) -> dict[str, dict[str, Shape]]:
    """By file: names and shapes of all tensors of a release, those that nothing reads included."""
    modules = Modules.empty(configs)
    return {
        MODEL_FILE: weights.stored_shapes(modules.main, _main_fusions(configs.model)),
        CODEC_FILE: weights.stored_shapes(modules.codec, _codec_fusions(configs.codec)) | unused_shapes(configs.codec),
    }


def stored_shapes(configs: Configs, folder: Path | None = None) -> dict[str, dict[str, Shape]]:
    """`released_shapes`, or `check` of a folder."""
    return released_shapes(configs) if folder is None else check(folder, configs)


def count_parts(shapes: Mapping[str, Mapping[str, Shape]]) -> dict[str, int]:
    """Elements of the tensors of both files by part; parts that the variant lacks are left out."""
    counts = weights.count_parts({**shapes[MODEL_FILE], **shapes[CODEC_FILE]}, PARTS)
    return {part: count for part, count in counts.items() if count}


def weight_bytes(configs: Configs, dtype: torch.dtype, codec_dtype: torch.dtype = torch.float32) -> int:
    """What the weights take in memory with the talker and the codec's decoder in these; derived tables not counted."""
    modules = Modules.empty(configs)
    tensors = modules.main.state_dict() | modules.codec.state_dict()
    return sum(tensor.numel() * _dtype_of(name, dtype, codec_dtype).itemsize for name, tensor in tensors.items())


def _named(**modules: nn.Module | None) -> nn.ModuleDict:
    return nn.ModuleDict({name: module for name, module in modules.items() if module is not None})


def _dtype_of(name: str, dtype: torch.dtype, codec_dtype: torch.dtype) -> torch.dtype:
    if name.startswith("talker."):
        return dtype
    # What makes codes and x-vectors stays in float32.
    is_narrow = name.startswith("decoder.") and not CodecDecoder.is_wide(name.removeprefix("decoder."))
    return codec_dtype if is_narrow else torch.float32


def _main_fusions(config: ModelConfig) -> tuple[Fusion, ...]:
    talker, predictor = config.talker_config, config.talker_config.code_predictor_config
    return (
        *weights.parted_names("talker.model.", talker.num_attention_heads, talker.num_key_value_heads),
        *weights.parted_names(
            "talker.code_predictor.model.", predictor.num_attention_heads, predictor.num_key_value_heads
        ),
    )


def _codec_fusions(config: CodecConfig) -> tuple[Fusion, ...]:
    decoder, encoder = config.decoder_config, config.encoder_config
    return (
        *weights.parted_names("decoder.pre_transformer.", decoder.num_attention_heads, decoder.num_key_value_heads),
        *(
            weights.parted_names(
                "encoder.encoder_transformer.", encoder.num_attention_heads, encoder.num_key_value_heads
            )
            if encoder
            else ()
        ),
    )


def unused_shapes(config: CodecConfig) -> dict[str, Shape]:
    """Tensors that are in the released file and that neither speaking nor encoding reads."""
    decoder, encoder = config.decoder_config, config.encoder_config
    book_width = decoder.codebook_dim // 2
    shapes: dict[str, Shape] = {
        f"decoder.quantizer.rvq_{part}.input_proj.weight": (book_width, decoder.codebook_dim, 1)
        for part in ("first", "rest")
    }
    if encoder is None:
        return shapes
    kept = config.encoder_valid_num_quantizers - encoder.num_semantic_quantizers
    for part, books, first_unused in (
        ("semantic", encoder.num_semantic_quantizers, encoder.num_semantic_quantizers),
        ("acoustic", encoder.num_quantizers - encoder.num_semantic_quantizers, kept),
    ):
        quantizer = f"encoder.quantizer.{part}_residual_vector_quantizer"
        shapes[f"{quantizer}.output_proj.weight"] = (encoder.hidden_size, encoder.codebook_dim, 1)
        for index in range(books):
            book = f"{quantizer}.layers.{index}.codebook"
            shapes[f"{book}.initialized"] = (1,)
            if index >= first_unused:
                shapes[f"{book}.embed_sum"] = (encoder.codebook_size, encoder.codebook_dim)
                shapes[f"{book}.cluster_usage"] = (encoder.codebook_size,)
    return shapes


# The gains keep the vocoder's residual sums from growing, so that its output is about a fifth of full scale at every
# released or reduced width. A transposed convolution of stride s and kernel 2s gives each sample from two inputs.
_DUMMY_RULES = (
    DummyRule(r"\.(alpha|beta)$", std=0.1),
    DummyRule(r"cluster_usage$", mean=1.0, std=0.1),
    DummyRule(r"(embedding_sum|embed_sum)$", std=1.0),
    DummyRule(r"layer_scale\.scale$", mean=0.3, std=0.03),
    DummyRule(r"\.gamma$", mean=0.3, std=0.03),
    DummyRule(r"text_embedding\.weight$", std=1.0),
    DummyRule(r"codec_embedding\.(\d+\.)?weight$", std=0.25),
    DummyRule(r"^decoder\.upsample\.\d+\.0\.conv\.weight$", fan_in=lambda shape: shape[0]),
    DummyRule(r"^decoder\.decoder\.\d+\.block\.1\.conv\.weight$", fan_in=lambda shape: 2 * shape[0]),
    DummyRule(r"^decoder\.decoder\.\d+\.block\.\d+\.conv2\.conv\.weight$", gain=0.3),
    DummyRule(r"^decoder\.decoder\.6\.conv\.weight$", gain=0.06),
)
