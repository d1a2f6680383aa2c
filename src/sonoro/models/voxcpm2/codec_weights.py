"""How the tensors of audiovae.pth are stored: released names and shapes, and rules for random weights."""

from pathlib import Path

import torch
from torch import Tensor

from sonoro.core.errors import TensorMismatch
from sonoro.models.shared.codec_file import UNIT_NAMES, CodecFile, all_but, spread_rates
from sonoro.nn.weights import DummyRule, Shape

from .codec import CodecConfig, VoxCodec
from .decoder import CodecDecoder

CODEC_FILE = "audiovae.pth"

PARTS = {"codec decoder": ("decoder.",), "codec encoder": ("encoder.",)}

_EDGES = "decoder.sr_bin_boundaries"
_RENAMES = {r"\.conv\.(?=weight|bias)": ".", r"\.model\.(\d+)\.(?=scale_embed|bias_embed)": r".sr_cond_model.\1."}


def _sift(tensors: dict[str, Tensor], config: CodecConfig, where: Path) -> dict[str, Tensor]:
    edges = tensors.get(_EDGES, torch.zeros(0)).tolist()
    if edges != [*config.sr_bin_boundaries]:
        limit = f"sr_bin_boundaries of config.json are {[*config.sr_bin_boundaries]}"
        raise TensorMismatch(f"{where}: tensor {_EDGES!r} is {edges}, but {limit}")
    return {name: tensor for name, tensor in tensors.items() if name != _EDGES}


def _unused(config: CodecConfig) -> dict[str, Shape]:
    # The log-variance head of the VAE encoder, used in training alone.
    width, latent = config.encoder_dim << len(config.encoder_rates), config.latent_dim
    return {"encoder.fc_logvar.weight": (latent, width, 3), "encoder.fc_logvar.bias": (latent,)}


FILE = CodecFile(
    make=VoxCodec,
    sift=_sift,
    renames=_RENAMES | UNIT_NAMES,
    shape_of=spread_rates,
    norms={r"(?!.*_embed$).*": 1},
    unused=_unused,
    is_wide=all_but(CodecDecoder),
    rules=(
        DummyRule(r"\.alpha$", mean=1.0, std=0.1),
        DummyRule(r"scale_embed\.weight$", mean=1.0, std=0.1),
        DummyRule(r"bias_embed\.weight$", std=0.1),
        DummyRule(r"^decoder\.model\.\d+\.block\.1\.conv\.weight$", fan_in=lambda shape: 2 * shape[0]),
        DummyRule(r"\.conv2\.conv\.weight$", gain=0.3),
        DummyRule(r"^decoder\.model\.[2-9]\d*\.conv\.weight$", gain=0.06),
    ),
)
