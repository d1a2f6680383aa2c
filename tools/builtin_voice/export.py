"""Write a trained voice as checkpoint files in the released layout, which `sonoro` loads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from sonoro.core.errors import OutputError
from sonoro.models.qwen3_tts.backbone import Talker
from sonoro.models.qwen3_tts.config import read_configs
from sonoro.models.qwen3_tts.decoder import CodecDecoder
from sonoro.models.qwen3_tts.encoder import CodecEncoder
from sonoro.models.qwen3_tts.voice import SpeakerEncoder
from sonoro.models.qwen3_tts.weights import CODEC_FILE, FILES, codec_fusions, main_fusions
from sonoro.models.shared.model_files import MODEL_FILES
from sonoro.nn import stored
from sonoro.nn.weights import Fusion, Shape

__all__ = ["export", "export_checkpoint"]


def export_checkpoint(
    folder: Path,
    talker: Talker,
    decoder: CodecDecoder,
    *,
    dtype: torch.dtype,
    codec_dtype: torch.dtype,
    speaker_encoder: SpeakerEncoder | None = None,
    encoder: CodecEncoder | None = None,
    is_in_8_bits: Callable[[str, Tensor], bool] = lambda name, value: False,
    shard_bytes: int | None = None,
) -> None:
    """Write both weight files in the released layout, without unused tensors, to a folder with configuration files.

    `is_in_8_bits` and `shard_bytes` as in `export`. Raises `OutputError`, or `TensorMismatch` if the configuration
    needs other tensors."""
    configs = read_configs(folder)
    main, codec = _named(talker=talker, speaker_encoder=speaker_encoder), _named(decoder=decoder, encoder=encoder)
    for module, file, own_dtype, fusions in (
        (main, MODEL_FILES, dtype, main_fusions(configs.model)),
        (codec, CODEC_FILE, codec_dtype, codec_fusions(configs.codec)),
    ):
        export(
            module, folder / file, dtype=own_dtype, fusions=fusions, is_in_8_bits=is_in_8_bits, shard_bytes=shard_bytes
        )
    FILES.stored_shapes(configs, folder)


def _named(**modules: nn.Module | None) -> nn.ModuleDict:
    return nn.ModuleDict({name: module for name, module in modules.items() if module is not None})


def export(
    module: nn.Module,
    file: Path,
    *,
    dtype: torch.dtype,
    fusions: Sequence[Fusion] = (),
    is_in_8_bits: Callable[[str, Tensor], bool] = lambda name, value: False,
    shard_bytes: int | None = None,
) -> None:
    """Write `module`'s tensors to `file` in `dtype`, with fusions undone; `sonoro.nn.weights.load` reads it back.

    Tensors selected by `is_in_8_bits` (stored name, value) become int8 with a scale per row. More than `shard_bytes`
    are split into shards with an index, named as in releases. Raises `OutputError` if the file cannot be written or a
    value does not fit `dtype`."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in module.state_dict().items():
        parts = _stored(name, tuple(tensor.shape), fusions)
        pieces = tensor.split([shape[0] for shape in parts.values()]) if len(parts) > 1 else (tensor,)
        for part, piece in zip(parts, pieces, strict=True):
            value = piece.detach().to("cpu", copy=True).contiguous()
            if is_in_8_bits(part, value):
                tensors[part], tensors[part + stored.SCALE] = _in_8_bits(value)
            else:
                tensors[part] = value.to(dtype)
            if not all(tensors.get(key, value).isfinite().all() for key in (part, part + stored.SCALE)):
                raise OutputError(f"{file}: tensor {part!r} has a value that {dtype} cannot hold")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _save(tensors, file, shard_bytes)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"{file} cannot be written: {error}") from error


def _stored(name: str, shape: Shape, fusions: Sequence[Fusion]) -> dict[str, Shape]:
    return next((parts for fusion in fusions if (parts := fusion.split(name, shape)) is not None), {name: shape})


def _in_8_bits(value: Tensor) -> tuple[Tensor, Tensor]:
    """`value` [rows, ...] as int8 from -127 to 127, and the float32 scale of each row."""
    rows = value.float().flatten(1)
    scale = (rows.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (rows / scale[:, None]).round().to(torch.int8).view(value.shape), scale


def _save(tensors: Mapping[str, Tensor], file: Path, shard_bytes: int | None) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shard_bytes is not None and shards[-1] and filled + tensor.nbytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], file, metadata={"format": "pt"})
        return
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        part = file.with_name(f"{file.stem}-{number:05d}-of-{len(shards):05d}{file.suffix}")
        save_file(shard, part, metadata={"format": "pt"})
        files |= dict.fromkeys(shard, part.name)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": files}
    file.with_name(f"{file.name}.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
